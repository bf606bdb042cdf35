"""`qkablate sample` of encoders, as a user types it."""

import re

import pytest

from qkablate.cli import main
from qkablate.data import sources
from tests.cli.helpers import assert_refused

SIZES = ["model=nano_encoder", "model.layers=1", "model.d_model=32", "model.heads=2"]
SIZES += ["train.batch_size=8", "tracking.wandb=disabled", "threads=1", "optim.lr=0.01"]


def train_encoder(folder, *words):
    """Train a small encoder; return its folder and the word that names its cache."""
    cache = f"data.cache={folder}/cache"
    cached = [] if "data=add" in words else [cache]
    with pytest.raises(SystemExit) as exit_:
        main(["train", *SIZES, *words, *cached, f"out={folder}"])
    assert exit_.value.code == 0
    (run,) = (folder / "runs").iterdir()
    return str(run), cache


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    (folder / "text.txt").write_text("".join(letter * 64 for letter in "abcd") * 64)
    words = ["data=text", "data.objective=mlm", "data.tokenizer=chars", "train.steps=150"]
    return train_encoder(folder, *words, "model.context=16", f"data.path={folder}/text.txt")


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagged")
    for i in range(60):
        signs = f"{i:06b}".replace("0", "+").replace("1", "-")  # no two files are equal
        lines = f"call(x, {signs}y)\nx = {signs}x + [y]\nrows = [y, {signs}x]\n"
        (folder / f"{i}.py").write_text(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "find_files", lambda _: sorted(folder.glob("*.py")))
        words = ["data=stdlib_tags", "data.vocab_size=257", "model.context=16"]
        return train_encoder(folder, *words, "train.steps=100")


def test_masks_are_filled_in(qkablate, masked):
    run, _ = masked
    for text in ("bbb[MASK]bbbb[MASK]bbb", "bbb▒bbbb▒bbb"):
        done = qkablate("sample", run, f"text={text}")
        assert done.code == 0
        assert done.out == "bbbbbbbbbbbb\n"
        assert re.fullmatch(r"\S+, step 150: 2 masks: 'b' \d+%, 'b' \d+%\n", done.err)


def test_impossible_masked_texts(qkablate, masked):
    run, _ = masked
    line = "text: it has no mask; write [MASK] for each token to fill in"
    assert_refused(qkablate("sample", run, "text=abc"), line)
    line = "text: 'x' is not known to the tokenizer of this run"
    assert_refused(qkablate("sample", run, "text=x[MASK]"), line)
    line = "text: it has 17 tokens, and model.context=16 of this run allows 16"
    assert_refused(qkablate("sample", run, f"text={'a' * 16}[MASK]"), line)


def test_attention_on_masked_text_is_inspected(qkablate, masked):
    """Even where no token ends a document."""
    done = qkablate("inspect", masked[0], "--text", "abcd", "--layer", "0", "--head", "0")
    assert done.code == 0
    assert "Largest attention weights" in done.out


def test_masked_split_has_scores_and_examples(qkablate, masked):
    run, cache = masked
    done = qkablate("sample", run, "--split", "val", "--show", "2", cache)
    assert done.code == 0
    assert re.search(r": val, \d+ windows: accuracy 9\d.\d%, \d.\d{4} nats per answer\n", done.err)
    for number, block in enumerate(done.out.split("\n\n"), 1):
        head, text, answers, output = block.splitlines()
        assert head.startswith(f"val {number}: ")
        assert len(text.removeprefix("  text     ")) == 16
        assert answers.count("'") == output.count("'") == 4  # two of 16 are asked for
    assert number == 2


def test_names_of_a_statement_are_tagged(qkablate, tagged):
    """With the right answers, which Python's parser gives."""
    run, _ = tagged
    done = qkablate("sample", run, "text=call(x, --+-+-y)")
    assert done.code == 0
    head, *lines = done.out.splitlines()
    assert head.startswith("statement 1: 100.0% right, ")
    assert lines == [
        "  text     call ( x , - - + - + - y )",
        "  answers  call/call x/argument y/value",
        "  output   call/call x/argument y/value",
    ]
    typed = qkablate("sample", run, "text=x = [<unknown>]\nfor x in <string> :")
    assert "  answers  x/target <unknown>/value\n" in typed.out
    assert "\n\nstatement 2: " in typed.out
    assert typed.out.splitlines()[-2] == "  answers  x/target"
    for text in ("x =", "1 + 1"):
        line = "text: it is no Python statement with a name, such as 'x = add(y)'"
        assert_refused(qkablate("sample", run, f"text={text}"), line)


def test_tagged_split_has_scores_and_examples(qkablate, tagged):
    run, cache = tagged
    done = qkablate("sample", run, "--split", "test", cache)
    assert done.code == 0
    assert done.out.count("  answers  ") == 5
    line = r": test, \d+ windows: accuracy \d+.\d%, exact match \d+.\d%, \d.\d{4} nats per answer\n"
    assert re.search(line, done.err)
    moved = qkablate("sample", run, "--split", "test", f"{cache}-of-another")
    assert_refused(moved, "--split: the run's data is not prepared on this machine")


def test_task_is_answered(qkablate, tmp_path):
    run, _ = train_encoder(tmp_path, "data=add", "model.context=13", "train.steps=2")
    done = qkablate("sample", run, "text=2 + 3")
    assert done.code == 0
    assert done.out.endswith("\n")
    assert re.fullmatch(r"\S+, step 2: \d+ answers?\n", done.err)
    assert_refused(qkablate("sample", run, "text=2 + x"), "text: 'x' is not known to data=add")
