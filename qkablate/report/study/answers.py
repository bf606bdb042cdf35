"""The table of the study's answers, and what limits them."""

from qkablate.analysis.claims.judgement import Judgement
from qkablate.analysis.claims.verdict import is_deciding
from qkablate.analysis.comparison.audit import LIMITS
from qkablate.analysis.comparison.decision import Verdict
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.study.costs import LEVEL, format_costs
from qkablate.report.study.multiplicity import find_fragile
from qkablate.report.study.questions import ANSWER_OF, PARTLY_NO, ask_claim, find_question
from qkablate.report.text.table import Markdown, Table, escape_markdown, format_markdown

_COST = f"cost of the variant (+: worse) or what is named, {100 * LEVEL:g} % interval"
# What limits an answer, by the check of the audit that warns of it; the table has the marks.
NOTES = {
    "learning rate": "a finer search for learning rates may change the answer, or, where not losses"
    " are compared, a search by what is compared",
    "documents": "other test documents may change the answer; no interval here varies over them",
    "content": "standard is not shown to be better than `static_scores`, a learned table of weights"
    " by position that looks at no token, so the answer may be about attention by position only (in"
    " the settings of other decided answers that was mostly not measured)",
    "n-grams": "in a part that decides, the loss of the model compared with is not below that of"
    " the best n-gram of the same text",
    "extrapolation": "the losses at ∞ tokens are extrapolated",
}
_MARKS, _DOUBT, _FRAGILE = dict(zip(NOTES, "¹²³⁴⁵", strict=True)), "†", "‡"


def format_answers(claims: list[StudiedClaim], most: int = 1, *, linked: bool = False) -> str:
    """Return the table of the claims that have ended, by question; or ''.

    It has the costs of `most` parts of each at most, and on the page links to the sections. Marks
    say what limits an answer.
    """
    rows: list[list[str]] = []
    asked, found = None, set[str]()
    fragile = {id(part) for part in find_fragile([p for one in claims for p in one.deciding])}
    for studied in claims:
        judged, name = studied.judgement, studied.claim.name
        if not judged.has_ended:
            continue
        if (question := find_question(name)) != asked:
            rows.append([Markdown(f"**{escape_markdown(question)}**"), "", "", ""])
            asked = question
        asks = escape_markdown(ask_claim(name, studied.claim.says))
        asks += f" [{name}](#{studied.anchor})" if linked else f" `{name}`"
        asks += f", on {studied.data}"
        asks += f", positions {studied.positions}" * (studied.positions != "learned")
        word = _format_word(judged) + (", exploratory" if judged.exploratory else "")
        # That rare outliers are excluded stands beside the table, and which parts in the section.
        marks = [_MARKS[limit] for limit in judged.limits]
        marks += [_DOUBT] if studied.doubt else []
        marks += [_FRAGILE] if _is_fragile(judged, fragile) else []
        answer = " ".join([f"{_answer(judged)} ({word})", *marks])
        found |= {*marks}
        costs = Markdown("<br>".join(map(escape_markdown, format_costs(studied, most))))
        rows.append([Markdown(asks), answer, costs, str(judged.n)])
    if not rows:
        return ""
    table = format_markdown(Table("", ["question", "answer", _COST, "n"], rows))
    notes = [
        f"- {mark} {LIMITS[name]}: {NOTES[name]}" for name, mark in _MARKS.items() if mark in found
    ]
    if _DOUBT in found:
        notes.append(
            f"- {_DOUBT} in doubt: not all of its parts are to be relied on; its section says why"
        )
    if _FRAGILE in found:
        notes.append(
            f"- {_FRAGILE} not adjusted for the other claims: if the tests of all claims are"
            " adjusted together, the answer is undecided"
        )
    return "\n".join([table.partition("\n\n")[2].strip(), "", *notes]).strip() + "\n"


def _is_fragile(judgement: Judgement, fragile: set[int]) -> bool:
    """Return whether an answer rests on parts, by their `id`, that others would leave undecided."""
    deciding = [part for part in judgement.parts if is_deciding(part.word, judgement.word)]
    are_fragile = [id(part) in fragile for part in deciding]
    if judgement.word == Verdict.REFUTED:  # by any of its parts
        return all(are_fragile)
    return judgement.is_conclusive and any(are_fragile)


def _answer(judgement: Judgement) -> str:
    """Return yes, no, or partly no where some parts of a claim that does not hold are supported."""
    answer = ANSWER_OF[judgement.word]
    are_some = any(part.word == Verdict.SUPPORTED for part in judgement.parts)
    return PARTLY_NO if answer == "no" and are_some else answer


def _format_word(judgement: Judgement) -> str:
    """Return the verdict, with the number of its parts if some were refuted."""
    refuted = sum(part.word == Verdict.REFUTED for part in judgement.parts)
    if judgement.word != Verdict.REFUTED or refuted == len(judgement.parts):
        return judgement.word
    return f"{judgement.word} in {refuted} part{'s' * (refuted > 1)} of {len(judgement.parts)}"
