"""BLEU by sacrebleu."""

import os
import sys

import pytest

from qkablate.data.pairs.bleu import score_bleu
from qkablate.errors import UserError


def test_score_and_signature():
    if not os.environ.get("QKABLATE_NEEDS_EXPORT"):  # the extras must be there
        pytest.importorskip("sacrebleu")
    texts = ["the cat sat on the mat", "and saw two dogs"]
    assert score_bleu(texts, texts).score == pytest.approx(100)
    bleu = score_bleu(["the cat sat on a mat", "and saw two dogs"], texts)
    assert 30 < bleu.score < 95
    assert "nrefs:1" in bleu.signature
    assert "version:" in bleu.signature


def test_missing_extra_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"pip install '\.\[translate\]'"):
        score_bleu(["a"], ["a"])
