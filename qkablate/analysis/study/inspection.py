"""Measures of `qkablate inspect` of an imported run, as a report shows them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate.analysis.comparison.head_metrics import (
    IMPORTED_MEASURES,
    HeadMetrics,
    parse_diagnostics,
)
from qkablate.analysis.study.attention_maps import ArmAttention
from qkablate.analysis.study.study import Entry
from qkablate.errors import sanitize
from qkablate.runs.attention_map import FULL_WEIGHT, MAX_TOKENS, check_weights
from qkablate.runs.inspection import FILE_NAME, check_forms, read_inspection

_MAX_NUMBERS = 2**22  # of one measure


@dataclass(frozen=True)
class Inspection:
    """Heads of an imported run, and what forms hold of it where that was measured."""

    heads: HeadMetrics
    forms: dict[str, Any] | None
    source: str  # of the tokens
    attention: ArmAttention | None  # on the beginning of a text


def read_arm_inspection(entry: Entry) -> Inspection | None:
    """Read what was measured of an imported run; damage is recorded as a problem of it."""
    for record in entry.with_status("imported"):
        try:
            content = read_inspection(record.folder)
            if content is None:
                continue
            values = parse_diagnostics(content.get("diagnostics"), IMPORTED_MEASURES, _MAX_NUMBERS)
            sources = [content.get("tokens"), content.get("tokens_of_forms", "")]
            if not values or not all(isinstance(source, str) for source in sources):
                raise ValueError("it is not what `qkablate inspect` writes")
            forms = None
            if "forms" in content:
                forms = check_forms(content["forms"]) | {"tokens": str(sources[1])}
            attention = _read_attention(content.get("text"), entry)
        except ValueError as error:
            record.problems.append(f"{FILE_NAME}: {error}")
            continue
        heads = HeadMetrics(entry, [{entry.tokens: values}])
        return Inspection(heads, forms, str(sources[0]), attention)
    return None


def _read_attention(text: Any, entry: Entry) -> ArmAttention | None:
    """Return the attention map of a file, if it has one; ValueError for anything else."""
    if text is None:
        return None
    model = entry.arm.config.model
    try:
        tokens = tuple(map(sanitize, text["tokens"]))
        numbers = np.array(text["attention"])
        shape = (model.layers, model.heads, len(tokens), len(tokens))
        if len(tokens) > MAX_TOKENS or numbers.shape != shape or numbers.dtype != np.int64:
            raise ValueError
        if numbers.min() < 0 or numbers.max() > FULL_WEIGHT:
            raise ValueError
        a_LHTT = numbers.astype(np.uint8)
        check_weights(a_LHTT, len(tokens))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError("its attention is not what `qkablate inspect` writes") from None
    return ArmAttention(entry.name, entry.arm.variant, "as imported", tokens, a_LHTT)
