"""`qkablate inspect`: measures of the circuits and the attention of a trained run."""

import itertools
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.api.evaluate import DATA_WORDS, request_data
from qkablate.cli.arguments import (
    CIRCUIT_KEYS,
    Parser,
    check_utf8,
    convert_value,
    out_words,
    propose_sample,
    restore_run,
    run_and_keys,
    take_out,
    whole_number,
)
from qkablate.cli.text_attention import attend, draw
from qkablate.errors import UserError, sanitize
from qkablate.report.text.heads import print_measures, print_spectra
from qkablate.table import format_count, print_json, print_next_commands

if TYPE_CHECKING:
    from qkablate.config import Config

HELP = """qkablate inspect: measures of the circuits and the attention of a trained run.

Usage: qkablate inspect RUN [key=value …] [--layer N] [--head N]
                            [--text TEXT [--target TEXT]] [-o FILE] [--json]
       qkablate inspect RUN --variants [--layer N] [--json] [key=value …]

RUN is a run's folder, or a unique beginning of its name or id. Its newest
checkpoint is used; the run may still be training. Two tables describe the
matrices B_h (the scores of head h) and M_h (its output), the third describes
the attention at the beginning of the validation split: of the run's own data,
if that is prepared on this machine, or of data=NAME; otherwise random tokens
are read. Training logs the same numbers (diagnostics.every).

With --variants: how well each variant of the catalogue can represent the run's
circuits at this size, without training (minutes for 100 M parameters). What is
measured of an imported run is kept in its folder, for its report.

Flags
{flags}

Keys
  step=N              the checkpoint of this step (default: the newest)
  out=outputs         the folder that holds runs/
  data=NAME           other data that the run can read, and all of data.* as in
                      train, instead of the run's own (an imported run has
                      no data)
  data.cache=FOLDER   where prepared data is (default: as in train)
  variant.file=PATH   the file of the run's own circuit, if it was trained with
                      one
  variant.qk=NAME     the name of its QK circuit, if it comes from an installed
                      package
  variant.ov=NAME     the same for its OV circuit

Measures of B_h and M_h
  stable_rank     ‖B‖² / σ₁², the number of directions that carry the norm
  effective_rank  exp of the entropy of the normalized singular values σ
  nuclear         Σσ
  frobenius       ‖B‖; of B_h at the score scale of standard, so that variants
                  are comparable
  symmetry        1: B = Bᵀ, -1: B = -Bᵀ
  directionality  1: single columns dominate (of B_h: properties of keys; of
                  M_h: outputs), -1: single rows (queries; inputs)
  moved           ‖B - B_start‖ / ‖B_start‖
  off_rank        ‖B - its best approximation of rank d_head‖ / ‖B‖
  balance         0: the two factors have equal norms, 1: one of them has all of
                  it

Measures of the attention
  score_std       standard deviation of the scores of a query
  score_max       the largest score
  entropy         of the weights of a query, in nats
  self, first, previous  weight on the query's own position, the first, the
                         preceding one
  sink            weight of the most attended position beyond an equal share
  induction       on a repeated random block: weight on the token after the same
                  token
  repeat_previous on the same block: weight on the preceding token
  rounding        ‖X(W_q W_kᵀ)Xᵀ - (XW_q)(XW_k)ᵀ‖ / ‖(XW_q)(XW_k)ᵀ‖ in the
                  precision of training
  rounding_fp64   the same in fp64

Columns of --variants
  params          parameters of all attention layers, relative to the run's
  scores          root mean square error of the scores on the inputs of the
                  layers, with the closest circuits of the variant, relative to
                  the scores; constants of a query, which softmax ignores, do
                  not count; 1: nothing is represented
  output          the same for what the heads write; both over all layers
  worst scores    the largest error of the scores of a layer, and the layer
  worst output    the same for the output
  logits          for exact variants (errors below 1e-6): the largest difference
                  of the logits after the conversion, relative to the largest
                  logit
With --layer: the errors of the layer and of each of its heads, H0, H1, …

Examples
  qkablate inspect merged_w
  qkablate inspect merged_w --layer 0 --head 2
  qkablate inspect merged_w --layer 0 --head 2 --text 'def main(self):'
  qkablate inspect merged_w --text 'def main(self):' -o heads.svg
  qkablate inspect merged_w-d128-h4-s0-0123456789ab --json > merged_w.json
  qkablate inspect gpt2 data=text data.path=book.txt --variants
  qkablate inspect no_q_cross --text 's3 s1 s4' --target 's4 s1 s3' -o pair.svg

Exit codes: 0 the measures are printed · 2 a mistake in the command
"""
KEYS = ("step", "out", *DATA_WORDS, *CIRCUIT_KEYS)
_PARTS = {"qk": "B_h, the scores of a head", "ov": "M_h, the output of a head"}
_IMAGES = (".svg", ".png")


PARSER = Parser(HELP, ("run",), [f"{key}=" for key in KEYS])
PARSER.option("--layer", "N", "only this layer, with spectra; from 0", whole_number())
PARSER.option("--head", "N", "only this head, with its spectrum; from 0", whole_number())
PARSER.option(
    "--text",
    "TEXT",
    "the attention between its tokens: with --layer and --head the three most attended tokens"
    " of each, with --json the weights of all layers and heads",
)
PARSER.option("--target", "TEXT", "for runs that translate: the target of the source --text")
PARSER.option(
    "-o", "FILE", "with --text: draw the attention of all heads or of one; FILE.svg or FILE.png"
)
PARSER.switch("--variants", "how well each variant of the catalogue can represent the run")
PARSER.switch("--json", "print all measures of all layers and heads")


def main(argv: list[str]) -> int:
    """Print measures of the circuits and the attention of a run."""
    args = _parse_args(argv)
    restored = restore_run(args.run, args.keys | {"out": args.out}, args.step)
    from qkablate.cli.inspected_forms import (
        keep_measures,
        map_attention,
        measure_all_forms,
        propose_after_forms,
    )
    from qkablate.diagnostics import DiagnosticPanel
    from qkablate.diagnostics.forms import TOKENS_PER_DIMENSION
    from qkablate.diagnostics.panel import TOKENS
    from qkablate.training.recorders.diagnostics import choose_inputs, initial_layers
    from qkablate.training.recorders.run_evaluation import open_run_data

    model, config = restored.model, restored.config
    all_layers, form = model.attention_layers(), config.model.form
    places = None if form == "decoder" else [layer.place for layer in all_layers]
    _check_index("--layer", args.layer, len(all_layers))
    _check_index("--head", args.head, config.model.heads)
    text = attend(restored, args)
    count = TOKENS
    if args.variants:
        count = max(TOKENS, TOKENS_PER_DIMENSION * config.model.d_model)
    cache, requested = args.keys.get("data.cache", "auto"), request_data(config.data, args.keys)
    data = None if requested is None else open_run_data(restored, requested, cache)
    inputs, source = choose_inputs(restored, cache, count, data)
    starts = initial_layers(model, config, restored.folder / "start")
    if restored.is_imported:  # how it began is not known
        starts = iter(())
    first = max(2, TOKENS // inputs[-1].shape[1])
    row = DiagnosticPanel(model, *(tokens[:first] for tokens in inputs), starts=starts).row()
    forms = measure_all_forms(restored, inputs) if args.variants else None
    if restored.is_imported:
        a_map = None if data is None else map_attention(model, inputs[0][0], data)
        keep_measures(restored, source, row, forms, a_map)
    attention = model.variant_layer().module
    name = restored.folder.resolve().name
    image = ""
    if text is not None and args.o is not None:
        only = None if args.layer is None or args.head is None else (args.layer, args.head)
        image = draw(Path(args.o), text, only)
    rows, length = inputs[-1].shape
    if args.json:
        print_json(
            {
                "run": name,
                "step": restored.step,
                "variant": config.variant.name,
                "equation": attention.equation,
                "no_circuit": attention.no_circuit_reason or None,
                "tokens": {"of": source, "sequences": rows, "length": length},
                **({} if places is None else {"layers": places}),
                **row,
                **({} if text is None else {"text": text.content()}),
                **({} if forms is None else {"forms": forms}),
            }
        )
        return 0
    print(f"{sanitize(name)}, step {restored.step}: {attention.equation}")
    if forms is not None:
        from qkablate.report.text.forms import print_forms

        print(f"Approximation errors of the variants, on {_format_tokens(rows, length, source)}\n")
        print_forms(forms, args.layer)
        print_next_commands(*propose_after_forms(args, restored))
        return 0
    layers = range(len(all_layers)) if args.layer is None else (args.layer,)
    heads = range(config.model.heads) if args.head is None else (args.head,)
    shown = list(itertools.product(layers, heads))
    is_selection = args.layer is not None or args.head is not None
    for part, title in _PARTS.items():
        if all(heads is None for heads in row[part]["frobenius"]):
            reason = getattr(attention, part).no_circuit_reason or "its values are not finite"
            print(f"\n{title}: no matrix: {reason}")
            continue
        remark = attention.no_circuit_reason if part == "qk" else ""
        print(f"\n{title} ({remark})" if remark else f"\n{title}")
        print_measures(row[part], shown, places)
        if is_selection:
            print_spectra(row[part]["singular"], shown)
    print(f"\nAttention, on {_format_tokens(rows, length, source)}")
    print_measures(row["attention"], shown, places)
    if text is not None and is_selection:
        text.print_weights(*shown[0])
    if image:
        print(f"\n{sanitize(image)}")
    print_next_commands(_propose(args, config, row))
    return 0


def _parse_args(argv: list[str]) -> Namespace:
    """Parse the words, before anything heavy is imported."""
    args = PARSER.parse(argv)
    words, args.out = take_out(args.words)
    args.run, args.keys = run_and_keys(words, KEYS, "inspect RUN")
    step = args.keys.pop("step", None)
    args.step = None if step is None else convert_value("step", step, whole_number())
    has_both = args.layer is not None and args.head is not None
    has_any = args.layer is not None or args.head is not None
    if args.variants:
        others = {"--head": args.head, "--text": args.text, "-o": args.o}
        if given := [flag for flag, value in others.items() if value is not None]:
            raise UserError(
                f"--variants shows all heads of all layers or of one; leave out {given[0]}"
            )
    if args.json and has_any:
        raise UserError("--json prints all layers and heads; leave out --layer and --head")
    if args.text and not (args.json or args.o or has_both):
        raise UserError("--text needs --layer and --head, --json or -o")
    if args.o:
        if not args.text:
            raise UserError("-o needs --text, the text whose attention is drawn")
        if has_both != has_any:
            raise UserError("-o draws all heads or one: give both --layer and --head, or neither")
        _check_image(args.o)
    if args.target is not None and args.text is None:
        raise UserError("--target needs --text, the source")
    for flag, text in (("--text", args.text), ("--target", args.target)):
        check_utf8(flag, text or "")
    return args


def _format_tokens(rows: int, length: int, source: str) -> str:
    """Format what the model read."""
    from qkablate.training.recorders.diagnostics import RANDOM_TOKENS

    sequences = f"{format_count(rows, 'sequence')} of"
    if source == RANDOM_TOKENS:
        return f"{sequences} {length:,} {source}"
    return f"{sequences} {format_count(length, 'token')} of {sanitize(source)}"


def _check_image(path: str) -> None:
    """Raise UserError unless an image can be drawn and written there."""
    if os.path.splitext(path)[1].lower() not in _IMAGES:
        raise UserError(f"-o: '{path}' does not end in {' or '.join(_IMAGES)}")
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or "."):
        raise UserError(f"-o: '{path}' cannot be written: it is not a writable file path")


def _check_index(flag: str, value: int | None, count: int) -> None:
    if value is not None and value >= count:
        allowed = f"0 to {count - 1}" if count > 1 else "0"
        raise UserError(f"{flag}: there is no {value} (allowed: {allowed})")


def _propose(args: Namespace, config: "Config", row: dict[str, Any]) -> list[str]:
    """Return a command: the head whose scores spread most, or after that a sample."""
    words = [f"{key}={value}" for key, value in args.keys.items()] + out_words(args.out)
    if args.layer is None and args.head is None:
        words += [] if args.step is None else [f"step={args.step}"]
        heads = {
            (layer, head): value
            for layer, values in enumerate(row["attention"]["score_std"])
            for head, value in enumerate(values)
            if value is not None
        }
        layer, head = max(heads, key=heads.__getitem__, default=(0, 0))
        return ["inspect", args.run, *words, "--layer", str(layer), "--head", str(head)]
    return propose_sample(config, [args.run, *words])
