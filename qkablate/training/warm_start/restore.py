"""Models restored from run folders, which are read as untrusted data.

Weights come from safetensors only. Nothing is imported because a folder names it: the user must
name external circuits. Nothing in the folder is written.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
from qkablate.config import Config, check, explain
from qkablate.config.data import PADDED_SOURCES, has_masks
from qkablate.data import TASKS, open_task, task_words, tokenizers
from qkablate.data.pairs.sentences import Sentences, TaskSentences, TextSentences
from qkablate.disk import expand_user
from qkablate.errors import UserError, print_stderr
from qkablate.models.base import Model
from qkablate.models.build import build_model
from qkablate.models.catalogue import resolve_circuits
from qkablate.runs.records import read_config, read_json
from qkablate.runs.run import IMPORTED, check_identity
from qkablate.training import checkpoint


@dataclass(frozen=True)
class RestoredRun:
    """A trained run with its model, in eval mode."""

    folder: Path
    config: Config
    identity: dict[str, Any]
    checkpoint: Path
    step: int
    model: Model  # on the meta device unless its weights are loaded

    @property
    def is_imported(self) -> bool:
        """True if the weights were published, and not trained by this program."""
        return IMPORTED in self.identity

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the tokenizer; raise UserError if the run has none or it is damaged."""
        if self.config.data.source in TASKS:
            words = task_words(self.config.data, self.config.model)
            raise UserError(
                f"'{self.folder}' was trained on a task, whose tokens are not text; write"
                f" qkablate data show {' '.join(words)}"
            )
        # A mask is no text.
        vocabulary = self.model.vocabulary - has_masks(self.config.data)
        path = self.folder / "tokenizer.json"
        description = read_json(path)
        if description is None and self.is_imported and self.config.data.tokenizer is None:
            raise UserError(
                f"'{self.folder}' was imported with a tokenizer of its own, which qkablate does not"
                " read: no text can be written in its tokens"
            )
        if not path.exists():  # as in older runs; bytes need none
            if self.config.data.tokenizer != "bytes":
                raise UserError(f"'{path}' does not exist; train the run again with --rerun")
            description = {"name": "bytes"}
        try:
            tokenizer = tokenizers.load_tokenizer(description)
        except ValueError as error:
            raise UserError(f"'{path}' is damaged: {error}") from None
        if tokenizer.vocabulary != vocabulary:
            raise UserError(
                f"'{path}' is not this run's: it has {tokenizer.vocabulary} tokens, the model"
                f" {vocabulary}"
            )
        return tokenizer

    def sentences(self) -> Sentences:
        """Return how sources and targets of a run that translates are written."""
        config = self.config
        if config.data.source not in TASKS:
            return TextSentences(self.tokenizer())
        check(Config(variant=config.variant, model=config.model, data=config.data))
        task = open_task(config.data, config.model)
        if task.vocabulary != self.model.vocabulary:
            raise UserError(
                f"'{self.folder}' is damaged: data={task.name} has {task.vocabulary} tokens, the"
                f" model {self.model.vocabulary}"
            )
        return TaskSentences(task)


def restore(
    folder: Path,
    *,
    variant_file: str | None = None,
    qk: str | None = None,
    ov: str | None = None,
    weights: str | None = None,
    step: int | None = None,
    load: bool = True,
) -> RestoredRun:
    """Restore a run from its newest intact checkpoint, or from the one with these weights or step.

    `weights` is a sha256. `variant_file`, `qk` and `ov` name the run's external circuits. Unless
    `load`, everything is checked, but the model stays on the meta device.
    """
    config, content = _read_config(folder / "config.yaml")
    identity = content["identity"]
    config = _resolve_external(config, identity["circuits_from_outside"], variant_file, qk, ov)
    # The only recorded values that shape the model, so that they must be valid.
    check(Config(variant=config.variant, model=config.model))
    model = _build(config, identity["vocabulary"], folder).eval()
    path, restored = _newest_checkpoint(folder, weights, step)
    check_shapes(model, restored, folder)
    try:
        check_identity(content)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"'{folder / 'config.yaml'}' is damaged: {error}") from None
    if load:
        model.to_empty(device="cpu").load_state_dict(restored.weights)
    return RestoredRun(folder, config, identity, path, restored.progress.step, model)


def _read_config(path: Path) -> tuple[Config, dict[str, Any]]:
    """Return a frozen config and the content of its file; raise UserError for wrong types."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not path.is_file():
        raise UserError(f"'{path.parent}' is not a run folder: it has no {path.name}")
    try:
        content = read_config(path.parent)
        values = {key: value for key, value in content.items() if key != "identity"}
        del values["id"]
        external = content["identity"]["circuits_from_outside"]
        vocabulary = content["identity"]["vocabulary"]
        if not isinstance(vocabulary, int) or not 1 <= vocabulary < 2**31:
            raise ValueError(f"a vocabulary of {vocabulary!r}")
        if not all(isinstance(word, str) for pair in external.items() for word in pair):
            raise ValueError("circuits_from_outside are not names and hashes")
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
        assert isinstance(config, Config)
        return config, content
    except OmegaConfBaseException as error:
        reason = explain(error)
    except ValueError as error:
        reason = str(error)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"it is not what a run writes ({type(error).__name__}: {error})"
    raise UserError(f"'{path}' is damaged: {reason}")


def _resolve_external(
    config: Config, recorded: dict[str, str], file: str | None, qk: str | None, ov: str | None
) -> Config:
    """Put the circuits that the user named into the config; they must be the recorded ones."""
    variant = config.variant
    name = variant.file and Path(variant.file).stem  # a circuit's name is its file's
    sides = ("qk", variant.qk, qk, QK_CIRCUITS), ("ov", variant.ov, ov, OV_CIRCUITS)
    for key, trained, requested, built_in in sides:
        if requested is None and trained not in (*built_in, name):
            raise UserError(
                f"variant.{key}: this run was trained with '{trained}' of an installed package;"
                f" give variant.{key}={trained}, because a run's package is imported only on"
                " request"
            )
        if requested not in (None, trained):
            raise UserError(
                f"variant.{key}: this run was trained with '{trained}', not '{requested}'"
            )
    if name is None and file is not None:
        raise UserError("variant.file: given, but this run was trained with no circuit from a file")
    if name is not None:
        if name not in recorded:
            raise UserError(f"variant.file: config.yaml has no hash of its circuit '{name}'")
        if file is None:
            raise UserError(
                f"variant.file: this run was trained with a circuit from a file, '{name}'; give"
                " variant.file=PATH, because a run's file is imported only on request"
            )
        _check_file(file, name, recorded[name])
    config, hashes = resolve_circuits(replace(config, variant=replace(variant, file=file)))
    if hashes != recorded:
        names = ", ".join({**recorded, **hashes})
        raise UserError(f"variant: {names}: not the circuit that the run was trained with")
    return config


def _check_file(file: str, name: str, sha256: str) -> None:
    """Check the name and the hash of a circuit's file before any of it runs."""
    if Path(file).stem != name:
        raise UserError(f"variant.file: '{file}' must have the name of the circuit, '{name}.py'")
    try:
        content = expand_user("variant.file", file).read_bytes()
    except OSError as error:
        raise UserError(f"variant.file: cannot read '{file}': {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"variant.file: '{file}' is not the file the run was trained with")


def _newest_checkpoint(
    folder: Path, weights: str | None, step: int | None
) -> tuple[Path, checkpoint.Checkpoint]:
    """Load the newest intact checkpoint, or the one with these weights or at this step."""
    paths = checkpoint.find_checkpoints(folder / "checkpoints")
    if not paths and (archive := (read_json(folder / "result.json") or {}).get("published")):
        raise UserError(
            f"{folder.name} is a published run, without weights; `qkablate reproduce"
            f" {str(archive).partition('-')[0]} --check --from FOLDER`, with the folder of its"
            " archive, trains some runs of its claim again"
        )
    if not paths:
        raise UserError(f"'{folder}' has no checkpoint yet")
    if step is not None:
        by_step = {path.name.removeprefix("step-").lstrip("0") or "0": path for path in paths}
        if str(step) not in by_step:
            raise UserError(
                f"step: there is no checkpoint of step {step} (allowed: {', '.join(by_step)})"
            )
        paths = [by_step[str(step)]]
    damaged = []
    for path in paths:
        try:
            if weights is not None and weights != checkpoint.weights_sha256(path):
                continue
            loaded = checkpoint.load_weights(path)
        except (OSError, ValueError, TypeError) as error:
            damaged.append(f"checkpoint '{path}' is damaged ({error})")
            continue
        for line in damaged:
            print_stderr(f"qkablate: {line}: not used")
        return path, loaded
    if weights is not None:
        damaged.insert(0, f"'{folder}' no longer has weights with the sha256 {weights[:12]}…")
    raise UserError("; ".join(damaged))


def _build(config: Config, vocabulary: int, folder: Path) -> Model:
    try:
        with torch.device("meta"):
            padding = config.data.source in PADDED_SOURCES
            return build_model(
                config.model, config.variant, vocabulary, device="cpu", padding=padding
            )
    except UserError:
        raise
    except Exception as error:  # of values that are valid one by one, but not together
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        path = folder / "config.yaml"
        raise UserError(f"no model can be built from '{path}': {reason}") from None


def check_shapes(model: Model, loaded: checkpoint.Checkpoint, folder: Path) -> None:
    """Raise UserError if the weights in a folder do not fit the model of its config."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({*expected, *loaded.weights}):
        tensor = loaded.weights.get(name)
        if tensor is not None and not tensor.is_floating_point():
            raise UserError(
                f"the weights in '{folder}' cannot be loaded: {name} has dtype {tensor.dtype}"
            )
        shape = "missing" if tensor is None else tuple(tensor.shape)
        required = expected.get(name, "no such tensor")
        if shape != required:
            raise UserError(
                f"the weights in '{folder}' do not fit its config.yaml:"
                f" {name} is {shape}, and {required} is expected"
            )
