"""A published checkpoint as a run folder: whole, or not at all.

Everything is checked before anything is written; the folder gets its name last. The run has no
result, no metrics and no data: `identity` says which files it was made of.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from qkablate.config import Config, DataConfig, OptimConfig, resolve
from qkablate.data.progress import Progress
from qkablate.disk import describe_os_error, exclusive_folder, hash_file, make_folder, sync_folder
from qkablate.errors import UserError, sanitize
from qkablate.pretrained.layouts import PREFIXES
from qkablate.pretrained.published_config import Architecture, parse_config
from qkablate.pretrained.repository import CONFIG, Repository, origin_of
from qkablate.runs.records import write_json
from qkablate.runs.run import IMPORTED, ORIGIN_FILE, Run, identity, run_id
from qkablate.strict_json import hash_json
from qkablate.table import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}", re.ASCII)
GPT2_VOCABULARY = 50257
# Other languages have models of this size with tokens of their own.
_GPT2_IDS = {"Hello": 15496, "Ġworld": 995, "Ġthe": 262, "<|endoftext|>": 50256}
_LR = 6e-4  # the rate that models of GPT-2's size are trained at; fine-tuning takes 0.3 of it


@dataclass(frozen=True)
class ImportedRun:
    """An imported run, and what was found on the way."""

    folder: Path
    architecture: Architecture
    origin: dict[str, Any]
    params: int
    is_new: bool
    has_tokenizer: bool  # text can be written in the model's tokens


def _has_gpt2_tokens(architecture: Architecture, found: Repository) -> bool:
    """Return whether the tokens of a model are GPT-2's, as far as its vocab.json, if any, says."""
    if architecture.family != "gpt2" or architecture.vocabulary != GPT2_VOCABULARY:
        return False
    if (vocabulary := found.read_vocabulary()) is None:
        return True
    return isinstance(vocabulary, dict) and _GPT2_IDS.items() <= vocabulary.items()


def import_run(
    found: Repository, out: str, name: str | None = None, context: int | None = None
) -> ImportedRun:
    """Write a published model as a run, unless it is there."""
    label = name or found.name
    if not _NAME.fullmatch(label):
        raise UserError(
            f"as: '{sanitize(label[:60])}' is not made of letters, digits, . _ + - (100 at most)"
        )
    architecture = parse_config(found.read_config(), context)
    files = found.weight_files()
    from qkablate.pretrained.weights import find_tensors, load_tensors
    from qkablate.training import hardware
    from qkablate.training.resolve import build_empty_model, check_out

    tensors = find_tensors(architecture, files)
    sizes = [entry_size(entry.shape) for entry in architecture.tensor_maps().values()]
    params, root = sum(sizes), Path(out).expanduser()
    check_out(root, 4 * params + 2**20)  # in fp32
    # The largest is also there as it is read, as it is checked, and where it is stored twice.
    required = 4 * (params + 3 * max(sizes)) + 2**20
    if (memory := hardware.free_memory()) < required:
        raise UserError(
            f"the weights need {format_bytes(required)} of memory in fp32, and"
            f" {format_bytes(memory)} are free"
        )
    progress = Progress(f"import {label}")
    sums = _hash_files([found.folder / CONFIG, *files], progress)
    has_tokenizer = _has_gpt2_tokens(architecture, found)
    config = _make_config(architecture, out, "gpt2" if has_tokenizer else None)
    model = build_empty_model(config, architecture.vocabulary)
    weights_of = {file: sums[file] for file in sums if file != CONFIG}
    frozen = identity(
        config,
        data_fingerprint=IMPORTED,
        vocabulary=architecture.vocabulary,
        device="cpu",
        kernel=model.kernel,
        circuits_from_outside={},
    ) | {IMPORTED: hash_json(weights_of)}
    run = Run(out, label, run_id(frozen))
    origin = origin_of(found, sums)
    result = ImportedRun(run.folder, architecture, origin, params, True, has_tokenizer)
    if (run.folder / "config.yaml").exists():
        return replace(result, is_new=False)
    progress.stage("weights", params, "parameters")
    try:
        weights = load_tensors(architecture, tensors, progress.update)
    finally:
        progress.close()
    _check_weights(model.state_dict(), weights)
    temporary = run.folder.with_name(f".importing-{run.id[:12]}.tmp")
    try:
        with exclusive_folder(temporary) as folder:
            if (run.folder / "config.yaml").exists():  # of another process, meanwhile
                return replace(result, is_new=False)
            _write(Run(str(folder), label, run.id), config, frozen, origin, weights)
            Run(str(folder), label, run.id).folder.rename(run.folder)
            sync_folder(run.folder.parent)
    except BlockingIOError:
        raise UserError("another process is importing this model; wait for it") from None
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write '{sanitize(str(run.folder))}': {describe_os_error(error)}"
        ) from None
    return result


def _write(
    run: Run,
    config: Config,
    identity: dict[str, Any],
    origin: dict[str, Any],
    weights: dict[str, "Tensor"],
) -> None:
    """Write the files of a run, the config last."""
    from qkablate.training import checkpoint

    make_folder(run.folder)
    checkpoint.save(run.checkpoints, checkpoint.Checkpoint(checkpoint.TrainProgress(), weights))
    write_json(run.folder / ORIGIN_FILE, origin)
    if config.data.tokenizer is not None:
        write_json(run.folder / "tokenizer.json", {"name": config.data.tokenizer})
    run.freeze(config, identity)


def entry_size(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    size = 1
    for length in shape:
        size *= length
    return size


def _check_weights(expected: dict[str, Any], weights: dict[str, Any]) -> None:
    """Assert that the layouts name every tensor of the model with its shape."""
    ours = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in weights.items()}, PREFIXES


def _make_config(architecture: Architecture, out: str, tokenizer: str | None) -> Config:
    """Return the config of the run: the model, and defaults that are the same on every machine."""
    config = resolve(
        Config(
            variant=architecture.variant,
            model=architecture.model,
            data=DataConfig(),
            optim=OptimConfig(lr=_LR),
            device="cpu",
            precision="fp32",
            matmul="torch",
            compile=False,
            threads=1,
            out=out,
        )
    )
    train = replace(config.train, vmap=1)
    return replace(config, train=train, data=replace(config.data, tokenizer=tokenizer))


def _hash_files(files: list[Path], progress: Progress) -> dict[str, str]:
    """Return the sha256 of files by name."""
    sums, done = {}, 0
    progress.stage("checksums", sum(file.stat().st_size for file in files))
    try:
        for file in files:
            sums[file.name] = hash_file(file)
            done += file.stat().st_size
            progress.update(done)
    except OSError as error:
        raise UserError(f"{file.name}: it cannot be read: {describe_os_error(error)}") from None
    finally:
        progress.close()
    return sums
