"""Words that are rejected before they reach Hydra: numbers too long for a float, above all."""

import pytest

from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.config import KEYS, GridConfig
from qkablate.config.sweep import SWEEP_KEYS
from qkablate.errors import UserError
from tests.cli.helpers import assert_refused

DIGITS = "9" * 400
FORMS = [
    "{}",
    "-{}",
    "{}.5",
    "0.{}",
    "1{}e3",
    "[{}]",
    "[0.1,{}]",
    "1,{}",
    "range({})",
    "range(0,{})",
]
NUMBERS = [name for name, info in KEYS.items() if info.bounds]
SWEEP_NUMBERS = [name for name, info in SWEEP_KEYS.items() if info.bounds]


@pytest.fixture
def opened_hydra():
    with open_hydra():
        yield


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("seed=rnge(5)", "seed: 'rnge(5)' (nearest: range) cannot be read; write it as in"),
        ("seed=range()", "seed: 'range()' cannot be read; write it as in 'seed=range(5)'"),
        ("variant=chioce(a,b)", "(nearest: choice) cannot be read; write it as in"),
        ("data.path=a(b", """quote a value with special characters: 'data.path="a(b"'"""),
    ],
)
def test_misspelt_function_names_the_nearest(opened_hydra, word, line):
    with pytest.raises(UserError) as error:
        read_request([word])
    assert line in str(error.value)


def assert_one_line(text, name):
    assert text.startswith(f"{name}: ")
    assert "\n" not in text
    assert len(text) < 200


@pytest.mark.parametrize("name", NUMBERS)
def test_train_rejects_a_number_of_400_digits(qkablate, name):
    for form in ("{}", "-{}", "[0.1,{}]"):
        done = qkablate("train", f"{name}={form.format(DIGITS)}")
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert_one_line(done.err.strip().removeprefix("qkablate: "), name)


@pytest.mark.parametrize("name", NUMBERS)
def test_sweep_rejects_a_number_of_400_digits(opened_hydra, name):
    for form in FORMS:
        with pytest.raises(UserError) as error:
            read_request([f"{name}={form.format(DIGITS)}"])
        assert_one_line(str(error.value), name)


@pytest.mark.parametrize("name", NUMBERS)
def test_number_that_is_not_finite_is_rejected(opened_hydra, name):
    for value in ("1e400", "-1e400", "nan", "inf"):
        with pytest.raises(UserError) as error:
            make_config({name: value})
        assert_one_line(str(error.value), name)


@pytest.mark.parametrize("name", SWEEP_NUMBERS)
def test_keys_of_a_sweep_reject_a_number_of_400_digits(opened_hydra, name):
    for form in FORMS:
        with pytest.raises(UserError) as error:
            read_request(["seed=0", "engine=slurm", f"{name}={form.format(DIGITS)}"])
        assert_one_line(str(error.value), name)
    with pytest.raises(UserError) as error:
        read_request(["seed=0", "engine=slurm", f"{name}=1e400"])
    assert_one_line(str(error.value), name)


@pytest.mark.parametrize("name", ["optim.lr", "train.steps", "seed", "model.mlp_ratio"])
@pytest.mark.parametrize("make", [int, float, lambda text: [1, int(text)], lambda text: -int(text)])
def test_number_of_400_digits_in_a_file_is_rejected(opened_hydra, name, make):
    """Reject the number in the file of a sweep or a claim, too."""

    def configs(grid):
        request = read_request(["variant=no_q"], grid)
        make_config({key: values[-1] for key, values in request.choices.items()})

    for grid in (GridConfig(axes={name: make(DIGITS)}), GridConfig(fixed={name: make(DIGITS)})):
        with pytest.raises(UserError) as error:
            configs(grid)
        assert_one_line(str(error.value), name)


@pytest.mark.parametrize("name", ["optim.lr", "train.steps", "optim.betas", "model.mlp_ratio"])
def test_number_of_400_digits_in_a_config_file_is_one_line(qkablate, tmp_path, name):
    section, _, leaf = name.partition(".")
    value = f"[0.9, {DIGITS}]" if leaf == "betas" else DIGITS
    text = f"defaults: [train, _self_]\n{section}: {{{leaf}: {value}}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    done = qkablate("train", "--config-dir", str(tmp_path), "--config-name", "mine")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert done.err.startswith("qkablate: ")


def test_variant_that_is_chosen_twice_is_a_mistake(qkablate):
    line = "variant: chosen twice, 'standard' and 'no_q'; several are written variant=a,b"
    for verb in ("train", "sweep"):
        assert_refused(qkablate(verb, "variant=standard", "variant=no_q"), line)
    assert_refused(qkablate("sweep", "sweep=quick", "sweep=qk"), "sweep: chosen twice, 'quick' and")


def test_text_may_have_any_digits(opened_hydra):
    assert make_config({"tracking.group": DIGITS}).tracking.group == DIGITS
