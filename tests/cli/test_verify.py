"""`qkablate verify`: what holds, and that a wrong variant is found out."""

import json
import re
import textwrap

import pytest

from qkablate.config import variants

SMALL = ("model.d_model=16", "model.heads=4", "model.context=12")
WRONG = """
    import torch
    from qkablate.attention import QK, by_head, matrix, project, split_heads

    class Wrong(QK):
        params = "2 d²"
        def __init__(self, spec):
            super().__init__(spec)
            self.w_q = matrix(spec.d_model, spec.d_model)
        def queries(self, x_BTD):
            return split_heads(project(x_BTD, self.w_q), self.spec.heads)
        def keys(self, y_BSD):
            return split_heads(y_BSD * y_BSD[:, -1:], self.spec.heads)
        def circuit(self):
            return 2 * by_head(self.w_q, self.spec.heads) @ self.e().mT, None
        def e(self):
            return by_head(torch.eye(self.spec.d_model).to(self.w_q), self.spec.heads)
"""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("position", ["learned", "alibi", "rope"])
def test_every_variant_holds(qkablate, bias, position):
    words = (*SMALL, f"model.bias={bias}", f"model.position={position}")
    done = qkablate("verify", *words, "--json")
    lines = json.loads(done.out)
    assert [line for line in lines if not line["holds"]] == []
    assert done.code == 0
    # Single precision is within its rounding, too: the identities are not true by cancellation.
    over = [x for x in lines if x["residual_fp32"] > x["tolerance_fp32"]]
    assert over == []
    if position == "learned":
        found = {line["variant"] for line in lines}
        assert all(any(name.startswith(variant) for name in found) for variant in variants())


@pytest.mark.parametrize(
    ("variant", "checks"),
    [
        (
            "standard",
            "E1 gradients,E1 merged twin,E7 gauge gradient,E7 values,E8 one step,E9 decay",
        ),
        (
            "standard",
            "E9 nuclear norm,E12 gauge,E12 heads,E14 bare block,E15 absorbed,E6 any weights",
        ),
        ("low_rank_w", "E2 rank d_head,E6 rank"),
        ("no_q", "E3 one head"),
        ("no_k", "E3 one head"),
        ("collaborative", "E4 one-hot mixing"),
        ("gqa", "E4 g = h,E7 gauge gradient"),
        ("sym_pairwise", "E4 U"),
        ("four_matrix", "E4 folding"),
        ("shared_qk", "E5 symmetric,E5 positive,E9 shared"),
        ("shared_qk_reformer", "E5 own score,E17 self mask"),
        ("qk_norm", "E7 norm"),
        ("no_o", "E15 one head"),
        ("merged_ov", "E15 one head"),
        ("static_scores", "E11 static scores"),
        ("uniform", "E11 uniform"),
        ("standard_reassociated", "E2 twin,E12 gauge"),
        ("merged_w", "B_h,M_h,E16 parameters,E16 FLOPs,E16 KV cache,E16 decoding,E16 causality"),
    ],
)
def test_a_variant_gets_the_checks_that_are_its_own(qkablate, variant, checks):
    done = qkablate("verify", f"variant={variant}", *SMALL, "--json")
    assert {*checks.split(",")} <= {line["check"] for line in json.loads(done.out)}


def test_biases_and_rope_have_checks_of_their_own(qkablate):
    biased = qkablate("verify", "variant=standard", *SMALL, "model.bias=true", "--json")
    assert {"E11 key bias", "E11 value bias"} <= {x["check"] for x in json.loads(biased.out)}
    turned = qkablate("verify", "variant=standard", *SMALL, "model.position=rope", "--json")
    names = {line["check"] for line in json.loads(turned.out)}
    assert "E7 rope" in names
    assert "B_h" not in names


def test_a_wrong_variant_is_found_out(qkablate, tmp_path):
    """Wrong B_h, a wrong count of parameters, and keys that look at what comes later."""
    (tmp_path / "wrong.py").write_text(textwrap.dedent(WRONG))
    done = qkablate("verify", "variant.file=wrong.py", *SMALL)
    assert done.code == 1
    violated = [line for line in done.out.splitlines() if "VIOLATED" in line]
    for check in ("B_h", "E16 parameters", "E16 causality", "E16 decoding"):
        assert any(re.split(r"\s{2,}", line)[1] == check for line in violated), check
    assert f"{len(violated)} violated" in done.out


def test_the_table(qkablate):
    done = qkablate("verify", "variant=standard,uniform", *SMALL)
    assert done.code == 0
    head = done.out.splitlines()[0].split()
    assert head == ["variant", "check", "residual", "fp32", "verdict", "identity"]
    assert "checks of 2 variants: 0 violated" in done.out
