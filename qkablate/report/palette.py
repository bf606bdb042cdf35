"""Styles of variants, the same in every chart: a color, a dash pattern and a point shape.

Dashes and shapes keep variants distinguishable in grayscale and for color-blind readers. Colors are
CSS variables, so that one chart serves light and dark themes; `use_light_colors` inserts the light
values for standalone files. Each set of seven hues maximizes the smallest distance between two of
them under normal vision, deuteranopia, protanopia and tritanopia, with a contrast of at least 3 : 1
to the background.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from qkablate.config.variant import without_sizes

_COLORS = {  # light, dark
    "ground": ("#ffffff", "#14171c"),
    "panel": ("#f6f7f9", "#1b1f26"),
    "ink": ("#16191d", "#e8ebef"),
    "faint": ("#59616b", "#a3acb8"),
    "line": ("#d5d9de", "#363d47"),
    "link": ("#0a4fc4", "#7fb0ff"),
    "warn": ("#9a4a00", "#ffb066"),
    "c0": ("#4d5560", "#b8c0cc"),
    "c1": ("#0040ff", "#3a63ff"),
    "c2": ("#99540f", "#ee4a12"),
    "c3": ("#00663c", "#2fe08f"),
    "c4": ("#600080", "#99568a"),
    "c5": ("#b28f00", "#ffcf33"),
    "c6": ("#149ecc", "#10aee6"),
    "c7": ("#4c0000", "#a84444"),
    # Diverging scale: lower loss is blue, higher is orange, no difference is neutral.
    "low3": ("#5b8fd6", "#2a63b0"),
    "low2": ("#9bbce8", "#27528c"),
    "low1": ("#d3e1f5", "#20364f"),
    "none": ("#e4e6ea", "#3a3f47"),  # no difference found
    "mid": ("#f6f7f9", "#1b1f26"),
    "high1": ("#f9e0c8", "#4a3320"),
    "high2": ("#f0b988", "#80501f"),
    "high3": ("#dd8a45", "#955615"),
}
LIGHT, DARK = ({name: pair[i] for name, pair in _COLORS.items()} for i in (0, 1))
HUES = 7
DASHES = ([1, 0], [6, 3], [2, 2], [9, 3, 2, 3])
SHAPES = ("circle", "square", "triangle-up", "diamond")

# The most common variants have a hue of their own.
_ROWS = (
    ("merged_w", "shared_qk", "no_q", "no_v", "no_k", "gqa", "no_o"),
    ("symmetric_w", "low_rank_w", "qk_norm", "tied_kv", "no_qk", "mqa", "tied_qkv"),
    ("sym_pairwise", "four_matrix", "wide_qk", "merged_ov", "uniform", "collaborative", "four_ov"),
    (
        *("no_vo", "sym_diag", "shared_qk_reformer", "static_scores", "standard_reassociated"),
        *("six_matrix", "mla"),
    ),
)
_SLOTS = {name: row * HUES + i for row, names in enumerate(_ROWS) for i, name in enumerate(names)}
_NO_SLOT = len(_SLOTS) + 99


@dataclass(frozen=True)
class Style:
    """Color, dash pattern and point shape of a variant."""

    color: str
    dash: list[int]
    shape: str


def assign_styles(variants: Iterable[str]) -> dict[str, Style]:
    """Return the style of each variant; standard is gray.

    Of several ranks or groups of a variant, the first has the variant's own style. The others, and
    variants from user files, take free styles in order; styles repeat after 28.
    """
    names, slots = {*variants}, dict[str, int]()
    for name in sorted(names - {"standard"}, key=lambda name: (_slot(name), name)):
        slot = _slot(name)
        slots[name] = slot if slot not in (*slots.values(), _NO_SLOT) else -1
    # Slots that belong to no built-in variant come first.
    unused = [slot for slot in range(HUES * len(DASHES)) if slot not in slots.values()]
    free = itertools.cycle(sorted(unused or [0], key=lambda slot: slot in _SLOTS.values()))
    styles = {"standard": Style("var(--c0)", DASHES[0], SHAPES[0])} if "standard" in names else {}
    for name, slot in slots.items():
        slot = next(free) if slot < 0 else slot
        row = (slot // HUES + slot % HUES) % len(DASHES)  # neighbors differ in more than color
        styles[name] = Style(f"var(--c{1 + slot % HUES})", DASHES[row], SHAPES[row])
    return styles


def _slot(name: str) -> int:
    """Return the slot of a variant; low_rank_w_r64 has that of low_rank_w."""
    return _SLOTS.get(name, _SLOTS.get(without_sizes(name), _NO_SLOT))


def use_light_colors(text: str) -> str:
    """Replace CSS variables with the colors of the light theme."""
    return re.sub(r"var\(--(\w+)\)", lambda match: LIGHT.get(match[1], match[0]), text)


def darken(text: str) -> str:
    """Replace the colors of the light theme with those of the dark one."""
    dark = {light: DARK[name] for name, light in LIGHT.items()}
    return re.sub(r"#[0-9a-f]{6}", lambda match: dark.get(match[0], match[0]), text)


def to_css(colors: dict[str, str]) -> str:
    """Return colors as declarations of CSS variables."""
    return ";".join(f"--{name}:{color}" for name, color in colors.items())
