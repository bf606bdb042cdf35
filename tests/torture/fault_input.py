"""Malformed input: arguments of the command line, YAML, and every file that is read.

Each case ends within 5 seconds of CPU time: it either succeeds, or is rejected in one line with
exit code 2, without a traceback, and without writing anything. No case trains.
"""

import contextlib
import copy
import io
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qkablate.config import KEYS
from qkablate.config.sweep import ENGINE_KEYS
from qkablate.training.signals import Stopped
from tests.torture.readers import (
    SMALL,
    ForbiddenOutcome,
    Reader,
    check_command,
    make_readers,
    prepare_text,
)
from tests.torture.tally import Tally

SHORT = 200
FULL = 10_000
_WORDS = 0.2  # fraction of cases that are commands, which take ten times as long
_SECONDS = 5  # of CPU time
_PATIENCE = 60  # seconds of wall time; the machine may be busy
_STARTED_CODE = 128 + signal.SIGTERM  # exit code of a command that would have trained


def torture(cases: int, seed: int, folder: Path) -> Tally:
    """Try the cases, in one process per core if there are many."""
    parts = 1 if cases < 1000 else len(os.sched_getaffinity(0))
    jobs = [(cases // parts + 1, seed * parts + n, folder / str(n)) for n in range(parts)]
    if parts == 1:
        return _run_part(*jobs[0])
    total = Tally()
    with multiprocessing.get_context("fork").Pool(parts) as pool:
        for tally in pool.starmap(_run_part, jobs):
            total.add(tally)
    return total


def _run_part(cases: int, seed: int, folder: Path) -> Tally:
    folder.mkdir()
    hypothesis.configuration.set_hypothesis_home_dir(folder / "hypothesis")
    with _isolated(folder):
        trial = _Trial()
        all_readers = make_readers(folder / "sweep")
        words = int(cases * _WORDS)
        cases_each = (cases - words) // len(all_readers) + 1
        for n, (name, reader) in enumerate(all_readers.items()):
            trial.run_cases(
                _content_strategy(reader), cases_each, seed * 1000 + n, name, reader.try_
            )
        try_ = _Command(folder / "commands")
        trial.run_cases(_COMMANDS, words - words // 4, seed, "words", try_.words)
        trial.run_cases(_YAML, words // 4, seed, "yaml", try_.yaml)
        return trial.tally()


@contextlib.contextmanager
def _isolated(folder: Path) -> Iterator[None]:
    """Isolate the cases from the user's home, the network, and the settings of this process."""
    home, before = folder / "home", Path.cwd()
    home.mkdir()
    environment = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": str(home)}
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(socket, "getaddrinfo", side_effect=OSError("no network")),
        ):
            yield
    finally:
        os.chdir(before)
        logging.root.handlers[:], logging.root.level = handlers, level


class Hung(BaseException):
    """Time limit exceeded; no `except Exception` may catch it."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def raise_hung(*_: Any) -> None:
        raise Hung

    kinds = ((signal.ITIMER_PROF, signal.SIGPROF, _SECONDS),)
    kinds += ((signal.ITIMER_REAL, signal.SIGALRM, _PATIENCE),)
    before = [signal.signal(number, raise_hung) for _, number, _ in kinds]
    try:
        for timer, _, seconds in kinds:
            signal.setitimer(timer, seconds)
        yield
    finally:
        for (timer, number, _), handler in zip(kinds, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


class _Trial:
    """Many cases; problems at the same place are reported once, with the first case and a count."""

    def __init__(self) -> None:
        self.cases = 0
        self._lost: dict[str, list[str]] = {}
        self._wrong: dict[str, list[str]] = {}

    def run_cases(
        self, strategy: Any, cases: int, seed: int, name: str, try_: Callable[[Any], None]
    ) -> None:
        end = self.cases + cases
        while self.cases < end:  # hypothesis stops early once it has seen all it can generate

            @settings(
                max_examples=end - self.cases,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @hypothesis.seed(seed)
            @given(strategy)
            def run_case(case: Any) -> None:
                self._run_case(name, case, try_)

            run_case()
            seed += 1_000_000

    def _run_case(self, name: str, case: Any, try_: Callable[[Any], None]) -> None:
        self.cases += 1
        try:
            with _time_limit(), contextlib.redirect_stderr(io.StringIO()):
                try_(case)
        except Hung as hung:
            self._lost.setdefault(
                f"{name}: time limit exceeded at {_error_place(hung)}", []
            ).append(repr(case))
        except Exception as error:
            error_text = (
                ""
                if isinstance(error, ForbiddenOutcome)
                else f"{type(error).__name__} at {_error_place(error)}: "
            )
            key = f"{name}: {error_text}{error}"[:300]
            key = re.sub(r"\d+", "0", key) if error_text else key
            self._wrong.setdefault(key, []).append(repr(case))

    def tally(self) -> Tally:
        lost, wrong = (
            [f"{key} ({len(cases)} times, e.g. {cases[0][:400]})" for key, cases in of.items()]
            for of in (self._lost, self._wrong)
        )
        return Tally(self.cases, lost, wrong)


def _error_place(error: BaseException) -> str:
    """Return the function of qkablate that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if "/qkablate/" in frame.filename] or list(frames)
    return f"{Path(own_frames[-1].filename).name}, {own_frames[-1].name}"


# Contents of files: valid ones, edited.

_BITS = [b"\0", b"\xff", b"\xc3", b"\n", b"\r", b'"', b"{", b"}", b"[", b"]", b":", b",", b"-"]
_BITS += [b"NaN", b"Infinity", b"1e999", b"null", b"true", b"9" * 30, b"9" * 5000, b"[" * 3000]
_BITS += [
    b"&a ",
    b"*a",
    b"!!python/object:os.system ",
    b"!!int x",
    b"${oc.env:HOME}",
    b"\xef\xbb\xbf",
]
_BITS += [
    b"'",
    b"\\ud800",
    b"\\",
    b"# ",
    b"---\n",
    b"0x",
    b"1_0",
    b"? ",
    b"- ",
    b"2001-01-01",
    b"==",
]
_KINDS = ("flip", "cut", "insert", "remove", "repeat")
_EDIT = st.tuples(
    st.sampled_from(_KINDS), st.integers(0, 2**20), st.sampled_from(_BITS) | st.binary(max_size=6)
)
_DEEP: Any = []
for _ in range(200):
    _DEEP = [_DEEP]
_VALUES = [None, True, False, 0, -1, 1, 2**31, 10**30, -(10**400), 0.5, 1e308, float("nan")]
_VALUES += [float("inf"), "", "x", "NaN", "1", "\0", "\ud800", "∑" * 100, [], {}, [[]], [1, "a"]]
_VALUES += [{"a": 1}, {"": None}, _DEEP, ["x"] * 1000]
_CHANGE = st.tuples(st.integers(0, 2**20), st.sampled_from(_VALUES), st.booleans())


def _content_strategy(reader: Reader) -> Any:
    edited = st.lists(_EDIT, min_size=1, max_size=4).map(
        lambda edits: _apply_edits(reader.good, edits)
    )
    strategy = edited | st.binary(max_size=64)
    if reader.path.suffix == ".json":
        strategy |= st.lists(_CHANGE, min_size=1, max_size=3).map(
            lambda edits: json.dumps(_apply_changes(json.loads(reader.good), edits)).encode()
        )
    if reader.path.suffix == ".jsonl":
        lines = reader.good.splitlines()
        strategy |= st.tuples(st.integers(0, len(lines) - 1), _CHANGE).map(
            lambda change: _replace_line(lines, change[0], change[1])
        )
    return strategy


def _apply_edits(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, number, new in edits:
        position = number % (len(content) + 1)
        rest = content[position:]
        if kind == "flip" and rest:
            rest = bytes([rest[0] ^ (1 << number % 8)]) + rest[1:]
        content = (
            content[:position]
            + {
                "flip": rest,
                "cut": b"",
                "insert": new + rest,
                "remove": rest[1 + number % 16 :],
                "repeat": content[max(0, position - 20) : position] + rest,
            }[kind]
        )
    return content


def _apply_changes(content: Any, changes: list[tuple[int, Any, bool]]) -> Any:
    """Replace values, or remove their keys, anywhere."""
    for number, value, is_removed in changes:
        spots = list(_find_spots(content))
        if not spots:
            return copy.deepcopy(value)
        holder, key = spots[number % len(spots)]
        if is_removed:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(value)
    return content


def _find_spots(content: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(inner):
        yield content, key
        if isinstance(value, dict | list) and depth < 8:
            yield from _find_spots(value, depth + 1)


def _replace_line(lines: list[bytes], number: int, change: tuple[int, Any, bool]) -> bytes:
    line = json.dumps(_apply_changes(json.loads(lines[number]), [change])).encode()
    return b"\n".join([*lines[:number], line, *lines[number + 1 :]]) + b"\n"


# Arguments of the command line.

_NUMBERS = ["0", "-1", "1", "2", "7", "0.5", "1e3", "1e999", "nan", "inf", "-inf", "9" * 20]
_NUMBERS += ["9" * 400, "1_000", "0x10", "٣", "9007199254740992", "9007199254740993", "1e-320"]
_SPECIAL_VALUES = [
    "",
    "null",
    "true",
    "auto",
    "[",
    "]",
    "[]",
    "[1,2]",
    "[[1]]",
    "{}",
    "{a:1}",
    "{a:{b:[1]}}",
]
_SPECIAL_VALUES += [
    "{",
    "}",
    "(",
    ")",
    "'",
    '"',
    "\\",
    "a\\",
    '\\"',
    '"a',
    "'a'",
    '""',
    ",",
    "1,",
    ",1",
    "1,2",
]
_SPECIAL_VALUES += [
    "${seed}",
    "${out}",
    "${nope}",
    "${",
    "$",
    "${oc.env:HOME}",
    "${oc.env:NOPE}",
    "???",
]
_SPECIAL_VALUES += [
    "${oc.decode:'['}",
    "${hydra:job.name}",
    "${.seed}",
    "${..seed}",
    "${seed:1}",
    "${${seed}}",
]
_SPECIAL_VALUES += [
    "range(3)",
    "range(1000000000)",
    "range(0,1,0)",
    "range(0,1,1e-9)",
    "choice(1,2)",
    "glob(*)",
]
_SPECIAL_VALUES += [
    "interval(0,1)",
    "shuffle(1,2)",
    "sort(2,1)",
    "tag(a,1)",
    "int(x)",
    "float(1)",
    "str([)",
]
_SPECIAL_VALUES += [
    "extend_list(1)",
    "json_str({a:1})",
    "nope(1)",
    "glob([*],exclude=x*)",
    "bool(maybe)",
]
_SPECIAL_VALUES += [
    "a b",
    " ",
    "\t",
    "\n",
    "\x1b[31m",
    "\x7f",
    "\x01",
    "é",
    "∑",
    "𝔘",
    "\u202e",
    "\udcff",
    "#",
]
_SPECIAL_VALUES += [
    "=",
    "==",
    ":",
    "@",
    "a@b",
    "a:b",
    "*",
    "a" * 300,
    "a" * 5000,
    "[" * 60,
    "(" * 60,
    "%s",
    "{0}",
]
_SPECIAL_VALUES += [
    "standard",
    "merged_w,no_q",
    "recall",
    "text",
    "hub",
    "bpe",
    "chars",
    "gpt2",
    "cuda",
    "bf16",
]
_OTHER_KEYS = [
    "variant",
    "model",
    "data",
    "attention",
    "train",
    "optim",
    "tracking",
    "hydra",
    "seeds",
    "lr",
]
_OTHER_KEYS += [
    "variant@x",
    "model.",
    ".model",
    "model..layers",
    "nope",
    "é",
    "",
    "hydra.verbose",
    "a b",
]
_SWEEP = [
    "sweep",
    "sweep.name",
    "sweep.axes",
    "sweep.filter",
    "sweep.baseline",
    "sweep.tune",
    "engine",
]
_SWEEP += [
    "sweep.tuning_seeds",
    "control",
    "control.adjust",
    "control.tolerance",
    "workers",
    "runs_per_gpu",
]
_SWEEP += ["on_failure", "engine.nope", *(f"engine.{key}" for key in ENGINE_KEYS["slurm"])]
_FLAGS = [
    "--rerun",
    "-m",
    "--multirun",
    "--cfg",
    "job",
    "--cfg=job",
    "--cfg=all",
    "--help",
]
_FLAGS += [
    "--nope",
    "-x",
    "--",
    "-",
    "--config-name",
    "--config-dir",
    "--package",
    "--yes",
    "--retry",
]
_FLAGS += ["--dry-run", "--json", "--resolve", "--run", "=", "seed", "+seed=1", "++seed=1", "~seed"]

_VALUE = st.sampled_from(_NUMBERS) | st.sampled_from(_SPECIAL_VALUES) | st.text(max_size=6)
_KEY = st.sampled_from([*KEYS]) | st.sampled_from([*KEYS]) | st.sampled_from(_OTHER_KEYS)
_KEY |= st.sampled_from(_SWEEP)
_PAIR = st.tuples(_KEY, _VALUE).map("=".join)
_MUTATED = st.tuples(_PAIR, st.integers(0, 2**16), _VALUE).map(
    lambda at: at[0][: at[1] % (len(at[0]) + 1)] + at[2] + at[0][at[1] % (len(at[0]) + 1) :]
)
_WORD = _PAIR | _PAIR | _MUTATED | st.sampled_from(_FLAGS) | _VALUE
_COMMANDS = st.tuples(st.sampled_from(["train", "sweep"]), st.lists(_WORD, min_size=1, max_size=3))

_LINES = ["name: mine", "qk: no_q", "ov: separate", "qk: {a: 1}", "qk: [1]", "name: 1", "rank: 1e9"]
_LINES += [
    "rank: ${nope}",
    "mask_self: maybe",
    "- a",
    "a: &x [*x]",
    "defaults: [nope]",
    "? [1]",
    "\t",
]
_LINES += [
    "defaults:\n  - standard",
    "# @package nope",
    "# @package _global_",
    "seed: 1",
    "qk: !!int x",
]
_LINES += [
    "name: ???",
    "qk:",
    "'",
    '"',
    "{",
    "qk: no_q\nqk: no_q",
    "file: nope.py",
    "lr: [",
    "%YAML 9",
]
_LINES += [
    "name: ${oc.env:NOPE}",
    "groups: -1",
    "init: é",
    "norm: qk",
    "...",
    "null",
    "1: 2",
    "name: \x01",
]
_YAML = st.lists(st.sampled_from(_LINES) | st.text(max_size=8), max_size=5).map("\n".join)


class _Command:
    """A small command with additional random arguments."""

    def __init__(self, folder: Path) -> None:
        self.text = prepare_text(folder / "data")
        self.folder = folder / "here"

    def words(self, case: tuple[str, list[str]]) -> None:
        verb, words = case
        # A path outside the folder would really be used.
        words = [re.sub(r"[/~]|\.\.", "", w) if re.search("out|cache|dir", w) else w for w in words]
        words = [w for w in words if "\0" not in w and not re.search("[\ud800-\udc7f]", w)]
        # Ten thousand layers are valid, but counting their parameters takes half a minute.
        words = ["model.layers=3" if w.startswith("model.layers=9007") else w for w in words]
        axes = ["variant=standard,no_q", "sweep.floor=false", "seed=0,1"] if verb == "sweep" else []
        self._run_and_check(verb, *SMALL, *self.text, "out=outputs", *axes, *words)

    def yaml(self, content: str) -> None:
        """Write the YAML of a user's own variant."""
        self._reset_folder()
        (self.folder / "own" / "variant").mkdir(parents=True)
        path = self.folder / "own" / "variant" / "mine.yaml"
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        arguments = ["--config-dir", "own", "variant=mine"]
        self._run_and_check("train", *SMALL, *self.text, "out=outputs", *arguments, reset=False)

    def _reset_folder(self) -> None:
        os.chdir(self.folder.parent)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        os.chdir(self.folder)

    def _run_and_check(self, *words: str, reset: bool = True) -> None:
        from hydra.core.global_hydra import GlobalHydra

        if reset:
            self._reset_folder()
        GlobalHydra.instance().clear()  # left over from a command that exceeded its time
        try:
            with (
                mock.patch(
                    "qkablate.training.session.train_run", side_effect=Stopped(signal.SIGTERM)
                ),
                mock.patch("qkablate.cli.sweep.run_and_print", return_value=_STARTED_CODE),
                mock.patch("qkablate.cli.launch.run_and_print", return_value=_STARTED_CODE),
                mock.patch("qkablate.cli.launch.show_plan", return_value=0),
            ):
                result = check_command(*words, codes=(0, 2, _STARTED_CODE))
            if result.code == 2:
                written = [p for p in self.folder.rglob("*") if p.is_file() and "runs" in p.parts]
                written += self.folder.glob("outputs/sweeps/*")
                if written:
                    raise ForbiddenOutcome(f"it was rejected, but wrote {written[0]}")
        finally:
            logging.disable(logging.NOTSET)
