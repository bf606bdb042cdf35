"""From names to circuits: the built-in ones, a user's own file, and what installed packages offer.

A file is imported because the command line names it, never because a run folder does.
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

import torch

from qkablate.attention import OV, OV_CIRCUITS, QK, QK_CIRCUITS, Attention, Meaningless, Spec
from qkablate.config import Config, ModelConfig, VariantConfig, resolve_variant
from qkablate.errors import Impossible, UserError, nearest

ENTRY_POINTS = "qkablate.circuits"  # the group in which a package offers circuits
GPT2_SIGMA = 0.02


@dataclass(frozen=True)
class Foreign:
    """A circuit from outside: its class, and the hash of the file it stands in."""

    name: str
    circuit: type[QK] | type[OV]
    sha256: str
    file: Path


def settle(config: Config) -> tuple[Config, dict[str, str]]:
    """The config with the names of the circuits that `variant.file` brings, and the hashes of the
    files of all circuits from outside.
    """
    variant = config.variant
    foreign: list[Foreign] = []
    if variant.file is not None:
        own = load_file(variant.file)
        side = "qk" if issubclass(own.circuit, QK) else "ov"
        if (given := getattr(variant, side)) not in ("separate", own.name):
            raise UserError(
                f"variant.file: '{variant.file}' is the {side.upper()} circuit, and variant.{side}"
                f" is '{given}' already; give one of the two"
            )
        plain = resolve_variant(replace(variant, name="standard"), config.model).name
        if variant.name == plain:  # not the user's own name, and not true any more
            variant = replace(variant, name="standard")
        variant = replace(variant, **{side: own.name})  # type: ignore[arg-type]
        variant = resolve_variant(variant, config.model)
        foreign.append(own)
    for side in ("qk", "ov"):
        name = getattr(variant, side)
        if name not in {own.name for own in foreign} and (found := _offered(side, name)):
            foreign.append(found)
    if foreign:
        _check_used(variant)
    return replace(config, variant=variant), {own.name: own.sha256 for own in foreign}


def circuits(variant: VariantConfig) -> tuple[type[QK], type[OV]]:
    """The two classes that a variant's names stand for."""
    own = load_file(variant.file) if variant.file is not None else None
    pair = []
    for kind, known in (("qk", QK_CIRCUITS), ("ov", OV_CIRCUITS)):
        name = getattr(variant, kind)
        foreign = own if own is not None and own.name == name else _offered(kind, name)
        if foreign is None and name not in known:
            names = ", ".join(known)
            raise UserError(f"variant.{kind}: '{name}' is not one of {names}{nearest(name, known)}")
        pair.append(foreign.circuit if foreign is not None else known[name])
    return pair[0], pair[1]  # type: ignore[return-value]


def spec(model: ModelConfig, variant: VariantConfig) -> Spec:
    """What the circuits need to know of the model around them."""
    linear_sigma = (3 * model.d_model) ** -0.5  # of a uniform within ±1/√d
    gpt2 = model.init == "gpt2"
    assert variant.rank is None or isinstance(variant.rank, int)
    assert variant.groups is None or isinstance(variant.groups, int)
    return Spec(
        d_model=model.d_model,
        heads=model.heads,
        bias=model.bias,
        sigma=GPT2_SIGMA if gpt2 else linear_sigma,
        residual=(2 * model.layers) ** -0.5 if gpt2 else 1.0,
        init=variant.init,
        rank=variant.rank,
        groups=variant.groups,
        context=model.context,
    )


def attention(
    model: ModelConfig,
    variant: VariantConfig,
    *,
    device: str = "cpu",
    half: bool = False,
    kernel: str = "auto",
) -> Attention:
    """One attention layer of this model, without values yet; UserError for what has no meaning."""
    qk, ov = circuits(variant)
    own = load_file(variant.file) if variant.file is not None else None
    try:
        layer = Attention(
            spec(model, variant),
            qk,
            ov,
            norm=variant.norm,
            mask_self=variant.mask_self,
            position=model.position if model.position in ("alibi", "rope") else "none",
            device=device,
            half=half,
            dropout=model.dropout,
            kernel=kernel,
        )
        if own is not None:
            _try(own, layer)
        return layer
    except Meaningless as refused:
        raise Impossible(f"variant: {variant.name} is refused: {refused}") from None
    except Exception as error:
        if own is None or isinstance(error, UserError):
            raise
        raise UserError(f"variant.file: {blame(error, own.file)}") from None


def load_file(path: str) -> Foreign:
    """The one circuit that a user's Python file defines."""
    try:
        return _load(path, Path(path).expanduser().read_bytes())
    except OSError as error:
        raise UserError(f"variant.file: cannot read '{path}': {error.strerror}") from None
    except ValueError as error:  # a path that no file can have
        raise UserError(f"variant.file: cannot read {path!r}: {error}") from None


@functools.cache
def _load(path: str, source: bytes) -> Foreign:
    file = Path(path).expanduser()
    name = file.stem
    if name in {*QK_CIRCUITS, *OV_CIRCUITS} or not name.isidentifier():
        raise UserError(
            f"variant.file: '{file.name}' gives the circuit its name: letters, digits and _,"
            " and no name that there is already"
        )
    module = ModuleType(f"qkablate_variant_{name}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)  # what was hashed is what runs
    except SyntaxError as error:
        where = f" line {error.lineno}" if error.lineno else ""
        raise UserError(f"variant.file: '{path}'{where}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"variant.file: {blame(error, file)}") from None
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, (QK, OV))
        and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = f" ({', '.join(circuit.__name__ for circuit in own)})" if own else ""
        raise UserError(
            f"variant.file: '{path}' must define one class, a QK or an OV,"
            f" and defines {len(own)}{names}"
        )
    return Foreign(name, own[0], hashlib.sha256(source).hexdigest(), file)


def blame(error: BaseException, file: Path) -> str:
    """What went wrong in a user's file, and where in it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    where = f"'{file}'" + (f" line {lines[-1]}" if lines else "")
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{where}: {type(error).__name__}: {first}"


def _check_used(variant: VariantConfig) -> None:
    """What config checks for the built-in circuits."""
    pair = circuits(variant)
    for key in ("rank", "groups"):
        given, users = getattr(variant, key), [c.__name__ for c in pair if key in c.uses]
        if users and given is None:
            raise UserError(f"variant.{key}: {users[0]} needs a number")
        if given is not None and not users:
            raise UserError(
                f"variant.{key}: {given} given, but qk={variant.qk}, ov={variant.ov} have none"
            )


def _try(own: Foreign, layer: Attention) -> None:
    """Look at the shapes of what a user's circuit gives, before anything is trained."""
    circuit = layer.qk if isinstance(layer.qk, own.circuit) else layer.ov
    inherited = type(circuit).init_.__module__.startswith("qkablate.")
    if inherited and next(circuit.children(), None) is not None:
        name = own.circuit.__name__
        raise UserError(f"variant.file: {name} has torch modules, and no `init_` to start them")
    model = copy.deepcopy(layer).to("meta")
    x_BTD = torch.empty(2, 3, layer.qk.spec.d_model, device="meta")
    q_BHTE, k_BGSE = model.qk(x_BTD, x_BTD)
    v_BGSV = model.ov.values(x_BTD, k_BGSE)
    qk, ov, heads = layer.qk, layer.ov, layer.qk.spec.heads
    for what, found, expected in (
        ("queries", q_BHTE, (2, heads, 3, qk.width)),
        ("keys", k_BGSE, (2, qk.key_heads, 3, qk.width)),
        ("values", v_BGSV, (2, ov.value_heads, 3, ov.width)),
        ("write", model.ov.write(v_BGSV.new_empty(2, heads, 3, ov.width)), tuple(x_BTD.shape)),
    ):
        if tuple(found.shape) != expected:
            says = "qk.width" if what in ("queries", "keys") else "ov.width"
            raise UserError(
                f"variant.file: {own.circuit.__name__} gives {what} of shape {tuple(found.shape)}"
                f" for 2 sequences of 3 tokens; {expected} is what its heads and its"
                f" {says}={expected[-1]} say"
            )


def _offered(kind: str, name: str) -> Foreign | None:
    """What an installed package offers under this name."""
    if name in QK_CIRCUITS or name in OV_CIRCUITS:
        return None
    for entry in metadata.entry_points(group=ENTRY_POINTS, name=name):
        try:
            circuit = entry.load()
        except Exception as error:
            raise UserError(
                f"variant.{kind}: '{name}' ({entry.value}) cannot be loaded:"
                f" {type(error).__name__}: {error}"
            ) from None
        if inspect.isclass(circuit) and issubclass(circuit, QK if kind == "qk" else OV):
            file = Path(inspect.getfile(circuit))
            return Foreign(name, circuit, hashlib.sha256(file.read_bytes()).hexdigest(), file)
    return None
