"""`qkablate sample` as a user types it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qkablate.cli import main
from qkablate.cli.sample import KEYS, PARSER, parse_args, write_text
from qkablate.data.pairs.bleu import Bleu
from qkablate.data.pairs.sentences import TargetTokens
from qkablate.models.translate import translate
from qkablate.training.warm_start.restore import restore
from tests.cli.helpers import assert_refused, train_on_pairs

STEPS = ("train.steps=30", "train.batch_size=8")
REPORT = r"{}, step 30: {} tokens, [\d,]+ tokens/s\n"


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), *STEPS, "variant=merged_w")


@pytest.fixture(scope="module")
def of_chars(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("chars"), *STEPS, "data.tokenizer=chars", "optim.lr=0.01")


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return train_task(tmp_path_factory.mktemp("translator"), "model=nano_translator")


def train_task(folder, *words):
    """Train a small model on `reverse` for two steps."""
    sizes = ["model.layers=1", "model.d_model=16", "model.heads=2", "train.steps=2"]
    sizes += ["data=reverse", "data.val_tokens=64", "data.test_tokens=64", "train.batch_size=2"]
    sizes += ["tracking.wandb=disabled", "threads=1", f"out={folder}"]
    with pytest.raises(SystemExit) as exit_:
        main(["train", *words, *sizes])
    assert exit_.value.code == 0
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture
def sample(qkablate, trained):
    return lambda *words: qkablate("sample", str(trained), *words)


@pytest.mark.slow
def test_prompt_and_text_alone_on_stdout(sample, trained):
    done = sample("prompt=a=b, c", "tokens=40", "temperature=0")
    assert done.code == 0
    restored = restore(trained)
    tokens = list(b"a=b, c")
    first = 0
    for _ in range(40):  # past the context of 16, as --help says
        if len(tokens) - first > 16:
            first = len(tokens) - 8
        with torch.no_grad():
            tokens.append(int(restored.model(torch.tensor([tokens[first:]]))[0, -1].argmax()))
    assert done.out == bytes(tokens).decode("utf-8", "replace")
    assert re.fullmatch(REPORT.format(trained.name, 40), done.err)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_positions(train, qkablate, tmp_path, position):
    run = train(tmp_path, *STEPS, f"model.position={position}")
    done = qkablate("sample", run.name[:8], "prompt=the", "tokens=30")
    assert done.code == 0
    assert re.fullmatch(REPORT.format(run.name, 30), done.err)


@pytest.mark.slow
def test_seed_decides_the_text(sample):
    base = sample("prompt=the ").out
    assert len(base.encode()) >= 204
    assert sample("prompt=the ", "seed=0").out == base
    assert sample("prompt=the ", "seed=1").out != base
    assert sample("prompt=the ", "temperature=0.1").out != base
    assert sample("prompt=the ", "top_k=2").out != base
    assert sample("top_k=1").out == sample("temperature=0").out


def test_default_prompt_is_a_newline(sample):
    done = sample("tokens=5")
    assert done.out.startswith("\n")
    assert done.out == sample("tokens=5", "prompt=\n").out


def test_backslash_is_not_an_escape(sample):
    assert sample("tokens=1", r"prompt=a\nb").out.startswith(r"a\nb")


@pytest.mark.slow
def test_characters(qkablate, of_chars):
    done = qkablate("sample", str(of_chars), "prompt=äh", "tokens=60")
    assert done.code == 0
    assert len(done.out) == 62
    assert set(done.out) <= set("the cat sat on the mat, ähnlich ∑\n")
    missing = qkablate("sample", str(of_chars), "prompt=Äh! é é\t")
    assert missing.code == 2
    assert missing.out == ""
    assert missing.err == (
        "qkablate: prompt: the tokenizer of this run does not know 'Ä', '!', 'é', '\\t'\n"
    )


def test_bytes_outside_utf8_are_replaced(sample):
    """At a temperature where every byte comes: the output is UTF-8 all the same."""
    done = sample("temperature=100", "tokens=300", "prompt=∑")
    assert done.code == 0
    assert done.out.startswith("∑")
    assert "\ufffd" in done.out


def test_control_characters_are_not_printed(capfd, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_text("a\x1b[31m\t\x9b2J∑\u3000\r\0\n")
    assert capfd.readouterr().out == "a\ufffd[31m\t\ufffd2J∑\u3000\ufffd\ufffd\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    write_text("\x1b")
    assert capfd.readouterr().out == "\x1b"


def test_run_by_name_or_id(qkablate, trained):
    out = f"out={trained.parent.parent}"
    texts = [
        qkablate("sample", word, out, "tokens=3").out
        for word in (trained.name, trained.name[:6], trained.name.rpartition("-")[2][:7])
    ]
    assert len(set(texts)) == 1
    done = qkablate("sample", "mrged_w", out)
    assert done.code == 2
    assert "there is no run 'mrged_w'" in done.err
    assert "(nearest: merged_w)" in done.err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(qkablate, flag):
    done = qkablate("sample", "nope", flag)
    assert (done.code, done.out, done.err) == (0, PARSER.format_help(), "")
    assert all(f"  {key}=" in done.out for key in KEYS)


@pytest.mark.parametrize(("words", "search"), [([], "greedy"), (["--beam", "3"], "beam 3")])
def test_source_is_translated(qkablate, translator, words, search):
    done = qkablate("sample", str(translator), "source=s1 s2  ·", *words)
    assert done.code == 0
    model, tokens = restore(translator).model, TargetTokens(start=17)
    (target,) = translate(model, [[1, 2, 16]], tokens, 3 if words else 1)
    names = {16: "·", 17: ">"}
    assert done.out == " ".join(names.get(i, f"s{i}") for i in target) + "\n"
    assert re.fullmatch(rf"\S+, step 2: {search}, 8 tokens, [\d,]+ tokens/s\n", done.err)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["source=s1 s99 x"], "source: 's99', 'x' are not known to data=reverse (allowed: s0, s1,"),
        (["source=s1 s99"], "'s99' is not known to data=reverse (allowed: s0, s1, …, s15, ·, >)"),
        (["source=" + "s1 " * 9], "source: it has 9 tokens, and model.source=8 of this run"),
        ([], "source: a run with model.form=encoder_decoder translates; give source=TEXT or --spl"),
        (["text=s1"], "text: only a run with model.form=encoder answers a text, and this one has"),
        (["prompt=a"], "source: a run with model.form=encoder_decoder translates"),
    ],
)
def test_impossible_sources(qkablate, translator, words, line):
    done = qkablate("sample", str(translator), *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert line in done.err


def test_runs_without_a_translator(qkablate, sample, tmp_path):
    done = sample("source=the cat")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "it has model.form=decoder, and only encoder_decoder does; give prompt=TEXT" in done.err
    run = str(train_task(tmp_path, "model=nano_encoder", "model.context=8"))
    done = qkablate("sample", run, "source=s1")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "it has model.form=encoder, and only encoder_decoder does; give text=TEXT\n" in done.err
    line = "a run with model.form=encoder generates no text; give text=TEXT or --split test"
    assert_refused(qkablate("sample", run), line)
    assert_refused(qkablate("sample", run, "--split", "test", "--beam", "2"), "--beam: only a tr")
    done = sample("text=the cat")
    assert_refused(done, "this one has model.form=decoder; give prompt=TEXT")


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory):
    """Return a run on text that translates, and the words that name its data."""
    folder = tmp_path_factory.mktemp("pairs")
    return train_on_pairs(folder), f"data.cache={folder}/cache"


def test_source_of_text_is_translated(qkablate, of_pairs):
    run, _ = of_pairs
    done = qkablate("sample", str(run), "source=1234")
    assert done.code == 0
    assert set(done.out) <= {*"0123456789\n"}
    done = qkablate("sample", str(run), "source=12a4b")
    assert done.err == "qkablate: source: 'a', 'b' are not known to the tokenizer of this run\n"


@pytest.mark.parametrize("split", ["val", "test"])
def test_split_is_translated_and_scored(qkablate, of_pairs, monkeypatch, split):
    run, cache = of_pairs
    monkeypatch.setattr(
        "qkablate.data.pairs.bleu.score_bleu",
        lambda hypotheses, references: Bleu(
            sum(len(text) for text in references), f"lines:{len(hypotheses)}"
        ),
    )
    done = qkablate("sample", str(run), "--split", split, cache)
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    assert "\0" not in done.out
    line = r"\S+, step 2: {}, greedy, 2 pairs: exact match 0.0%, BLEU \d+.00 \(lines:2\)\n"
    assert re.fullmatch(line.format(split), done.err)


def test_bleu_stands_beside_its_signature(qkablate, of_pairs):
    if not os.environ.get("QKABLATE_NEEDS_EXPORT"):  # the extras must be there
        pytest.importorskip("sacrebleu")
    run, cache = of_pairs
    done = qkablate("sample", str(run), "--split", "test", cache)
    assert re.search(r"BLEU \d+\.\d\d \(nrefs:1\|.*\|version:[\d.]+\)", done.err)


def test_bleu_needs_its_extra(qkablate, of_pairs, monkeypatch):
    """Exact match does not."""
    run, cache = of_pairs
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    done = qkablate("sample", str(run), "--split", "test", cache)
    assert done.code == 0
    assert "exact match 0.0%, BLEU not computed: this needs sacrebleu, of the extra" in done.err
    assert done.err.count("\n") == 1


def test_split_of_a_task_is_translated(qkablate, translator):
    done = qkablate("sample", str(translator), "--split", "test")
    assert done.code == 0
    assert len(done.out.splitlines()) == 8
    assert re.fullmatch(r"\S+, step 2: test, greedy, 8 pairs: exact match \d+.\d%\n", done.err)


def test_examples_of_a_split_are_shown(qkablate, of_pairs):
    run, cache = of_pairs
    done = qkablate("sample", str(run), "--split", "test", "--show", "9", cache)
    assert done.code == 0
    lines = qkablate("sample", str(run), "--split", "test", cache).out.splitlines()
    blocks = done.out.split("\n\n")
    assert len(blocks) == len(lines) == 2  # the split has no more
    for block, line in zip(blocks, lines, strict=True):
        head, source, target, output = block.splitlines()
        assert re.fullmatch(r"test \d: wrong, \d\.\d{4} nats per token", head)
        assert source.removeprefix("  source   ")[::-1] == target.removeprefix("  target   ")
        assert output.removeprefix("  output").strip() == line
    assert "exact match 0.0%" in done.err


def test_split_needs_the_data(qkablate, of_pairs, tmp_path):
    done = qkablate("sample", str(of_pairs[0]), "--split", "test", f"data.cache={tmp_path}/none")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "--split: the run's data is not prepared on this machine; data.cache=FOLDER" in done.err


MISTAKES = [
    ([], "no run given: write qkablate sample RUN prompt='a text'"),
    (["a", "b"], "2 runs given (a, b)"),
    (["a", "promt=x"], "promt: there is no such key (nearest: prompt)"),
    (["a", "variant.fil=x"], "variant.fil: there is no such key (nearest: variant.file)"),
    (["a", "=x"], "there is no such key"),
    (["a", "--promt"], "'--promt' is not one of --beam, --help, --show, --split, -h"),
    (["a", "--prompt", "x"], "a key is written without dashes: prompt=VALUE"),
    (["a", "--hlep"], "(nearest: --help)"),
    (["a", "--help=1"], "--help takes no value"),
    (["a", "tokens=0"], "tokens: '0' is not a whole number from 1 to 1000000000"),
    (["a", "tokens=ten"], "tokens: 'ten' is not a whole number"),
    (["a", "tokens=1e3"], "tokens: '1e3' is not a whole number"),
    (["a", "tokens=²"], "tokens: '²' is not a whole number"),
    (["a", "tokens=" + "9" * 5000], "is not a whole number"),
    (["a", "top_k=0"], "top_k: '0' is not a whole number from 1"),
    (["a", "seed=-1"], "seed: '-1' is not a whole number from 0"),
    (["a", "temperature=-1"], "temperature: '-1' is not a number from 0 to 100"),
    (["a", "temperature=nan"], "temperature: 'nan' is not a number from 0 to 100"),
    (["a", "temperature=hot"], "temperature: 'hot' is not a number from 0 to 100"),
    (["a", "seed=1", "seed=2"], "seed: given twice"),
    (["a", "source="], "source: is empty; give the text to translate"),
    (["a", "source= \t"], "source: is empty; give the text to translate"),
    (["a", "source=\udcff"], "source: it is not UTF-8 text"),
    (["a", "text= "], "text: is empty; give the text to answer"),
    (["a", "text=\udcff"], "text: it is not UTF-8 text"),
    (["a", "source=x", "top_k=2"], "top_k: only generated text has one; leave out top_k or source"),
    (["a", "source=x", "prompt=y"], "prompt: only generated text has one"),
    (["a", "text=x", "seed=1"], "seed: only generated text has one; leave out seed or text"),
    (["a", "text=x", "source=y"], "text: a source is given; leave out text or source"),
    (["a", "text=x", "--split", "val"], "--split: a text is given; leave out --split or text"),
    (["a", "text=x", "--beam", "2"], "--beam: only a translation has one; give source=TEXT"),
    (["a", "source=x", "--show", "2"], "--show: only --split has examples; give --split test"),
    (["a", "source=x", "--beam", "0"], "--beam: '0' is not a whole number from 1 to 1000"),
    (["a", "source=x", "--split", "val"], "--split: a source is given"),
    (["a", "seed=1", "--split", "val"], "seed: only generated text has one; leave out seed or --"),
    (["a", "--split", "train"], "--split: 'train' is not one of val, test"),
    (["a", "source=x", "data.cache=y"], "data.cache: only --split reads data"),
    (["a", "--beam", "2"], "--beam: only a translation has one; give source=TEXT"),
    (["a", "prompt="], "prompt: is empty; leave it out for the default"),
    (["a", "prompt=\udcff"], "prompt: it is not UTF-8 text"),
    (["a"], "there is no run 'a' in 'outputs', which does not exist; start one: "),
    (["./a=b/c"], "there is no folder './a=b/c'"),
    (["home"], "'home' is not a run: it has no config.yaml"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=lambda x: str(x)[:30])
def test_mistakes(qkablate, words, line):
    done = qkablate("sample", *words)
    assert done.code == 2
    assert done.err.startswith("qkablate: ")
    assert line in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


@pytest.mark.parametrize("words", [["--help"], ["a", "tokens=0"], ["a", "promt=x"], ["a"]], ids=str)
def test_mistakes_are_found_before_heavy_imports(words):
    code = (
        "import sys, qkablate.cli\n"
        f"try: qkablate.cli.main(['sample', *{words}])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_defaults():
    args = parse_args(["a"])
    assert (args.prompt, args.tokens, args.temperature) == (None, 200, 0.8)
    assert (args.top_k, args.seed, args.values) == (None, 0, {})
    args = parse_args(["variant.file=a=b.py", "a", "top_k=3", "variant.qk=x", "prompt=-h"])
    assert args.values == {
        "variant.file": "a=b.py",
        "variant.qk": "x",
        "top_k": "3",
        "prompt": "-h",
    }
    assert args.top_k == 3
    assert (args.run, args.prompt) == ("a", "-h")


def test_damaged_run_is_one_line(qkablate, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "copy"))
    next(run.glob("checkpoints/*/weights.safetensors")).write_bytes(b"damaged")
    done = qkablate("sample", str(run))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "is damaged (weights.safetensors does not have its checksum)" in done.err
    (run / "tokenizer.json").write_text("{")
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(trained / "checkpoints", run / "checkpoints")
    done = qkablate("sample", str(run))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "tokenizer.json' is damaged" in done.err


def test_variant_file_must_be_given(train, qkablate, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from qkablate.attention.qk.factored import SeparateQK\n"
        "class Mine(SeparateQK):\n    equation = 'mine'\n"
    )
    run = train(tmp_path, *STEPS, f"variant.file={file}")
    done = qkablate("sample", str(run))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "give variant.file=PATH" in done.err
    assert qkablate("sample", str(run), "tokens=3", f"variant.file={file}").code == 0


def test_run_is_not_modified(sample, trained):
    def tree():
        return {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in found()}

    def found():
        return sorted(trained.rglob("*"))

    before = tree()
    assert sample("tokens=3").code == 0
    assert tree() == before
    assert json.loads((trained / "tokenizer.json").read_text()) == {"name": "bytes"}


@pytest.mark.slow
def test_rerun_moves_the_tokenizer_to_the_attempt(train, qkablate, tmp_path):
    run = train(tmp_path, *STEPS)
    words = (run / "config.yaml").read_text()
    train(tmp_path, *STEPS, "--rerun")
    assert (run / "attempts" / "1" / "tokenizer.json").exists()
    assert (run / "attempts" / "1" / "config.yaml").read_text() == words
    assert (run / "tokenizer.json").exists()
    assert qkablate("sample", str(run / "attempts" / "1"), "tokens=3").code == 0


@pytest.mark.slow
def test_text_is_streamed(spawn, trained):
    """Text printed before Ctrl-C is kept."""
    process = spawn("sample", str(trained), "prompt=the ", "tokens=1000000000", "temperature=0")
    begun = process.stdout.read(40)
    assert begun.startswith("the ")
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "qkablate: interrupted\n"
    assert isinstance(rest, str)


@pytest.mark.slow
def test_closed_pipe_ends_quietly(spawn, trained):
    """Exit quietly in `qkablate sample RUN | head -c 9`."""
    process = spawn("sample", str(trained), "tokens=1000000000")
    assert len(process.stdout.read(9)) == 9
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


def test_completion(qkablate, trained, monkeypatch):
    monkeypatch.chdir(trained.parent.parent.parent)
    for shell, line, found in [
        ("bash", "qkablate sa", ["sample"]),
        ("bash", "qkablate sample merg", [trained.name]),
        ("zsh", "qkablate sample x tem", ["temperature="]),
        ("fish", "qkablate sample x t", ["text=", "tokens=", "temperature=", "top_k="]),
        ("fish", "qkablate sample x nope", []),
    ]:
        monkeypatch.setenv("COMP_LINE", line)
        assert qkablate("-sc", f"query={shell}").out.split() == found
