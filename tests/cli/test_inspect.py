"""`qkablate inspect` as a user types it."""

import json
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

from qkablate.cli.inspect import KEYS, PARSER
from qkablate.config import variants
from qkablate.diagnostics import attention_weights, circuits
from qkablate.diagnostics.panel import ATTENTION_MEASURES
from qkablate.report.text.heads import format_number, sparkline
from qkablate.training.warm_start.restore import restore
from tests.cli.helpers import assert_refused

STEPS = ("train.steps=30", "train.batch_size=8", "data.val_tokens=2000", "data.test_tokens=100")


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    words = (*STEPS, "train.checkpoint_every=10", "diagnostics.every=20", "variant=merged_w")
    return train(tmp_path_factory.mktemp("trained"), *words)


@pytest.fixture
def cache(trained):
    return f"data.cache={trained.parent.parent.parent / 'cache'}"


@pytest.fixture
def inspect(qkablate, trained, cache):
    return lambda *words: qkablate("inspect", str(trained), cache, *words)


def last_row(run):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["diagnostics"] for row in rows if "diagnostics" in row][-1]


def test_numbers_equal_those_of_training(inspect, trained):
    done = inspect("--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["run"], found["step"], found["variant"]) == (trained.name, 30, "merged_w")
    assert found["tokens"]["of"].startswith("the validation split of ")
    assert found["no_circuit"] is None
    expected = last_row(trained)
    for part, measures in expected.items():
        assert found[part].keys() == measures.keys()
        for name, layers in measures.items():
            for mine, theirs in zip(found[part][name], layers, strict=True):
                flat = [x and torch.tensor(x).flatten().tolist() for x in (mine, theirs)]
                assert flat[0] is flat[1] or flat[0] == pytest.approx(flat[1], rel=1e-3, abs=1e-6)


def test_tables(inspect, trained):
    done = inspect()
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"{trained.name}, step 30: B_h = W, free d × d; M_h = W_v W_o"
    heads = [line.split() for line in lines if line[:1] == " " and line.split()[0].isdecimal()]
    assert [words[:2] for words in heads] == 3 * [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    columns = [line.split()[2:] for line in lines if line.startswith("layer")]
    left_out = {"singular"}
    assert columns[0] == [m for m in circuits.MEASURES if m not in {*left_out, "balance"}]
    assert columns[1] == [m for m in circuits.MEASURES if m not in {*left_out, "off_rank"}]
    # A merged W has no other order of multiplication.
    assert columns[2] == [m for m in ATTENTION_MEASURES if not m.startswith("rounding")]
    assert lines[-2] == "Next"
    assert lines[-1].startswith(f"  qkablate inspect {trained} data.cache=")
    assert "--layer " in lines[-1]
    expected = last_row(trained)["qk"]["frobenius"][1][0]
    assert heads[2][5] == format_number(expected)


def test_head_option_shows_one_head(inspect, trained):
    done = inspect("--layer", "1", "--head=0")
    heads = [line for line in done.out.splitlines() if line[:1] == " " and line.split()[0] == "1"]
    assert len(heads) == 3
    assert done.out.count("  L1 H0  █") == 2
    assert done.out.splitlines()[-1] == f"  qkablate sample {trained}"
    assert inspect("--head", "1").out.count("  L0 H1  █") == 2


def test_attention_of_a_text(inspect, trained):
    text = "the mat, ähn"
    found = json.loads(inspect("--json", "--text", text).out)["text"]
    ids = list(text.encode())
    assert found["ids"] == ids
    assert "".join(found["tokens"][:9]) == "the mat, "
    a_LHTS = torch.stack(attention_weights(restore(trained).model, torch.tensor(ids)))
    torch.testing.assert_close(torch.tensor(found["attention"]), a_LHTS, rtol=1e-4, atol=1e-7)
    out = inspect("--layer", "0", "--head", "1", "--text", "a\nb").out
    assert "Largest attention weights, layer 0, head 1" in out
    assert "\n0   'a'    'a' at 0: 1.00\n1   '\\n'   " in out


def test_checkpoint_is_selected_by_its_step(inspect):
    assert json.loads(inspect("--json", "step=30").out)["step"] == 30
    done = inspect("step=7")
    assert (done.code, done.err) == (
        2,
        "qkablate: step: there is no checkpoint of step 7 (allowed: 30)\n",
    )


def test_without_the_data_random_tokens_are_used(qkablate, trained, tmp_path):
    """No path of the run's folder is read, and nothing is prepared."""
    done = qkablate("inspect", str(trained), "--json")
    assert done.code == 0
    assert done.err.count("\n") == 1
    assert "the run's data is not prepared in" in done.err
    found = json.loads(done.out)
    assert found["tokens"]["of"] == "random tokens"
    assert found["qk"] == json.loads(qkablate("inspect", str(trained), "--json").out)["qk"]
    assert not (tmp_path / "home" / ".cache").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["variant=static_scores"],
        ["variant=qk_norm"],
        ["variant=standard", "model.position=rope"],
        ["variant=merged_ov", "model.position=alibi"],
    ],
    ids=str,
)
def test_layers_without_a_matrix_give_the_reason(train, qkablate, tmp_path, words):
    run = train(tmp_path, *STEPS, *words)
    done = qkablate("inspect", str(run), f"data.cache={tmp_path / 'cache'}")
    assert (done.code, done.err) == (0, "")
    expected = {
        "variant=static_scores": "B_h, the scores of a head: no matrix: the scores do not depend",
        "variant=qk_norm": "B_h, the scores of a head (the queries or keys are normalized, so the",
        "variant=standard": "B_h, the scores of a head (with rope, B_h is different at every dis",
    }
    assert expected.get(words[0], "M_h, the output of a head") in done.out


def test_run_on_a_task(qkablate, tmp_path):
    words = ["data=copy", "data.copy_length=4", "data.val_tokens=640", "data.test_tokens=64"]
    words += ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"]
    words += ["train.steps=2", "tracking.wandb=disabled", "threads=1"]
    assert qkablate("train", *words).code == 0
    done = qkablate("inspect", "standard")
    assert (done.code, done.err) == (0, "")
    assert "of the validation split of copy" in done.out
    done = qkablate("inspect", "standard", "--json", "--text", "x")
    assert done.code == 2
    assert "was trained on a task, whose tokens are not text" in done.err


MISTAKES = [
    ([], "no run given: write qkablate inspect RUN"),
    (["a", "b"], "2 runs given (a, b)"),
    (["a", "stp=1"], "stp: there is no such key (nearest: step)"),
    (["a", "step="], "step: is empty"),
    (["a", "step=x"], "step: 'x' is not a whole number"),
    (["a", "--layer", "-1"], "--layer: '-1' is not a whole number from 0"),
    (["a", "--layer"], "--layer: a value is missing"),
    (["a", "--hed=1"], "'--hed' (nearest: --head) is not one of"),
    (["a", "--json", "--head", "0"], "--json prints all layers and heads"),
    (["a", "--text", "x"], "--text needs --layer and --head, --json or -o"),
    (["a", "--json", "--text", "\udcff"], "--text: it is not UTF-8 text"),
    (
        ["a", "--variants", "--head", "0"],
        "--variants shows all heads of all layers or of one; leave out",
    ),
    (["a", "--variants", "--text", "x"], "leave out --text"),
    (["a"], "there is no run 'a'"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=lambda x: str(x)[:30])
def test_mistakes(qkablate, words, line):
    done = qkablate("inspect", *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("qkablate: ")
    assert line in done.err


def test_missing_layer_or_head_is_rejected(inspect):
    for words, line in (
        (["--layer", "2"], "--layer: there is no 2 (allowed: 0 to 1)"),
        (["--head", "9", "--layer", "0"], "--head: there is no 9 (allowed: 0 to 1)"),
        (
            ["--json", "--text", "x" * 17],
            "--text: 17 tokens are more than the limit of 16",
        ),
    ):
        done = inspect(*words)
        assert (done.code, done.out, done.err) == (2, "", f"qkablate: {line}\n")


def test_help(qkablate):
    done = qkablate("inspect", "--help")
    assert (done.code, done.out, done.err) == (0, PARSER.format_help(), "")
    usage = done.out.partition("Usage: ")[2].partition("\n\n")[0]
    assert len(usage.splitlines()) == 3
    assert all(f"  {key}=" in done.out for key in KEYS if not key.startswith("data."))
    assert all(flag in done.out for flag in PARSER.flags)
    names = {*circuits.MEASURES, *ATTENTION_MEASURES} - {"singular"}
    assert all(name in done.out for name in names)


def test_mistakes_are_found_before_heavy_imports():
    code = (
        "import sys, qkablate.cli\n"
        "try: qkablate.cli.main(['inspect', 'a', 'stp=1'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_completion(qkablate, trained, monkeypatch):
    monkeypatch.chdir(trained.parent.parent.parent)
    for line, found in [
        ("qkablate ins", ["inspect"]),
        ("qkablate inspect merg", [trained.name]),
        ("qkablate inspect x --la", ["--layer"]),
        ("qkablate inspect x ste", ["step="]),
    ]:
        monkeypatch.setenv("COMP_LINE", line)
        assert qkablate("-sc", "query=bash").out.split() == found


def test_damaged_run_is_one_line(qkablate, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "copy")
    next(run.glob("checkpoints/*/weights.safetensors")).write_bytes(b"damaged")
    done = qkablate("inspect", str(run))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_bars_and_numbers():
    assert sparkline([1.0, 0.5, 0.0]) == "█▅▁"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""
    told = [format_number(x) for x in (None, 0.0, 0.12345, -0.5, 1.0, 12.345, 1234.5, 2e-5, -0.0)]
    assert told == ["–", "0.000", "0.123", "-0.500", "1.00", "12.35", "1234", "2e-05", "0.000"]


@pytest.mark.parametrize("name", ["heads.svg", "heads.PNG"])
def test_chart_of_a_text(inspect, tmp_path, name):
    done = inspect("--text", "the cat", "-o", str(tmp_path / name))
    assert (done.code, done.err) == (0, "")
    assert f"{tmp_path / name}  " in done.out
    assert "Largest attention weights" not in done.out  # that is of one head
    content = (tmp_path / name).read_bytes()
    if name.endswith("svg"):
        words = "".join(ElementTree.fromstring(content).itertext())
        assert all(word in words for word in ("layer 0", "layer 1", "head 0", "head 1"))
        assert "the cat" in words
    else:
        assert content.startswith(b"\x89PNG")


def test_chart_of_one_head_names_its_tokens(inspect, tmp_path):
    path = tmp_path / "head.svg"
    words = ("--text", "on the mat", "--layer", "1", "--head", "0", "-o", str(path))
    done = inspect(*words)
    assert (done.code, done.err) == (0, "")
    assert "Largest attention weights, layer 1, head 0" in done.out
    found = [one.text for one in ElementTree.fromstring(path.read_bytes()).iter() if one.text]
    assert "layer 0" not in found
    assert [found.count(one) for one in "tmh"] == [4, 2, 2]  # beside the map and below it
    before = path.read_bytes()
    assert inspect(*words, "--json").code == 2  # all heads, or one
    assert inspect("--json", *words[:2], "-o", str(path)).code == 0
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "x.svg"], "-o needs --text"),
        (["--text", "cat", "-o", "x.gif"], "-o: 'x.gif' does not end in .svg or .png"),
        (["--text", "cat", "-o", "svg"], "-o: 'svg' does not end in .svg or .png"),
        (["--text", "cat", "-o", "no/x.svg"], "-o: 'no/x.svg' cannot be written"),
        (["--text", "cat", "-o", "x.svg", "--layer", "0"], "-o draws all heads or one"),
    ],
)
def test_impossible_chart_is_rejected_before_any_work(inspect, words, message, tmp_path):
    done = inspect(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"qkablate: {message}")
    assert done.err.count("\n") == 1
    assert not [*tmp_path.glob("*svg")]


def test_attention_of_a_text_in_an_encoder(train, qkablate, tmp_path):
    words = ("model.form=encoder", "data.objective=mlm", "train.steps=2", "train.batch_size=2")
    run = train(tmp_path, *words, "data.val_tokens=2000", "data.test_tokens=1000")
    found = json.loads(qkablate("inspect", str(run), "--json", "--text", "the cat").out)["text"]
    assert "".join(found["tokens"]) == "the cat"
    a_LHTS = torch.tensor(found["attention"])
    assert a_LHTS.shape == (2, 2, 7, 7)
    assert (a_LHTS > 0).all()  # no token is hidden from another
    torch.testing.assert_close(a_LHTS.sum(-1), torch.ones(2, 2, 7), rtol=1e-3, atol=1e-3)


PAIRS = ("data=reverse", "data.val_tokens=512", "data.test_tokens=512", "train.steps=4")
SIZE = ("model.layers=1", "model.d_model=16", "model.heads=2", "train.batch_size=4", "threads=1")


PAIR = ("--text", "s3 s1 s4 s1 s5", "--target", "s6 s2 s9")


def test_attention_of_a_pair(qkablate, tmp_path):
    """The layers of the encoder, of the decoder, and from the target to the source."""
    words = ("model=nano_translator", *PAIRS, *SIZE, "variant=no_q", "variant.sites=cross")
    assert qkablate("train", *words).code == 0
    found = json.loads(qkablate("inspect", "no_q", *PAIR, "--json").out)["text"]
    assert found["source"] == {"tokens": PAIR[1].split(), "ids": [3, 1, 4, 1, 5]}
    assert found["target"]["tokens"] == [">", *PAIR[3].split()]
    (run,) = (tmp_path / "outputs" / "runs").iterdir()
    ids = [torch.tensor([found[side]["ids"]]) for side in ("source", "target")]
    for (layer, streams), mine in zip(
        restore(run).model.attention_inputs(*ids), found["attention"], strict=True
    ):
        theirs = layer.module.weights(*streams, causal=layer.site == "decoder")[0]
        torch.testing.assert_close(torch.tensor(mine), theirs, rtol=1e-3, atol=1e-6)
    assert [torch.tensor(mine).shape for mine in found["attention"]] == [
        (2, 5, 5), (2, 4, 4), (2, 4, 5)
    ]  # fmt: skip
    full = ("--text", PAIR[1], "--target", " ".join(["s1"] * 8))  # the last is never read
    read = json.loads(qkablate("inspect", "no_q", *full, "--json").out)["text"]["target"]
    assert read["tokens"] == [">", *["s1"] * 7]
    image = tmp_path / "cross.svg"
    done = qkablate("inspect", "no_q", *PAIR, "--layer", "2", "--head", "0", "-o", str(image))
    assert "Largest attention weights, layer 2, cross 0: target to source, head 0" in done.out
    assert done.out.count("' at ") == 3 * 4
    texts = [one.text for one in ElementTree.fromstring(image.read_bytes()).iter() if one.text]
    assert all(token in texts for token in (">", *PAIR[1].split(), *PAIR[3].split()))
    assert "no_q_cross, cross, step 4" in texts
    assert qkablate("inspect", "no_q", *PAIR, "-o", str(image)).code == 0
    words = "".join(ElementTree.fromstring(image.read_bytes()).itertext())
    assert all(f"no_q_cross, {site}, step 4" in words for site in ("encoder", "decoder", "cross"))


PAIR_MISTAKES = [
    (PAIR[:2], "--text: a run with model.form=encoder_decoder reads a pair; give --target, too"),
    ((PAIR[0], "s3 x", *PAIR[2:]), "--text: 'x' is not known to data=reverse"),
    ((*PAIR[:3], "s1 ?"), "--target: '?' is not known to data=reverse"),
    ((PAIR[0], " ".join(["s1"] * 9), *PAIR[2:]), "--text: 9 tokens are more than the limit of 8"),
    ((*PAIR[:3], " ".join(["s1"] * 9)), "--target: 10 tokens with the one that starts a target"),
    ((PAIR[0], " ", *PAIR[2:]), "--text: is empty"),
]


def test_encoder_of_masked_text_is_inspected_on_its_data_and_on_a_text(qkablate, tmp_path, train):
    run = train(tmp_path, *STEPS, "model.form=encoder", "data.objective=mlm")
    words = ("inspect", str(run), f"data.cache={tmp_path / 'cache'}")
    done = qkablate(*words)
    assert (done.code, done.err) == (0, "")  # no random tokens
    assert "of the validation split of" in done.out
    text = json.loads(qkablate(*words, "--text", "the cat", "--json").out)["text"]
    assert "".join(text["tokens"]) == "the cat"
    weights_TT = torch.tensor(text["attention"][0][0])
    assert weights_TT.sum(dim=1).tolist() == pytest.approx([1] * 7, abs=1e-3)
    assert weights_TT[0, -1] > 0  # of what comes later


def test_unfit_texts_are_refused(qkablate):
    words = (*PAIRS, *SIZE)
    assert qkablate("train", "model=nano_translator", *words, "variant=no_q").code == 0
    for pair, line in PAIR_MISTAKES:
        assert_refused(qkablate("inspect", "no_q", *pair, "--json"), line)
    assert_refused(qkablate("inspect", "no_q", *PAIR[2:], "--json"), "--target needs --text")
    assert qkablate("train", "model=nano_encoder", *words).code == 0
    line = "--target: a run with model.form=encoder reads one text"
    assert_refused(qkablate("inspect", "standard", *PAIR, "--json"), line)
    a_LHTS = json.loads(qkablate("inspect", "standard", *PAIR[:2], "--json").out)["text"]
    assert torch.tensor(a_LHTS["attention"]).shape == (1, 2, 5, 5)


def test_layers_of_a_translator_are_named_by_site(qkablate):
    words = (*PAIRS, *SIZE, "variant=merged_w", "variant.sites=cross", "out=translators")
    assert qkablate("train", "model=nano_translator", *words).code == 0
    run = ("merged_w_cross", "out=translators")
    done = qkablate("inspect", *run)
    assert done.code == 0, done.err
    first = done.out.split("\n\n")[1].splitlines()
    assert first[1].split()[:4] == ["layer", "site", "head", "stable_rank"]
    places = [line.split()[1:3] for line in first[2:]]
    assert places[::2] == [["encoder", "0"], ["decoder", "0"], ["cross", "0"]]
    found = json.loads(qkablate("inspect", *run, "--json").out)
    assert found["layers"] == ["encoder 0", "decoder 0", "cross 0"]
    assert qkablate("inspect", *run, "--layer", "2", "--head", "0").code == 0
    assert_refused(qkablate("inspect", *run, "--layer", "3"), "--layer: there is no 3")
    for verb in ("verify", "ls"):
        assert qkablate(verb, *run[verb == "ls" :]).code == 0
    projected = qkablate("project", *run, "variant=no_q", "finetune.steps=2", "--json")
    layers = json.loads(projected.out)["runs"][0]["layers"]
    assert [layer["layer"] for layer in layers] == found["layers"]


def test_forms_are_a_table_with_every_variant(inspect):
    done = inspect("--variants")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "of the validation split of " in lines[1]
    header = next(line for line in lines if line.startswith("variant"))
    assert header.split("  ")[0] == "variant"
    named = done.out.replace(",", " ").replace(":", " ").split()
    assert {*variants()} <= {*named}
    own = next(line.split() for line in lines if line.startswith("merged_w "))
    assert own[:4] == ["merged_w", "100%", "exact", "exact"]
    assert lines[-1].startswith("  qkablate project ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sites"),
    [
        (["model=nano_encoder"], ["encoder"]),
        (["model=nano_translator"], ["encoder", "decoder", "cross"]),
        (["model=nano_translator", "variant=no_q", "variant.sites=cross"], ["cross"]),
    ],
    ids=["encoder", "translator", "cross"],
)
def test_forms_of_a_run_on_pairs(qkablate, tmp_path, words, sites):
    """A form replaces the layers of the variant's sites alone."""
    assert qkablate("train", *words, *PAIRS, *SIZE).code == 0
    (run,) = (tmp_path / "outputs" / "runs").iterdir()
    done = qkablate("inspect", run.name, "--variants", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    forms = {form["variant"]: form for form in found["forms"]["forms"]}
    assert {*forms} | {*found["forms"]["obstacles"]} == {*variants()}
    has_no_q = sites == ["cross"]
    exact = {"standard", "merged_w", "wide_qk"} | ({"no_q"} if has_no_q else set())
    for name in exact:
        assert max(forms[name]["scores"], forms[name]["output"]) < 1e-6
        assert forms[name]["logits"] < 1e-10
    assert (forms["standard"]["share"] > 1) == has_no_q
    for name in {"no_q", "shared_qk", "uniform"} - exact:
        for place, layer in zip(found["layers"], forms[name]["layers"], strict=True):
            assert (layer["scores"] > 1e-3) == (place.split()[0] in sites), (name, place)
        assert forms[name]["logits"] is None
    assert forms["uniform"]["share"] < 1
    done = qkablate("inspect", run.name, "--variants")
    assert (done.code, done.err) == (0, "")
    row = next(line.split() for line in done.out.splitlines() if line.startswith("no_v "))
    assert (row[2] == "exact", float(row[3]) > 0) == (True, True)
    command = next(line for line in done.out.splitlines() if line.startswith("  qkablate project"))
    assert ("variant.sites=cross" in command) == has_no_q
    if has_no_q:
        one = command.replace("variant=all", "variant=uniform").split()[1:]
        planned = qkablate(*one, "finetune.steps=1", "--dry-run", "--json")
        assert planned.code == 0, planned.err
        assert "uniform_cross-d16-h2" in {arm["arm"] for arm in json.loads(planned.out)["arms"]}


def test_forms_of_a_layer_are_shown_by_head(inspect):
    done = inspect("--variants", "--layer", "1")
    headers = [line.split() for line in done.out.splitlines() if line.startswith("variant")]
    assert headers == 2 * [["variant", "layer", "H0", "H1"]]
    assert "--layer: there is no 2" in inspect("--variants", "--layer", "2").err


def test_forms_as_json(inspect):
    found = json.loads(inspect("--variants", "--json").out)
    forms = {form["variant"]: form for form in found["forms"]["forms"]}
    assert forms["merged_w"]["share"] == 1
    assert forms["wide_qk"]["logits"] < 1e-10
    assert {*forms} | {*found["forms"]["obstacles"]} == {*variants()}
    assert "qk" in found
