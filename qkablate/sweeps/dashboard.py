"""What the saved W&B view of a sweep shows: its own runs, and sections of panels over them.

Curves come from the runs; gaps, verdicts and pictures from the sweep's own run, sweep-<id>, which
holds what `qkablate report` says.
"""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from qkablate.redaction import redacted
from qkablate.runs import read_config
from qkablate.sweeps.manifest import Manifest
from qkablate.sweeps.state import Standing

# In the sweep's own run: tables, the report, and its charts by their names there.
TABLES = ("gaps", "verdicts", "runs")
REPORT = "report"
CHARTS = ("gaps", "gap-curves", "heat", "costs", "rates")
# What a diagnosing step says of a circuit, a mean over heads for each layer.
CIRCUIT = (
    *("stable_rank", "effective_rank", "nuclear", "frobenius", "symmetry", "directionality"),
    *("moved", "off_rank", "balance"),
)
ATTENTION = (
    *("score_std", "score_max", "entropy", "self", "first", "previous", "sink", "induction"),
    "repeat_previous",
)
_MOST_LINES = 100  # of one panel, W&B's own bound
_MOST_GPUS = 8


def view(standing: Standing, entity: str, project: str) -> Any:
    """The workspace, as wandb-workspaces knows it; nothing is asked of any network."""
    import wandb_workspaces.workspaces as ws

    manifest = standing.manifest
    lines = min(_MOST_LINES, len(stood_together(manifest)) + 1)
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"{manifest.name}-{manifest.id}".replace("+", "_"),  # it takes no +
        sections=sections(manifest, lines),
        settings=ws.WorkspaceSettings(max_runs=lines),
        runset_settings=_runs(standing, own_run=bool(entity)),
    )


def group(manifest: Manifest) -> str:
    """Of its runs in W&B."""
    return manifest.track.group or f"{manifest.name}-{manifest.id}"


def stood_together(manifest: Manifest) -> list[str]:
    """The means that there are: of runs that differ in their seed alone."""
    return list(dict.fromkeys([*map(manifest.alike, manifest.runs), *manifest.arms]))


def by_variant(manifest: Manifest) -> bool:
    """Whether the variant tells all of them apart; else the job type does, if it is ours."""
    alone = len({arm.variant for arm in manifest.arms.values()}) == len(stood_together(manifest))
    return alone or manifest.track.job_type is not None


def mixed(manifest: Manifest) -> bool:
    """Whether a mean is of more than seeds, because the user gave all arms one job type."""
    variants = {arm.variant for arm in manifest.arms.values()}
    return by_variant(manifest) and len(variants) < len(stood_together(manifest))


def _runs(standing: Standing, *, own_run: bool) -> Any:
    """Those of the sweep's group, and those that it shares with an older sweep."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    manifest = standing.manifest
    wanted = f'Metric("Group") == {_quoted(group(manifest))}'
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
    own = group(standing.manifest)
    for state in standing.states.values():
        try:
            track = read_config(state.folder).get("track")
        except ValueError:
            continue  # not begun, or damaged
        if not isinstance(track, dict) or track.get("group") == own:
            continue
        attempt = (state.result or {}).get("attempt")
        yield f"{state.run.id}-{attempt if isinstance(attempt, int) else 1}"


def sections(manifest: Manifest, lines: int) -> list[Any]:
    """In the order in which one reads them; those that few need are closed."""
    import wandb_workspaces.workspaces as ws

    panels = _Panels(manifest, lines)
    layout = ws.SectionLayoutSettings(columns=3, rows=3)
    return [
        ws.Section(
            name=name,
            panels=[*found],
            is_open=opened,
            layout_settings=layout if len(found) > 6 else ws.SectionLayoutSettings(columns=2),
        )
        for name, opened, found in (
            ("Answer", True, panels.answer()),
            ("Loss", True, panels.losses()),
            ("Gaps", True, panels.gaps()),
            ("Sizes", True, panels.sizes()),
            ("Learning rates", False, panels.rates()),
            ("QK circuit", False, panels.circuit("qk", CIRCUIT)),
            ("OV circuit", False, panels.circuit("ov", CIRCUIT)),
            ("Attention", False, panels.circuit("attention", ATTENTION)),
            ("Speed and system", False, panels.speed()),
            ("Runs", False, panels.runs()),
        )
    ]


class _Panels:
    """The panels of each section."""

    def __init__(self, manifest: Manifest, lines: int) -> None:
        import wandb_workspaces.reports.v2 as wr

        self._wr: Any = wr
        self._manifest = manifest
        self._lines = lines
        alone = by_variant(manifest)
        self._by = self._wr.Config("variant.name") if alone else self._wr.Metric("JobType")
        self._configs = [arm.config for arm in manifest.arms.values()]

    def answer(self) -> Sequence[Any]:
        wr = self._wr
        return [
            wr.MarkdownPanel(markdown=self._told()),
            self._chart("gaps", "Gaps, with their intervals"),
            wr.WeavePanelSummaryTable(table_name="gaps"),
            wr.WeavePanelSummaryTable(table_name="verdicts"),
        ]

    def losses(self) -> Sequence[Any]:
        from qkablate.data.tasks import TASKS

        tasks = {config.data.source in TASKS for config in self._configs}
        besides = ["val/bits_per_byte"] * (False in tasks) + ["val/accuracy"] * (True in tasks)
        return [
            self._curve("Validation loss", "val/loss", x="tokens"),
            self._curve("Training loss", "train/loss", x="tokens"),
            self._curve("Validation loss: all seeds", "val/loss", x="tokens", band="minmax"),
            *(self._curve(name, name, x="tokens") for name in besides),
        ]

    def gaps(self) -> Sequence[Any]:
        return [
            self._chart("gap-curves", "Gap while training"),
            self._final("Test loss, mean and standard deviation over seeds", "final/test_loss"),
            self._final("Validation loss, the same", "final/val_loss"),
            self._wr.MediaBrowser(title="The whole report", media_keys=[REPORT], num_columns=1),
        ]

    def sizes(self) -> Sequence[Any]:
        wr = self._wr
        columns = [
            (wr.Config("variant.name"), "variant", None),
            (wr.Config("model.d_model"), "d_model", None),
            (wr.Config("model.heads"), "heads", None),
            (wr.Config("optim.lr"), "learning rate", True),
            (wr.SummaryMetric("params"), "parameters", True),
            (wr.SummaryMetric("final/test_loss"), "test loss", None),
        ]
        return [
            self._chart("heat", "Gap by variant and size"),
            self._chart("costs", "Loss against cost"),
            wr.ParallelCoordinatesPlot(
                title="Variant, size and test loss",
                columns=[
                    wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=name, log=log)
                    for metric, name, log in columns
                ],
            ),
            wr.ScatterPlot(
                title="Test loss by parameters",
                x=wr.SummaryMetric("params"),
                y=wr.SummaryMetric("final/test_loss"),
                log_x=True,
            ),
        ]

    def rates(self) -> Sequence[Any]:
        wr = self._wr
        return [
            wr.ScatterPlot(
                title="Validation loss by learning rate, tuning runs among them",
                x=wr.Config("optim.lr"),
                y=wr.SummaryMetric("final/val_loss"),
                log_x=True,
            ),
            self._chart("rates", "Learning rates: the bowls"),
        ]

    def circuit(self, circuit: str, measures: Sequence[str]) -> Sequence[Any]:
        return [
            self._curve(
                f"{circuit}: {measure.replace('_', ' ')}",
                pattern=rf"^{circuit}/{measure}/L\d+$",
            )
            for measure in measures
        ]

    def speed(self) -> Sequence[Any]:
        found = [
            self._curve("Tokens per second", "perf/tokens_per_second"),
            self._curve("Speed, as a part of the fastest stretch", "perf/mfu"),
            self._curve("Seconds", "seconds", x="tokens"),
            self._curve("Norm of the gradient", "train/grad_norm"),
            self._curve("Learning rate", "train/lr"),
            self._system("CPU, %", "system/cpu"),
            self._system("Memory of the process, MB", "system/proc.memory.rssMB"),
        ]
        if any(config.device.startswith("cuda") for config in self._configs):
            for title, what in (("GPU, %", "gpu"), ("Memory of the GPU, %", "memoryAllocated")):
                names = [f"system/gpu.{number}.{what}" for number in range(_MOST_GPUS)]
                found.append(self._system(title, *names))
        return found

    def runs(self) -> Sequence[Any]:
        return [
            self._wr.WeavePanelSummaryTable(table_name="runs"),
            self._wr.RunComparer(diff_only="split"),
        ]

    def _curve(
        self, title: str, metric: str = "", *, pattern: str = "", x: str = "Step", band: str = ""
    ) -> Any:
        """A mean with a band over seeds."""
        return self._wr.LinePlot(
            title=title,
            x=x,
            y=[metric] if metric else [],
            metric_regex=pattern or None,
            groupby=self._by,
            groupby_aggfunc="mean",
            groupby_rangefunc=band or "stddev",
            max_runs_to_show=self._lines,
        )

    def _final(self, title: str, metric: str) -> Any:
        return self._wr.BarPlot(
            title=title,
            metrics=[metric],
            groupby=self._by,
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
            max_runs_to_show=self._lines,
            max_bars_to_show=self._lines,
        )

    def _system(self, title: str, *names: str) -> Any:
        return self._wr.LinePlot(title=title, x="RelativeTime(Process)", y=[*names])

    def _chart(self, name: str, title: str) -> Any:
        return self._wr.MediaBrowser(title=title, media_keys=[f"charts/{name}"], num_columns=1)

    def _told(self) -> str:
        manifest = self._manifest
        together = "variant" if by_variant(manifest) else "job type (arm and learning rate)"
        what = "and more: all arms have one job type" if mixed(manifest) else "alone"
        return "\n\n".join(
            [
                f"**{manifest.name}-{manifest.id}**: {len(manifest.arms)} arms",
                f"`{redacted(shlex.join(manifest.command))}`",
                f"Lines are means by {together}, bands one standard deviation over seeds {what}."
                " They show, and decide nothing: what is known, with its interval, stands in the"
                f" tables and pictures of the run sweep-{manifest.id}.",
                "Runs that served to tune a learning rate have the tag `tuning`.",
            ]
        )
