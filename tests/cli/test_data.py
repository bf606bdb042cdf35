"""`qkablate data` as a user types it."""

import json
import re

import pytest

from qkablate.cli.data import HELP
from qkablate.config import conf_dir
from qkablate.data import sources
from tests.cli.helpers import proposed_commands

TASKS = ("recall", "induction", "copy", "reverse", "directed", "dyck")


@pytest.fixture
def user_text(tmp_path, text):
    return ["data=text", f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]


def test_help(qkablate):
    help_text = qkablate("data", "--help").out
    assert qkablate("data").out == help_text
    before, after = HELP.split("{flags}\n")
    assert help_text.startswith(before)
    assert help_text.endswith(after)
    assert "--split SPLIT" in help_text


def test_list_shows_every_option_and_what_is_prepared(qkablate, tmp_path, text):
    done = qkablate("data", "list")
    assert done.code == 0
    for path in (conf_dir() / "data").glob("*.yaml"):
        assert re.search(rf"^{path.stem} +\S", done.out, re.MULTILINE)
    assert "qkablate data prepare data=stdlib" in done.out
    assert "Nothing is prepared" in done.out
    assert qkablate("data", "prepare", "data=text", f"data.path={text}").code == 0
    done = qkablate("data", "list", "--json")
    (row,) = json.loads(done.out)["prepared"]
    assert (row["text"], row["tokenizer"]) == (str(text), "bytes")
    assert sum(row["tokens"].values()) > 30_000
    (tmp_path / "home/.cache/qkablate/data" / row["folder"] / "manifest.json").write_text("{")
    done = qkablate("data", "list")
    assert "damaged" in done.out
    assert f"  rm -r {tmp_path / 'home/.cache/qkablate/data' / row['folder']}\n" in done.out


def test_prepare_once(qkablate, user_text):
    done = qkablate("data", "prepare", *user_text)
    assert done.code == 0
    assert re.search(r"[\d,]+ tokens to train on, [\d,]+ to validate, [\d,]+ to test", done.out)
    assert re.search(r"kB in [\d.]+ s, [\d.]+ MB/s, 1.00 bytes per token", done.out)
    assert "qkablate data show data=text" in done.out
    assert "prepared before" in qkablate("data", "prepare", *user_text).out


def test_nothing_is_prepared_if_one_cannot_be(qkablate, user_text, tmp_path):
    done = qkablate("data", "prepare", *user_text, "model.form=decoder,encoder_decoder")
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
    assert json.loads(qkablate("data", "list", "--json").out)["prepared"] == []


def test_prepare_several(qkablate, user_text):
    done = qkablate("data", "prepare", *user_text, "data.tokenizer=bytes,chars")
    assert done.code == 0
    assert ", bytes: " in done.out
    assert ", chars: " in done.out


def test_next_command_has_the_lengths_that_pairs_need(qkablate, tmp_path):
    rows = [f"source {i}\ttarget number {i}" for i in range(60)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["a\tb", *rows]) + "\n")
    words = ["data=pairs", f"data.path={tmp_path / 'pairs.tsv'}", f"data.cache={tmp_path / 'c'}"]
    words += ["data.source_field=a", "data.target_field=b", "data.tokenizer=bytes"]
    done = qkablate("data", "prepare", "model=nano_translator", "model.context=8", *words)
    assert "note: model.source: of 60 pairs" in done.out
    show, train = proposed_commands(done)
    assert train[-2:] == show[-2:] == ["model.source=9", "model.context=17"]
    assert qkablate(*show[1:]).code == 0
    assert qkablate(*train[1:], "--help").code == 0


def test_info_prints_the_manifest(qkablate, user_text, text):
    before = qkablate("data", "info", *user_text)
    assert before.code == 2
    assert "the data is not prepared yet; type qkablate data prepare data=text" in before.err
    bpe = [*user_text, "data.tokenizer=bpe", "data.vocab_size=300"]
    qkablate("data", "prepare", *bpe)
    told = json.loads(qkablate("data", "info", *bpe, "--json").out)
    assert told["path"] == str(text)
    assert told["tokenizer"].startswith("bpe, ")
    assert "by position" in told["split"]
    assert len(told["fingerprint"]) == len(told["tokenizer_sha256"]) == 64
    assert told["bytes"]["train"] == pytest.approx(0.9 * text.stat().st_size, abs=2)
    assert told["bytes_per_token"]["train"] > 2
    shown = qkablate("data", "info", *bpe).out
    assert f"fingerprint       {told['fingerprint']}" in shown


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_show_decodes_the_windows_that_a_run_sees(qkablate, user_text, text, tokenizer):
    words = [*user_text, f"data.tokenizer={tokenizer}", "model.context=16"]
    qkablate("data", "prepare", *words)
    done = qkablate("data", "show", *words)
    corpus = text.read_text()
    windows = re.findall(r"^train \d\n  (.*)", done.out, re.MULTILINE)
    assert len(windows) == 3
    assert all(window.strip() in corpus for window in windows)
    other = qkablate("data", "show", *words, "seed=1")
    assert windows[0] not in other.out
    first = qkablate("data", "show", *words, "--split", "test", "--count", "1")
    (window,) = re.findall(r"^test \d\n  (.*)", first.out, re.MULTILINE)
    assert corpus[-int(0.05 * len(corpus)) :].startswith(window[:10])


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_show_prints_an_example_of_every_task(qkablate, task, split):
    done = qkablate("data", "show", f"data={task}", "--split", split, "--count", "2")
    assert done.code == 0
    assert len(re.findall(rf"^{split} \d\n  \S", done.out, re.MULTILINE)) == 2
    assert ("→" in done.out) == (task != "induction")
    again = qkablate("data", "show", f"data={task}", "--split", split, "--count", "2")
    assert again.out == done.out


def test_show_prints_source_and_target_of_a_pair(qkablate):
    done = qkablate("data", "show", "data=reverse", "model=nano_translator", "--count", "2")
    pairs = re.findall(r"^  source  (s.*)\n  target  (s.*)$", done.out, re.MULTILINE)
    assert len(pairs) == 2
    assert all(source.split() == target.split()[::-1] for source, target in pairs)


def test_show_prints_masked_text_and_what_is_masked(qkablate, user_text):
    words = [*user_text, "data.objective=mlm", "model=nano_encoder", "model.context=40"]
    qkablate("data", "prepare", *words)
    done = qkablate("data", "show", *words)
    windows = re.findall(r"^train \d\n  (.*)\n→ (.*)$", done.out, re.MULTILINE)
    assert len(windows) == 3
    for text, answers in windows:
        assert len(text) == 40
        assert len(re.findall("'.'", answers)) == 6
    assert sum(text.count("▒") for text, _ in windows) > 8
    info = json.loads(qkablate("data", "info", *words, "--json").out)
    assert info["masked"] == "6 of 40 tokens; the mask is token 256"


@pytest.fixture
def tagged(tmp_path, monkeypatch):
    """Return the words of a command that reads small files as tagged sentences."""
    for i in range(60):
        signs = f"{i:06b}".replace("0", "+").replace("1", "-")  # no two files are equal as tokens
        (tmp_path / f"{i}.py").write_text(f"x = f(name_{i}, {signs}1)\nf({signs}name_{i})\n")
    monkeypatch.setattr(sources, "find_files", lambda _: sorted(tmp_path.glob("*.py")))
    return ["data=stdlib_tags", "model=nano_encoder", "model.context=14"]


def test_show_prints_words_with_their_tags(qkablate, tagged):
    qkablate("data", "prepare", *tagged)
    done = qkablate("data", "show", *tagged, "--count", "20")
    shown = r"^  x/target = f/call \( name_\d+/argument , [+ -]+ <number> \)$"
    assert re.search(shown, done.out, re.MULTILINE)
    info = json.loads(qkablate("data", "info", *tagged, "--json").out)
    assert info["accuracy"] == {"chance": pytest.approx(2 / 5), "word": pytest.approx(3 / 5)}
    assert re.fullmatch(r"by the sha256 .* val and test", info["split"])


def test_repeats_of_tagged_sentences_are_counted(qkablate, tagged, tmp_path):
    for i in range(60):
        with (tmp_path / f"{i}.py").open("a") as file:
            file.writelines(f"k(rare_{i}_{n})\n" for n in range(3))  # unknown in val and test
    qkablate("data", "prepare", *tagged)
    info = json.loads(qkablate("data", "info", *tagged, "--json").out)
    split, files = info["split"], info["files"]
    assert all(info["documents"][split] // 3 <= n <= 12 for split, n in files.items())
    repeats = "; repeats of a sentence, with rare words as <unknown>, are left out: "
    assert re.search(repeats + r"\d+ of val, \d+ of test$", split)


def test_chance_of_a_run_is_of_what_it_reads(qkablate, tagged, tmp_path):
    tiny = ["model.layers=1", "model.d_model=16", "train.steps=2"]
    for limit in ("14", "all"):
        done = qkablate("train", *tagged, *tiny, f"train.test_tokens={limit}", f"out={limit}")
        assert done.code == 0, done.err
        (file,) = (tmp_path / limit / "runs").glob("*/result.json")
        chance = json.loads(file.read_text())["chance"]
        # The most common tag is `call`: one of three in a sentence, and one of two in the other.
        whole = pytest.approx(2 / 5)
        assert chance == whole if limit == "all" else chance in (1 / 3, 1 / 2)
        assert ("common tag is right at 60.0%" in done.err) == (limit == "all")


def test_show_leaves_padding_out(qkablate):
    words = ("data=commands", "model=nano_translator", "model.source=9", "model.context=49")
    done = qkablate("data", "show", *words, "--count", "3")
    pairs = re.findall(r"^  source  ([a-z ]+)\n  target  ([A-Z ]+ end)$", done.out, re.MULTILINE)
    assert len(pairs) == 3, done


def test_show_has_longer_commands_in_the_test_split_alone(qkablate):
    words = ("data=commands", "model.context=87", "data.held_out=0", "data.extra_phrases=1")
    for split, longest in (("train", 2), ("test", 3)):
        done = qkablate("data", "show", *words, f"--split={split}", "--count", "32")
        assert "phrases 2, held_out 0, extra_phrases 1, length 87" in done.out
        commands = re.findall("^  ([a-z ]+) >", done.out, re.MULTILINE)
        phrases = [len(re.split(" and | after ", command)) for command in commands]
        assert (len(phrases), max(phrases)) == (32, longest)


@pytest.mark.parametrize("task", TASKS)
def test_info_and_prepare_of_a_task(qkablate, task):
    told = json.loads(qkablate("data", "info", f"data={task}", "--json").out)
    assert told["task"] == task
    assert told["harder"].startswith(("data.", "model."))
    assert "nothing to prepare" in qkablate("data", "prepare", f"data={task}").out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("shw", "'shw' (nearest: show) is not one of list, prepare, info, show"),
        ("show data=recal", "data: 'recal' (nearest: recall) is not one of"),
        (
            "show data=recall --split=tset",
            "--split: 'tset' (nearest: test) is not one of train, val, test",
        ),
        ("show data=recall --count 0", "--count: '0' is not a whole number"),
        ("show data=recall --json", "'--json' is not a flag of data show"),
        ("show data=recall,dyck", "data show takes one data set"),
        ("show data=commands data.extra_phrases=-1", "data.extra_phrases: -1 is not a number from"),
        ("show data=commands data.extra_phrases=1", "use model.context=87 or more"),
        ("show data=add data.extra_phrases=1", "data.extra_phrases: data=add has no such key"),
        ("show data=recall data.pairs=99", "data.pairs: 99 pairs and as many queries do not fit"),
        ("list data=recall", "data list takes no 'data=recall'"),
        ("prepare data=text data.path=nothing.txt", "data.path: there is no file, folder or"),
        ("info data", "'data' is not key=value"),
    ],
)
def test_mistakes_are_one_line(qkablate, words, line):
    done = qkablate("data", *words.split())
    assert (done.code, done.out) == (2, "")
    assert line in done.err
    assert done.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("variant", ["standard", "merged_w"])
def test_run_of_every_task(qkablate, tiny, tmp_path, task, variant):
    small = {
        "recall": ["data.vocab_size=32", "data.pairs=4"],
        "induction": ["data.segment=8"],
        "copy": ["data.copy_length=4"],
        "reverse": ["data.copy_length=4"],
        "dyck": ["data.depth=4"],
    }
    words = [word for word in tiny if not word.startswith("data")]
    words += [f"data={task}", *small.get(task, []), "data.val_tokens=320", "data.test_tokens=640"]
    done = qkablate("train", *words, f"variant={variant}")
    assert done.code == 0, done.err
    assert re.search(r"accuracy  val [\d.]+%   test [\d.]+%   chance [\d.]+%", done.out)
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["data"]["source"] == task
    assert result["data"]["val_tokens"] == 320
    assert "path" not in result["data"]
    assert result["bits_per_byte"] == {"val": None, "test": None}
    assert 0 <= result["accuracy"]["test"] <= 1
    assert 0 < result["chance"] < 1
    assert result["text_references"] is None
    assert any(name.startswith("accuracy/") for name in result["measures"]["test"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in rows if row["step"] == 12 and "val/accuracy" in row]
    assert last["val/accuracy"] == result["accuracy"]["val"]
    assert not (folder / "tokenizer.json").exists()
    sampled = qkablate("sample", str(folder))
    assert sampled.code == 2
    assert "was trained on a task, whose tokens are not text" in sampled.err
    assert qkablate("verify", str(folder)).code == 0


def test_train_prepares_missing_data(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "data.tokenizer=bpe", "data.vocab_size=280")
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    assert json.loads((folder / "tokenizer.json").read_text())["name"] == "bpe"
    sampled = qkablate("sample", str(folder), "prompt=the cat ∑", "tokens=20", "seed=1")
    assert sampled.code == 0, sampled.err
    assert sampled.out.startswith("the cat ∑")


@pytest.mark.parametrize("split", ["train", "val"])
def test_show_prints_the_source_and_the_target_of_pairs(qkablate, split):
    for model in ("model=nano_translator", "model=nano_encoder"):
        words = ("data=reverse", model, "--split", split)
        done = qkablate("data", "show", *words)
        assert done.code == 0, done.err
        sources = re.findall(r"^  source  (.*)", done.out, re.MULTILINE)
        targets = re.findall(r"^  target  (.*)", done.out, re.MULTILINE)
        assert len(sources) == 3
        assert [x.split()[::-1] for x in sources] == [x.split() for x in targets]
    words = ("data=reverse", "model=nano_translator", "model.source=12", "--json")
    told = json.loads(qkablate("data", "info", *words).out)
    assert (told["source"], told["length"]) == (12, 8)
