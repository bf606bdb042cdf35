"""Published checkpoints as runs: equal logits, and nothing written of one that is refused."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qkablate.disk import exclusive_folder
from qkablate.errors import UserError
from qkablate.pretrained.import_run import import_run
from qkablate.pretrained.repository import find_repository
from qkablate.training.warm_start.restore import restore
from tests.pretrained.hostile_models import FOLDERS
from tests.pretrained.published import (
    TOKENS,
    change_config,
    logits_of,
    publish,
    transformers,
    write_published,
)


def import_folder(folder, **options):
    return import_run(find_repository(str(folder)), str(folder.parent / "out"), **options)


def refused(folder, **options):
    """Return the reason; nothing that a list shows is written."""
    with pytest.raises(UserError) as error:
        import_folder(folder, **options)
    assert not [*folder.parent.glob("out/runs/*/config.yaml")]
    assert "\n" not in str(error.value)
    return str(error.value)


def change_tensors(folder, change):
    """Write the weights again after a change of the map of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


GPT2_CHANGES = {
    "tie_word_embeddings": False,
    "n_inner": 40,
    "layer_norm_epsilon": 1e-3,
    "activation_function": "gelu",
}
LLAMA_CHANGES = {
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", GPT2_CHANGES),
        ("llama", {}),
        ("llama", LLAMA_CHANGES),
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, monkeypatch, family, changes):
    theirs = publish(tmp_path / "published", family, **changes)
    ours = restore(import_folder(tmp_path / "published").folder).model
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        expected = logits_of(theirs, dtype, monkeypatch)
        with torch.no_grad():
            found = ours.to(dtype)(TOKENS)
        assert (found - expected).abs().max() < tolerance
        assert expected.std() > 0.1


def test_mistral_without_a_window_has_the_default_of_its_class(tmp_path):
    assert transformers().MistralConfig().sliding_window == 4096
    publish(tmp_path / "published", "mistral", max_position_embeddings=8192)
    path = tmp_path / "published" / "config.json"
    settings = json.loads(path.read_text())
    del settings["sliding_window"]
    path.write_text(json.dumps(settings))
    assert "give context=4096" in refused(tmp_path / "published")
    assert import_folder(tmp_path / "published", context=4096).is_new


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_are_read_back(tmp_path, family):
    model = write_published(tmp_path / "published", family)
    run = import_folder(tmp_path / "published")
    restored = restore(run.folder)
    assert restored.is_imported
    assert restored.step == 0
    with torch.no_grad():
        assert torch.equal(restored.model(TOKENS), model(TOKENS))
    origin = json.loads((run.folder / "origin.json").read_text())
    assert origin["folder"] == str(tmp_path / "published")
    assert {*origin["sha256"]} == {"config.json", "model.safetensors"}


def test_same_model_is_written_once(tmp_path):
    write_published(tmp_path / "published")
    first = import_folder(tmp_path / "published", name="one")
    second = import_folder(tmp_path / "published", name="two")
    assert (first.is_new, second.is_new) == (True, False)
    assert second.folder == first.folder
    assert [path.name for path in (tmp_path / "out" / "runs").iterdir()] == [first.folder.name]


def test_first_positions_alone_are_kept(tmp_path):
    model = write_published(tmp_path / "published")
    short = restore(import_folder(tmp_path / "published", context=5).folder).model
    with torch.no_grad():
        assert torch.equal(short(TOKENS[:, :5]), model(TOKENS[:, :5]))
    assert "context: 17 is more" in refused_in(tmp_path / "other", context=17)


def test_positions_beyond_the_context_are_not_read(tmp_path):
    write_published(tmp_path / "published")

    def set_last(tensors):
        tensors["transformer.wpe.weight"][12:] = float("nan")

    change_tensors(tmp_path / "published", set_last)
    assert "not finite" in refused(tmp_path / "published")
    assert import_folder(tmp_path / "published", context=12).is_new


@pytest.mark.parametrize(
    ("ids", "known"),
    [
        (None, True),
        ({"Hello": 15496, "Ġworld": 995, "Ġthe": 262, "<|endoftext|>": 50256, "!": 0}, True),
        ({"Hello": 262, "Ġworld": 995, "Ġthe": 15496, "<|endoftext|>": 50256}, False),
        ({"Olá": 15496}, False),
        ([], False),
    ],
)
def test_tokens_are_gpt2s_unless_the_vocabulary_says_otherwise(tmp_path, ids, known):
    write_published(tmp_path / "published", vocabulary=50257)
    if ids is not None:
        (tmp_path / "published" / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    run = import_folder(tmp_path / "published")
    assert run.has_tokenizer is known
    assert restore(run.folder).config.data.tokenizer == ("gpt2" if known else None)


def test_vocabulary_of_other_models_is_not_read(tmp_path):
    write_published(tmp_path / "published", "llama", vocabulary=50257)
    (tmp_path / "published" / "vocab.json").write_text("{", encoding="utf-8")
    assert not import_folder(tmp_path / "published").has_tokenizer


def test_memory_holds_the_weights_and_their_largest_tensor(tmp_path, monkeypatch):
    model = write_published(tmp_path / "published", vocabulary=50257)
    params = sum(parameter.numel() for parameter in model.parameters())
    free = "qkablate.training.hardware.free_memory"
    monkeypatch.setattr(free, lambda: 4 * (params + 50257 * 16))
    assert "of memory in fp32" in refused(tmp_path / "published", context=8)


def refused_in(folder, **options):
    folder.mkdir()
    write_published(folder / "published")
    return refused(folder / "published", **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(tmp_path, dtype):
    write_published(tmp_path / "published")

    def halve(tensors):
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}

    change_tensors(tmp_path / "published", halve)
    stored = load_file(tmp_path / "published" / "model.safetensors")["transformer.wte.weight"]
    weights = restore(import_folder(tmp_path / "published").folder).model.state_dict()
    assert torch.equal(weights["token_embedding.weight"], stored.float())


def test_shards_and_masks_and_names_without_prefix_are_read(tmp_path):
    folder = tmp_path / "published"
    model = write_published(folder)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for part in {*places.values()}:
        chosen = {name: tensors[name] for name in places if places[name] == part}
        save_file(chosen, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with torch.no_grad():
        assert torch.equal(restore(import_folder(folder).folder).model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {"model_type": "gtp2"}, ["model_type", "nearest: gpt2"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse", "false"]),
        ("gpt2", {"activation_function": "relu"}, ["activation_function", "gelu_new"]),
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, ["architectures"]),
        ("gpt2", {"n_head": 3}, ["config.json: model.heads: 3 does not divide"]),
        ("gpt2", {"n_layer": 3}, ["h.2.ln_1.weight is missing", "2 blocks"]),
        ("gpt2", {"n_layer": 10**9}, ["config.json: model.layers"]),
        ("gpt2", {"model_type": ["gpt2"]}, ["model_type: ['gpt2']", "allowed: gpt2"]),
        ("gpt2", {"architectures": {"a": [[[[[[[1]]]]]]]}}, ["architectures"]),
        ("gpt2", {"n_embd": "16"}, ["n_embd", "a whole number"]),
        ("gpt2", {"n_layer": 1}, ["is not a tensor of the model"]),
        ("gpt2", {"vocab_size": 2**30}, ["wte.weight has the shape [61, 16]"]),
        ("gpt2", {"quantization_config": {"bits": 4}}, ["quantization_config", "null"]),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.rope_type", "default"]),
        ("llama", {"sliding_window": 8}, ["sliding_window", "context=8"]),
        ("llama", {"head_dim": 8}, ["head_dim: 8", "null or 4"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads: 3"]),
        ("llama", {"attention_bias": True}, ["self_attn.q_proj.bias is missing"]),
    ],
)
def test_unsupported_settings_are_rejected(tmp_path, family, changes, words):
    write_published(tmp_path / "published", family)
    change_config(tmp_path / "published", **changes)
    reason = refused(tmp_path / "published")
    for word in words:
        assert word in reason


def set_nan(tensors):
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 4] = torch.nan


def untie(tensors):
    tensors["lm_head.weight"] = torch.zeros(61, 16)


DAMAGES = {
    "not finite": set_nan,
    "is not the embedding": untie,
    "ln_f.bias is missing": lambda tensors: tensors.pop("transformer.ln_f.bias"),
    "h.0.extra": lambda tensors: tensors.update({"h.0.extra": torch.zeros(2)}),
    "[16, 48]": lambda tensors: tensors.update(
        {"transformer.h.0.attn.c_attn.weight": torch.zeros(48, 16)}
    ),
    "type F64": lambda tensors: tensors.update(
        {"transformer.ln_f.bias": torch.zeros(16, dtype=torch.float64)}
    ),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_wrong_tensors_are_rejected(tmp_path, reason):
    write_published(tmp_path / "published")
    change_tensors(tmp_path / "published", DAMAGES[reason])
    assert reason in refused(tmp_path / "published")


@pytest.mark.parametrize("name", FOLDERS)
def test_hostile_folders_are_refused(tmp_path, name):
    """With a reason, and nothing is written; tests/torture also watches memory and code."""
    write_published(tmp_path / "published")
    plant, reason = FOLDERS[name]
    try:
        plant(tmp_path / "published")
    except OSError:
        pytest.skip("this file system holds no sparse file of 4 TB")
    line = refused(tmp_path / "published")
    assert re.search(reason, line), line
    assert line.isprintable()
    assert len(line) < 400


def test_cut_off_weights_are_rejected(tmp_path):
    write_published(tmp_path / "published")
    path = tmp_path / "published" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert "it is cut off or damaged" in refused(tmp_path / "published")


def test_pickle_is_never_read(tmp_path):
    write_published(tmp_path / "published")
    (tmp_path / "published" / "model.safetensors").rename(
        tmp_path / "published" / "pytorch_model.bin"
    )
    assert "pickle" in refused(tmp_path / "published")


def test_leftovers_of_a_killed_import_are_removed(tmp_path):
    write_published(tmp_path / "published")
    run = import_folder(tmp_path / "published")
    temporary = run.folder.with_name(f".importing-{run.folder.name[-12:]}.tmp")
    left = temporary / "new" / "runs" / "x-123"
    left.mkdir(parents=True)
    (left / "config.yaml").touch()
    run.folder.rename(tmp_path / "gone")
    assert not [*(tmp_path / "out").glob("runs/*/config.yaml")]  # none of it is listed
    assert import_folder(tmp_path / "published").folder == run.folder
    assert [path.name for path in run.folder.parent.iterdir()] == [run.folder.name]


@pytest.mark.parametrize("place", ["run", "temporary"])
def test_files_in_the_place_of_a_run_are_kept(tmp_path, place):
    write_published(tmp_path / "published")
    folder = import_folder(tmp_path / "published").folder
    shutil.rmtree(folder)
    taken = folder.with_name(f".importing-{folder.name[-12:]}.tmp")
    taken = folder if place == "run" else taken
    taken.write_text("precious")
    assert f"cannot write '{folder}'" in refused(tmp_path / "published")
    assert taken.read_text() == "precious"
    assert [path.name for path in folder.parent.iterdir()] == [taken.name]


def test_two_imports_at_once_write_one_run(tmp_path):
    write_published(tmp_path / "published")
    folder = import_folder(tmp_path / "published").folder
    shutil.rmtree(folder)
    with exclusive_folder(folder.with_name(f".importing-{folder.name[-12:]}.tmp")):
        assert "another process is importing" in refused(tmp_path / "published")
    assert import_folder(tmp_path / "published").is_new


@pytest.mark.parametrize("name", ["../x", "a/b", "-x", "é"])
def test_names_that_are_no_names_are_rejected(tmp_path, name):
    write_published(tmp_path / "published")
    assert "as:" in refused(tmp_path / "published", name=name)
