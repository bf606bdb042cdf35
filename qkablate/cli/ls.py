"""`qkablate ls`: the runs and sweeps in a folder."""

import fnmatch
import itertools
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from qkablate.cli.arguments import (
    Parser,
    convert_value,
    one_of,
    out_words,
    refuse_missing,
    split_runs,
    take_out,
    whole_number,
)
from qkablate.cli.names import known_names
from qkablate.config import KEYS, Role, conf_dir, config_names, flatten, keys_with
from qkablate.errors import UserError, nearest_hint, sanitize
from qkablate.report.text.table import format_known
from qkablate.runs.lease import LeaseObserver
from qkablate.runs.listing import (
    RunListing,
    find_run_folders,
    format_age,
    last_written,
    shorten_names,
    summarize_run,
)
from qkablate.runs.records import is_number
from qkablate.table import format_count, format_list, print_json, print_next_commands, print_table

_LIMIT = 20  # rows by default
# Short names of keys, for filters and for --sort.
_KEYS = {
    "variant": "variant.name",
    "data": "data.source",
    "lr": "optim.lr",
    "steps": "train.steps",
    "seed": "seed",
    "status": "status",
}
STATUSES = (
    *("done", "diverged", "failed", "running", "interrupted", "imported", "damaged"),
    "unfinished",
)
SORTS = ("age", "name", "loss", *_KEYS)

HELP = """qkablate ls: the runs and sweeps in a folder, the newest first.

Usage: qkablate ls [WORD …] [--sort KEY] [--limit N | --all] [--json]
                   [out=FOLDER]

A run or sweep is listed if every WORD fits it. A WORD is a part of a name, a
pattern such as 'standard*s0*', or key=value: a key of the resolved config as
in model.d_model=64, or variant (with its rank or groups, as low_rank_w_r16),
data, lr, steps, seed, status. Several values are separated by commas. A sweep
fits if one of its arms does.

Examples
  qkablate ls                                   everything in outputs/
  qkablate ls merged_w                          what has merged_w in its name
  qkablate ls variant=merged_w status=done      runs of merged_w that are done
  qkablate ls data=stdlib,wikitext2 lr=1e-3     of two data sets, at one
                                                learning rate
  qkablate ls model.d_model=128 --sort loss     the lowest test loss first

Columns: a name is variant, width, heads and seed, and how the id begins; any
verb takes it as RUN. Losses are in nats per token (of tasks per answer, of
masked text per mask). Status is done, diverged,
failed, running, interrupted, imported or damaged; that of a sweep done,
running, unfinished or damaged.

Flags
{flags}

Exit codes: 0 the list is printed · 2 a mistake in the command
"""

PARSER = Parser(HELP, ("run", "sweep"), ("out=", *(f"{key}=" for key in _KEYS)))
PARSER.option("--sort", "KEY", f"{', '.join(SORTS)}; default: age", one_of(SORTS))
PARSER.option("--limit", "N", f"rows of each table; default: {_LIMIT}", whole_number(1))
PARSER.switch("--all", "no limit, the default of --json")
PARSER.switch("--json", "print JSON, with every key of the runs' configs")


def main(argv: list[str]) -> int:
    """Print the runs and sweeps that fit the words."""
    args = PARSER.parse(argv)
    if args.all and args.limit:
        raise UserError("--all and --limit: give one of the two")
    words, out = take_out(args.words)
    refuse_missing(out)
    names, pairs = split_runs(words)
    wanted = dict(map(parse_filter, pairs))
    limit = args.limit or (None if args.all or args.json else _LIMIT)
    fits = [_name_filter(name) for name in names]
    folders = [f for f in find_run_folders(out) if all(fit(f.name) for fit in fits)]
    total = len(folders)
    if not wanted and args.sort in (None, "age"):  # the others need not be read
        folders = folders[:limit]
    observer = LeaseObserver(by_file_times=True)
    runs = [summarize_run(folder, observer) for folder in folders]
    found = runs
    if wanted:
        runs = [run for run in runs if _fits({**run.settings, "status": run.status}, wanted)]
        total = len(runs)
    runs.sort(key=lambda run: _sort_key(run, args.sort or "age"))
    sweeps = [s for s in _read_sweeps(out, wanted) if all(fit(s["name"]) for fit in fits)]
    shown = runs[:limit]
    if args.json:
        print_json({"runs": [*map(_to_json, shown)], "sweeps": sweeps[:limit]})
    elif runs or sweeps:
        _print(shown, total, sweeps, limit, out)
    else:
        _print_nothing(words, found, out)
    return 0


def _print_nothing(words: list[str], runs: list[RunListing], out: str) -> None:
    """Print that nothing fits the words; with the nearest name or value, those of `runs`."""
    names = {kind: known_names(kind, out) for kind in ("run", "sweep")}
    text = f"'{out}' has {' and '.join(format_count(len(n), kind) for kind, n in names.items())}"
    known = {
        part  # a name, its part before the id, and its first word
        for name in itertools.chain(*names.values())
        for part in (name, name.rpartition("-")[0], name.split("-")[0])
    }
    for run in runs:
        known |= {f"{key}={run.get(_KEYS[key])}" for key in ("variant", "data")}
    for group in ("variant", "data"):
        known |= {f"{group}={name}" for name in config_names(group)}
    if words:
        hints = [nearest_hint(word, known) for word in words if word not in known]
        text += f"; none fits {' '.join(words)}{next(filter(None, hints), '')}"
    print(sanitize(text))
    print_next_commands(["ls", *out_words(out)] if words else ["train", *out_words(out)])


def parse_filter(pair: str) -> tuple[str, list[Any]]:
    """Return the full key of a `key=value,value` word, and its values."""
    key, _, text = pair.partition("=")
    full = _KEYS.get(key, key)
    if full not in KEYS and full != "status":
        known = [*_KEYS, *KEYS]
        raise UserError(f"{key}: there is no such key{nearest_hint(key, known)}")
    if not text:
        raise UserError(f"{key}: a value is missing; write {key}=VALUE")
    values = re.split(r",(?![^\[]*\])", text)  # the commas of a list are its own
    if full == "status":
        return full, [convert_value(key, value, one_of(STATUSES)) for value in values]
    if key == "data":
        return full, [_find_data(value) for value in values]
    parsed = [_parse_value(value) for value in values]
    for value in parsed:
        KEYS[full].check(key, value)
    return full, parsed


def _find_data(name: str) -> str | dict[str, Any]:
    """Return a source of data, or the settings of a named set that is more than a source."""
    if name not in config_names("data"):
        return name
    settings = yaml.safe_load((conf_dir() / "data" / f"{name}.yaml").read_text(encoding="utf-8"))
    if settings["source"] == name:
        return name
    sizes = ("max_tokens", "val_tokens", "test_tokens", "cache")
    return {f"data.{key}": value for key, value in settings.items() if key not in sizes}


def _parse_value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError):  # as of 2024-02-30, a date that is none
        return text
    return value if value is None or isinstance(value, bool | list) else text


def _name_filter(word: str) -> Callable[[str], bool]:
    """Return a function that tells if a name contains the word or matches the pattern."""
    word = word.rstrip("/").rpartition("/")[2]
    return lambda name: fnmatch.fnmatchcase(name, f"*{word}*")


def _fits(values: Mapping[str, Any], wanted: Mapping[str, list[Any]]) -> bool:
    def fits(key: str, value: Any) -> bool:
        if isinstance(value, dict):
            return all(values.get(name) == own for name, own in value.items())
        return bool(values.get(key) == value)

    return all(any(fits(key, value) for value in allowed) for key, allowed in wanted.items())


def _sort_key(run: RunListing, sort: str) -> tuple[Any, ...]:
    if sort == "age":
        return (-run.written, run.name)
    if sort == "name":
        return (run.name,)
    if sort == "loss":
        value: Any = run.val if run.test is None else run.test
    else:
        value = run.status if sort == "status" else run.get(_KEYS[sort])
    # Unknown values last; numbers before text, as a damaged file may hold either, or a list.
    if value is not None and not is_number(value):
        value = str(value)
    return (value is None, isinstance(value, str), value or 0, -run.written)


def _read_sweeps(out: str, wanted: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the sweeps that have an arm with the values, the newest first."""
    from qkablate.sweeps.planning.manifest import MANIFEST_FILE, read_manifest
    from qkablate.sweeps.running.state import SweepState

    rows = []
    for folder in (
        path.parent for path in Path(out).expanduser().glob(f"sweeps/*/{MANIFEST_FILE}")
    ):
        row: dict[str, Any] = {"name": folder.name, "folder": str(folder)}
        row["written"] = last_written(folder, (MANIFEST_FILE, "results.csv"))
        try:
            state = SweepState(read_manifest(folder), LeaseObserver(by_file_times=True))
            state.refresh()
        except UserError as error:
            row |= {"status": "damaged", "runs": None, "counts": {}, "reason": str(error)}
            rows += [row] if not wanted else []
            continue
        counts = {status: n for status, n in state.status_counts().items() if n}
        if state.is_finished():  # also where a launcher of another machine may still be there
            row["status"] = "done"
        else:
            is_running = state.is_running() or counts.get("running")
            row["status"] = "running" if is_running else "unfinished"
        row |= {"runs": state.expected_runs(), "counts": counts}
        arms = {name: flatten(arm.config) for name, arm in state.manifest.arms.items()}
        for key in ("variant", "data", "steps"):
            row[key] = [*dict.fromkeys(arm[_KEYS[key]] for arm in arms.values())]
        planned = [*state.manifest.runs, *(one.run for one in state.states.values())]
        values = [{**arms[run.arm], **run.changes, **row} for run in planned]
        if not wanted or any(_fits(one, wanted) for one in values):
            rows.append(row)
    return sorted(rows, key=lambda row: (-row["written"], row["name"]))


def _to_json(run: RunListing) -> dict[str, Any]:
    row: dict[str, Any] = {"name": run.name, "folder": str(run.folder), "status": run.status}
    row |= {"val_loss": run.val, "test_loss": run.test, "written": run.written}
    return row | {"config": dict(run.settings)}


def _print(
    runs: list[RunListing], total: int, sweeps: list[dict[str, Any]], limit: int | None, out: str
) -> None:
    now = time.time()
    if sweeps:
        rows = [
            [
                *(
                    row["name"],
                    row["status"],
                    f"{row['counts'].get('done', 0)}/{row['runs'] or '–'}",
                ),
                *(format_list([*map(str, row.get(key, []))], 2) for key in ("variant", "data")),
                format_age(now - row["written"]),
            ]
            for row in sweeps[:limit]
        ]
        columns = ["sweep", "status", "done", "variants", "data", "age"]
        print_table(columns, [[*map(sanitize, row)] for row in rows], 2, ("variants", "sweep"))
        _print_rest(len(sweeps) - len(rows))
    if runs:
        print("\n" * bool(sweeps), end="")
        short = shorten_names(run.name for run in runs)
        table = [
            [
                *(short[run.name], run.status, _data(run), _cell(run, "optim.lr")),
                *(_cell(run, "train.steps"), format_known(run.val, ".3f")),
                *(format_known(run.test, ".3f"), format_age(now - run.written)),
            ]
            for run in runs
        ]
        columns = ["run", "status", "data", "lr", "steps", "val", "test", "age"]
        print_table(columns, [[*map(sanitize, row)] for row in table], 3, ("run",))
        _print_rest(total - len(runs))
    print_next_commands(*_next_commands(runs, sweeps, out))


def _print_rest(count: int) -> None:
    if count:
        print(f"and {count:,} more (--all)")


def _data(run: RunListing) -> str:
    objective = run.get("data.objective")
    return _cell(run, "data.source") + ("" if objective in (None, "causal") else f", {objective}")


def _cell(run: RunListing, key: str) -> str:
    value = run.get(key)
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)[:12]


def _next_commands(
    runs: list[RunListing], sweeps: list[dict[str, Any]], out: str
) -> list[list[str]]:
    """Return what may follow: the results of the newest sweep, and two runs side by side."""
    commands = []
    if sweeps and sweeps[0]["runs"]:
        verb = "results" if sweeps[0]["counts"].get("done") else "status"
        commands.append([verb, sweeps[0]["name"]])
    short = shorten_names(run.name for run in runs)
    done, imported = (
        [run for run in runs if run.status == status] for status in ("done", "imported")
    )
    if pair := _find_pair(done):
        commands.append(["compare", *(short[run.name] for run in pair)])
    elif kept := [run for run in [*done, *imported] if (run.folder / "checkpoints").is_dir()]:
        commands.append(["inspect", short[kept[0].name]])
    if not commands and runs:
        commands.append(["report", short[runs[0].name]])
    return [[*words, *out_words(out)] for words in commands]


def _find_pair(runs: list[RunListing]) -> tuple[RunListing, RunListing] | None:
    """Return the newest run that has a baseline among the runs, and that baseline."""
    ignored = {*keys_with(Role.VARIANT | Role.LOCAL), "variant.lr", "out"}

    def shared(run: RunListing) -> str:
        return str([item for item in run.settings.items() if item[0] not in ignored])

    standard = [run for run in runs if run.get("variant.name") == "standard"]
    baselines = {shared(run): run for run in reversed(standard)}
    arms = [run for run in runs if run.get("variant.name") not in ("standard", "uniform")]
    return next(((run, baselines[key]) for run in arms if (key := shared(run)) in baselines), None)
