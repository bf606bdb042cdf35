"""W&B is slow, dead, wrong or without a disk, and training neither waits nor loses a number."""

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
_AT_ONCE = 4  # they wait rather than compute
_LOG, _CLOSE, _BEGIN = 1.0, 30.0, 60.0  # seconds that training waits for W&B
_GRACE = 2.0  # that a busy machine takes besides, at the end and the beginning
_BOUND = 180  # then it hangs
_KEY = "0123456789abcdef0123456789abcdef01234567"
_CLOCKS = ("seconds", "perf/", "crc32")


class _Slow(FakeServer):
    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        time.sleep(0.7)
        return super().answer(path, body)


@contextmanager
def _saying(content: bytes) -> Iterator[str]:
    """Start a server that gives everyone the same answer."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(content)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Nothing: clients that go away are part of the game."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def _fake(kind: type[FakeServer] = FakeServer, **how: Any) -> Iterator[str]:
    with kind(**how) as server:
        yield server.url


@contextmanager
def _full_disk() -> Iterator[str]:
    """W&B's own process can write but a little into any file."""

    def begin(self: Any, *what: Any, real: Callable[..., Any] = WandbRun.__init__) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
        try:
            real(self, *what)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    WandbRun.__init__ = begin  # type: ignore[method-assign]
    with _fake() as url:
        yield url


@contextmanager
def _disk_of_its_own(folder: Path, name: str) -> Iterator[bool]:
    """In one case W&B's folder alone is on a disk that is soon full; but to mount it takes root."""
    if name != "full disk of its own":
        yield False
        return
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(folder)]
    can = shutil.which("mount") is not None
    mounted = can and not subprocess.run(words, capture_output=True).returncode
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
# Each with the key that the user has. The first ones are quick.
_SERVERS: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "refuses": (lambda: contextlib.nullcontext(dead_url()), _KEY),
    "no key": (_fake, ""),
    "no folder": (_fake, ""),
    "works": (_fake, _KEY),
    "is slow": (lambda: _fake(_Slow), _KEY),
    "wrong key": (lambda: _fake(status=401), _KEY),
    "no such key": (_fake, "short"),
    "out of order": (lambda: _fake(status=500), _KEY),
    "asks for patience": (lambda: _fake(status=429), _KEY),
    "hangs": (lambda: _fake(hangs_at="/"), _KEY),
    "hangs at the start": (lambda: _fake(hangs_at="/graphql"), _KEY),
    "hangs midway": (lambda: _fake(hangs_at="/file_stream"), _KEY),
    "dies at the start": (lambda: _fake(dies_at="/graphql"), _KEY),
    "dies midway": (lambda: _fake(dies_at="/file_stream"), _KEY),
    "a page": (lambda: _saying(_PAGE), _KEY),
    "noise": (lambda: _saying(random.Random(0).randbytes(4096)), _KEY),
    "full disk": (_full_disk, _KEY),
    "full disk, offline": (_full_disk, ""),
    "full disk of its own": (_fake, ""),
}


def _words(folder: Path, seed: int) -> list[str]:
    return [
        *("train", "model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"),
        *("train.steps=60", "train.batch_size=2", "train.eval_every=20", "tracking.log_every=2"),
        *("data=text", f"data.path={folder}/text.txt", f"data.cache={folder}/cache"),
        *("data.val_tokens=64", "data.test_tokens=64", "threads=1", f"seed={seed}"),
    ]


def _train(name: str, seed: int, folder: Path, out: Path) -> None:
    """Train beside such a server, or without W&B; waited.json records how long training waited."""
    out.mkdir(exist_ok=True)
    os.chdir(out)
    for descriptor in (1, 2):
        os.dup2(os.open(out / "told.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    for variable in [v for v in os.environ if v.startswith(("WANDB_", "NETRC", "XDG_"))]:
        del os.environ[variable]
    os.environ["HOME"] = str(out)
    waited: dict[str, list[float]] = {"__init__": [], "log": [], "close": []}
    for method, seconds in waited.items():
        setattr(WandbRun, method, _timed(getattr(WandbRun, method), seconds))
    serve, key = _SERVERS.get(name, (contextlib.nullcontext, ""))
    words = [*_words(folder, seed), f"out={out}"]
    with serve() as url, contextlib.suppress(SystemExit):
        if url:
            os.environ["WANDB_BASE_URL"] = url
        if key:
            os.environ["WANDB_API_KEY"] = key
        main([*words, "tracking.wandb=auto" if url else "tracking.wandb=disabled"])
    (out / "waited.json").write_text(json.dumps({k: max(v) for k, v in waited.items()}))


def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*what: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*what)
        finally:
            seconds.append(time.monotonic() - began)

    return call


def _apart(context: Any, *what: Any) -> bool:
    """Train in a process of its own; whether it came to its end."""
    process = context.Process(target=_train, args=what)
    process.start()
    process.join(_BOUND)
    ended = process.exitcode is not None
    if not ended:
        process.kill()
        process.join()
    return ended


def _numbers(out: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return the losses, and every row without times."""
    (folder,) = (out / "runs").iterdir()
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    own = [{k: v for k, v in row.items() if not k.startswith(_CLOCKS)} for row in rows]
    result = json.loads((folder / "result.json").read_text())
    return (result["status"], result["measures"]), own


def torture(cases: int, seed: int, folder: Path) -> Tally:
    (folder / "text.txt").write_text("the cat sat on the mat and saw two dogs\n" * 400)
    # Each from a process that has imported all, and never started W&B.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qkablate.sweeps.running.worker", "wandb"])
    tally = Tally()
    if not _apart(context, "", seed, folder, folder / "without"):
        return Tally(1, ["without W&B: never ends"])
    expected = _numbers(folder / "without")
    (run,) = (folder / "without" / "runs").iterdir()

    def tried(case: int) -> Tally:
        name = list(_SERVERS)[case % len(_SERVERS)]
        out = folder / str(case)
        wandb = out / "runs" / run.name / "wandb"
        if name == "no folder":
            wandb.parent.mkdir(parents=True)
            wandb.touch()
        found = Tally(1)
        with _disk_of_its_own(wandb, name) as full:
            ended = _apart(context, name, seed, folder, out)
        if not ended:
            found.lost.append(f"{name}: never ends")
            return found
        said = (out / "told.txt").read_text(errors="replace")
        try:
            if _numbers(out) != expected:
                found.wrong.append(f"{name}: other numbers than without W&B")
            waited = json.loads((out / "waited.json").read_text())
        except (OSError, ValueError) as error:
            found.lost.append(f"{name}: {error}; {said[-500:]}")
            return found
        if "Traceback" in said:
            found.wrong.append(f"{name}: a traceback: {said[-500:]}")
        full |= name in ("full disk", "full disk, offline")
        if full and said.count("W&B: the log is incomplete") != 1:
            found.wrong.append(f"{name}: nobody is told: {said[-500:]}")
        bounds = {"log": _LOG, "close": _CLOSE + _GRACE, "__init__": _BEGIN + _GRACE}
        for method, most in bounds.items():
            if waited[method] > most:
                found.wrong.append(f"{name}: {method} took {waited[method]:.1f} s")
        return found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for found in pool.map(tried, range(cases)):
            tally.add(found)
    return tally
