"""Many launchers on one sweep, many preparations of one text, and readers all the while."""

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
_AT_ONCE = {SHORT: 3}
_MANY = 8  # otherwise
_BOUND = 300  # seconds: then it hangs
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
        *("variant=standard,no_q", "seed=range(3)", "workers=1", f"out={out}"),
    ]


def _at_once(actors: dict[str, Callable[[], int]], folder: Path) -> dict[str, int | None]:
    """Fork a process for each action, with output in <folder>/<name>.txt; return the exit codes.

    None stands for a process that hangs.
    """
    folder.mkdir(parents=True)
    pids = {}
    for name, act in actors.items():
        pids[name] = os.fork()
        if not pids[name]:
            code = 70
            try:
                file = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT, 0o666)
                for descriptor in (1, 2):
                    os.dup2(file, descriptor)
                code = act()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    codes, until = dict[str, int | None](), time.monotonic() + _BOUND
    for name, pid in pids.items():
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
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
    """Run a launcher that records what is trained; its runs are forked from this warm process."""
    from qkablate.training import session

    def sit(plan: Any, *what: Any, real: Callable[..., Any] = session._train_session) -> Any:
        with trained.open("a") as file:
            file.write(f"{plan.run.id}\n")
        return real(plan, *what)

    session._train_session = sit
    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: forked  # type: ignore[method-assign, assignment]
    return _command("sweep", *words)


def _read(out: Path, over: Path, shown: Path, verbs: list[list[str]]) -> int:
    """Ask again and again, once more after the end; what JSON says is kept."""
    last = False
    while not last:
        last = over.exists()
        time.sleep(0.05)  # what is read has to be written, too
        for words in verbs:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                code = _command(*words, f"out={out}")
            if code not in (0, 1, 2) or (code == 2 and last):
                print(f"{words} ended with {code}", flush=True)
            if code != 2 and words[-1].endswith("json"):
                with shown.open("a") as file:
                    file.write(json.dumps(json.loads(said.getvalue())) + "\n")
            pages = list(out.glob("sweeps/*/report.html")) if words[0] == "report" else []
            for page in pages:
                if not page.read_text(encoding="utf-8").rstrip().endswith("</html>"):
                    print("half a report", flush=True)
    return 0


def _prepare(folder: Path, cache: Path, tokenizer: str, started: float) -> int:
    from qkablate.config import DataConfig
    from qkablate.data.corpus import open_corpus

    path, size = f"{folder}/text.txt", 300 if tokenizer == "bpe" else None
    config = DataConfig(
        source="text", path=path, cache=str(cache), tokenizer=tokenizer, vocab_size=size
    )
    time.sleep(max(0.0, started - time.monotonic()))  # all at the same moment
    print("fingerprint", open_corpus(config).fingerprint)
    return 0


def _numbers(out: Path) -> dict[str, Any]:
    """Return the losses of each run, and every row without times."""
    found = {}
    for path in sorted(out.glob("runs/*/result.json")):
        result = json.loads(path.read_text())
        rows = map(json.loads, (path.parent / "metrics.jsonl").read_text().splitlines())
        own = [{k: v for k, v in row.items() if not k.startswith(_CLOCKS)} for row in rows]
        found[result["id"]] = (result["status"], result["measures"], result["attempt"], own)
    return found


def _told_wrongly(shown: Path, numbers: dict[str, Any]) -> list[str]:
    """Return what a reader was shown that is true of no run."""
    wrong = []
    for line in shown.read_text().splitlines() if shown.exists() else ():
        told = json.loads(line)
        runs = [(state["id"], state) for state in told.get("states", ())]
        for arm in told.get("arms", ()):
            runs += [(run["run"].rpartition("-")[2], run) for run in arm["runs"]]
            losses = [run["test_loss"] for run in arm["runs"] if run["status"] == "done"]
            if losses and abs(statistics.fmean(losses) - arm["mean"]) > 1e-9:
                wrong.append(f"a mean of {arm['mean']} for {losses}")
        for id, run in runs:
            for split in ("val", "test"):
                value = run[f"{split}_loss"]
                if value is not None and value != numbers[id][1][split]["loss"]:
                    wrong.append(f"{split} loss {value} for {id}")
    return wrong


def _round(folder: Path, text: Path, many: int, expected: dict[str, Any], choice: int) -> Tally:
    found = Tally(1)
    out, cache, over = folder / "out", folder / "cache", folder / "over"
    tokenizer = ("bytes", "chars", "bpe")[choice % 3]
    started = time.monotonic() + 0.3
    prepare = lambda: _prepare(text, folder / "prepared", tokenizer, started)  # noqa: E731
    codes = _at_once({f"prepare{n}": prepare for n in range(many)}, folder / "preparers")
    said = [path.read_text() for path in (folder / "preparers").iterdir()]
    prints = {print_ for told in said for print_ in re.findall(r"fingerprint (\w+)", told)}
    made = [path.name for path in (folder / "prepared").iterdir() if path.suffix != ".lock"]
    if {*codes.values()} != {0} or len(prints) != 1 or len(made) != 1:
        found.wrong.append(f"{tokenizer}: {codes}, {len(prints)} fingerprints, {made}: {said}")

    words = _train_words(text, out, cache)
    launch = lambda: _launch(words, folder / "trained")  # noqa: E731
    status, results = ["status", "--json"], ["results", "--format", "json"]

    def launchers() -> int:
        codes = _at_once({f"launch{n}": launch for n in range(many)}, folder / "launchers")
        over.touch()
        print(codes)
        return int(any(codes.values()))

    actors: dict[str, Callable[[], int]] = {"all": launchers}
    asked = {"numbers": [status, results], "pages": [["report"], ["status"]]}
    if many < _MANY:
        asked = {"numbers": [status, results, ["report"]]}
    for name, verbs in asked.items():
        actors[name] = lambda name=name, verbs=verbs: _read(out, over, folder / name, verbs)
    codes = _at_once(actors, folder / "actors")
    paths = [path for part in ("actors", "launchers") for path in (folder / part).iterdir()]
    outputs = {path.stem: path.read_text() for path in paths}
    if any(codes.values()):
        ends = "\n".join(f"{name}: {output[-500:]}" for name, output in outputs.items())
        found.lost.append(f"exit codes {codes}\n{ends}")
    for name, output in outputs.items():
        if re.search("Traceback|half a report|ended with", output):
            found.wrong.append(f"{name} printed {output[-1000:]}")
    numbers = _numbers(out)
    if numbers.keys() != expected.keys():
        found.lost.append(f"{len(numbers)} of {len(expected)} runs")
    elif numbers != expected:
        found.wrong.append("other numbers than of one launcher")
    trained = Counter((folder / "trained").read_text().split())
    if {*trained.values()} != {1} or trained.keys() != expected.keys():
        found.wrong.append(f"trained so many times: {dict(trained)}")
    for name in asked:
        found.wrong += [f"{name} told {what}" for what in _told_wrongly(folder / name, expected)]
    if not (folder / "numbers").exists():
        found.wrong.append("nothing was read")
    return found


def _all(cases: int, seed: int, folder: Path, answer: Any) -> None:
    """Run the rounds in a process that has imported everything and computed nothing."""
    os.environ["HOME"] = str(folder)
    tqdm.set_lock(threading.RLock())  # its own is one between processes, and not given back
    draw = random.Random(seed)
    vocabulary = ["the", "cat", "sat", "on", "a", "mat"]
    lines = [" ".join(draw.choices(vocabulary, k=9)) for _ in range(3000)]
    (folder / "text.txt").write_text("\n".join(lines))
    words = _train_words(folder, folder / "one" / "out", folder / "one" / "cache")
    launch = {"launch": lambda: _launch(words, folder / "one" / "trained")}
    codes = _at_once(launch, folder / "one")
    tally, expected = Tally(), _numbers(folder / "one" / "out")
    if codes != {"launch": 0} or len(expected) != 6:
        tally.lost.append(f"one launcher alone: {(folder / 'one' / 'launch.txt').read_text()}")
        cases = 0
    first = draw.randrange(3)
    for case in range(cases):
        many = _AT_ONCE.get(cases, _MANY)
        found = _round(folder / str(case), folder, many, expected, first + case)
        tally.add(
            Tally(
                found.cases,
                [f"{case}: {what}" for what in found.lost],
                [f"{case}: {what}" for what in found.wrong],
            )
        )
    answer.send(tally)


def torture(cases: int, seed: int, folder: Path) -> Tally:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    answer, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_all, args=(cases, seed, folder, theirs))
    process.start()
    theirs.close()
    try:
        return answer.recv()
    except EOFError:
        return Tally(cases, [f"the rounds ended with {process.exitcode}"])
    finally:
        process.join()
