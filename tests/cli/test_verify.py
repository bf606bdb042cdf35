"""`qkablate verify`: what holds, and that a wrong variant is found out."""

import json
import re
import textwrap

import pytest

from qkablate.cli import main
from qkablate.cli.arguments import propose_sample
from qkablate.config import Config, DataConfig, variants
from qkablate.data import sources
from tests.cli.helpers import assert_refused

SMALL = ("model.d_model=16", "model.heads=4", "model.context=12")
WRONG = """
    import torch
    from qkablate.attention import QK, apply_matrix, by_head, empty_matrix, split_heads

    class Wrong(QK):
        params = "2 d²"
        def __init__(self, spec):
            super().__init__(spec)
            self.w_q = empty_matrix(spec.d_model, spec.d_model)
        def queries(self, x_BTD):
            return split_heads(apply_matrix(x_BTD, self.w_q), self.spec.heads)
        def keys(self, y_BSD):
            return split_heads(y_BSD * y_BSD[:, -1:], self.spec.heads)
        def circuit(self):
            return 2 * by_head(self.w_q, self.spec.heads) @ self.e().mT, None
        def e(self):
            return by_head(torch.eye(self.spec.d_model).to(self.w_q), self.spec.heads)
"""


@pytest.mark.exhaustive
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
            "gradients,merged twin,gauge gradient,value gradient,one step,decay",
        ),
        (
            "standard",
            "nuclear norm,gauge,order of heads,bare block,absorbed,any weights",
        ),
        ("low_rank_w", "rank d_head,rank"),
        ("no_q", "one head"),
        ("no_k", "one head"),
        ("collaborative", "one-hot mixing"),
        ("gqa", "g = h,gauge gradient"),
        ("sym_pairwise", "U = 1"),
        ("four_matrix", "folding"),
        ("shared_qk", "symmetric,positive,shared norm"),
        ("shared_qk_reformer", "own score,self mask"),
        ("qk_norm", "norm gradient"),
        ("no_o", "one value head"),
        ("merged_ov", "one value head"),
        ("static_scores", "no content"),
        ("uniform", "averages"),
        ("standard_reassociated", "precision twin,gauge"),
        ("merged_w", "B_h,M_h,parameters,FLOPs,KV cache,decoding,causality"),
    ],
)
def test_variant_gets_its_specific_checks(qkablate, variant, checks):
    done = qkablate("verify", f"variant={variant}", *SMALL, "--json")
    assert {*checks.split(",")} <= {line["check"] for line in json.loads(done.out)}


def test_biases_and_rope_have_specific_checks(qkablate):
    biased = qkablate("verify", "variant=standard", *SMALL, "model.bias=true", "--json")
    assert {"key bias", "value bias"} <= {x["check"] for x in json.loads(biased.out)}
    turned = qkablate("verify", "variant=standard", *SMALL, "model.position=rope", "--json")
    names = {line["check"] for line in json.loads(turned.out)}
    assert "rope gradient" in names
    assert "B_h" not in names


def test_wrong_variant_is_detected(qkablate, tmp_path):
    """Wrong B_h, a wrong count of parameters, and keys that look at what comes later."""
    (tmp_path / "wrong.py").write_text(textwrap.dedent(WRONG))
    done = qkablate("verify", "variant.file=wrong.py", *SMALL)
    assert done.code == 1
    violated = [line for line in done.out.splitlines() if "VIOLATED" in line]
    for check in ("B_h", "parameters", "causality", "decoding"):
        assert any(re.split(r"\s{2,}", line)[1] == check for line in violated), check
    assert f"{len(violated)} violated" in done.out


TRANSLATOR = ("model=nano_translator", "model.d_model=16", "model.source=11")
OF_CROSS = {"both streams", "FLOPs of two streams", "source cache", "M_h of two streams"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_every_variant_holds_at_every_site(qkablate, bias, position):
    words = (*TRANSLATOR, f"model.bias={bias}", f"model.position={position}")
    done = qkablate("verify", *words, "--json")
    lines = json.loads(done.out)
    assert [line for line in lines if not line["holds"]] == []
    found = {(line["variant"], line["site"]) for line in lines}
    assert len(found) == 3 * len({name for name, _ in found})
    assert {line["check"] for line in lines if line["site"] == "cross"} >= OF_CROSS
    masked = qkablate("verify", *words, "variant=shared_qk_reformer", "variant.sites=cross")
    assert (masked.code, masked.out) == (2, "")
    assert "cross-attention has no self to mask" in masked.err


def test_sites_are_checked_as_what_they_are(qkablate):
    done = qkablate("verify", "variant=no_k", *TRANSLATOR, "--json")
    checks = {"encoder": set(), "decoder": set(), "cross": set()}
    for line in json.loads(done.out):
        assert line["holds"]
        checks[line["site"]].add(line["check"])
    assert checks["cross"] >= {*OF_CROSS, "B_h of two streams", "merged twin of two streams"}
    assert "causality" in checks["decoder"] - checks["encoder"] - checks["cross"]
    assert "sees all" in checks["encoder"] - checks["decoder"]
    one = qkablate("verify", "variant=no_k", "variant.sites=cross", *TRANSLATOR)
    assert one.out.split()[:3] == ["variant", "site", "check"]
    assert {*re.findall(r"no_k_cross +(\w+)", one.out)} == {"cross"}


@pytest.fixture(scope="module")
def runs_of_encoders(tmp_path_factory):
    """Return the folder of runs of an encoder on masked text, and of one that tags."""
    folder = tmp_path_factory.mktemp("encoders")
    files = [folder / f"{i}.py" for i in range(60)]
    for i, file in enumerate(files):
        file.write_text(f"call(x, {'+' * i}y)\n")
    words = ["train", "model=nano_encoder", "model.layers=2", "model.d_model=16", "train.steps=2"]
    words += ["train.batch_size=2", "tracking.wandb=disabled", "threads=1", "model.context=80"]
    words += ["variant=merged_w", f"data.cache={folder}/cache"]
    kinds = [["data=text", "data.objective=mlm", f"data.path={folder}/*.py", f"out={folder}/mlm"]]
    kinds += [["data=stdlib_tags", "data.vocab_size=257", f"out={folder}/tags"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "find_files", lambda _: files)
        for kind in kinds:
            with pytest.raises(SystemExit) as exit_:
                main([*words, *kind])
            assert exit_.value.code == 0
    return folder


@pytest.mark.parametrize("kind", ["mlm", "tags"])
def test_runs_of_encoders_hold(qkablate, runs_of_encoders, kind):
    """On masked text and on tagged sentences, whose sources are padded."""
    (run,) = (runs_of_encoders / kind / "runs").iterdir()
    done = qkablate("verify", str(run), "--json")
    lines = json.loads(done.out)
    assert done.code == 0
    assert {line["site"] for line in lines} == {"encoder"}
    assert {"B_h", "sees all"} <= {line["check"] for line in lines}
    assert all(line["holds"] for line in lines)
    printed = qkablate("verify", str(run))
    assert printed.out.endswith(f"  qkablate sample {run} --split test --show 5\n")


def test_table(qkablate):
    done = qkablate("verify", "variant=standard,uniform", *SMALL)
    assert done.code == 0
    head = done.out.splitlines()[0].split()
    assert head == ["variant", "check", "verdict", "residual", "fp32", "identity"]
    assert "checks of 2 variants: 0 violated" in done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.d_model=8192"], "would take many minutes"),
        (["model=300m"], "to decompose 29 variants at d 1,024 would take many minutes"),
        (["model.context=1"], "model.context: the checks need 2 or more"),
        (["variant=uniform", "attention.kernel=flash"], "this variant has none"),
    ],
)
def test_impossible_checks_are_rejected(qkablate, words, says):
    done = qkablate("verify", *words)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_quotes_of_out_are_those_of_hydra(qkablate):
    assert_refused(qkablate("verify", "mine", 'out="my (runs)"'), "'my (runs)'")
    assert_refused(qkablate("verify", "mine", "out=a", "out=b"), "out: given twice")


def test_text_in_unknown_tokens_is_not_proposed():
    words = ["smol", "out=here", "step=3"]
    config = Config(data=DataConfig(tokenizer=None))
    assert propose_sample(config, words) == ["inspect", "smol", "out=here", "--variants"]
    assert propose_sample(Config(), words)[:2] == ["sample", "smol"]


@pytest.mark.slow
def test_unsupported_variant_is_left_out_and_not_proposed(qkablate):
    words = (*SMALL, "model.position=rope")
    done = qkablate("verify", "variant=standard,merged_w,no_k", *words)
    assert done.code == 0
    assert "left out: variant: merged_w is not supported" in done.err
    assert "Next\n  qkablate train variant=no_k model.d_model=16" in done.out
    none = qkablate("verify", "variant=merged_w,symmetric_w", *words)
    assert (none.code, none.out) == (2, "")
    assert none.err.endswith("no requested variant supports this size\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [8, 2])
def test_small_heads_hold(qkablate, heads):
    words = ("model.d_model=8", f"model.heads={heads}", "model.context=4")
    done = qkablate("verify", *words)
    assert done.code == 0, done.out


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["math", "folded"])
def test_forced_kernels_hold(qkablate, kernel):
    assert qkablate("verify", *SMALL, f"attention.kernel={kernel}").code == 0
