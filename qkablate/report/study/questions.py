"""The questions that the study asks, and the claims that answer each."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qkablate.analysis.comparison.decision import Verdict

_FILE = Path(__file__).with_suffix(".yaml")
OTHERS = "Other claims"  # of users
PARTLY_NO = "partly no"
ANSWER_OF = {
    Verdict.SUPPORTED: "yes",
    Verdict.REFUTED: "no",
    Verdict.EQUIVALENT: "no",
    Verdict.MIXED: PARTLY_NO,
    Verdict.INSENSITIVE: "could not tell",
    Verdict.UNDERPOWERED: "undecided",
}


@cache
def _load() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return entries


def load_questions() -> dict[str, dict[str, str]]:
    """Return for each question its claims, each with its own question, in the order of the page."""
    return {entry["asks"]: entry["claims"] for entry in _load()}


def load_doubts() -> dict[str, str]:
    """Return what some verdicts should not be relied on for, by the names of their archives."""
    return {claim: text for entry in _load() for claim, text in entry.get("doubts", {}).items()}


def find_question(claim: str) -> str:
    """Return the question that a claim, by its name, belongs to."""
    return next((asks for asks, claims in load_questions().items() if claim in claims), OTHERS)


def ask_claim(claim: str, says: str) -> str:
    """Return what a claim asks; of a user's claim, what it says."""
    return load_questions().get(find_question(claim), {}).get(claim, says)


def rank_claim(claim: str) -> int:
    """Return the place of a claim on the page; those of users are last."""
    names = [name for claims in load_questions().values() for name in claims]
    return names.index(claim) if claim in names else len(names)
