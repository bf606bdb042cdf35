"""The traced runs: a table whose rows cover every pair of settings that there can be."""

import itertools
import math
import random
from pathlib import Path
from typing import NamedTuple

# Precisions, and the capability of the GPU.
PRECISIONS = {
    "bf16": ("bf16", (9, 0)),
    "fp16": ("fp16", (9, 0)),
    "fp16-sm75": ("fp16", (7, 5)),
    "fp32": ("fp32", (9, 0)),
}
POSITIONS = ("learned", "rope", "alibi")
STEPS = 2
WORDS = {
    "device": "cuda",
    "compile": "false",
    "threads": "1",
    "tracking.wandb": "disabled",
    "tracking.log_every": "2",
    "diagnostics.every": "0",
    "train.steps": str(STEPS),
    "train.batch_size": "2",
    "train.eval_every": "1000",
    "train.checkpoint_every": "1000",
    "data.val_tokens": "2048",
    "data.test_tokens": "2048",
    "model.layers": "1",
    "model.d_model": "64",
    "model.heads": "4",
    "model.context": "256",
}


def run_words(words: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the words of a run in a folder, on a text that is written there."""
    text = folder / "corpus.txt"
    if not text.exists():
        text.write_text("the cat sat on the mat, and saw two dogs\n" * 400, encoding="utf-8")
    given = WORDS | {"out": str(folder / "out"), "data.cache": str(folder / "cache")}
    given |= {"data": "text", "data.path": str(text)} if "data" not in words else {}
    whole = given | words
    return whole if whole["data"] == "text" else whole | {"data.cache": "null"}


class Case(NamedTuple):
    """One run."""

    variant: str
    precision: str  # a key of PRECISIONS
    kernel: str = "auto"  # "static" is chosen where it is possible
    position: str = "learned"
    dropout: float = 0.0
    recompute: bool = False
    blocks: bool = False  # the loss is computed in blocks
    words: str = ""
    kept: float = math.inf  # see _TABLE

    @property
    def kept_bytes(self) -> float:
        """The most that a block of a text's model keeps: of two windows of 256, 64 wide."""
        return self.kept * 2 * 256 * 64 * 4

    @property
    def name(self) -> str:
        """The words of a test's name."""
        flags = {"dropout": self.dropout, "recompute": self.recompute, "blocks": self.blocks}
        parts = [self.variant, self.precision, self.kernel, self.position]
        return " ".join([*parts, *(name for name, is_on in flags.items() if is_on), self.words])

    @property
    def settings(self) -> dict[str, str]:
        """The words of the run."""
        return {
            "variant": self.variant,
            "precision": PRECISIONS[self.precision][0],
            "attention.kernel": "auto" if self.kernel == "static" else self.kernel,
            "model.position": self.position,
            "model.dropout": str(self.dropout),
            "train.checkpoint_activations": str(self.recompute).lower(),
            **dict(word.split("=", 1) for word in self.words.split()),
        }

    @property
    def pairs(self) -> set[tuple[object, ...]]:
        """Pairs of settings, each with its place."""
        return {*itertools.combinations(enumerate(self[1:7]), 2)}


# The last number bounds what a block keeps for the backward pass, in fp32 streams of d_model.
_TABLE = """
standard fp16 flash learned dropout recompute blocks 1.5
standard bf16 cudnn rope dropout 14
collaborative bf16 math learned 39
four_matrix bf16 folded learned dropout blocks 45
four_ov fp32 folded learned recompute blocks 1.5
gqa fp16 folded alibi blocks 38
low_rank_w fp32 folded alibi dropout 57
merged_ov fp16-sm75 efficient learned dropout blocks 16
merged_w fp32 blocked learned blocks 31
mla fp16 cudnn rope recompute 1.5
mqa bf16 blocked alibi recompute 1.5
no_k fp16 cudnn learned recompute blocks 1.5
no_k fp32 efficient learned dropout recompute 1.5
no_o bf16 folded learned blocks 38
no_q bf16 folded alibi recompute blocks 1.5
no_qk fp32 math learned dropout recompute blocks 1.5
no_v bf16 efficient alibi dropout 17
no_vo bf16 blocked alibi 27
qk_norm fp16 efficient rope recompute blocks 1.5
shared_qk fp16-sm75 blocked alibi 27
shared_qk_reformer fp16-sm75 math rope dropout 35
six_matrix fp16 folded alibi 41
standard_reassociated fp16-sm75 folded alibi recompute blocks 1.5
static_scores bf16 static learned blocks 23
static_scores fp16-sm75 static alibi 23
sym_diag bf16 blocked rope recompute 1.5
sym_pairwise fp16 blocked rope recompute blocks 1.5
symmetric_w fp16 flash learned dropout 20
tied_kv bf16 flash rope recompute blocks 1.5
tied_qkv fp16 math alibi blocks 20
uniform fp32 static alibi dropout recompute 1.5
uniform bf16 static rope dropout 17
uniform fp16 static learned recompute blocks 1.5
wide_qk fp32 folded rope dropout 66
"""
_REVERSE = "data=reverse model.context=8 data.copy_length=8"
PADDED = "data=add model.source=13 model.context=8 model.form=encoder_decoder"
# Other forms of model, and another optimizer.
FORMS = [
    Case("merged_w", "bf16", words=f"{_REVERSE} model.form=encoder"),
    Case("gqa", "fp16-sm75", words=f"{_REVERSE} model.form=encoder_decoder"),
    Case(
        "qk_norm", "bf16", words=f"{_REVERSE} model.form=encoder_decoder model.encoder_d_model=32"
    ),
    Case("standard", "bf16", words=PADDED),
    Case("merged_w", "fp32", recompute=True, words=PADDED),
    Case("gqa", "fp16-sm75", words="data=add model.context=13 model.form=encoder"),
    Case("standard", "bf16", words="model.form=encoder data.objective=mlm"),
    Case("symmetric_w", "bf16", words="optim=muon"),
]
# Pairs of a kernel and a setting that the kernel does not support.
IMPOSSIBLE = {
    ("fp16-sm75", "flash"),
    ("fp32", "flash"),
    ("blocked", 0.125),
    ("flash", "alibi"),
    ("fp16-sm75", "cudnn"),
    ("fp32", "cudnn"),
    ("cudnn", "alibi"),
}


def _parse(row: str) -> Case:
    variant, precision, kernel, position, *flags, kept = row.split()
    return Case(
        variant,
        precision,
        kernel,
        position,
        dropout=0.125 if "dropout" in flags else 0.0,
        recompute="recompute" in flags,
        blocks="blocks" in flags,
        kept=float(kept),
    )


# By variant, the kernel that is chosen on an H100 in bf16, and the same bound with it.
_CHOSEN = """
standard cudnn 11.5
collaborative cudnn 11.5
four_matrix cudnn 12.5
four_ov cudnn 12.0
gqa cudnn 11.5
low_rank_w cudnn 12.0
merged_ov efficient 14.0
merged_w efficient 14.0
mla cudnn 11.5
mqa cudnn 10.5
no_k cudnn 11.0
no_o cudnn 11.5
no_q cudnn 11.0
no_qk cudnn 10.5
no_v cudnn 11.5
no_vo cudnn 11.0
qk_norm cudnn 14.0
shared_qk cudnn 10.5
shared_qk_reformer efficient 12.0
six_matrix cudnn 13.0
standard_reassociated efficient 14.5
static_scores static 21.5
sym_diag cudnn 11.0
sym_pairwise cudnn 12.0
symmetric_w efficient 14.5
tied_kv cudnn 10.5
tied_qkv cudnn 9.5
uniform static 9.5
wide_qk efficient 15.0
"""
CHOSEN = {
    Case(variant, "bf16", kept=float(kept)): kernel
    for variant, kernel, kept in map(str.split, _CHOSEN.strip().splitlines())
}

CASES = [_parse(row) for row in _TABLE.strip().splitlines()]


def product(variants: list[str], share: float) -> list[Case]:
    """Return a share of all combinations with the kernels that are chosen for them."""
    flags = (False, True)
    each = itertools.product(variants, PRECISIONS, ("auto",), POSITIONS, (0.0, 0.1), flags, flags)
    every = [Case(*values) for values in each]
    return random.Random(0).sample(every, round(share * len(every)))
