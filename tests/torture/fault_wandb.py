"""W&B that is slow, dead, wrong or out of disk space; training neither waits nor loses numbers."""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from qkablate.cli import main
from qkablate.tracking import WandbRun
from tests.torture.tally import Tally
from tests.tracking.wandb.fake_server import FakeServer, dead_url

SHORT, FULL = 3, 19
_AT_ONCE = 4  # cases at once, which mostly wait
_LOG, _CLOSE, _BEGIN = 1.0, 30.0, 60.0  # seconds that training may wait for W&B
_GRACE = 2.0  # additional seconds on a busy machine, at the start and the end
_BOUND = 180  # seconds until a run counts as hanging
_KEY = "0123456789abcdef0123456789abcdef01234567"
_CLOCKS = ("seconds", "perf/", "crc32")


class _SlowServer(FakeServer):
    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        time.sleep(0.7)
        return super().answer(path, body)


@contextmanager
def _constant_server(content: bytes) -> Iterator[str]:
    """Start a server that always sends the same answer."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(content)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore clients that disconnect, which the cases cause."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def _fake_server(kind: type[FakeServer] = FakeServer, **options: Any) -> Iterator[str]:
    with kind(**options) as server:
        yield server.url


@contextmanager
def _limit_file_size() -> Iterator[str]:
    """Limit the size of the files that W&B's process writes."""

    def limited_init(
        self: Any, *args: Any, original: Callable[..., Any] = WandbRun.__init__
    ) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
        try:
            original(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    WandbRun.__init__ = limited_init  # type: ignore[method-assign]
    with _fake_server() as url:
        yield url


@contextmanager
def _small_disk(folder: Path, name: str) -> Iterator[bool]:
    """In one case, mount a small disk for W&B's folder alone, if this process may mount."""
    if name != "full disk of its own":
        yield False
        return
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(folder)]
    has_mount = shutil.which("mount") is not None
    mounted = has_mount and not subprocess.run(words, capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


_HTML = b"<html>Please log in to the network of this hotel</html>"
_PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
    len(_HTML),
    _HTML,
)
# Servers by name, each with the user's key. The first ones are fast.
_SERVERS: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "refuses": (lambda: contextlib.nullcontext(dead_url()), _KEY),
    "no key": (_fake_server, ""),
    "no folder": (_fake_server, ""),
    "works": (_fake_server, _KEY),
    "is slow": (lambda: _fake_server(_SlowServer), _KEY),
    "wrong key": (lambda: _fake_server(status=401), _KEY),
    "no such key": (_fake_server, "short"),
    "out of order": (lambda: _fake_server(status=500), _KEY),
    "asks for patience": (lambda: _fake_server(status=429), _KEY),
    "hangs": (lambda: _fake_server(hangs_at="/"), _KEY),
    "hangs at the start": (lambda: _fake_server(hangs_at="/graphql"), _KEY),
    "hangs midway": (lambda: _fake_server(hangs_at="/file_stream"), _KEY),
    "dies at the start": (lambda: _fake_server(dies_at="/graphql"), _KEY),
    "dies midway": (lambda: _fake_server(dies_at="/file_stream"), _KEY),
    "a page": (lambda: _constant_server(_PAGE), _KEY),
    "noise": (lambda: _constant_server(random.Random(0).randbytes(4096)), _KEY),
    "full disk": (_limit_file_size, _KEY),
    "full disk, offline": (_limit_file_size, ""),
    "full disk of its own": (_fake_server, ""),
}


def _make_words(folder: Path, seed: int) -> list[str]:
    return [
        *("train", "model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"),
        *("train.steps=60", "train.batch_size=2", "train.eval_every=20", "tracking.log_every=2"),
        *("data=text", f"data.path={folder}/text.txt", f"data.cache={folder}/cache"),
        *("data.val_tokens=64", "data.test_tokens=64", "threads=1", f"seed={seed}"),
    ]


def _train(name: str, seed: int, folder: Path, out: Path) -> None:
    """Train with a server, or without W&B; waited.json records how long training waited."""
    out.mkdir(exist_ok=True)
    os.chdir(out)
    for descriptor in (1, 2):
        os.dup2(os.open(out / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    for variable in [v for v in os.environ if v.startswith(("WANDB_", "NETRC", "XDG_"))]:
        del os.environ[variable]
    os.environ["HOME"] = str(out)
    waited: dict[str, list[float]] = {"__init__": [], "log": [], "close": []}
    for method, seconds in waited.items():
        setattr(WandbRun, method, _timed(getattr(WandbRun, method), seconds))
    serve, key = _SERVERS.get(name, (contextlib.nullcontext, ""))
    words = [*_make_words(folder, seed), f"out={out}"]
    with serve() as url, contextlib.suppress(SystemExit):
        if url:
            os.environ["WANDB_BASE_URL"] = url
        if key:
            os.environ["WANDB_API_KEY"] = key
        main([*words, "tracking.wandb=auto" if url else "tracking.wandb=disabled"])
    (out / "waited.json").write_text(json.dumps({k: max(v) for k, v in waited.items()}))


def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*args)
        finally:
            seconds.append(time.monotonic() - began)

    return call


def _train_isolated(context: Any, *args: Any) -> bool:
    """Train in a separate process; return whether it ended."""
    process = context.Process(target=_train, args=args)
    process.start()
    process.join(_BOUND)
    ended = process.exitcode is not None
    if not ended:
        process.kill()
        process.join()
    return ended


def _read_numbers(out: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return the losses, and every row without times."""
    (folder,) = (out / "runs").iterdir()
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    untimed_rows = [{k: v for k, v in row.items() if not k.startswith(_CLOCKS)} for row in rows]
    result = json.loads((folder / "result.json").read_text())
    return (result["status"], result["measures"]), untimed_rows


def torture(cases: int, seed: int, folder: Path) -> Tally:
    (folder / "text.txt").write_text("the cat sat on the mat and saw two dogs\n" * 400)
    # Forked from a process that has imported everything, and never started W&B.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qkablate.sweeps.running.worker", "wandb"])
    total = Tally()
    if not _train_isolated(context, "", seed, folder, folder / "without"):
        return Tally(1, ["without W&B: the run hangs"])
    expected = _read_numbers(folder / "without")
    (run,) = (folder / "without" / "runs").iterdir()

    def run_case(case: int) -> Tally:
        name = list(_SERVERS)[case % len(_SERVERS)]
        out = folder / str(case)
        wandb = out / "runs" / run.name / "wandb"
        if name == "no folder":
            wandb.parent.mkdir(parents=True)
            wandb.touch()
        tally = Tally(1)
        with _small_disk(wandb, name) as is_full:
            ended = _train_isolated(context, name, seed, folder, out)
        if not ended:
            tally.lost.append(f"{name}: the run hangs")
            return tally
        log_text = (out / "output.txt").read_text(errors="replace")
        try:
            if _read_numbers(out) != expected:
                tally.wrong.append(f"{name}: other numbers than without W&B")
            waited = json.loads((out / "waited.json").read_text())
        except (OSError, ValueError) as error:
            tally.lost.append(f"{name}: {error}; {log_text[-500:]}")
            return tally
        if "Traceback" in log_text:
            tally.wrong.append(f"{name}: a traceback: {log_text[-500:]}")
        is_full |= name in ("full disk", "full disk, offline")
        if is_full and log_text.count("W&B: the log is incomplete") != 1:
            tally.wrong.append(f"{name}: the full disk is not reported: {log_text[-500:]}")
        bounds = {"log": _LOG, "close": _CLOSE + _GRACE, "__init__": _BEGIN + _GRACE}
        for method, bound in bounds.items():
            if waited[method] > bound:
                tally.wrong.append(f"{name}: {method} took {waited[method]:.1f} s")
        return tally

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for tally in pool.map(run_case, range(cases)):
            total.add(tally)
    return total
