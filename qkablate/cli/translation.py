"""Translation of a source, or of a split, by the run of `qkablate sample`."""

import time
from argparse import Namespace
from typing import TYPE_CHECKING

from qkablate.cli.answers import find_data, show_examples
from qkablate.errors import UserError
from qkablate.table import format_count

if TYPE_CHECKING:
    from qkablate.models.encoder_decoder import EncoderDecoder
    from qkablate.training.warm_start.restore import RestoredRun


def translate_source(args: Namespace, restored: "RestoredRun") -> tuple[str, str]:
    """Return the translation of `args.source`, and a report in one line."""
    from qkablate.models.translate import translate

    model, beam = _translator(restored), args.beam or 1
    sentences = restored.sentences()
    source, longest = sentences.encode(args.source), model.input_lengths()[0]
    if len(source) > longest:
        raise UserError(
            f"source: it has {len(source)} tokens, and model.source={longest} of this run allows"
            f" {longest}"
        )
    began = time.perf_counter()
    (target,) = translate(model, [source], sentences.tokens, beam)
    speed = len(target) / (time.perf_counter() - began)
    report = f"{_search(beam)}, {format_count(len(target), 'token')}, {speed:,.0f} tokens/s"
    return f"{sentences.decode(target)}\n", report


def translate_split(args: Namespace, restored: "RestoredRun") -> tuple[str, str]:
    """Return the translations of a split, a line each, or examples; and scores in one line."""
    from qkablate.data import iterate_windows
    from qkablate.models.translate import translate

    model, beam = _translator(restored), args.beam or 1
    data, sentences = find_data(args, restored), restored.sentences()
    windows = iterate_windows(
        *(data, args.split),
        seed=0,
        batch_size=1,
        grad_accum=1,
        context=restored.config.model.context,
    )
    pairs_of_tokens = [sentences.tokens.read_pair(batch, row) for batch, row in windows]
    references = [target for _, target in pairs_of_tokens]
    found = translate(model, [source for source, _ in pairs_of_tokens], sentences.tokens, beam)
    exact = sum(map(list.__eq__, found, references)) / len(references)
    lines = [sentences.decode(target).replace("\n", " ") for target in found]
    pairs = format_count(len(found), "pair")
    report = f"{args.split}, {_search(beam)}, {pairs}: exact match {exact:.1%}"
    if restored.config.data.tokenizer is not None:  # a task has no text
        report += f", BLEU {_format_bleu(lines, [*map(sentences.decode, references)])}"
    if args.show:
        return show_examples(args, restored, data), report
    return "".join(f"{line}\n" for line in lines), report


def _translator(restored: "RestoredRun") -> "EncoderDecoder":
    """Return the model of a run that translates."""
    from qkablate.models.encoder_decoder import EncoderDecoder

    if isinstance(restored.model, EncoderDecoder):
        return restored.model
    form = restored.config.model.form
    instead = "prompt=TEXT" if form == "decoder" else "text=TEXT"
    raise UserError(
        f"this run does not translate, as source=TEXT and --split ask: it has model.form={form},"
        f" and only encoder_decoder does; give {instead}"
    )


def _format_bleu(hypotheses: list[str], references: list[str]) -> str:
    from qkablate.data.pairs.bleu import score_bleu

    try:
        bleu = score_bleu(hypotheses, references)
    except UserError as error:
        return f"not computed: {error}"
    return f"{bleu.score:.2f} ({bleu.signature})"


def _search(beam: int) -> str:
    return "greedy" if beam == 1 else f"beam {beam}"
