"""`qkablate eval`: evaluate trained runs, without training."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkablate.api.evaluate import EVAL_KEYS
from qkablate.cli.arguments import CIRCUIT_KEYS, Parser, one_of, out_words, runs_and_keys
from qkablate.config.data import HELD_OUT_SPLITS
from qkablate.errors import UserError, sanitize
from qkablate.report.text.table import format_interval, format_known
from qkablate.runs.listing import shorten_names
from qkablate.table import (
    format_nats,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from qkablate.api.evaluate import Evaluation, EvaluationGap

HELP = """qkablate eval: evaluate trained runs, without training.

Usage: qkablate eval RUN [RUN …] [data=NAME] [key=value …] [--split SPLIT]
                     [--json]

RUN is a run's folder, or a unique beginning of its name or id. Its final
weights are evaluated, or the newest checkpoint of one that is still training.
Nothing is written into its folder.

Without keys of data, a run is evaluated on its own validation split, on as many
tokens as in training: the loss is that of its last evaluation. With data=NAME
it is evaluated on the whole validation split of that data. Text is encoded by
the run's own tokenizer.

  loss        mean in nats per token; for pairs per target token, for tasks per
              answer, for masked text per mask
  SE          standard error over documents: how much the loss would vary with
              other documents. A document is a text, a sequence of a task or,
              for pairs, a file (the pair itself where files are unknown)
  perplexity  exp(loss)
  bits/byte   the loss per byte of text, comparable between tokenizers
  accuracy    share of tokens whose top prediction is right
  exact       share of the sequences that are right as a whole

Of several runs on the same documents, the gaps to the last one are printed,
with standard errors and 95 % intervals over documents. They hold for these runs
on other texts, not for other seeds: `qkablate results` compares variants.

Keys
  data=NAME          the data, with the defaults of NAME but the run's
                     tokenizer, vocabulary and objective; without it a key of
                     data.* that is not given is the run's, unless it is a path
  data.cache=FOLDER  where prepared data is (default: as in train)
  tokens=N|all       tokens to read (default: of the run's own data as many as
                     in training, otherwise all)
  step=N             the checkpoint of this step, instead of the newest
  device, precision, threads
                     as in train (default: those of the training, if this
                     machine has them)
  out=outputs        the folder that holds runs/
  variant.file=PATH  the file of the run's own circuit, if it was trained with
                     one; variant.qk, variant.ov: of an installed package

Flags
{flags}

Examples
  qkablate eval merged_w
  qkablate eval merged_w --split test
  qkablate eval merged_w standard data=text data.path=book.txt
  qkablate eval standard-d64 data=reverse data.test_tokens=4096 --split test

Exit codes: 0 the evaluation is printed · 2 a mistake in the command
"""
KEYS = EVAL_KEYS


PARSER = Parser(HELP, ("run",), [f"{key}=" for key in EVAL_KEYS])
PARSER.option("--split", "SPLIT", "val (default) or test", one_of(HELD_OUT_SPLITS))
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Print the losses of trained runs on a split."""
    args = PARSER.parse(argv)
    runs, values = runs_and_keys(args.words, KEYS)
    if not runs:
        raise UserError("no run given: write qkablate eval RUN [data=NAME]")
    from qkablate.api.evaluate import compare_evaluations, evaluate_runs

    try:
        found = evaluate_runs(runs, values, args.split or "val")
    except KeyboardInterrupt:
        print("qkablate: interrupted", file=sys.stderr)
        return 130
    *compared, baseline = found
    gaps = [compare_evaluations(evaluation, baseline) for evaluation in compared]
    if args.json:
        content = [*map(_as_json, found)]
        known = [dataclasses.asdict(gap) for gap in gaps if gap is not None]
        print_json({"evaluations": content, "gaps": known})
        return 0
    _print(found)
    if compared:
        _print_gaps(found, gaps)
    print_next_commands(_propose(runs, values, found))
    return 0


def _as_json(evaluation: "Evaluation") -> dict[str, Any]:
    """Return all but the sums by document."""
    fields = (field.name for field in dataclasses.fields(evaluation) if field.name != "sums")
    return {name: getattr(evaluation, name) for name in fields}


def _print(found: Sequence["Evaluation"]) -> None:
    short = shorten_names([evaluation.run for evaluation in found])
    rows = []
    for one in found:
        part = f"{one.split} of {one.data}, {one.documents:,}"
        exact = [format_known(one.exact, ".1%")]
        rows.append(
            [
                *(sanitize(short[one.run]), format_known(one.loss), format_known(one.loss_se)),
                *(format_known(one.perplexity, ".4g"), format_known(one.bits_per_byte)),
                *(format_known(one.accuracy, ".1%"), format_known(one.accuracy_se, ".1%"), *exact),
                *(f"{one.step:,}", f"{one.answers:,}", sanitize(part)),
            ]
        )
    columns = ["run", "loss", "SE", "perplexity", "bits/byte", "accuracy", "SE", "exact"]
    print_table([*columns, "step", "tokens", "documents"], rows)


def _print_gaps(found: Sequence["Evaluation"], gaps: Sequence["EvaluationGap | None"]) -> None:
    short = shorten_names([evaluation.run for evaluation in found])
    baseline, rows = short[found[-1].run], []
    for evaluation, gap in zip(found, gaps, strict=False):
        if gap is None:
            print()
            name = short[evaluation.run]
            print_text(sanitize(f"no gap: {name} and {baseline} have read different tokens"))
            continue
        error = format_known(gap.se, ".2g")
        cells = [format_nats(gap.gap), error, format_interval(gap.interval), f"{gap.documents:,}"]
        rows.append([sanitize(f"{short[gap.run]} − {baseline}"), *cells])
    if rows:
        print()
        print_table(["gap in loss", "mean", "SE", "95 % interval", "documents"], rows)


def _propose(
    runs: Sequence[str], values: dict[str, str], found: Sequence["Evaluation"]
) -> list[str]:
    """Return a command: the heads of one run, or two runs side by side."""
    out = out_words(values.get("out", "outputs"))
    if len(runs) == 1 or found[0].run == found[1].run:
        circuits = [f"{key}={values[key]}" for key in CIRCUIT_KEYS if key in values]
        return ["inspect", runs[0], *out, *circuits]
    return ["compare", *runs[:2], *out]
