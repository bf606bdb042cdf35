"""Circuits by name: built-in ones, a user's file, and entry points of installed packages.

A file is executed only if the command line names it, never because a run folder does.
"""

import copy
import functools
import hashlib
import inspect
import sys
import traceback
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Unpack

import torch

from qkablate.attention import OV, OV_CIRCUITS, QK, QK_CIRCUITS, Attention, Spec
from qkablate.attention.kernels.choice import KernelOptions
from qkablate.attention.spec import (
    FORMULA_LETTERS,
    Circuit,
    UnsupportedCombination,
    UnsupportedKernel,
)
from qkablate.config import Config, ModelConfig, VariantConfig, resolve_variant
from qkablate.config.variant import describe_unused, stream_width, variant_sites
from qkablate.disk import expand_user
from qkablate.errors import ImpossibleConfig, UserError, not_one_of

ENTRY_POINTS = "qkablate.circuits"  # the entry-point group for circuits of other packages
GPT2_SIGMA = 0.02


@dataclass(frozen=True)
class ExternalCircuit:
    """A circuit from a user's file or another package, with the hash of its file."""

    name: str
    circuit: type[QK] | type[OV]
    sha256: str
    file: Path


def resolve_circuits(config: Config) -> tuple[Config, dict[str, str]]:
    """Return the config with the circuit of `variant.file` filled in, and hashes of external files.

    The hashes (name → sha256) cover circuits of `variant.file` and of installed packages.
    """
    variant, sides = config.variant, ["qk", "ov"]
    if variant.file is not None:
        from_file = load_file(variant.file)
        side = "qk" if issubclass(from_file.circuit, QK) else "ov"
        if (current := getattr(variant, side)) not in ("separate", from_file.name):
            raise UserError(
                f"variant.file: '{variant.file}' defines the {side.upper()} circuit, but"
                f" variant.{side} is '{current}'; set only one of the two"
            )
        default_name = resolve_variant(replace(variant, name="standard"), config.model).name
        if variant.name == default_name:  # not chosen by the user, and wrong with this circuit
            variant = replace(variant, name="standard")
        variant = replace(variant, **{side: from_file.name})  # type: ignore[arg-type]
        variant = resolve_variant(variant, config.model)
        sides = sides if side == "qk" else sides[::-1]  # the file's circuit first
    external = [circuit for side in sides if (circuit := _find_external(variant, side))]
    if external:
        _check_sizes(variant)
    return replace(config, variant=variant), {circuit.name: circuit.sha256 for circuit in external}


def has_external(variant: VariantConfig) -> bool:
    """Return whether a circuit of a variant is of the user or of an installed package."""
    return any(_find_external(variant, side) is not None for side in ("qk", "ov"))


def circuit_classes(variant: VariantConfig) -> tuple[type[QK], type[OV]]:
    """Return the QK and the OV class of a variant."""
    pair = []
    for side, known in (("qk", QK_CIRCUITS), ("ov", OV_CIRCUITS)):
        name, external = getattr(variant, side), _find_external(variant, side)
        if external is None and name not in known:
            problem = not_one_of(name, known, "qkablate variants")
            raise UserError(f"variant.{side}: {problem}")
        pair.append(external.circuit if external is not None else known[name])
    return pair[0], pair[1]  # type: ignore[return-value]


def make_spec(model: ModelConfig, variant: VariantConfig, site: str = "decoder") -> Spec:
    """Return the sizes and the initial scale of the circuits of a model at a site."""
    source = model.source or model.context
    width, d_source = stream_width(model, site), None
    if site == "cross":
        d_source = stream_width(model, "encoder")
    gpt2 = model.init == "gpt2"
    assert variant.rank is None or isinstance(variant.rank, int)
    assert variant.groups is None or isinstance(variant.groups, int)
    return Spec(
        d_model=width,
        heads=model.heads,
        bias=model.bias,
        sigma=GPT2_SIGMA if gpt2 else _linear_sigma(width),
        residual=residual_writes(model, site) ** -0.5 if gpt2 else 1.0,
        init="matched" if variant.init == "symmetric" else variant.init,
        symmetric=variant.init == "symmetric",
        rank=variant.rank,
        groups=variant.groups,
        rope_dims=variant.rope_dims or 0,
        context=source if site == "encoder" else model.context,
        source=source if site == "cross" else None,
        causal=site == "decoder",
        d_source=d_source,
        source_sigma=None if gpt2 or d_source is None else _linear_sigma(d_source),
    )


def _linear_sigma(fan_in: int) -> float:
    """Return the standard deviation of a uniform distribution within ±1/√fan_in."""
    return float((3 * fan_in) ** -0.5)


def residual_writes(model: ModelConfig, site: str) -> int:
    """Return how many sublayers write to the residual stream that a site belongs to."""
    if model.form != "encoder_decoder":
        return 2 * model.layers
    return 2 * encoder_layers(model) if site == "encoder" else 3 * model.layers


def encoder_layers(model: ModelConfig) -> int:
    """Return the number of encoder blocks of an encoder–decoder."""
    return model.encoder_layers or model.layers


def make_attention(
    model: ModelConfig,
    variant: VariantConfig,
    site: str | None = None,
    **options: Unpack[KernelOptions],
) -> Attention:
    """Return an uninitialized attention layer; UserError for an unsupported combination.

    It is standard's at a site that does not carry the variant; without a site, the first that does.
    """
    sites = variant_sites(variant, model)
    if site is None:
        site = sites[0]
    elif site not in sites:
        variant = resolve_variant(VariantConfig(), model)
    qk, ov = circuit_classes(variant)
    from_file = load_file(variant.file) if variant.file is not None else None
    rotated = ("alibi", "rope")
    if site == "decoder":  # where padding comes after all that counts
        options["padding"] = False
    try:
        layer = Attention(
            make_spec(model, variant, site),
            qk,
            ov,
            norm=variant.norm,
            mask_self=variant.mask_self and site != "cross",
            # Positions of two sequences have no distance.
            position=model.position if model.position in rotated and site != "cross" else "none",
            rope_theta=model.rope_theta,
            dropout=model.dropout,
            **options,
        )
        if from_file is not None:
            _check_shapes(from_file, layer)
        return layer
    except UnsupportedKernel as reason:
        raise ImpossibleConfig(f"{reason}") from None
    except UnsupportedCombination as reason:
        raise ImpossibleConfig(f"variant: {variant.name} is not supported: {reason}") from None
    except Exception as error:
        if from_file is None or isinstance(error, UserError):
            raise
        raise UserError(f"variant.file: {describe_error(error, from_file.file)}") from None


def load_file(path: str) -> ExternalCircuit:
    """Return the circuit that a user's Python file defines."""
    try:
        return _load(path, expand_user("variant.file", path).read_bytes())
    except OSError as error:
        raise UserError(f"variant.file: cannot read '{path}': {error.strerror}") from None
    except ValueError as error:  # not a valid path
        raise UserError(f"variant.file: cannot read {path!r}: {error}") from None


@functools.cache
def _load(path: str, source: bytes) -> ExternalCircuit:
    file = expand_user("variant.file", path)
    name = file.stem
    if name in {*QK_CIRCUITS, *OV_CIRCUITS} or not name.isidentifier():
        raise UserError(
            f"variant.file: the name of '{file.name}' becomes the name of the circuit; it must"
            " consist of letters, digits and _ and must not be the name of a built-in circuit"
        )
    module = ModuleType(f"qkablate_variant_{name}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:  # exactly the bytes that were hashed
        exec(compile(source, str(file), "exec"), module.__dict__)
    except SyntaxError as error:
        where = f" line {error.lineno}" if error.lineno else ""
        raise UserError(f"variant.file: '{path}'{where}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"variant.file: {describe_error(error, file)}") from None
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, (QK, OV))]
    circuits = [circuit for circuit in classes if circuit.__module__ == module.__name__]
    if len(circuits) != 1:
        names = f" ({', '.join(circuit.__name__ for circuit in circuits)})" if circuits else ""
        raise UserError(
            f"variant.file: '{path}' must define exactly one subclass of QK or OV, but defines"
            f" {len(circuits)}{names}"
        )
    return ExternalCircuit(name, circuits[0], hashlib.sha256(source).hexdigest(), file)


def describe_error(error: BaseException, file: Path) -> str:
    """Return the file, the line and the message of an error in a user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    where = f"'{file}'" + (f" line {lines[-1]}" if lines else "")
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{where}: {type(error).__name__}: {first}"


def _check_sizes(variant: VariantConfig) -> None:
    """Check rank and groups for external circuits, as the config does for built-in ones."""
    pair = circuit_classes(variant)
    for key in ("rank", "groups"):
        value, users = getattr(variant, key), [c.__name__ for c in pair if key in c.uses]
        if users and value is None:
            raise UserError(f"variant.{key}: {users[0]} needs a number")
        if value is not None and not users:
            raise UserError(describe_unused(variant, key))


def _check_shapes(external: ExternalCircuit, layer: Attention) -> None:
    """Check the shapes that a user's circuit returns, before anything is trained."""
    circuit = layer.qk if isinstance(layer.qk, external.circuit) else layer.ov
    _check_tensors(circuit)
    _check_formula(circuit)
    model = copy.deepcopy(layer).to("meta")
    qk, ov, spec = model.qk, model.ov, model.qk.spec
    x_BTD = y_BTD = torch.empty(2, 3, spec.d_model, device="meta")
    if spec.d_keys != spec.d_model:
        y_BTD = torch.empty(2, 3, spec.d_keys, device="meta")
    q_BHTE, k_BGSE = qk(x_BTD, y_BTD)
    v_BGSV = ov.values(y_BTD, k_BGSE)
    for what, result, expected in (
        ("queries", q_BHTE, (2, spec.heads, 3, qk.width)),
        ("keys", k_BGSE, (2, qk.key_heads, 3, qk.width)),
        ("values", v_BGSV, (2, ov.value_heads, 3, ov.width)),
        ("write", ov.write(v_BGSV.new_empty(2, spec.heads, 3, ov.width)), (2, 3, spec.d_model)),
    ):
        if tuple(result.shape) != expected:
            key = "qk.width" if what in ("queries", "keys") else "ov.width"
            raise UserError(
                f"variant.file: `{what}` of {external.circuit.__name__} returns shape"
                f" {tuple(result.shape)} for 2 sequences of 3 tokens; {expected} is expected from"
                f" its heads and {key}={expected[-1]}"
            )


def _check_tensors(circuit: Circuit) -> None:
    """Check that every tensor of a user's circuit is initialized with the weights, or restored."""
    name = type(circuit).__name__
    buffers = {key for key, buffer in circuit.named_buffers() if buffer.numel()}
    plain = [
        f"{prefix}.{key}".lstrip(".")
        for prefix, module in circuit.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    if lost := [*plain, *sorted(buffers - circuit.state_dict().keys())]:
        raise UserError(
            f"variant.file: the values of {name}.{lost[0]} are lost, as it is neither a parameter"
            " nor a persistent buffer: compute it where it is used"
        )
    inherited = type(circuit).init_.__module__.startswith("qkablate.")
    if inherited and (buffers or next(circuit.children(), None) is not None):
        what = "buffers" if buffers else "torch modules"
        raise UserError(
            f"variant.file: {name} contains {what} but no `init_` that initializes them"
        )


def _check_formula(circuit: Circuit) -> None:
    """Check that the formula of a user's circuit, if it has one, gives a number."""
    try:
        _ = circuit.params and circuit.count_params()
    except Exception as error:
        raise UserError(
            f"variant.file: params of {type(circuit).__name__}, {circuit.params!r}, cannot be"
            f" evaluated ({error}); it is a formula such as '2 d² + d h', of"
            f" {', '.join(FORMULA_LETTERS)}"
        ) from None


def _find_external(variant: VariantConfig, side: str) -> ExternalCircuit | None:
    """Return the circuit of `variant.file` or of an installed package; None for a built-in one."""
    name = getattr(variant, side)
    if variant.file is not None and (from_file := load_file(variant.file)).name == name:
        return from_file
    if name in QK_CIRCUITS or name in OV_CIRCUITS:
        return None
    for entry in metadata.entry_points(group=ENTRY_POINTS, name=name):
        try:
            circuit = entry.load()
        except Exception as error:
            raise UserError(
                f"variant.{side}: '{name}' ({entry.value}) cannot be loaded:"
                f" {type(error).__name__}: {error}"
            ) from None
        if inspect.isclass(circuit) and issubclass(circuit, QK if side == "qk" else OV):
            file = Path(inspect.getfile(circuit))
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            return ExternalCircuit(name, circuit, sha256, file)
    return None
