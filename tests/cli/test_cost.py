"""`qkablate cost` and `qkablate variants`: figures that were published, and tables one can read."""

import csv
import io
import json

import pytest

from qkablate.config import variants


def rows(qkablate, *words):
    done = qkablate("cost", *words, "--json")
    assert done.code == 0, done.err
    return {row["variant"]: row for row in json.loads(done.out)}


def test_published_parameter_counts(qkablate):
    """Kayyam et al. (2026): 20 layers, d 1024, 16 heads, vocabulary 50304, tied, biases."""
    found = rows(qkablate, "variant=standard,shared_qk,tied_kv,tied_qkv", "--at", "300m")
    assert {name: row["params"] for name, row in found.items()} == {
        "standard": 305_534_976,
        "shared_qk": 284_542_976,
        "tied_kv": 284_542_976,
        "tied_qkv": 263_550_976,
    }


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("gpt2", 124_439_808),  # the published model's
        # 12 layers of 4 d² + 3 · 2,048 d, d 768, with 25 norms and 32,000 tied embeddings
        ("llama_125m", 12 * (4 * 768**2 + 3 * 2048 * 768) + 25 * 768 + 32_000 * 768),
    ],
)
def test_parameter_counts_of_sizes_with_125_million(qkablate, size, parameters):
    found = rows(qkablate, "variant=standard", "--at", size)
    assert found["standard"]["params"] == parameters


def test_example_of_the_discussions(qkablate):
    """16 heads of 256 at d 4096: one W per head is 8 times W_q and W_k together."""
    found = rows(qkablate, "variant=standard,merged_w", "--at=gpt-j")
    standard, merged = found["standard"], found["merged_w"]
    square = 4096**2
    assert standard["attention_params_per_layer"] == 4 * square
    assert merged["attention_params_per_layer"] == (16 + 2) * square
    assert merged["score_flops_per_token"] == 16 * standard["score_flops_per_token"]
    assert merged["projection_flops_per_token"] == 2 * 18 * square
    assert merged["kv_bytes_per_token"] == standard["kv_bytes_per_token"] == 2 * 28 * 2 * 4096
    assert standard["score_matrix_bytes"] == 2 * 16 * 2048**2


@pytest.mark.slow
def test_every_variant_is_relative_to_the_first(qkablate):
    found = rows(qkablate)
    assert len(found) == len(variants())
    assert next(iter(found)) == "standard"
    standard = found["standard"]
    for row in found.values():
        ratio = row["training_flops_per_token"] / standard["training_flops_per_token"]
        assert row["training_flops_ratio"] == pytest.approx(ratio)
        assert row["forward_flops_per_token"] * 3 == pytest.approx(row["training_flops_per_token"])


def test_table_names_sizes_where_there_are_several(qkablate):
    done = qkablate("cost", "variant=standard,no_q", "model.d_model=64,128")
    assert done.code == 0
    assert all(f"no_q d{d} " in done.out for d in (64, 128))
    assert "4 layers, 4 heads, context 64, 16-bit numbers" in done.out


@pytest.mark.slow
def test_rows_name_the_keys_that_vary(qkablate):
    words = ("variant=standard", "model.context=16,32", "model.mlp_ratio=2,4")
    done = qkablate("cost", *words)
    labels = [line.split("  ")[0] for line in done.out.splitlines()[1:5]]
    assert labels[0] == "standard context=16 mlp_ratio=2.0"
    assert len({*labels}) == 4
    assert "\n4 layers, d 128, 4 heads, 16-bit numbers, vocabulary 256\n" in done.out
    found = json.loads(qkablate("cost", *words, "seed=1,2", "--json").out)
    assert [(r["context"], r["model.mlp_ratio"], r["seed"]) for r in found][:3] == [
        (16, 2.0, 1),
        (16, 2.0, 2),
        (16, 4.0, 1),
    ]
    assert not any("seeds" in key for key in found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "following"),
    [
        ([], ["verify variant=collaborative", "train variant=collaborative"]),
        (["--at", "gpt-j", "variant=mqa"], ["train variant=mqa", ""]),
        (["variant=standard,no_q"], ["verify variant=no_q", "train variant=no_q"]),
        (
            ["model=nano_translator", "variant=no_q"],
            [
                "verify model=nano_translator variant=no_q",
                "train model=nano_translator variant=no_q data=reverse",
            ],
        ),
        (
            ["variant.qk=merged", "variant.ov=no_o", "model.d_model=64,128"],
            [
                "verify variant.qk=merged variant.ov=no_o model.d_model=64",
                "train variant.qk=merged variant.ov=no_o model.d_model=64",
            ],
        ),
        (
            ["--at", "gpt2", "variant=mqa"],
            ["verify model=gpt2 variant=mqa", "train model=gpt2 variant=mqa"],
        ),
    ],
)
def test_next_commands_repeat_the_arguments(qkablate, words, following):
    done = qkablate("cost", *words)
    found = done.out.split("Next\n")[1].split("\n")[:2]
    assert found == [f"  qkablate {words}" if words else "" for words in following]


def test_precision_sets_the_bytes_of_a_number(qkablate):
    words = ("variant=standard,mqa", "model.heads=8")
    half, single = (rows(qkablate, *words, p) for p in ("precision=bf16", "precision=fp32"))
    assert single["mqa"]["kv_bytes_per_token"] == 2 * half["mqa"]["kv_bytes_per_token"]
    assert half["standard"]["kv_bytes_per_token"] == 8 * half["mqa"]["kv_bytes_per_token"]


def test_vocabulary_is_that_of_the_task(qkablate):
    words = ("cost", "variant=standard", "--json")
    for task, own in (("data=recall", "8192"), ("data=recall,recall data.vocab_size=64", "64")):
        given = json.loads(qkablate(*words, *task.replace(",recall", "").split()).out)
        assert given == json.loads(qkablate(*words, "--vocabulary", own).out)
    done = qkablate(*words, "data=recall,dyck")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "data: these have different vocabularies; give --vocabulary=N" in done.err
    assert qkablate(*words, "data=recall,dyck", "--vocabulary=99").code == 0


def test_layers_of_an_encoder_are_its_own(qkablate):
    words = ("cost", "model=nano_translator", "model.layers=2", "model.encoder_layers=6")
    rows = json.loads(qkablate(*words, "--json").out)
    assert {row["site"]: row["layers"] for row in rows} == {"encoder": 6, "decoder": 2, "cross": 2}
    assert "2 layers, encoder 6 layers, d " in qkablate(*words).out


def test_translator_has_a_row_per_site(qkablate):
    words = ("variant=standard,no_k", "model=nano_translator", "model.source=24", "precision=bf16")
    found = json.loads(qkablate("cost", *words, "--json").out)
    assert [(row["variant"], row["site"]) for row in found] == [
        (name, site) for name in ("standard", "no_k") for site in ("encoder", "decoder", "cross")
    ]
    assert [row["score_matrix_bytes"] for row in found[:3]] == [
        2 * 4 * size for size in (24 * 24, 8 * 8, 8 * 24)
    ]
    # Two layers cache 64 keys and values each per token of the source; slices are read from one x.
    assert [row["kv_bytes_per_token"] for row in found] == [0, 512, 512, 0, 512, 2 * 3 * 64]
    text = qkablate("cost", *words).out
    assert "source 24, context 8" in text
    assert "FLOPs are per token of the target" in text


def test_csv_equals_the_json(qkablate):
    done = qkablate("cost", "variant=standard,uniform", "--csv")
    lines = list(csv.DictReader(io.StringIO(done.out)))
    assert [line["variant"] for line in lines] == ["standard", "uniform"]
    assert float(lines[1]["score_flops_per_token"]) == 0


@pytest.mark.slow
def test_unsupported_variant_is_left_out_with_its_reason(qkablate):
    done = qkablate("cost", "model.position=rope", "--json")
    assert done.code == 0
    assert (
        "left out: variant: merged_w is not supported: model.position=rope: one W cannot"
        in done.err
    )
    assert "merged_w" not in {row["variant"] for row in json.loads(done.out)}
    alone = qkablate("cost", "variant=merged_w", "model.position=rope")
    assert (alone.code, alone.out) == (2, "")


def test_measure_times_real_steps(qkablate, monkeypatch):
    from qkablate.training import measure

    monkeypatch.setattr(measure, "SECONDS", 0.2)
    small = ("model.layers=1", "model.d_model=16", "model.context=8", "threads=1")
    found = rows(qkablate, "variant=standard,merged_w", *small, "--measure")
    assert all(row["step_ms"] > 0 and row["step_rounds"] >= 3 for row in found.values())
    assert found["standard"]["step_ratio"] == 1
    for form in ("encoder", "encoder_decoder"):
        found = rows(qkablate, "variant=standard", *small, f"model.form={form}", "--measure")
        assert found["standard"]["step_ms"] > 0


def test_measure_reports_too_little_memory(qkablate):
    done = qkablate("cost", "variant=standard,wide_qk", "--at", "gpt-j", "--measure")
    assert done.code == 2
    assert "GB together" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--at", "gptj"],
            "--at: 'gptj' (nearest: gpt-j) is not one of gpt-j, ",
        ),
        (["--at"], "--at: a value is missing"),
        (["--mesure"], "'--mesure' (nearest: --measure) is not one of"),
        (["--vocabulary", "many"], "--vocabulary: 'many' is not a whole number"),
        (["variant=merged"], "variant: 'merged' (nearest: merged_w) is not one of"),
        (["variant=standard,merged_w", "model.heads=3"], "model.heads: 3 does not divide"),
        (["merged_w"], "'merged_w' is not key=value"),
        (["--json", "--csv"], "give one of the two"),
        (["--at=gpt-j", "model=nano"], "--at and model=…: give one of the two"),
        (
            ["variant=[standard,no_q]"],
            "is a list; several values are written variant=standard,no_q",
        ),
        (["foo=1"], "qkablate: foo: there is no such key\n"),
        (["variant=low_rank_w", "variant.rank=1.5"], "'1.5' is not a whole number or auto"),
        (["variant.mask_self=maybe"], "variant.mask_self: 'maybe' is not true or false"),
        (["variant.file="], "variant.file: give a path"),
        (
            ["variant=low_rank_w", "variant.rank=0"],
            "variant.rank: 0 is not auto, or a number from 1",
        ),
        (
            ["variant=low_rank_w", "variant.rank=129"],
            "variant.rank: 129 is above model.d_model=128",
        ),
        (["variant=standard", "variant.rank=8"], "(used by: low_rank, collaborative, latent)"),
        (["variant=gqa", "variant.groups=3"], "variant.groups: 3 does not divide model.heads=4"),
        (["variant=gqa", "variant.qk=shared"], "shared keys are also the queries"),
        (["variant=tied_kv", "variant.qk=merged"], "the keys are x itself"),
        (["variant=uniform", "variant.norm=qk"], "no queries and keys to normalize"),
        (["variant=uniform", "attention.kernel=flash"], "this variant has none"),
        (["variant=standard", "model.position=rope", "model.d_model=12"], "3 wide, an odd number"),
        (["variant=merged_w", "variant.rope_dims=4"], "need model.position=rope, not learned"),
        (["variant.rope_dims=3", "model.position=rope"], "3 is odd, but rope rotates pairs"),
        (["variant.rope_dims=0", "model.position=rope"], "variant.rope_dims: 0 is not a number"),
        (["variant=mla", "variant.rank=129"], "variant.rank: 129 is above model.d_model=128"),
        (["variant.ov=latent"], "ov=latent reads the latent stream of qk=latent"),
        (
            ["variant=uniform", "variant.rope_dims=4", "model.position=rope"],
            "no queries and keys to add dimensions to",
        ),
        (
            ["model=nano_translator", "data=copy", "variant.sites=cross", "variant.rope_dims=4"],
            "the two streams of cross-attention have no distance",
        ),
        (["variant.file=none.py"], "variant.file: cannot read 'none.py'"),
    ],
)
def test_mistake_is_reported_in_one_line(qkablate, words, says):
    done = qkablate("cost", *words)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert done.err.count("\n") == 1


def test_variants_lists_the_catalogue(qkablate):
    done = qkablate("variants")
    assert done.code == 0
    assert all(any(line.startswith(name) for line in done.out.splitlines()) for name in variants())
    as_json = json.loads(qkablate("variants", "--json").out)
    by_name = {row["variant"]: row for row in as_json}
    assert by_name["standard"]["parameters"] == "4 d²"
    assert by_name["merged_w"]["parameters"] == "h d² + 2 d²"
    assert by_name["gqa"]["parameters"] == "2 d² + 2 d g k"
    assert by_name["mqa"]["parameters"] == "2 d² + 2 d k"
    assert by_name["tied_qkv"]["without"] == "W_q, W_v"
    assert all(row["equation"] and row["source"] for row in as_json)


def test_variants_shows_those_that_are_named(qkablate):
    rows = json.loads(qkablate("variants", "no_q", "merged_w", "--json").out)
    assert [row["variant"] for row in rows] == ["no_q", "merged_w"]
    assert "variant 'mergd' (nearest: merged_w)" in qkablate("variants", "mergd").err


@pytest.mark.parametrize("verb", ["variants", "cost", "verify"])
def test_help_has_examples(qkablate, verb):
    done = qkablate(verb, "--help")
    assert done.code == 0
    assert f"Usage: qkablate {verb}" in done.out
    assert "Examples" in done.out


def test_model_that_does_not_fit_is_not_proposed_for_training(qkablate, monkeypatch):
    monkeypatch.setattr("qkablate.training.measure.free_bytes", lambda _: 1e9)
    done = qkablate("cost", "--at", "gpt-j", "variant=merged_w", "device=cpu")
    assert (done.code, done.err) == (0, "")
    assert "training it takes 199 GB of memory, and 1 GB are free here" in done.out
    assert done.out.endswith("\nNext\n  qkablate train variant=merged_w device=cpu\n")
