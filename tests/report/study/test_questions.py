"""The questions of the study."""

from qkablate.analysis.claims.parse import claim_names
from qkablate.report.study.questions import OTHERS, find_question, load_questions, rank_claim


def test_each_shipped_claim_answers_one_question():
    asked = [name for names in load_questions().values() for name in names]
    assert sorted(asked) == sorted(claim_names())
    assert sorted(asked, key=rank_claim) == asked
    for question, names in load_questions().items():
        assert {find_question(name) for name in names} == {question}


def test_claims_of_users_are_last():
    assert find_question("mine") == OTHERS
    assert all(rank_claim(name) < rank_claim("mine") for name in claim_names())
