"""`qkablate cost`: the cost of variants at a size, by formula and by measurement."""

import sys
from typing import Any

from qkablate.cli.arguments import Parser, one_of, whole_number
from qkablate.compose.configs import Job, build_jobs, choose_next, compose_jobs
from qkablate.config import Config, config_names
from qkablate.errors import UserError
from qkablate.table import (
    format_bytes,
    format_count,
    format_short,
    print_csv,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

SIZES = config_names("model")
_VOCABULARIES = {"gpt-j": 50400, "gpt2": 50257, "300m": 50304}  # of models that do not read bytes
_DEFAULT_VOCABULARY = 256  # of data.tokenizer=bytes

HELP = """qkablate cost: parameters, FLOPs and memory of variants at a size.

Usage: qkablate cost [key=value …] [--at SIZE] [--measure] [--json | --csv]
                     [--vocabulary N]

Without `variant=…` all variants are shown. Keys are those of `qkablate train`;
several values are separated by commas.

Examples
  qkablate cost variant=standard,merged_w model.d_model=256,512
  qkablate cost --at gpt-j                          16 heads of 256 at d 4096
  qkablate cost --at 300m variant=standard,shared_qk,tied_kv,tied_qkv
  qkablate cost variant=standard,merged_w --measure also measure step times
  qkablate cost --csv > cost.csv

Columns
  params         of the whole model
  attention      parameters of one attention layer
  project, scores, values
                 FLOPs of one attention layer, forward, per token: the
                 projections, q kᵀ, and the weighted sum of the values. 2 per
                 multiply-add; a causal query sees (T + 1)/2 keys on average,
                 and only those count. Work that does not depend on the tokens
                 is divided by those of a batch (train.batch_size ×
                 model.context).
  training       FLOPs of the whole model per token, forward and backward
  of first       the preceding column, relative to the first row
  score matrix   memory of one sequence's scores in one layer, for a kernel that
                 stores them all
  KV/token       cache of a decoder per token, all layers
Bytes are those of 16-bit numbers; with precision=fp32, of 32-bit numbers.

Flags
{flags}
"""


PARSER = Parser(HELP)
PARSER.option(
    "--at",
    "SIZE",
    f"{', '.join(SIZES)}: the shape of conf/model/SIZE, and its vocabulary. The model is this"
    " program's GPT in that shape: tied embedding, model.position as given",
    one_of(SIZES),
)
PARSER.option(
    "--vocabulary", "N", "default: that of SIZE, or of data.tokenizer=bytes", whole_number(1)
)
PARSER.switch("--measure", "time training steps: one model at a time, in turns, medians")
PARSER.switch("--json", "print all figures, unrounded, as JSON")
PARSER.switch("--csv", "the same as CSV")


def main(argv: list[str]) -> int:
    """Print the cost of variants."""
    args = PARSER.parse(argv)
    words = args.words
    if args.json and args.csv:
        raise UserError("--json and --csv: give one of the two")
    vocabulary = args.vocabulary or _VOCABULARIES.get(args.at, _DEFAULT_VOCABULARY)
    if args.at:
        if any(word.lstrip("+").startswith("model=") for word in words):
            raise UserError("--at and model=…: give one of the two")
        words = [f"model={args.at}", *words]
    rows, jobs = _make_rows(compose_jobs(words, of_all_variants=True), vocabulary)
    configs = [job.config for job in jobs]
    if args.measure:
        _measure(configs, rows, vocabulary)
    if args.json:
        print_json(rows)
    elif args.csv:
        print_csv(rows)
    else:
        from qkablate.models.cost import MAX_DECOMPOSITION, decomposition_steps

        _print(rows, configs, vocabulary)
        job = choose_next(jobs)
        can_verify = decomposition_steps(job.config.model) <= MAX_DECOMPOSITION
        is_small = _fits_memory(job.config, rows[jobs.index(job)]["params"])
        # What is too large for this machine can be trained at the default size.
        words = [word for word in job.words if is_small or not word.startswith("model")]
        print_next_commands(*[["verify", *job.words]] * can_verify, ["train", *words])
    return 0


def _make_rows(planned: list[Job], vocabulary: int) -> tuple[list[dict[str, Any]], list[Job]]:
    """Return a row for every job whose variant supports its size, and those jobs."""
    from qkablate.models.cost import describe_cost, varied_values
    from qkablate.training import hardware
    from qkablate.training.resolve import build_empty_model

    models = build_jobs(
        planned, lambda config: build_empty_model(hardware.resolve(config), vocabulary)
    )
    jobs = [job for job, _ in models]
    rows = [describe_cost(job.config, model, vocabulary) for job, model in models]
    first = rows[0]["training_flops_per_token"]
    for row, values in zip(rows, varied_values([job.config for job in jobs]), strict=True):
        row["training_flops_ratio"] = row["training_flops_per_token"] / first
        row |= {key: value for key, value in values.items() if key.rpartition(".")[2] not in row}
    return rows, jobs


def _measure(configs: list[Config], rows: list[dict[str, Any]], vocabulary: int) -> None:
    from tqdm import tqdm

    from qkablate.training import hardware
    from qkablate.training.measure import check_memory, measure_step_times

    device = hardware.resolve(configs[0])
    check_memory([row["params"] for row in rows], device.device)
    print(
        f"timing steps of {device.train.batch_size} × {device.model.context} tokens on"
        f" {device.device}, {device.precision}, {device.threads} threads",
        file=sys.stderr,
    )
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}", disable=None) as bar:
        measured = measure_step_times(
            configs, vocabulary, lambda part: bar.update(int(100 * part) - bar.n)
        )
    for row, times in zip(rows, measured, strict=True):
        row["step_ms"] = 1000 * times.median
        row["step_ratio"] = times.median / measured[0].median
        row["step_rounds"] = times.rounds


def _fits_memory(config: Config, params: int) -> bool:
    """Return whether this machine has the memory to train so many parameters, and say if not."""
    from qkablate.training import hardware
    from qkablate.training.measure import BYTES_PER_PARAMETER, free_bytes

    required, free = BYTES_PER_PARAMETER * params, free_bytes(hardware.resolve(config).device)
    if required > free:
        print(
            f"training it takes {format_bytes(required)} of memory, and {format_bytes(free)} are"
            " free here; the default size fits"
        )
    return required <= free


def _print(rows: list[dict[str, Any]], configs: list[Config], vocabulary: int) -> None:
    from qkablate.models.cost import varied_values

    head = ["variant", "params", "attention", "project", "scores", "values", "training", "of first"]
    head += ["score matrix", "KV/token"]
    timed = "step_ms" in rows[0]
    table = []
    varied = varied_values(configs)
    for r, values in zip(rows, varied, strict=True):
        cells = [" ".join([r["variant"], *(_short_key(*pair) for pair in values.items())])]
        cells += [f"{r['params']:,}", *(format_short(r[key]) for key in _FIGURES)]
        cells += [f"× {r['training_flops_ratio']:.2f}", format_bytes(r["score_matrix_bytes"])]
        cells += [format_bytes(r["kv_bytes_per_token"])]
        if timed:
            cells += [f"{r['step_ms']:.1f}", f"× {r['step_ratio']:.2f}"]
        table.append(cells)
    print_table(head + (["ms/step", "of first"] if timed else []), table)
    model, differing = configs[0].model, varied[0]
    shared = {
        "model.layers": format_count(model.layers, "layer"),
        "model.d_model": f"d {model.d_model:,}",
        "model.heads": format_count(model.heads, "head"),
        "model.context": f"context {model.context:,}",
        "precision": f"{32 if configs[0].precision == 'fp32' else 16}-bit numbers",
    }
    texts = [text for key, text in shared.items() if key not in differing]
    print()
    print_text(f"{', '.join([*texts, f'vocabulary {vocabulary:,}'])}")
    print("FLOPs are per token; columns: qkablate cost --help")


def _short_key(key: str, value: Any) -> str:
    letter = {"model.d_model": "d", "model.heads": "h"}.get(key)
    return f"{letter}{value}" if letter else f"{key.rpartition('.')[2]}={value}"


_FIGURES = (
    "attention_params_per_layer",
    "projection_flops_per_token",
    "score_flops_per_token",
    "value_flops_per_token",
    "training_flops_per_token",
)
