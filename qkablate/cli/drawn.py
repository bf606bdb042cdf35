"""What the heads of one run do with one text, as a picture."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.cli.results import need_analysis
from qkablate.errors import UserError

_PICTURES = (".svg", ".png")


@dataclass(frozen=True)
class _Named:
    title: str


def check_picture(path: str | None) -> None:
    """Whether a picture can be made and written there."""
    if path is None:
        return
    ending = os.path.splitext(path)[1].lower()
    if ending not in _PICTURES:
        raise UserError(f"-o: '{path}' does not end in {' or '.join(_PICTURES)}")
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or "."):
        raise UserError(f"-o: '{path}' cannot be written: it is a folder, or in none")
    need_analysis("vl_convert")


def draw(
    path: Path, text: dict[str, Any], name: str, restored: Any, only: tuple[int, int] | None
) -> str:
    """Write the picture; what is told of it."""
    import numpy as np

    from qkablate.analysis.study.attention_maps import Example, seen
    from qkablate.cli.report import write
    from qkablate.report.charts.attention import attention_of
    from qkablate.report.render import picture
    from qkablate.runs.attention_map import rounded

    weights_LHTT = np.array(text["attention"], np.float64)  # None becomes NaN
    if not np.isfinite(weights_LHTT).all():
        raise UserError("-o: there is nothing to draw: the weights of this run are no numbers")
    tokenizer = restored.tokenizer()
    tokens = tuple(seen(tokenizer.decode([token])) for token in text["ids"])
    variant, which = restored.config.variant.name, f"step {restored.step}"
    own = Example(name, variant, which, tokens, rounded(weights_LHTT))
    chart = attention_of([own], f"At step {restored.step}", only)
    try:
        content = picture(chart, _Named(name), path.suffix[1:].lower())
        return write(path, content)
    except OSError as error:
        raise UserError(f"-o: '{path}' cannot be written: {error.strerror}") from None
