"""Panels of the W&B view of a sweep.

The sweep's own W&B run holds the tables `gaps`, `verdicts`, `distances` and `runs`, the page
`report` and the charts `charts/<name>`, named as in `qkablate report`. Runs of translators and
encoders hold the table `examples`.
"""

from collections.abc import Sequence
from typing import Any

from qkablate.config import Config
from qkablate.config.data import PAIR_SOURCES, is_causal_text

# Diagnostics of a circuit, as the mean over the heads of each layer: `qk/moved/L0`, or
# `qk/moved/cross_L0` where a model has several sites.
_CIRCUIT_METRICS = (
    *("stable_rank", "effective_rank", "nuclear", "frobenius", "symmetry", "directionality"),
    *("moved", "off_rank", "balance"),
)
CIRCUITS = {
    "qk": _CIRCUIT_METRICS,
    "ov": _CIRCUIT_METRICS,
    "attention": (
        *("score_std", "score_max", "entropy", "self", "first", "previous", "sink", "induction"),
        "repeat_previous",
    ),
}
# Charts of the report for each circuit.
_CHARTS = {
    "qk": (
        ("heads", "Heads during training"),
        ("rounding", "Two orders of multiplication"),
        ("spectra", "Spectra of the QK circuit"),
        ("spectra-training", "Spectra during training"),
        ("head-maps", "Head by head"),
    ),
    "attention": (("attention", "Attention of one text"),),
}
_MAX_GPUS = 8


class PanelFactory:
    """Build the panels of each section."""

    def __init__(self, configs: Sequence[Config], by_variant: bool, lines: int) -> None:
        import wandb_workspaces.reports.v2 as wr

        self._wr: Any = wr
        self._configs = configs
        self._lines = lines
        by = self._wr.Config("variant.name") if by_variant else self._wr.Metric("JobType")
        # Of the runs that a line or a bar stands for: those that differ in their seed.
        self._means = {"groupby": by, "groupby_aggfunc": "mean", "max_runs_to_show": lines}

    def summary(self, introduction: str) -> Sequence[Any]:
        wr = self._wr
        return [
            wr.MarkdownPanel(markdown=introduction),
            self._chart("gaps", "Gaps with 95 % intervals"),
            wr.WeavePanelSummaryTable(table_name="gaps"),
            wr.WeavePanelSummaryTable(table_name="verdicts"),
        ]

    def losses(self) -> Sequence[Any]:
        from qkablate.data.tasks import TASKS

        causal = {is_causal_text(config.data) for config in self._configs}
        besides = ["val/bits_per_byte"] * (True in causal) + ["val/accuracy"] * (False in causal)
        has_sequences = any(
            config.data.source in (*TASKS, *PAIR_SOURCES) for config in self._configs
        )
        besides += ["val/exact"] * has_sequences
        return [
            self._curve("Validation loss", "val/loss", x="tokens"),
            self._curve("Training loss", "train/loss", x="tokens"),
            self._curve("Validation loss: all seeds", "val/loss", x="tokens", band="minmax"),
            *(self._curve(name, name, x="tokens") for name in besides),
            self._chart("losses", "Loss (report)"),
        ]

    def gaps(self) -> Sequence[Any]:
        is_finetuned = any(config.init_from.run is not None for config in self._configs)
        conversions = self._chart("conversions", "Conversions to other variants")
        return [
            *[conversions] * is_finetuned,
            self._chart("gap-curves", "Gap during training"),
            self._final("Test loss", "final/test_loss"),
            self._final("Validation loss", "final/val_loss"),
            self._chart("function-distance", "Function distance between arm and baseline"),
            self._wr.WeavePanelSummaryTable(table_name="distances"),
            self._media("report", "Full report"),
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
            self._chart("scaling", "Scaling laws"),
            wr.ParallelCoordinatesPlot(
                title="Variant, size and test loss",
                columns=[
                    wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=name, log=log)
                    for metric, name, log in columns
                ],
            ),
            self._scatter("Test loss by parameters", wr.SummaryMetric("params"), "final/test_loss"),
        ]

    def rates(self) -> Sequence[Any]:
        title = "Validation loss by learning rate, including tuning runs"
        return [
            self._scatter(title, self._wr.Config("optim.lr"), "final/val_loss"),
            self._chart("rates", "Learning-rate curves"),
        ]

    def circuit(self, circuit: str) -> Sequence[Any]:
        return [
            *(
                self._curve(
                    f"{circuit}: {measure.replace('_', ' ')}",
                    pattern=rf"^{circuit}/{measure}/(\w+_)?L\d+$",
                )
                for measure in CIRCUITS[circuit]
            ),
            *(self._chart(name, title) for name, title in _CHARTS.get(circuit, ())),
        ]

    def speed(self) -> Sequence[Any]:
        panels = [
            self._curve("Tokens per second", "perf/tokens_per_second"),
            self._curve("MFU", "perf/mfu"),
            self._curve("Seconds", "seconds", x="tokens"),
            self._curve("Gradient norm", "train/grad_norm"),
            self._curve("Learning rate", "train/lr"),
            self._system("CPU, %", "system/cpu"),
            self._system("Process memory, MB", "system/proc.memory.rssMB"),
        ]
        if any(config.device.startswith("cuda") for config in self._configs):
            for title, metric in (("GPU, %", "gpu"), ("GPU memory, %", "memoryAllocated")):
                names = [f"system/gpu.{number}.{metric}" for number in range(_MAX_GPUS)]
                panels.append(self._system(title, *names))
        return panels

    def runs(self) -> Sequence[Any]:
        tables = ["runs"]
        if any(config.model.form != "decoder" for config in self._configs):
            tables.append("examples")
        return [
            *(self._wr.WeavePanelSummaryTable(table_name=name) for name in tables),
            self._wr.RunComparer(diff_only="split"),
        ]

    def _curve(
        self,
        title: str,
        metric: str = "",
        *,
        pattern: str = "",
        x: str = "Step",
        band: str = "stddev",
    ) -> Any:
        """Return a line plot of the mean with a band over seeds."""
        return self._wr.LinePlot(
            title=title,
            x=x,
            y=[metric] if metric else [],
            metric_regex=pattern or None,
            groupby_rangefunc=band,
            **self._means,
        )

    def _final(self, loss: str, metric: str) -> Any:
        return self._wr.BarPlot(
            title=f"{loss}, mean and standard deviation over seeds",
            metrics=[metric],
            groupby_rangefunc="stddev",
            max_bars_to_show=self._lines,
            **self._means,
        )

    def _scatter(self, title: str, x: Any, y: str) -> Any:
        return self._wr.ScatterPlot(title=title, x=x, y=self._wr.SummaryMetric(y), log_x=True)

    def _system(self, title: str, *names: str) -> Any:
        return self._wr.LinePlot(title=title, x="RelativeTime(Process)", y=[*names])

    def _chart(self, name: str, title: str) -> Any:
        return self._media(f"charts/{name}", title)

    def _media(self, key: str, title: str) -> Any:
        return self._wr.MediaBrowser(title=title, media_keys=[key], num_columns=1)
