"""Run a command in a supervised child, and record its output, exit code and forbidden actions.

It must start no program, use no network, and write nothing outside its folder.
"""

import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from qkablate.cli import VERBS, load_verb, main

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Programs that a run starts to describe its environment.
ALLOWED_PROGRAMS = {"git", "uname", "lscpu"}
PROGRAM_STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn"}

TINY = [
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"),
    *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "train.checkpoint_every=4"),
    *("tracking.log_every=2", "tracking.wandb=disabled", "data=text", "data.path=corpus.txt"),
    "data.cache=cache",
]
SWEEP = [
    *("sweep", "sweep.name=small", "sweep.floor=false", "variant=standard,no_q", "seed=0,1"),
    *TINY,
]
CLAIM = """
says: Keys alone are enough.
source: a comment
seeds: 3
tuning_seeds: 0
grid: {variant: "standard,no_q"}
parts:
  within: {arm: no_q, kind: noninferior, margin: 3}
"""
SECRET = "a planted secret"
CORPUS = "the cat sat on the mat, ähnlich ∑\n" * 60


@dataclass(frozen=True)
class CommandResult:
    """Outcome of a command; a negative code is the signal that killed it."""

    code: int
    out: str
    err: str
    harm: list[str]

    @property
    def all(self) -> str:
        return self.out + self.err


def import_everything() -> None:
    """Import what the commands need, so that a child starts fast."""
    for verb in VERBS:
        load_verb(verb)
    for name in (
        "cli.hydra.multirun",
        "training.session",
        "training.warm_start.restore",
        "report.page",
        "verify",
        "data.corpus",
    ):
        import_module(f"qkablate.{name}")
    for name in (
        "omegaconf",
        "hydra.core.hydra_config",
        "pyarrow.parquet",
        "altair",
        "scipy.stats",
    ):
        with suppress(ImportError):
            import_module(name)


def run_command(
    words: list[str],
    box: Path,
    *,
    memory: int = 2**30,
    seconds: int = 60,
    before: Callable[[], object] = lambda: None,
    notes_folder: Path | None = None,
) -> CommandResult:
    """Run a command in `box`, the only folder it may write to, with limited additional memory."""
    notes_parent = notes_folder or box.parent
    notes = {name: notes_parent / f"{box.name}.{name}" for name in ("out", "err", "harm")}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    files = [os.open(path, flags) for path in notes.values()]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            signal.alarm(seconds)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            code = _child(words, box, memory, files, before)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for file in files:
        os.close(file)
    _, status = os.waitpid(child, 0)
    out, err, harm = (path.read_text("utf-8", "replace") for path in notes.values())
    return CommandResult(os.waitstatus_to_exitcode(status), out, err, harm.splitlines())


def _child(
    words: list[str], box: Path, memory: int, files: list[int], before: Callable[[], object]
) -> int:
    out, err, harm = files
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = (
        open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        for descriptor in (1, 2)
    )
    os.chdir(box)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "HYDRA_", "XDG_"))]:
        del os.environ[name]
    home = str(box / "home")
    os.environ |= {"HOME": home, "PLANTED": SECRET, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor"}
    tempfile.tempdir = home
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before()
    # Pytest would write the bytecode of what is imported here and named test_… or a plugin.
    sys.meta_path = [one for one in sys.meta_path if not type(one).__module__.startswith("_pytest")]
    sys.addaudithook(_AuditHook(box.resolve(), harm))
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 98  # main always raises SystemExit


class _AuditHook:
    """Audit hook that records forbidden actions."""

    def __init__(self, box: Path, harm: int) -> None:
        self._box, self._harm = str(box), harm

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in PROGRAM_STARTS or (
            event == "socket.connect" and args[0].family != socket.AF_UNIX
        ):
            self._note(event, args)
        elif event == "subprocess.Popen":
            if os.path.basename(os.fsdecode(args[1][0])) not in ALLOWED_PROGRAMS:
                self._note(event, args)
        elif event == "open":
            path, mode, flags = args
            if isinstance(path, str | bytes | os.PathLike) and (
                flags & WRITE_FLAGS or (mode and {*"wax+"} & {*mode})
            ):
                if flags & os.O_NOFOLLOW:  # opening a link fails
                    self._entry(event, path, -1)
                else:
                    self._check(event, os.path.realpath(os.fsdecode(path)))
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
            self._entry(event, args[0], args[-1] if event != "os.truncate" else -1)
        elif event in ("os.rename", "os.link"):
            self._entry(event, args[0], args[2])
            self._entry(event, args[1], args[3])
        elif event == "os.symlink":
            self._entry(event, args[1], args[2])

    def _entry(self, event: str, path: Any, folder: Any) -> None:
        """Check an entry of a folder: the link itself, not its target."""
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        parent, base = os.path.split(os.path.abspath(name))
        self._check(event, os.path.join(os.path.realpath(parent), base))

    def _check(self, event: str, path: str) -> None:
        if not (path + "/").startswith(self._box + "/") and not path.startswith(
            ("/dev/", "/proc/")
        ):
            self._note(event, path)

    def _note(self, event: str, detail: Any) -> None:
        os.write(self._harm, f"{event} {str(detail)[:300]!r}\n".encode())


def replace(target: object, name: str, value: object) -> None:
    """Replace an attribute that must exist, so that a renamed one does not go unnoticed."""
    getattr(target, name)
    setattr(target, name, value)


def restore_box(saved: Path, box: Path) -> None:
    """Restore a saved box, including times, under the same path."""
    shutil.rmtree(box, ignore_errors=True)
    shutil.copytree(saved, box, symlinks=True)


def interrupt_at(step: int) -> Callable[[], None]:
    """Return a patch that interrupts training at a step, as Ctrl-C would."""

    def patch() -> None:
        from qkablate.training.loop import Trainer

        def stop(self: Any, number: int, original: Any = Trainer._step) -> Any:
            if number == step:
                raise KeyboardInterrupt
            return original(self, number)

        Trainer._step = stop

    return patch


def make_box(box: Path) -> None:
    """Create a box that contains only a text."""
    (box / "home").mkdir(parents=True)
    (box / "corpus.txt").write_text(CORPUS, encoding="utf-8")


def run_successfully(words: list[str], box: Path) -> None:
    """Run a command that must succeed."""
    result = run_command(words, box)
    if result.code or result.harm:
        raise RuntimeError(f"{words[:3]}: {result}")
