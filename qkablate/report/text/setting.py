"""The question of a section, and the setting of its runs: what a reader needs before the answer."""

from collections.abc import Callable, Iterable

from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.study.study import Entry
from qkablate.config import TEXT_SOURCES
from qkablate.config.data import DataConfig, has_masks
from qkablate.report.section import Section, format_n
from qkablate.table import format_list


def format_question(section: Section) -> str:
    """Return the question that a sweep asks: which arms are compared with which."""
    if section.judgement is not None:
        return section.judgement.claim.says
    pairs = [(gap.arm.arm.variant, gap.baseline.arm.variant) for gap in _gaps(section)]
    arms = list(dict.fromkeys(arm for arm, baseline in pairs if arm != baseline))
    if not arms:
        return ""
    baselines = list(dict.fromkeys(baseline for _, baseline in pairs))
    names, others = format_list(arms, 6), format_list(baselines)
    return f"Is the test loss of {names} different from that of {others}?"


def _gaps(section: Section) -> list[Gap]:
    return [gap for family in section.families for gap in family.gaps]


def format_setting(section: Section) -> str:
    """Return data, size, length, learning rates, number of seeds and date of a section's runs."""
    entries = section.study.entries

    def each(value: Callable[[Entry], object]) -> str:
        return format_list(_distinct(map(value, entries)), 4)

    layers = each(lambda entry: entry.arm.config.model.layers)
    positions = each(lambda entry: entry.arm.config.model.position)
    tuned = "tuned learning rates" if section.study.lr_searches else ""
    rates = _distinct(f"{entry.rates.lr:.3g}" for entry in entries if entry.rates is not None)
    kind = "fine-tuning steps" if any(e.arm.is_finetuned for e in entries) else "steps"
    is_trained = not section.is_imported
    parts = [
        each(lambda entry: _format_data(entry.arm.config.data)) if is_trained else "imported",
        f"{layers} layer{'' if layers == '1' else 's'}",
        f"d_model {each(lambda entry: entry.arm.config.model.d_model)}",
        f"heads {each(lambda entry: entry.arm.config.model.heads)}",
        f"context {each(lambda entry: entry.arm.config.model.context)}",
        f"positions {positions}" * (positions != "learned"),
    ]
    if is_trained:
        parts += [
            f"{each(lambda entry: f'{int(entry.arm.config.train.steps):,}')} {kind}",
            tuned or f"lr {format_list(rates, 4)}" * bool(rates),
            format_n([len(entry.losses) for entry in entries]),
            _format_dates(section),
        ]
    return " · ".join(filter(None, parts)) if entries else ""


def _format_data(data: DataConfig) -> str:
    is_text = data.source in TEXT_SOURCES and data.tokenizer is not None
    source = data.source + (f" in {data.tokenizer}" if is_text else "")
    return f"masked tokens of {source}" if has_masks(data) else source


def _distinct(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(map(str, values)))


def _format_dates(section: Section) -> str:
    """Format the days on which runs ended: the day, or the first and the last."""
    ends = [record.facts.get("ended") for record in section.study.all_records]
    days = sorted({end[:10] for end in ends if isinstance(end, str)})
    return " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))
