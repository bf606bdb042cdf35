"""What the saved W&B view of a sweep shows: its own runs, and sections of panels over them.

Curves come from the runs; gaps, verdicts and pictures from the sweep's own run, sweep-<id>, which
holds what `qkablate report` says.
"""

import shlex
from collections.abc import Iterator
from typing import Any

from qkablate.dashboard.panels import Panels
from qkablate.disk import read_file
from qkablate.redaction import redacted
from qkablate.runs.records import read_config
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.state import Standing
from qkablate.table import counted

_MOST_LINES = 100  # of one panel, W&B's own bound


def view(standing: Standing, entity: str, project: str) -> Any:
    """The workspace, as wandb-workspaces knows it; nothing is asked of any network."""
    import wandb_workspaces.workspaces as ws

    manifest = standing.manifest
    lines = min(_MOST_LINES, len(means(manifest)) + 1)
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"{manifest.name}-{manifest.id}".replace("+", "_"),  # it takes no +
        sections=sections(manifest, lines),
        settings=ws.WorkspaceSettings(max_runs=lines),
        runset_settings=_runs(standing, own_run=bool(entity)),
    )


def means(manifest: Manifest) -> list[str]:
    """The means that there are: of runs that differ in their seed alone."""
    to_come = manifest.arms if manifest.finals else ()  # at rates that are not known yet
    return list(dict.fromkeys([*map(manifest.alike, manifest.runs), *to_come]))


def by_variant(manifest: Manifest) -> bool:
    """Whether the variant tells all of them apart; else the job type does, if it is ours."""
    alone = len({arm.variant for arm in manifest.arms.values()}) == len(means(manifest))
    return alone or manifest.track.job_type is not None


def mixed(manifest: Manifest) -> bool:
    """Whether a mean is of more than seeds, because the user gave all arms one job type."""
    variants = {arm.variant for arm in manifest.arms.values()}
    return by_variant(manifest) and len(variants) < len(means(manifest))


def _runs(standing: Standing, *, own_run: bool) -> Any:
    """Those of the sweep's group, and those that it shares with an older sweep."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    manifest = standing.manifest
    wanted = f'Metric("Group") == {_quoted(manifest.group)}'
    if shared := sorted(_elsewhere(standing)):
        wanted += f' or Metric("ID") in [{", ".join(map(_quoted, shared))}]'
    groupby: list[Any] = [expr.Config("variant.name")]
    groupby += [] if by_variant(manifest) else [expr.Metric("JobType")]
    return ws.RunsetSettings(
        filters=wanted,
        groupby=groupby,
        pinned_columns=[
            *("run:displayName", "run:jobType", "run:tags", "summary:final/status"),
            *("summary:final/test_loss", "summary:final/val_loss", "summary:params"),
            *("config:seed.value", "config:optim.value.lr"),
        ],
        # Always fetched, however many runs there are: it holds the tables and the pictures.
        pinned_runs=[f"sweep-{manifest.id}"] if own_run else [],
    )


def _quoted(text: str) -> str:
    """For a filter, whose signs (=, <, >) the library would replace in values, too."""
    plain = (c if c.isascii() and (c.isalnum() or c in "-_") else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'


def _elsewhere(standing: Standing) -> Iterator[str]:
    """The W&B ids of runs that stand in another group: a run belongs to no sweep."""
    own = standing.manifest.group
    line = f"\n  group: {own}\n".encode(errors="replace")
    for state in standing.states.values():
        try:
            if line in read_file(state.folder / "config.yaml"):
                continue  # as most do: to parse thousands takes seconds
            track = read_config(state.folder).get("track")
        except (OSError, ValueError):
            continue  # not begun, or damaged
        if not isinstance(track, dict) or track.get("group") == own:
            continue
        attempt = (state.result or {}).get("attempt")
        yield f"{state.run.id}-{attempt if isinstance(attempt, int) else 1}"


def sections(manifest: Manifest, lines: int) -> list[Any]:
    """In the order in which one reads them; those that few need are closed."""
    import wandb_workspaces.workspaces as ws

    panels = Panels([arm.config for arm in manifest.arms.values()], by_variant(manifest), lines)
    layout = ws.SectionLayoutSettings(columns=3, rows=3)
    return [
        ws.Section(
            name=name,
            panels=[*found],
            is_open=opened,
            layout_settings=layout if len(found) > 6 else ws.SectionLayoutSettings(columns=2),
        )
        for name, opened, found in (
            ("Answer", True, panels.answer(_told(manifest))),
            ("Loss", True, panels.losses()),
            ("Gaps", True, panels.gaps()),
            ("Sizes", True, panels.sizes()),
            ("Learning rates", False, panels.rates()),
            ("QK circuit", False, panels.circuit("qk")),
            ("OV circuit", False, panels.circuit("ov")),
            ("Attention", False, panels.circuit("attention")),
            ("Speed and system", False, panels.speed()),
            ("Runs", False, panels.runs()),
        )
    ]


def _told(manifest: Manifest) -> str:
    """What one must know to read it."""
    many = len(means(manifest))
    together = "variant" if by_variant(manifest) else "job type (arm and learning rate)"
    what = "and more: all arms have one job type" if mixed(manifest) else "alone"
    return "\n\n".join(
        [
            f"**{manifest.name}-{manifest.id}**: {counted(len(manifest.arms), 'arm')}",
            f"`{redacted(shlex.join(manifest.command))}`",
            f"Lines are means by {together}, bands one standard deviation over seeds {what}. They"
            " show, and decide nothing: what is known, with its interval, stands in the tables and"
            f" pictures of the run sweep-{manifest.id}.",
            "Runs that served to tune a learning rate have the tag `tuning`.",
            *[f"A panel draws {_MOST_LINES} of {many:,} means: filter the runs."]
            * (many > _MOST_LINES),
        ]
    )
