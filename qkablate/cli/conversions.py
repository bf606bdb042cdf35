"""`qkablate project` with several variants: a sweep of short runs, and their table."""

from argparse import Namespace
from typing import TYPE_CHECKING

from qkablate.cli.arguments import out_words
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import SweepRequest, read_request, split_engine_words
from qkablate.compose.words import expand_words, parse_values, split_words
from qkablate.config import Config, variants
from qkablate.errors import UserError, print_stderr
from qkablate.table import print_json, print_next_commands

if TYPE_CHECKING:
    from qkablate.sweeps.planning.manifest import Manifest

_ALL = "variant=all"


def has_several_variants(overrides: list[str]) -> bool:
    """Return whether the overrides name all variants, or more than one."""
    own = [word for word in overrides if word.startswith("variant")]
    with open_hydra():
        values = [parse_values(word)[1] for word in own]
    if any("all" in several and len(several) > 1 for several in values):
        raise UserError("variant: 'all' stands alone")
    return _ALL in own or any(len(several) > 1 for several in values)


def print_conversions(
    args: Namespace, runs: list[str], overrides: list[str], steps: int, out: str
) -> int:
    """Train the sweep of conversions, print its table, and return the exit code."""
    overrides = [f"variant={','.join(variants())}" if w == _ALL else w for w in overrides]
    engine_words, overrides = split_engine_words(overrides)
    with open_hydra():
        request = _read_request(engine_words, overrides)
        manifest, slots = _plan(args, request, runs, overrides, steps, out)
    if args.dry_run:
        from qkablate.cli.launch import show_plan

        return show_plan(manifest, slots, request, as_json=args.json)
    from qkablate.analysis.study.study import read_study
    from qkablate.api.sweep import run_sweep
    from qkablate.report.text import projection
    from qkablate.sweeps.running import results

    try:
        outcome = run_sweep(manifest, slots, request, retry=True)
    except OSError as error:  # as of a full disk; what is written so far stays
        print_stderr(f"qkablate: {error}")
        return 1
    study = read_study(outcome.manifest.folder)
    if args.json:
        print_json(projection.conversions_to_json(study))
        return outcome.code
    print()
    projection.print_conversions(study)
    results.print_failures(outcome.sweep_state)
    name = [outcome.manifest.folder.name, *out_words(out)]
    again = results.resume_commands(outcome.sweep_state)
    print_next_commands(*again, ["report", *name], ["results", *name])
    return outcome.code


def _read_request(engine_words: list[str], overrides: list[str]) -> SweepRequest:
    """Return the settings of the sweep, whose runs are those of the overrides."""
    from qkablate.sweeps.conversions import check_axes

    parsed = [parse_values(word) for word in overrides]
    check_axes(parsed)
    threads = [word for word in overrides if word.startswith("threads=")]
    return read_request([*engine_words, *threads, "variant=standard"])


def _plan(
    args: Namespace,
    request: SweepRequest,
    runs: list[str],
    overrides: list[str],
    steps: int,
    out: str,
) -> tuple["Manifest", list[str | None]]:
    from tqdm import tqdm

    from qkablate.api.sweep import pack_manifest
    from qkablate.sweeps.conversions import plan_conversions
    from qkablate.sweeps.engines.factory import check_engine

    check_engine(request.settings.engine)
    with tqdm(desc="planning", unit=" runs", leave=False, disable=None, delay=0.5) as bar:

        def note(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        manifest = plan_conversions(
            runs,
            expand_words(overrides),
            steps,
            out,
            _compose,
            ["qkablate", "project", *args.words, "--table"],
            remote=request.settings.engine.name != "local",
            note=note,
        )
    return pack_manifest(manifest, request)


def _compose(words: list[str]) -> Config:
    return make_config(split_words(words))
