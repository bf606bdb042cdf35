"""Concurrent launchers of one sweep, preparations of one text, and readers."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qkablate.cli import main
from tests.torture.tally import Tally

SHORT, FULL = 1, 10
_PROCESSES = {SHORT: 3}
_FULL_PROCESSES = 8  # in all other cases
_BOUND = 300  # seconds until a process counts as hanging
_PRELOADED = [
    *("qkablate.sweeps.running.worker", "omegaconf", "hydra", "pyarrow.parquet"),
    *("qkablate.cli.sweep", "qkablate.cli.status", "qkablate.cli.results", "qkablate.cli.report"),
]
_CLOCKS = ("seconds", "perf/", "crc32")


def _train_words(folder: Path, out: Path, cache: Path) -> list[str]:
    return [
        *("model.layers=1", "model.d_model=8", "model.heads=2", "model.context=16"),
        *("train.steps=20", "train.batch_size=2", "train.eval_every=10", "tracking.log_every=5"),
        *("data=text", f"data.path={folder}/text.txt", f"data.cache={cache}"),
        *("data.val_tokens=64", "data.test_tokens=64", "threads=1", "tracking.wandb=disabled"),
        *("variant=standard,no_q", "seed=range(3)", "workers=1", f"out={out}", "sweep.floor=false"),
    ]


def _run_together(actions: dict[str, Callable[[], int]], folder: Path) -> dict[str, int | None]:
    """Fork a process for each action, with output in <folder>/<name>.txt; return the exit codes.

    None means that a process hangs.
    """
    folder.mkdir(parents=True)
    pids = {}
    for name, action in actions.items():
        pids[name] = os.fork()
        if not pids[name]:
            code = 70
            try:
                file = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT, 0o666)
                for descriptor in (1, 2):
                    os.dup2(file, descriptor)
                code = action()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    codes, deadline = dict[str, int | None](), time.monotonic() + _BOUND
    for name, pid in pids.items():
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        codes[name] = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
    return codes


def _command(*words: str) -> int:
    try:
        main(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 70  # main always exits


def _launch(words: list[str], trained: Path) -> int:
    """Run a launcher that records what is trained; its runs are forked from this process."""
    from qkablate.training import session

    def recorded_session(
        plan: Any, *args: Any, original: Callable[..., Any] = session.train_session
    ) -> Any:
        with trained.open("a") as file:
            file.write(f"{plan.run.id}\n")
        return original(plan, *args)

    session.train_session = recorded_session
    fork_context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: fork_context  # type: ignore[method-assign, assignment]
    return _command("sweep", *words)


def _read(out: Path, finished: Path, output_file: Path, verbs: list[list[str]]) -> int:
    """Run commands repeatedly, and once more after the end; record their JSON."""
    is_last = False
    while not is_last:
        is_last = finished.exists()
        time.sleep(0.05)  # leave time for the writers
        for words in verbs:
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                code = _command(*words, f"out={out}")
            if code not in (0, 1, 2) or (code == 2 and is_last):
                print(f"{words} ended with {code}", flush=True)
            if code != 2 and words[-1].endswith("json"):
                with output_file.open("a") as file:
                    file.write(json.dumps(json.loads(stdout.getvalue())) + "\n")
            pages = list(out.glob("sweeps/*/report.html")) if words[0] == "report" else []
            for page in pages:
                if not page.read_text(encoding="utf-8").rstrip().endswith("</html>"):
                    print("half a report", flush=True)
    return 0


def _prepare(folder: Path, cache: Path, tokenizer: str, start_time: float) -> int:
    from qkablate.config import DataConfig
    from qkablate.data.corpus import open_corpus

    path, size = f"{folder}/text.txt", 300 if tokenizer == "bpe" else None
    config = DataConfig(
        source="text", path=path, cache=str(cache), tokenizer=tokenizer, vocab_size=size
    )
    time.sleep(max(0.0, start_time - time.monotonic()))  # all at the same moment
    print("fingerprint", open_corpus(config).fingerprint)
    return 0


def _read_numbers(out: Path) -> dict[str, Any]:
    """Return the losses of each run, and every row without times."""
    numbers = {}
    for path in sorted(out.glob("runs/*/result.json")):
        result = json.loads(path.read_text())
        rows = map(json.loads, (path.parent / "metrics.jsonl").read_text().splitlines())
        untimed_rows = [{k: v for k, v in row.items() if not k.startswith(_CLOCKS)} for row in rows]
        numbers[result["id"]] = (
            result["status"],
            result["measures"],
            result["attempt"],
            untimed_rows,
        )
    return numbers


def _find_wrong_output(output_file: Path, actual: dict[str, Any]) -> list[str]:
    """Return the numbers in a reader's output that no run has."""
    wrong = []
    for line in output_file.read_text().splitlines() if output_file.exists() else ():
        content = json.loads(line)
        runs = [(state["id"], state) for state in content.get("states", ())]
        for arm in content.get("arms", ()):
            runs += [(run["run"].rpartition("-")[2], run) for run in arm["runs"]]
            losses = [run["test_loss"] for run in arm["runs"] if run["status"] == "done"]
            if losses and abs(statistics.fmean(losses) - arm["mean"]) > 1e-9:
                wrong.append(f"a mean of {arm['mean']} for {losses}")
        for id, run in runs:
            for split in ("val", "test"):
                value = run[f"{split}_loss"]
                if value is not None and value != actual[id][1][split]["loss"]:
                    wrong.append(f"{split} loss {value} for {id}")
    return wrong


def _run_round(
    folder: Path, text: Path, count: int, expected: dict[str, Any], choice: int
) -> Tally:
    tally = Tally(1)
    out, cache, finished = folder / "out", folder / "cache", folder / "finished"
    tokenizer = ("bytes", "chars", "bpe")[choice % 3]
    start_time = time.monotonic() + 0.3
    prepare = lambda: _prepare(text, folder / "prepared", tokenizer, start_time)  # noqa: E731
    codes = _run_together({f"prepare{n}": prepare for n in range(count)}, folder / "preparers")
    printed = [path.read_text() for path in (folder / "preparers").iterdir()]
    fingerprints = {
        fingerprint
        for content in printed
        for fingerprint in re.findall(r"fingerprint (\w+)", content)
    }
    prepared_names = [
        path.name for path in (folder / "prepared").iterdir() if path.suffix != ".lock"
    ]
    if {*codes.values()} != {0} or len(fingerprints) != 1 or len(prepared_names) != 1:
        tally.wrong.append(
            f"{tokenizer}: {codes}, {len(fingerprints)} fingerprints, {prepared_names}: {printed}"
        )

    words = _train_words(text, out, cache)
    launch = lambda: _launch(words, folder / "trained")  # noqa: E731
    status, results = ["status", "--json"], ["results", "--format", "json"]

    def launchers() -> int:
        codes = _run_together({f"launch{n}": launch for n in range(count)}, folder / "launchers")
        finished.touch()
        print(codes)
        return int(any(codes.values()))

    actions: dict[str, Callable[[], int]] = {"all": launchers}
    readers = {"numbers": [status, results], "pages": [["report"], ["status"]]}
    if count < _FULL_PROCESSES:
        readers = {"numbers": [status, results, ["report"]]}
    for name, verbs in readers.items():
        actions[name] = lambda name=name, verbs=verbs: _read(out, finished, folder / name, verbs)
    codes = _run_together(actions, folder / "actions")
    paths = [path for part in ("actions", "launchers") for path in (folder / part).iterdir()]
    outputs = {path.stem: path.read_text() for path in paths}
    if any(codes.values()):
        ends = "\n".join(f"{name}: {output[-500:]}" for name, output in outputs.items())
        tally.lost.append(f"exit codes {codes}\n{ends}")
    for name, output in outputs.items():
        if re.search("Traceback|half a report|ended with", output):
            tally.wrong.append(f"{name} printed {output[-1000:]}")
    actual = _read_numbers(out)
    if actual.keys() != expected.keys():
        tally.lost.append(f"{len(actual)} of {len(expected)} runs")
    elif actual != expected:
        tally.wrong.append("other numbers than with one launcher")
    trained = Counter((folder / "trained").read_text().split())
    if {*trained.values()} != {1} or trained.keys() != expected.keys():
        tally.wrong.append(f"numbers of trainings: {dict(trained)}")
    for name in readers:
        tally.wrong += [
            f"{name} printed {problem}" for problem in _find_wrong_output(folder / name, expected)
        ]
    if not (folder / "numbers").exists():
        tally.wrong.append("nothing was read")
    return tally


def _run_rounds(cases: int, seed: int, folder: Path, answer: Any) -> None:
    """Run the rounds in a process that has imported everything and computed nothing."""
    os.environ["HOME"] = str(folder)
    tqdm.set_lock(
        threading.RLock()
    )  # tqdm's own lock is shared between processes and never released
    rng = random.Random(seed)
    vocabulary = ["the", "cat", "sat", "on", "a", "mat"]
    lines = [" ".join(rng.choices(vocabulary, k=9)) for _ in range(3000)]
    (folder / "text.txt").write_text("\n".join(lines))
    words = _train_words(folder, folder / "one" / "out", folder / "one" / "cache")
    launch = {"launch": lambda: _launch(words, folder / "one" / "trained")}
    codes = _run_together(launch, folder / "one")
    tally, expected = Tally(), _read_numbers(folder / "one" / "out")
    if codes != {"launch": 0} or len(expected) != 6:
        tally.lost.append(f"one launcher alone: {(folder / 'one' / 'launch.txt').read_text()}")
        cases = 0
    first = rng.randrange(3)
    for case in range(cases):
        count = _PROCESSES.get(cases, _FULL_PROCESSES)
        outcome = _run_round(folder / str(case), folder, count, expected, first + case)
        tally.add(
            Tally(
                outcome.cases,
                [f"{case}: {problem}" for problem in outcome.lost],
                [f"{case}: {problem}" for problem in outcome.wrong],
            )
        )
    answer.send(tally)


def torture(cases: int, seed: int, folder: Path) -> Tally:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    answer, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_rounds, args=(cases, seed, folder, theirs))
    process.start()
    theirs.close()
    try:
        return answer.recv()
    except EOFError:
        return Tally(cases, [f"the rounds ended with {process.exitcode}"])
    finally:
        process.join()
