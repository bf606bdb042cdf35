"""Predicates: arithmetic and comparisons of keys; all else is rejected and never executed."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkablate.errors import UserError
from qkablate.sweeps.planning.predicates import holds

VALUES = {
    "model.d_model": 64,
    "model.heads": 4,
    "model.mlp_ratio": 2.5,
    "model.attention_skip": True,
    "variant": "merged_w",
    "variant.name": "merged_w",
    "variant.rank": None,
    "seed": 0,
}

TRUE = [
    "model.d_model == 64",
    "model.d_model // model.heads >= 16",
    "model.d_model / 128 == 0.5",
    "model.d_model % 60 == model.heads",
    "model.d_model * model.mlp_ratio == 160",
    "model.d_model + model.heads - 4 == 64",
    "2 + 3 * 4 == 14",
    "(2 + 3) * 4 == 20",
    "-model.heads == -4",
    "10 - 3 - 2 == 5",
    "model.d_model",
    "model.attention_skip",
    "not seed",
    "16 <= model.d_model // model.heads < 32",
    "model.heads < 8 < model.d_model",
    "model.d_model != 32",
    "model.heads > 2 and model.heads < 8",
    "model.heads > 100 or model.d_model == 64",
    "not (model.heads > 100 or model.d_model == 32)",
    "seed and 1 or 1",  # and binds before or
    "variant == 'merged_w'",
    'variant != "standard"',
    "variant in ('standard', 'merged_w')",
    "variant in ['standard', 'merged_w']",
    "variant not in ['no_q']",
    "'merged' in variant",
    "model.d_model in (64, 128)",
    "variant.rank == None",
    "variant.rank in (None, 8)",
    "variant.rank == None or variant.rank >= 8",  # the second half is not evaluated
    "  model.heads == 4  ",
    "(model.heads ==\n 4)",
    "((((((((((model.heads))))))))))",
]
FALSE = [
    "model.d_model == 32",
    "model.d_model // model.heads >= 17",
    "16 <= model.d_model // model.heads < 16",
    "model.heads < 2 < model.d_model",
    "model.d_model < 100 < model.heads",
    "seed",
    "not model.heads",
    "model.heads > 2 and model.heads > 8",
    "model.heads > 8 or model.heads < 2",
    "variant == 'merged'",
    "variant == 0",
    "variant in ('standard', 'no_q')",
    "variant not in ('merged_w',)",
    "variant.rank",
    "variant.rank == 0",
    "variant.rank != None and variant.rank >= 8",
    "variant in ()",
]


@pytest.mark.parametrize("predicate", TRUE)
def test_predicate_is_true(predicate):
    assert holds(predicate, VALUES) is True


@pytest.mark.parametrize("predicate", FALSE)
def test_predicate_is_false(predicate):
    assert holds(predicate, VALUES) is False


OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@given(*[st.integers(0, 9)] * 3, *[st.sampled_from([*OPERATORS])] * 2)
def test_chained_comparison_is_a_conjunction(a, b, c, first, second):
    keys = {"model.layers": a, "model.heads": b, "seed": c}
    both = OPERATORS[first](a, b) and OPERATORS[second](b, c)
    assert holds(f"model.layers {first} model.heads {second} seed", keys) == both
    written_out = f"model.layers {first} model.heads and model.heads {second} seed"
    assert holds(written_out, keys) == both


@given(st.integers(1, 2**20), st.integers(1, 2**20))
def test_integer_and_true_division_differ(a, b):
    keys = {"model.d_model": a, "model.heads": b}
    whole = "model.d_model // model.heads * model.heads + model.d_model % model.heads"
    assert holds(f"{whole} == model.d_model", keys)
    assert holds("model.d_model / model.heads >= model.d_model // model.heads", keys)


REFUSED = [
    ("len(variant) > 3", "'len(variant)' cannot be computed"),
    ("print('here')", "cannot be computed"),
    ("variant.lower() == 'merged_w'", "cannot be computed"),
    ("''.__class__", "there is no key"),
    ("(1).real == 1", "there is no key"),
    ("model.d_model.__class__", "there is no key 'model.d_model.__class__'"),
    ("lambda: 1", "cannot be computed"),
    ("variant[0] == 'm'", "'variant[0]' cannot be computed"),
    ("[1, 2][0]", "cannot be computed"),
    ("[x for x in (1, 2)]", "cannot be computed"),
    ("{x for x in (1, 2)} == 3", "cannot be computed"),
    ("all(x for x in (1, 2))", "cannot be computed"),
    ("{'a': 1} == 1", "cannot be computed"),
    ("f'{variant}' == 'a'", "cannot be computed"),
    ("1 if seed else 2", "cannot be computed"),
    ("(seed := 3)", "cannot be computed"),
    ("variant is None", "cannot be computed"),
    ("2 ** 8 == 256", "'2 ** 8' cannot be computed"),
    ("9 ** 9 ** 9 ** 9", "cannot be computed"),
    ("1 << 10 ** 9", "cannot be computed"),
    ("~seed", "cannot be computed"),
    ("b'a' == 1", "cannot be computed"),
    ("1j", "cannot be computed"),
    ("...", "cannot be computed"),
    ("model.d_modl > 3", "there is no key 'model.d_modl' (nearest: model.d_model)"),
    ("varient == 'standard'", "there is no key 'varient' (nearest: variant)"),
    ("d_model > 3", "there is no key 'd_model' (nearest: model.d_model)"),
    ("__import__", "there is no key '__import__'"),
    ("model.d_model >", "is not an expression; write for instance"),
    ("", "is not an expression; write for instance"),
    ("model.heads = 4", "is not an expression"),
    ("seed == 1; seed == 2", "is not an expression"),
    ("import os", "is not an expression"),
    ("model.heads >= 1, 2)", "is not an expression"),
    ("model.heads === 4", "is not an expression"),
    ("a\0b", "is not an expression"),
    ("model.d_model / seed", "by zero"),
    ("model.d_model // 0 > 1", "by zero"),
    ("model.d_model % 0 > 1", "by zero"),
    ("variant < 3", "not supported between"),
    ("variant.rank >= 8", "not supported between"),
    ("3 in model.heads", "not iterable"),
    ("variant + 'a' == 'merged_wa'", "arithmetic needs numbers"),
    ("'a' * 10 == variant", "arithmetic needs numbers"),
    ("'a' * 1000000000 == variant", "arithmetic needs numbers"),
    ("[0] * 1000000000 == 1", "arithmetic needs numbers"),
    ("'%1000000000d' % seed == variant", "arithmetic needs numbers"),
    ("'a' * 10 ** 9", "cannot be computed"),
    ("-variant", "bad operand type"),
]


def refusal(predicate):
    with pytest.raises(UserError) as refused:
        holds(predicate, VALUES)
    return str(refused.value)


@pytest.mark.parametrize(("predicate", "why"), REFUSED)
def test_invalid_predicate_is_rejected_in_one_line(predicate, why):
    message = refusal(predicate)
    assert message.startswith(f"sweep.filter: '{predicate}'")
    assert why in message
    assert "\n" not in message


@pytest.mark.parametrize("predicate", ["model.heads ==\n4", "(model.haeds ==\n4)", "1 +\n\n"])
def test_multi_line_predicate_is_rejected_in_one_line(predicate):
    assert refusal(predicate).startswith("sweep.filter: ")
    assert "\n" not in refusal(predicate)


@pytest.mark.parametrize(
    "predicate",
    [
        "-" * 100_000 + "1",
        "not " * 100_000 + "1",
        "(" * 100_000 + "1" + ")" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        "1" + " + 1" * 100_000,
        "1" + " == 1 and (1" * 5_000 + ")" * 5_000,
        "9" * 100_000,
    ],
    ids=lambda text: text[:12].strip(),
)
def test_too_deep_or_too_long_predicate_is_rejected(predicate):
    assert refusal(predicate).startswith("sweep.filter: ")


class Trap:
    """A value that fails the test when anything but its name is used."""

    def __getattr__(self, name):
        raise AssertionError(f"somebody asked for {name}")

    def __call__(self, *given):
        raise AssertionError("somebody called it")

    def __getitem__(self, item):
        raise AssertionError("somebody looked into it")


@pytest.mark.parametrize(
    "predicate",
    [
        "__import__('pathlib').Path('here').touch()",
        "open('here', 'w')",
        'exec(\'open("here", "w")\')',
        'eval(\'open("here", "w")\')',
        "(lambda: open('here', 'w'))()",
        "[open('here', 'w') for seed in (1,)]",
        "f'{open(\"here\", \"w\")}' == 'a'",
        "seed == 0 and open('here', 'w')",
        "trap()",
        "trap.touch",
        "trap.touch()",
        "trap[0]",
        "trap.__class__.__mro__",
        "(seed := 7) == 7",
    ],
)
def test_nothing_is_ever_executed(predicate, tmp_path):
    values = {**VALUES, "trap": Trap(), "open": open, "exec": exec}
    before = dict(values)
    with pytest.raises(UserError):
        holds(predicate, values)
    assert not (tmp_path / "here").exists()  # in the working folder
    assert values == before
