"""The questions that the study asks, and the claims that answer each."""

from functools import cache
from pathlib import Path

import yaml

_FILE = Path(__file__).with_suffix(".yaml")
OTHERS = "Others"  # claims of users' own


@cache
def load_questions() -> dict[str, tuple[str, ...]]:
    """Return the names of the claims by question, both in the order of the page."""
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {entry["asks"]: tuple(entry["claims"]) for entry in entries}


def find_question(claim: str) -> str:
    """Return the question that a claim, by its name, belongs to."""
    return next((asks for asks, names in load_questions().items() if claim in names), OTHERS)


def rank_claim(claim: str) -> int:
    """Return the place of a claim on the page; those of users' own are last."""
    names = [name for claims in load_questions().values() for name in claims]
    return names.index(claim) if claim in names else len(names)
