"""`qkablate export-logs`: the logs of runs in the formats of TensorBoard and MLflow."""

from collections.abc import Callable
from pathlib import Path

from qkablate.cli.arguments import Parser, one_of, take_out
from qkablate.cli.names import find_by_name, known_names
from qkablate.disk import expand_user
from qkablate.errors import UserError, print_stderr, require_extra, sanitize
from qkablate.sweeps.planning.manifest import read_manifest
from qkablate.sweeps.running.state import SweepState
from qkablate.table import format_count
from qkablate.tracking.export.run_log import RunLog, read_run_log

MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}

HELP = """qkablate export-logs: logs of runs, for TensorBoard or MLflow.

Usage: qkablate export-logs [SWEEP | RUN …] --to tensorboard|mlflow
                            --into FOLDER [out=FOLDER]

Each argument is a folder, or the beginning of a name or id; the default is
every run in `out`. A sweep stands for its runs. The same command, given again,
adds what is new: a run that has not changed is skipped, and one that has is
replaced. Nothing in `out` is changed.

Examples
  qkablate export-logs --to tensorboard --into boards       every run in outputs
  qkablate export-logs quick --to tensorboard --into boards a sweep
  qkablate export-logs merged_w-d128 --to mlflow --into ml  a run

  tensorboard --logdir boards                               shows the first two
  mlflow ui --backend-store-uri sqlite:///ml/mlflow.db      shows the third;
                                                            needs all of mlflow

Each target needs its extra, in a clone: pip install '.[tensorboard]' or
'.[mlflow]'.

Flags
{flags}

Exit codes: 0 every run is exported · 1 a run could not be read, or FOLDER not
be written · 2 a mistake in the command, or a missing extra
"""

PARSER = Parser(HELP, ("sweep", "run"), ("out=",))
PARSER.option("--to", "|".join(MODULES), "the tool to write for", one_of(MODULES))
PARSER.option("--into", "FOLDER", "where to write; made if it does not exist")


def main(argv: list[str]) -> int:
    """Write the logs of runs for another tool."""
    args = PARSER.parse(argv)
    words, out = take_out(args.words)
    if args.to is None:
        raise UserError(f"--to: give {' or '.join(MODULES)}")
    if args.into is None:
        raise UserError("--into: give a folder to write in")
    into = expand_user("--into", args.into)
    if into.exists() and not into.is_dir():
        raise UserError(f"--into: '{sanitize(args.into)}' is not a folder")
    folders = _find_runs(words, out)
    _check_target(into, folders, Path(out).expanduser())
    require_extra(args.to, *MODULES[args.to])
    try:
        return _export(folders, args.to, into)
    except OSError as error:  # as of a full disk; what is written so far stays
        print_stderr(
            f"qkablate: cannot write in '{sanitize(args.into)}': {error.strerror or error}"
        )
        return 1


def _check_target(into: Path, folders: list[Path], out: Path) -> None:
    """Raise UserError for a target among the runs or sweeps: what a run has written stays as is."""
    target = into.resolve()
    taken = {out / "runs", out / "sweeps", *folders, *(folder.parent for folder in folders)}
    for folder in (path.resolve() for path in taken):
        if target == folder or folder in target.parents:
            raise UserError(
                f"--into: '{sanitize(str(into))}' is in the folder of runs"
                f" '{sanitize(str(folder))}'; give another folder"
            )


def _find_runs(words: list[str], out: str) -> list[Path]:
    """Return the folders of the runs that the words name, or of all runs in `out`."""
    root = Path(out).expanduser()
    folders = [] if words else [root / "runs" / name for name in known_names("run", root)]
    for word in words:
        kind, folder = find_by_name(word, out, ("sweep", "run"))
        if kind == "run":
            folders.append(folder)
            continue
        sweep_state = SweepState(read_manifest(folder))
        sweep_state.refresh()
        states = sweep_state.states.values()
        folders += [x.folder for x in states if (x.folder / "config.yaml").is_file()]
    if not folders:
        raise UserError(f"there is no run in '{out}' yet; start one: qkablate train")
    return list(dict.fromkeys(folders))


def _export(folders: list[Path], to: str, into: Path) -> int:
    write = _open_target(to, into)
    written = unreadable = 0
    for folder in folders:
        try:
            log = read_run_log(folder)
            if log.skipped:
                print_stderr(f"{log.name}: {format_count(log.skipped, 'damaged row')} skipped")
            written += write(log)
        except UserError as error:
            print_stderr(f"qkablate: {error}")
            unreadable += 1
    same = len(folders) - written - unreadable
    print(f"{format_count(written, 'run')} written to '{into}'; {same:,} unchanged")
    return 1 if unreadable else 0


def _open_target(to: str, into: Path) -> Callable[[RunLog], bool]:
    """Return the function that writes a run and tells whether it was new."""
    if to == "mlflow":
        from qkablate.tracking.export.mlflow import MlflowStore

        return MlflowStore(into).write
    from qkablate.tracking.export.tensorboard import write_events

    return lambda log: write_events(log, into)
