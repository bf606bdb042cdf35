"""A model from a run folder, which is read as data and never believed.

Weights come from safetensors alone. Nothing is imported because a folder says so: a circuit from
outside must be named by the user. Nothing in the folder is written.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
from qkablate.config import DATA_KEYS, Config, check, explain
from qkablate.data import TASKS, tokenizers
from qkablate.errors import UserError, tell
from qkablate.models.catalogue import settle
from qkablate.models.gpt import GPT
from qkablate.runs.records import read_config, read_json
from qkablate.runs.run import check_identity, find_run
from qkablate.training import checkpoint

__all__ = ["Restored", "find_run", "restore"]


@dataclass(frozen=True)
class Restored:
    """A trained model, and what it was trained as."""

    config: Config
    model: GPT
    tokenizer_description: Any  # as it stands in the folder; None where there is none
    folder: Path
    step: int
    checkpoint: Path  # where its weights stand
    identity: dict[str, Any]

    def tokenizer(self) -> tokenizers.Tokenizer:
        """What turns text into the model's tokens and back."""
        if self.config.data.source in TASKS:
            data, context = self.config.data, self.config.model.context
            own = [f"data.{key}={getattr(data, key)}" for key in DATA_KEYS[data.source]]
            words = [f"data={data.source}", *own, f"model.context={context}"]
            raise UserError(
                f"'{self.folder}' learned a task, whose tokens are no text; write"
                f" qkablate data show {' '.join(words)}"
            )
        path, vocabulary = self.folder / "tokenizer.json", self.model.token_embedding.num_embeddings
        description = self.tokenizer_description
        if not path.exists():  # older runs kept none, and bytes need none
            if self.config.data.tokenizer != "bytes":
                raise UserError(f"'{path}' is not there; train the run anew with --rerun")
            description = {"name": "bytes"}
        try:
            tokenizer = tokenizers.load(description)
        except ValueError as error:
            raise UserError(f"'{path}' is damaged: {error}") from None
        if tokenizer.vocabulary != vocabulary:
            raise UserError(
                f"'{path}' is not this run's: it has {tokenizer.vocabulary} tokens,"
                f" the model {vocabulary}"
            )
        return tokenizer


def restore(
    folder: Path,
    *,
    variant_file: str | None = None,
    qk: str | None = None,
    ov: str | None = None,
    device: str = "cpu",
    weights: str | None = None,
    step: int | None = None,
) -> Restored:
    """The model of a run's newest whole checkpoint, in eval mode, or of the one whose weights have
    this sha256, or of the one at `step`. `variant_file`, `qk` and `ov` are what the user names on
    the command line, where the run has circuits from outside.
    """
    config, identity = _frozen(folder)
    config = _with_circuits(config, identity["circuits_from_outside"], variant_file, qk, ov)
    # Of the recorded values these alone shape the model, and must make sense.
    check(Config(variant=config.variant, model=config.model))
    path, found = _newest_checkpoint(folder, device, weights, step)
    model = _build(config, identity["vocabulary"], device, folder)
    check_shapes(model, found, folder)
    try:
        check_identity(read_config(folder))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"'{folder / 'config.yaml'}' is damaged: {error}") from None
    model.to_empty(device=device).load_state_dict(found.weights)
    return Restored(
        config=config,
        model=model.eval(),
        tokenizer_description=read_json(folder / "tokenizer.json"),
        folder=folder,
        step=found.progress.step,
        checkpoint=path,
        identity=identity,
    )


def _frozen(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The config and the identity, with the types they must have."""
    path = folder / "config.yaml"
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not path.is_file():
        raise UserError(f"'{path.parent}' is no run: it has no {path.name}")
    try:
        plain = read_config(path.parent)
        identity = plain.pop("identity")
        foreign, vocabulary = identity["circuits_from_outside"], identity["vocabulary"]
        del plain["id"]
        if not isinstance(vocabulary, int) or not 1 <= vocabulary < 2**31:
            raise ValueError(f"a vocabulary of {vocabulary!r}")
        if not all(isinstance(word, str) for pair in foreign.items() for word in pair):
            raise ValueError("circuits_from_outside are not names and hashes")
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
        assert isinstance(config, Config)
        return config, identity
    except OmegaConfBaseException as error:
        reason = explain(error)
    except ValueError as error:
        reason = str(error)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"it is not what a run writes ({type(error).__name__}: {error})"
    raise UserError(f"'{path}' is damaged: {reason}")


def _with_circuits(
    config: Config, recorded: dict[str, str], file: str | None, qk: str | None, ov: str | None
) -> Config:
    """The config with the circuits from outside that the user named, if they are the recorded."""
    variant = config.variant
    for key, name, given in (("qk", variant.qk, qk), ("ov", variant.ov, ov)):
        if given not in (None, name):
            raise UserError(f"variant.{key}: this run was trained with '{name}', not '{given}'")
    # A circuit is called as its file.
    own = Path(variant.file).stem if variant.file is not None else None
    if own is not None and own not in recorded:
        raise UserError(f"variant.file: config.yaml has no hash of its circuit '{own}'")
    if own is None and file is not None:
        raise UserError("variant.file: given, but this run was trained with no circuit from a file")
    if own is not None:
        if file is None:
            raise UserError(
                f"variant.file: this run was trained with a circuit from a file, '{own}';"
                " give variant.file=PATH, for no file is imported because a run names it"
            )
        _check_file(file, own, recorded[own])
    for key, name, given, known in (
        ("qk", variant.qk, qk, QK_CIRCUITS),
        ("ov", variant.ov, ov, OV_CIRCUITS),
    ):
        if name not in known and name != own and given is None:
            raise UserError(
                f"variant.{key}: this run was trained with '{name}' of an installed package;"
                f" give variant.{key}={name}, for no package is imported because a run names it"
            )
    config, hashes = settle(replace(config, variant=replace(variant, file=file)))
    if hashes != recorded:
        names = ", ".join({**recorded, **hashes})
        raise UserError(f"variant: {names}: not the circuit that the run was trained with")
    return config


def _check_file(file: str, name: str, sha256: str) -> None:
    """Before anything of it runs."""
    if Path(file).stem != name:  # a circuit is called as its file
        raise UserError(
            f"variant.file: '{file}' is not called '{name}.py', as the run's circuit is"
        )
    try:
        content = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"variant.file: cannot read '{file}': {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"variant.file: '{file}' is not the file the run was trained with")


def _newest_checkpoint(
    folder: Path, device: str, weights: str | None, step: int | None
) -> tuple[Path, checkpoint.Checkpoint]:
    paths = checkpoint.newest_first(folder / "checkpoints")
    if not paths:
        raise UserError(f"'{folder}' has no checkpoint yet")
    if step is not None:
        known = {path.name.removeprefix("step-").lstrip("0") or "0": path for path in paths}
        if str(step) not in known:
            raise UserError(f"step: there is no checkpoint of step {step}, but {', '.join(known)}")
        paths = [known[str(step)]]
    damaged = []
    for path in paths:
        try:
            if weights is not None and weights != checkpoint.weights_sha256(path):
                continue
            found = checkpoint.load_weights(path, device)
        except (OSError, ValueError, TypeError) as error:
            damaged.append(f"checkpoint '{path}' is damaged ({error})")
            continue
        for line in damaged:
            tell(f"qkablate: {line}: not used")
        return path, found
    if weights is not None:
        damaged.insert(0, f"'{folder}' has no weights of sha256 {weights[:12]}… any more")
    raise UserError("; ".join(damaged))


def _build(config: Config, vocabulary: int, device: str, folder: Path) -> GPT:
    try:
        with torch.device("meta"):
            kind = torch.device(device).type
            return GPT(config.model, config.variant, vocabulary, device=kind)
    except UserError:
        raise
    except Exception as error:  # of values that pass one by one and make no model together
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        path = folder / "config.yaml"
        raise UserError(f"no model can be built from '{path}': {reason}") from None


def check_shapes(model: GPT, found: checkpoint.Checkpoint, folder: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({*expected, *found.weights}):
        given = found.weights.get(name)
        shape = "not there" if given is None else tuple(given.shape)
        wanted = expected.get(name, "nothing of that name")
        if given is not None and not given.is_floating_point():
            raise UserError(f"the weights in '{folder}' are no weights: {name} is {given.dtype}")
        if shape != wanted:
            raise UserError(
                f"the weights in '{folder}' are not those of its config.yaml:"
                f" {name} is {shape}, and {wanted} is expected"
            )
