"""The questions of the study."""

from pathlib import Path

import yaml

from qkablate.analysis.claims.parse import claim_names
from qkablate.analysis.comparison.decision import Verdict
from qkablate.report.study import questions
from qkablate.report.study.questions import (
    ANSWER_OF,
    OTHERS,
    ask_claim,
    find_question,
    load_doubts,
    load_questions,
    rank_claim,
)


def test_each_shipped_claim_answers_one_question():
    asked = [name for names in load_questions().values() for name in names]
    assert sorted(asked) == sorted(claim_names())
    assert sorted(asked, key=rank_claim) == asked
    for question, names in load_questions().items():
        assert {find_question(name) for name in names} == {question}


def test_claims_ask_what_yes_or_no_answers():
    for claims in load_questions().values():
        for name, asks in claims.items():
            assert asks.endswith("?")
            assert ask_claim(name, "It is so.") == asks


def test_doubts_are_about_published_verdicts_of_their_question():
    archives = Path(__file__).parents[3] / "docs" / "study" / "results"
    assert load_doubts()
    for entry in yaml.safe_load((Path(questions.__file__).with_suffix(".yaml")).read_text()):
        for slug in entry.get("doubts", {}):
            assert slug.partition("-")[0] in entry["claims"]
            assert (archives / f"{slug}.json.gz").is_file()


def test_yes_means_supported():
    assert ANSWER_OF == {
        Verdict.SUPPORTED: "yes",
        Verdict.REFUTED: "no",
        Verdict.EQUIVALENT: "no",
        Verdict.MIXED: "partly no",
        Verdict.INSENSITIVE: "could not tell",
        Verdict.UNDERPOWERED: "undecided",
    }


def test_claims_of_users_are_last_and_say_what_they_say():
    assert find_question("mine") == OTHERS
    assert ask_claim("mine", "It is so.") == "It is so."
    assert all(rank_claim(name) < rank_claim("mine") for name in claim_names())
