"""Measures of `qkablate inspect` of an imported run, as a report shows them."""

from dataclasses import dataclass
from typing import Any

from qkablate.analysis.comparison.head_metrics import (
    MEASURES,
    HeadMetrics,
    parse_diagnostics,
)
from qkablate.analysis.study.study import Entry
from qkablate.runs.inspection import FILE_NAME, check_forms, read_inspection

_MAX_NUMBERS = 2**22  # of one measure


@dataclass(frozen=True)
class Inspection:
    """Heads of an imported run, and what forms hold of it where that was measured."""

    heads: HeadMetrics
    forms: dict[str, Any] | None
    source: str  # of the tokens


def read_arm_inspection(entry: Entry) -> Inspection | None:
    """Read what was measured of an imported run; damage is recorded as a problem of it."""
    for record in entry.with_status("imported"):
        try:
            content = read_inspection(record.folder)
            if content is None:
                continue
            values = parse_diagnostics(content.get("diagnostics"), MEASURES, _MAX_NUMBERS)
            sources = [content.get("tokens"), content.get("tokens_of_forms", "")]
            if not values or not all(isinstance(source, str) for source in sources):
                raise ValueError("it is not what `qkablate inspect` writes")
            forms = None
            if "forms" in content:
                forms = check_forms(content["forms"]) | {"tokens": str(sources[1])}
        except ValueError as error:
            record.problems.append(f"{FILE_NAME}: {error}")
            continue
        return Inspection(HeadMetrics(entry, [{entry.tokens: values}]), forms, str(sources[0]))
    return None
