"""Attention between the tokens of a text, or of a source and its target, for `qkablate inspect`."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.disk import replace_file
from qkablate.errors import UserError
from qkablate.report.text.heads import print_attention
from qkablate.table import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from qkablate.analysis.study.attention_maps import ArmAttention
    from qkablate.models.base import AttentionLayer
    from qkablate.training.warm_start.restore import RestoredRun

_SIDES = {"text": "--text", "source": "--text", "target": "--target"}  # the flag of each


@dataclass(frozen=True)
class TextAttention:
    """Attention weights of all layers between the tokens of one text, or of a source and a target.

    The token that starts a target is its first.
    """

    restored: "RestoredRun"
    layers: "list[AttentionLayer]"
    ids: dict[str, list[int]]  # by side: text, or source and target
    tokens: dict[str, list[bytes]]
    weights: list[list[Any]]  # A_HTS of each layer; None: not finite

    def sides(self, layer: int) -> tuple[str, str]:
        """Return the sides of the queries and of the keys of a layer."""
        if "text" in self.ids:
            return "text", "text"
        site = self.layers[layer].site
        return "source" if site == "encoder" else "target", (
            "target" if site == "decoder" else "source"
        )

    def labels(self, side: str) -> list[str]:
        return [token.decode("utf-8", "replace") for token in self.tokens[side]]

    def print_weights(self, layer: int, head: int) -> None:
        """Print the largest weights of a head."""
        sides = self.sides(layer)
        site = "" if "text" in self.ids else f", {self.layers[layer].place}: {' to '.join(sides)}"
        print(f"\nLargest attention weights, layer {layer}{site}, head {head}")
        queries, keys = map(self.labels, sides)
        causal = self.layers[layer].causal
        print_attention(self.weights[layer][head], queries, keys, causal=causal)

    def content(self) -> dict[str, Any]:
        """Return what --json prints."""
        sides = {side: {"tokens": self.labels(side), "ids": ids} for side, ids in self.ids.items()}
        return {**sides.pop("text", {}), **sides, "attention": self.weights}


def attend(restored: "RestoredRun", args: Namespace) -> TextAttention | None:
    """Return the attention on `args.text` and `args.target`; None if no text is given."""
    form = restored.config.model.form
    if args.target is not None and form != "encoder_decoder":
        raise UserError(
            f"--target: a run with model.form={form} reads one text; leave out --target"
        )
    if args.text is None:
        return None
    if form == "encoder_decoder" and args.target is None:
        raise UserError(f"--text: a run with model.form={form} reads a pair; give --target, too")
    import torch

    from qkablate.diagnostics import attention_weights
    from qkablate.diagnostics.panel import LENGTH, round_digits

    encode, decode, first = _codec(restored)
    given = {"text": args.text}
    if args.target is not None:
        given = {"source": args.text, "target": args.target}
    ids = {side: encode(text, _SIDES[side]) for side, text in given.items()}
    if "target" in ids:
        ids["target"].insert(0, first)
        if len(ids["target"]) == restored.config.model.context + 1:
            ids["target"].pop()  # of a target of full length the last token is never read
    for (side, tokens), longest in zip(ids.items(), restored.model.input_lengths(), strict=True):
        limit = min(LENGTH, longest)
        if len(tokens) > limit:
            start = " with the one that starts a target" if side == "target" else ""
            raise UserError(
                f"{_SIDES[side]}: {len(tokens)} tokens{start} are more than the limit of {limit}"
            )
        if not tokens:
            raise UserError(f"{_SIDES[side]}: is empty")
    weights = attention_weights(restored.model, *map(torch.tensor, ids.values()))
    return TextAttention(
        restored,
        restored.model.attention_layers(),
        ids,
        {side: [*map(decode, tokens)] for side, tokens in ids.items()},
        [round_digits(a_HTS.tolist()) for a_HTS in weights],
    )


def _codec(
    restored: "RestoredRun",
) -> "tuple[Callable[[str, str], list[int]], Callable[[int], bytes], int]":
    """Return functions that encode a text and decode a token, and the start of a target."""
    from qkablate.data import TASKS

    config = restored.config
    if config.model.form != "decoder":
        sentences = restored.sentences()
        start = sentences.tokens.start if config.model.form == "encoder_decoder" else 0
        if config.data.source in TASKS:
            return sentences.encode, lambda i: sentences.decode([i]).encode(), start
        return sentences.encode, lambda i: restored.tokenizer().decode([i]), start
    tokenizer = restored.tokenizer()

    def encode(text: str, flag: str) -> list[int]:
        if unknown := tokenizer.unknown(text):
            raise UserError(
                f"{flag}: the tokenizer of this run does not know {', '.join(map(repr, unknown))}"
            )
        ids: list[int] = tokenizer.encode(text.encode()).tolist()
        return ids

    return encode, lambda i: tokenizer.decode([i]), 0


def draw(path: Path, text: TextAttention, only: tuple[int, int] | None) -> str:
    """Write an image of all heads, or of one layer and head; return its path and size."""
    from qkablate.report.charts.attention import make_attention_chart
    from qkablate.report.render import render_chart

    maps, restored = _maps(text), text.restored
    if only is not None:
        layer = text.layers[only[0]]
        maps = [a_map for a_map in maps if a_map.site == layer.site]
        only = int(layer.name.split(".")[1]), only[1]
    step = f"At step {restored.step}"
    chart = make_attention_chart(maps, step, only)
    content = render_chart(chart, restored.folder.resolve().name, path.suffix[1:].lower())
    try:
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"-o: '{path}' cannot be written: {error.strerror}") from None
    return f"{path}  {format_bytes(len(content))}"


def _maps(text: TextAttention) -> "list[ArmAttention]":
    """Return the maps of each site; UserError for weights that are not finite."""
    import numpy as np

    from qkablate.analysis.study.attention_maps import ArmAttention, show_token
    from qkablate.runs.attention_map import quantize

    restored, maps = text.restored, []
    name, variant = restored.folder.resolve().name, restored.config.variant.name
    separator = "" if restored.config.data.tokenizer else " "
    for site in dict.fromkeys(layer.site for layer in text.layers):
        numbers = [n for n, layer in enumerate(text.layers) if layer.site == site]
        a_LHTS = np.array([text.weights[n] for n in numbers], np.float64)  # None becomes NaN
        if not np.isfinite(a_LHTS).all():
            raise UserError("-o: there is nothing to draw: the attention weights are not finite")
        queries, keys = (
            tuple(map(show_token, text.tokens[side])) for side in text.sides(numbers[0])
        )
        maps.append(
            ArmAttention(
                *(name, variant, f"step {restored.step}", queries, quantize(a_LHTS), separator),
                keys=keys,
                site=site,
            )
        )
    return maps
