"""Diagrams of the variants: what each one does to the four matrices of standard attention.

The facts below are the only input. A diagram is one SVG whose lines and text have the color of the
surrounding text, so that it is legible on light and dark pages.
"""

import enum
from dataclasses import dataclass, field
from xml.sax.saxutils import escape


class Change(enum.Enum):
    """Fate of one matrix of standard attention."""

    KEPT = "kept"
    REMOVED = "removed"
    MERGED = "merged into one W"
    TIED = "equal to W_k"


@dataclass(frozen=True)
class Facts:
    """Fate of the two matrices of a circuit: W_q and W_k, or W_v and W_o."""

    first: Change = Change.KEPT
    second: Change = Change.KEPT
    labels: tuple[str, str] | None = None  # where the matrices have other names
    factors: tuple[str, str] = ("", "")  # another matrix in front of each
    between: str = ""  # what stands between queries and keys
    notes: tuple[str, str] = ("", "")  # a few words about each matrix
    joined: bool = False  # the two are multiplied with each other first

    def describe(self) -> tuple[str, str]:
        """Return in words what happens to each of the two matrices."""
        texts = []
        changes, labels = (self.first, self.second), self.labels or ("", "")
        for change, label, factor, note in zip(
            changes, labels, self.factors, self.notes, strict=True
        ):
            words = [f"replaced by {label}" if label else change.value]
            words += [f"after {factor}"] * bool(factor) + [note] * bool(note)
            texts.append(", ".join(words))
        return texts[0], texts[1]


REMOVED, MERGED, TIED = Change.REMOVED, Change.MERGED, Change.TIED

QK_FACTS = {
    "separate": Facts(),
    "merged": Facts(MERGED, MERGED, between="W"),
    "symmetric": Facts(MERGED, MERGED, between="W = Wᵀ"),
    "low_rank": Facts(labels=("U", "V"), notes=("rank r", "rank r")),
    "wide": Facts(notes=("d × d", "d × d")),
    "no_q": Facts(first=REMOVED),
    "no_k": Facts(second=REMOVED),
    "no_qk": Facts(REMOVED, REMOVED),
    "shared": Facts(first=TIED),
    "sym_diag": Facts(first=TIED, between="D"),
    "sym_pairwise": Facts(first=TIED, between="U"),
    "four_matrix": Facts(factors=("A_q", "A_k")),
    "collaborative": Facts(between="m_h", notes=("all heads", "all heads")),
    "grouped": Facts(notes=("", "g groups")),
    "static": Facts(REMOVED, REMOVED, between="table"),
    "uniform": Facts(REMOVED, REMOVED, between="0"),
    "reassociated": Facts(joined=True),
    "latent": Facts(factors=("", "W_c"), notes=("", "from c")),
}

OV_FACTS = {
    "separate": Facts(),
    "no_v": Facts(first=REMOVED),
    "no_o": Facts(second=REMOVED),
    "no_vo": Facts(REMOVED, REMOVED, notes=("", "gain g_h")),
    "merged": Facts(MERGED, MERGED, between="W"),
    "four": Facts(factors=("A_v", "")),
    "tied": Facts(first=TIED),
    "grouped": Facts(notes=("g groups", "")),
    "latent": Facts(factors=("W_c", ""), notes=("from c", "")),
}

_Q, _K, _V = 36, 90, 156  # heights of the three branches
_W, _H = 60, 30  # a box
_RED = "#d6455d"  # legible on white and on black


@dataclass
class _Drawing:
    """SVG elements, in the order in which they are painted."""

    parts: list[str] = field(default_factory=list)

    def line(self, *points: tuple[float, float], arrow: bool = False, faint: bool = False) -> None:
        path = " ".join(f"{'L' if i else 'M'}{x} {y}" for i, (x, y) in enumerate(points))
        style = ' stroke-dasharray="3 4" opacity="0.45"' if faint else ""
        self.parts.append(f'<path d="{path}" fill="none"{style}/>')
        if arrow and not faint:
            x, y = points[-1]
            tip = f"M{x} {y}l-7 -4v8z"
            if points[-2][0] == x:  # downwards
                tip = f"M{x} {y}l-4 -7h8z"
            self.parts.append(f'<path d="{tip}" fill="currentColor" stroke="none"/>')

    def text(self, x: float, y: float, words: str, size: int = 15, faint: bool = False) -> None:
        """Write words around a point; an underscore makes the rest of a word a subscript."""
        spans = []
        for word in words.split(" "):
            base, _, index = word.partition("_")
            low = f'<tspan dy="4" font-size="{size - 4}">{escape(index)}</tspan>' if index else ""
            spans.append(escape(base) + low + ('<tspan dy="-4">\u200b</tspan>' if index else ""))
        style = ' opacity="0.5"' if faint else ""
        self.parts.append(
            f'<text x="{x}" y="{y + 5}" font-size="{size}" text-anchor="middle"{style}'
            f' stroke="none" fill="currentColor">{" ".join(spans)}</text>'
        )

    def box(
        self, x: float, y: float, label: str, *, width: float = _W, height: float = _H,
        removed: bool = False, strong: bool = False, dashed: bool = False,
    ) -> None:  # fmt: skip
        """Draw a box around a point; a removed one is struck out."""
        left, top = x - width / 2, y - height / 2
        style = ' stroke-dasharray="4 3"' if removed or dashed else ""
        style += ' opacity="0.5"' if removed else ' stroke-width="2.6"' if strong else ""
        self.parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="5"'
            f' fill="none"{style}/>'
        )
        self.text(x, y, label, faint=removed)
        if removed:
            self.parts.append(
                f'<path d="M{left - 4} {top + height + 4}L{left + width + 4} {top - 4}"'
                f' stroke="{_RED}" stroke-width="2.6" fill="none"/>'
            )


def draw_variant(qk: str, ov: str, norm: str = "none", mask_self: bool = False) -> str:
    """Return the SVG of a pair of circuits and its modifiers."""
    d = _Drawing()
    scores, values = QK_FACTS[qk], OV_FACTS[ov]
    no_content = qk in ("static", "uniform")
    d.text(22, _K, "x")
    _draw_scores(d, scores, norm, no_content)
    d.line((310, (_Q + _K) / 2), (330, (_Q + _K) / 2), arrow=True)
    d.box(372, (_Q + _K) / 2, "softmax", width=84)
    if mask_self:
        d.text(372, _Q - 14, "not to itself", 12)
    d.line((414, (_Q + _K) / 2), (440, (_Q + _K) / 2), (440, _V - 13), arrow=True)
    _draw_outputs(d, values)
    title = "; ".join(
        f"{name} {text}"
        for name, text in zip(
            ("W_q", "W_k", "W_v", "W_o"), (*scores.describe(), *values.describe()), strict=True
        )
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 610 192" role="img"'
        f' aria-label="{escape(title)}" stroke="currentColor" stroke-width="1.4"'
        f' font-family="inherit"><title>{escape(title)}</title>{"".join(d.parts)}</svg>'
    )


def _draw_scores(d: _Drawing, facts: Facts, norm: str, no_content: bool) -> None:
    """Draw the two upper branches, from the boxes at 150 to the product at 295."""
    middle = (_Q + _K) / 2
    if facts.first is MERGED:
        _draw_input(d, _Q)
        _draw_input(d, _K)
        d.box(150, middle, "", height=_K - _Q + _H, strong=True)
        d.text(150, middle, facts.between, 12 if len(facts.between) > 1 else 15)
        d.line((180, middle), (310, middle))
        return
    normed = {"none": (), "qk": (_Q, _K), "unit_keys": (_K,)}[norm]
    rows = zip(
        (_Q, _K), (facts.first, facts.second), facts.labels or ("W_q", "W_k"), facts.factors,
        facts.notes, strict=True,
    )  # fmt: skip
    for y, change, label, factor, note in rows:
        _draw_input(d, y, factor, faint=no_content)
        d.box(150, y, label, removed=change is REMOVED, strong=label in ("U", "V"))
        if note:
            d.text(218, y - 10, note, 12)
        end = (295, y), (295, middle - 13 if y == _Q else middle + 13)
        if y in normed:
            d.line((180, y), (230, y))
            d.box(246, y, "‖·‖", width=32, height=24, strong=True)
            d.line((262, y), *end)
        else:
            d.line((180, y), *end, faint=no_content)
    if facts.first is TIED:
        d.text(150, middle, "=", 24)
    if facts.joined:
        d.box(150, middle, "", width=84, height=_K - _Q + _H + 14, dashed=True)
    if facts.between:
        d.box(295, middle, facts.between, width=46 if no_content else 32, height=26, strong=True)
    else:
        d.parts.append(f'<circle cx="295" cy="{middle}" r="13" fill="none"/>')
        d.text(295, middle, "·", 20)


def _draw_input(d: _Drawing, y: float, factor: str = "", faint: bool = False) -> None:
    """Draw the way from x to the box at 150, perhaps through a factor."""
    if factor:
        d.line((32, _K), (48, _K), (48, y), (62, y), faint=faint)
        d.box(82, y, factor, width=40, height=26, strong=True)
        d.line((102, y), (120, y))
    else:
        d.line((32, _K), (48, _K), (48, y), (120, y), faint=faint)


def _draw_outputs(d: _Drawing, facts: Facts) -> None:
    """Draw the lower branch: values, their average at 440, the output."""
    _draw_input(d, _V, facts.factors[0])
    if facts.first is MERGED:
        d.box(330, _V, "", width=420, height=40, strong=True)
        d.text(270, _V, facts.between)
    else:
        d.box(150, _V, "W_v", removed=facts.first is REMOVED)
        d.line((180, _V), (427, _V), arrow=True)
        d.line((453, _V), (480, _V), arrow=True)
        d.box(510, _V, "W_o", removed=facts.second is REMOVED)
        for x, note in zip((218, 510), facts.notes, strict=True):
            if note:
                d.text(x, _V - 10 if x == 218 else _V - 28, note, 12)
    if facts.first is TIED:
        d.text(150, (_K + _V) / 2, "=", 24)
    d.line((540, _V), (566, _V), arrow=True)
    d.parts.append(f'<circle cx="440" cy="{_V}" r="13" fill="none"/>')
    d.text(440, _V, "Σ", 15)
    d.text(586, _V, "out")
