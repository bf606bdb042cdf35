"""Read runs from disk: records, curves as a long table, and gaps with their intervals."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.analysis.claims.registry import Registration
from qkablate.analysis.comparison.summary import GapSummary, describe_study
from qkablate.analysis.publication.unpack import open_archives, unpacked_claims
from qkablate.analysis.study.loss_curves import read_rows
from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.analysis.study.study import Record, Study, read_study
from qkablate.disk import expand_user
from qkablate.errors import UserError, nearest_hint, print_stderr
from qkablate.runs.records import is_number
from qkablate.runs.run import NoMatch
from qkablate.sweeps.planning.manifest import MANIFEST_FILE, find_sweep

if TYPE_CHECKING:
    import pyarrow

Folders = str | Path | Iterable[str | Path]

# The columns of `load_curves`, with their types.
CURVE_COLUMNS = {
    **dict.fromkeys(("run", "arm", "variant"), "string"),
    **dict.fromkeys(("d_model", "heads", "seed"), "int64"),
    "lr": "float64",
    **dict.fromkeys(("step", "tokens"), "int64"),
    "metric": "string",
    "value": "float64",
}
_POSITION = ("step", "tokens", "crc32")  # of a row of metrics.jsonl: no metrics
_NOT_FINITE = {"nan", "inf", "-inf"}  # as JSON has them


def load_runs(folders: Folders = "outputs") -> list[Record]:
    """Return the runs in some folders: of all outputs, of a sweep, or of one run each.

    A sweep in outputs may be named as in `load_sweep`, too. Published runs, as those of
    docs/study/results, are read from their archive or its folder.

    >>> [run.test for run in load_runs("outputs") if run.status == "done"]
    """
    several = [folders] if isinstance(folders, str | Path) else [*folders]
    records: list[Record] = []
    alone: list[Path] = []
    for folder in map(_find_folder, several):
        if (folder / MANIFEST_FILE).is_file():
            records += read_study(folder).all_records
        elif (folder / "runs").is_dir():
            alone += sorted(path.parent for path in folder.glob("runs/*/config.yaml"))
        elif unpacked := open_archives(folder):
            records += [run for claim in unpacked_claims(unpacked) for run in _read_claim(claim)]
        elif (folder / "config.yaml").is_file():
            alone.append(folder)
        else:
            raise UserError(
                f"'{folder}' is not a run, a sweep, or a folder of outputs; load_sweep(name, out)"
                " finds a sweep by its name"
            )
    study = read_standalone_runs(alone)
    for reason in study.unread:
        print_stderr(f"qkablate: skipped: {reason}")
    return [*records, *study.all_records]


def _read_claim(claim: Registration) -> list[Record]:
    """Return the runs of all looks of a claim, each once."""
    records = [run for sweep in claim.sweeps.values() for run in read_study(sweep).all_records]
    return [*{record.run.id: record for record in records}.values()]


def _find_folder(name: str | Path) -> Path:
    """Return the folder that a user names, or that of the sweep whose name begins so."""
    folder = expand_user("folder", str(name))
    if isinstance(name, str) and not folder.exists():
        with suppress(NoMatch):
            return find_sweep(name, "outputs")
    return folder


def load_curves(
    runs: Study | Record | Iterable[Record], metrics: Collection[str] | None = None
) -> "pyarrow.Table":
    """Return every logged value of some runs as a long table: a row per run, step and metric.

    The columns are run, arm, variant, d_model, heads, seed, lr, step, tokens, metric and value.
    Without `metrics`, the table has all that are a number per step, such as val/loss.

    >>> load_curves(load_runs(), ["val/loss"]).to_pandas()
    """
    import pyarrow

    columns: dict[str, list[Any]] = {name: [] for name in CURVE_COLUMNS}
    logged: set[str] = set()
    metrics = [metrics] if isinstance(metrics, str) else metrics
    for record in _read_records(runs):
        readings = [
            (row.get("step"), row.get("tokens"), name, float(value))
            for row in read_rows(record.folder)
            if is_number(row.get("step")) and is_number(row.get("tokens"))
            for name, value in row.items()
            if name not in _POSITION and (is_number(value) or str(value) in _NOT_FINITE)
        ]
        logged.update(name for *_, name, _ in readings)
        if metrics is not None:
            readings = [reading for reading in readings if reading[2] in metrics]
        config, changes = record.config, record.run.changes
        fixed = {
            "run": record.run.id,
            "arm": record.run.arm,
            **{"variant": config.get("variant.name"), "d_model": config.get("model.d_model")},
            **{"heads": config.get("model.heads")},
            **{"seed": changes["seed"], "lr": changes["optim.lr"]},
        }
        for name, value in fixed.items():
            columns[name] += [value] * len(readings)
        for name, values in zip(
            ("step", "tokens", "metric", "value"), zip(*readings, strict=True), strict=False
        ):
            columns[name] += values
    for name in sorted({*(metrics or ())} - logged) if logged else ():
        raise UserError(f"metrics: no run has logged '{name}'{nearest_hint(name, sorted(logged))}")
    schema = pyarrow.schema([*CURVE_COLUMNS.items()])
    return pyarrow.table(columns, schema)


def gaps(runs: Study | Record | Iterable[Record], margin: float | None = None) -> list[GapSummary]:
    """Return the gap of every arm to its baseline, as `qkablate results` shows it.

    Each has n, mean, interval, decision and verdict. Runs without their sweep are paired with
    standard attention in the same settings.

    >>> [(gap.arm, gap.mean, gap.interval, gap.verdict) for gap in gaps(load_sweep("quick"))]
    """
    if margin is not None and not (is_number(margin) and margin > 0):
        raise UserError(f"margin: {margin} is not a positive number of nats")
    if not isinstance(runs, Study):
        runs = read_standalone_runs(record.folder for record in _read_records(runs))
    return describe_study(runs, margin=margin).gaps


def _read_records(runs: Study | Record | Iterable[Record]) -> Iterable[Record]:
    """Return the records of a study, or the given ones; UserError for anything else."""
    if isinstance(runs, Study):
        return runs.records
    if isinstance(runs, Record):
        return [runs]
    if isinstance(runs, str):
        raise UserError(f"runs: '{runs}' is a name; load_sweep({runs!r}) reads that sweep")
    records = [*runs]
    if not all(isinstance(record, Record) for record in records):
        raise UserError(f"runs: {runs!r} is not a list of records; pass what load_runs returns")
    return records
