"""The look of a variant, the same in every picture: a colour, and a dash and a shape for those who
see no colours or print in grey.

Colours are names of CSS variables, so that one picture serves light, dark and paper; `plain` puts
the light ones in their place, for files that stand alone. Each set was searched for: seven hues in
which the nearest two are furthest apart under normal sight, deuteranopia, protanopia and
tritanopia, with a contrast of 3 : 1 or more to the ground.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

LIGHT = {
    "ground": "#ffffff",
    "panel": "#f6f7f9",
    "ink": "#16191d",
    "faint": "#59616b",
    "line": "#d5d9de",
    "link": "#0a4fc4",
    "warn": "#9a4a00",
    "c0": "#4d5560",
    "c1": "#0040ff",
    "c2": "#99540f",
    "c3": "#00663c",
    "c4": "#600080",
    "c5": "#b28f00",
    "c6": "#149ecc",
    "c7": "#4c0000",
    # Lower loss is blue, higher is orange, and nothing is the ground.
    "low3": "#5b8fd6",
    "low2": "#9bbce8",
    "low1": "#d3e1f5",
    "mid": "#f6f7f9",
    "high1": "#f9e0c8",
    "high2": "#f0b988",
    "high3": "#dd8a45",
}
DARK = {
    "ground": "#14171c",
    "panel": "#1b1f26",
    "ink": "#e8ebef",
    "faint": "#a3acb8",
    "line": "#363d47",
    "link": "#7fb0ff",
    "warn": "#ffb066",
    "c0": "#b8c0cc",
    "c1": "#3a63ff",
    "c2": "#ee4a12",
    "c3": "#2fe08f",
    "c4": "#99568a",
    "c5": "#ffcf33",
    "c6": "#10aee6",
    "c7": "#a84444",
    "low3": "#2a63b0",
    "low2": "#27528c",
    "low1": "#20364f",
    "mid": "#1b1f26",
    "high1": "#4a3320",
    "high2": "#80501f",
    "high3": "#955615",
}
HUES = 7
DASHES = ([1, 0], [6, 3], [2, 2], [9, 3, 2, 3])
SHAPES = ("circle", "square", "triangle-up", "diamond")

# Those that are asked about most have a hue of their own.
_FIRST = ("merged_w", "shared_qk", "no_q", "no_v", "no_k", "gqa", "no_o")
_SECOND = ("symmetric_w", "low_rank_w", "qk_norm", "tied_kv", "no_qk", "mqa", "tied_qkv")
_THIRD = ("sym_pairwise", "four_matrix", "wide_qk", "merged_ov", "uniform", "collaborative")
_FOURTH = ("no_vo", "sym_diag", "shared_qk_reformer", "static_scores", "standard_reassociated")
_SLOTS: dict[str, int] = {
    name: row * HUES + place
    for row, names in enumerate((_FIRST, _SECOND, _THIRD, _FOURTH))
    for place, name in enumerate(names)
}

_FOREIGN = len(_SLOTS) + 99


@dataclass(frozen=True)
class Look:
    colour: str
    dash: list[int]
    shape: str


def looks(variants: Iterable[str]) -> dict[str, Look]:
    """Standard is grey. Of several ranks or groups of a variant the first has its look; these, and
    variants that are not ours, take the first looks that are free. Beyond 28 they come again.
    """
    slots: dict[str, int] = {}
    names = sorted({*variants}, key=lambda name: (name != "standard", _slot(name), name))
    for name in names[names[:1] == ["standard"] :]:
        own = _slot(name)
        slots[name] = own if own not in (*slots.values(), _FOREIGN) else -1
    # What is nobody's is taken before what is another's who is not here.
    unused = [slot for slot in range(HUES * len(DASHES)) if slot not in slots.values()]
    free = itertools.cycle(sorted(unused or [0], key=lambda slot: slot in _SLOTS.values()))
    found = {"standard": Look("var(--c0)", DASHES[0], SHAPES[0])} if "standard" in names else {}
    for name, own in slots.items():
        slot = own if own >= 0 else next(free)
        row = (slot // HUES + slot % HUES) % len(DASHES)  # neighbours differ in more than colour
        found[name] = Look(f"var(--c{1 + slot % HUES})", DASHES[row], SHAPES[row])
    return found


def _slot(name: str) -> int:
    """That of low_rank_w for low_rank_w_r64."""
    return _SLOTS.get(name, _SLOTS.get(re.sub(r"_[rg]\d+$", "", name), _FOREIGN))


def plain(text: str) -> str:
    """With the light colours in the place of their names."""
    return re.sub(r"var\(--(\w+)\)", lambda found: LIGHT.get(found[1], found[0]), text)


def css(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())
