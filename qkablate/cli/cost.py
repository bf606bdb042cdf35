"""`qkablate cost`: the cost of variants at a size, by formula and by measurement."""

import sys
from typing import Any

from qkablate.cli.arguments import Parser, one_of, whole_number
from qkablate.compose.configs import (
    Job,
    build_jobs,
    choose_next,
    compose_jobs,
    training_commands,
)
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

Cost = list[dict[str, Any]]  # the rows of a model, one per site

SIZES = config_names("model")
# Of models that do not read bytes.
_VOCABULARIES = {"gpt-j": 50400, "gpt2": 50257, "300m": 50304, "llama_125m": 32000}
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

A model with an encoder and a decoder has a row per site: encoder, decoder and
cross-attention. Its FLOPs are per token of the target, for a source of
model.source tokens; the KV/token of cross-attention is per token of the source,
and layers that cache the source itself share one copy. Bytes are those of
16-bit numbers; with precision=fp32, of 32-bit numbers.

Flags
{flags}

Exit codes: 0 the costs are printed · 2 a mistake in the command
"""


PARSER = Parser(HELP)
PARSER.option(
    "--at",
    "SIZE",
    f"{', '.join(SIZES)}: the model of conf/model/SIZE, with the published vocabulary of"
    f" {', '.join(_VOCABULARIES)}, and otherwise that of bytes",
    one_of(SIZES),
)
PARSER.option(
    "--vocabulary",
    "N",
    "size of the vocabulary (default: that of a task, of SIZE, or 256, that of bytes;"
    " data.tokenizer is not read)",
    whole_number(1, 2**31 - 1),
)
PARSER.switch("--measure", "also measure the median time of a training step, in turns")
PARSER.switch("--json", "print all figures, unrounded, as JSON")
PARSER.switch("--csv", "print all figures, unrounded, as CSV")


def main(argv: list[str]) -> int:
    """Print the cost of variants."""
    args = PARSER.parse(argv)
    words = args.words
    if args.json and args.csv:
        raise UserError("--json and --csv: give one of the two")
    if args.at:
        if any(word.lstrip("+").startswith("model=") for word in words):
            raise UserError("--at and model=…: give one of the two")
        words = [f"model={args.at}", *words]
    planned = compose_jobs(words, of_all_variants=True)
    vocabulary = args.vocabulary or _find_vocabulary(planned, args.at)
    jobs, costs = _describe(planned, vocabulary)
    configs = [job.config for job in jobs]
    if args.measure:
        _measure(configs, costs, vocabulary)
    rows = [row for cost in costs for row in cost]
    if args.json:
        print_json(rows)
    elif args.csv:
        print_csv(rows)
    else:
        from qkablate.models.cost import MAX_DECOMPOSITION, decomposition_steps

        _print(costs, configs, vocabulary)
        job = choose_next(jobs)
        can_verify = decomposition_steps(job.config.model) <= MAX_DECOMPOSITION
        is_small = _fits_memory(job.config, costs[jobs.index(job)][0]["params"])
        # What is too large for this machine can be trained at the default size.
        words = [word for word in job.words if not word.startswith("model")]
        training = training_commands(job) if is_small else [["train", *words]]
        print_next_commands(*[["verify", *job.words]] * can_verify, *training)
    return 0


def _find_vocabulary(planned: list[Job], at: str | None) -> int:
    """Return the vocabulary of a task, of a published size, or of bytes."""
    from qkablate.data import TASKS, open_task

    tasks = [job.config for job in planned if job.config.data.source in TASKS]
    if not tasks:
        return _VOCABULARIES.get(at or "", _DEFAULT_VOCABULARY)
    found = {open_task(config.data, config.model).vocabulary for config in tasks}
    if len(found) > 1 or len(tasks) < len(planned):
        raise UserError("data: these have different vocabularies; give --vocabulary=N")
    return found.pop()


def _describe(planned: list[Job], vocabulary: int) -> tuple[list[Job], list[Cost]]:
    """Return every job whose variant supports its size, and its cost."""
    from qkablate.models.cost import describe_cost, varied_values
    from qkablate.training import hardware
    from qkablate.training.resolve import build_empty_model

    models = build_jobs(
        planned, lambda config: build_empty_model(hardware.resolve(config), vocabulary)
    )
    jobs = [job for job, _ in models]
    costs = [describe_cost(job.config, model, vocabulary) for job, model in models]
    first = costs[0][0]["training_flops_per_token"]
    for cost, values in zip(costs, varied_values([job.config for job in jobs]), strict=True):
        for row in cost:
            row["training_flops_ratio"] = row["training_flops_per_token"] / first
            row |= {k: value for k, value in values.items() if k.rpartition(".")[2] not in row}
    return jobs, costs


def _measure(configs: list[Config], costs: list[Cost], vocabulary: int) -> None:
    from tqdm import tqdm

    from qkablate.training import hardware
    from qkablate.training.measure import check_memory, measure_step_times

    device = hardware.resolve(configs[0])
    check_memory([cost[0]["params"] for cost in costs], device.device)
    print(
        f"timing steps of {device.train.batch_size} × {device.model.context} tokens on"
        f" {device.device}, {device.precision}, {device.threads} threads",
        file=sys.stderr,
    )
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}", disable=None) as bar:
        measured = measure_step_times(
            configs, vocabulary, lambda part: bar.update(int(100 * part) - bar.n)
        )
    for cost, times in zip(costs, measured, strict=True):
        for row in cost:
            row["step_ms"] = 1000 * times.median
            row["step_ratio"] = times.median / measured[0].median
            row["step_rounds"] = times.rounds


def _fits_memory(config: Config, params: int) -> bool:
    """Return whether this machine has the memory to train so many parameters, and say if not."""
    from qkablate.training import hardware
    from qkablate.training.measure import free_bytes

    required = hardware.BYTES_PER_PARAMETER * params
    free = free_bytes(hardware.resolve(config).device)
    if required > free:
        print(
            f"training it takes {format_bytes(required)} of memory, and {format_bytes(free)} are"
            " free here; the default size fits"
        )
    return required <= free


def _print(costs: list[Cost], configs: list[Config], vocabulary: int) -> None:
    from qkablate.models.cost import varied_values

    head = ["variant", "site", "params", "attention", "project", "scores", "values", "training"]
    head += ["of first", "score matrix", "KV/token"]
    timed, has_sites = "step_ms" in costs[0][0], any(len(cost) > 1 for cost in costs)
    head += ["ms/step", "of first"] if timed else []
    table = []
    varied = varied_values(configs)
    for cost, values in zip(costs, varied, strict=True):
        label = " ".join([cost[0]["variant"], *(_short_key(*pair) for pair in values.items())])
        for r in cost:
            cells = [label, r["site"], f"{r['params']:,}"]
            cells += [format_short(r[key]) for key in _FIGURES]
            cells += [f"× {r['training_flops_ratio']:.2f}", format_bytes(r["score_matrix_bytes"])]
            cells += [format_bytes(r["kv_bytes_per_token"])]
            if timed:
                cells += [f"{r['step_ms']:.1f}", f"× {r['step_ratio']:.2f}"]
            if r is not cost[0]:  # what is of the whole model stands in the first row
                cells = ["" if key in _OF_MODEL else c for c, key in zip(cells, head, strict=True)]
            table.append(cells if has_sites else [cells[0], *cells[2:]])
    if not has_sites:
        head.remove("site")
    print_table(head, table, *((2, (), 2) if has_sites else ()))
    model, differing = configs[0].model, varied[0]
    shared = {
        "model.layers": format_count(model.layers, "layer"),
        "model.encoder_layers": f"encoder {format_count(deep, 'layer')}"
        if (deep := model.encoder_layers)
        else "",
        "model.d_model": f"d {model.d_model:,}",
        "model.encoder_d_model": f"encoder d {wide:,}" if (wide := model.encoder_d_model) else "",
        "model.heads": format_count(model.heads, "head"),
        "model.source": f"source {model.source or model.context:,}" if has_sites else "",
        "model.context": f"context {model.context:,}",
        "precision": f"{32 if configs[0].precision == 'fp32' else 16}-bit numbers",
    }
    texts = [text for key, text in shared.items() if text and key not in differing]
    print()
    print_text(f"{', '.join([*texts, f'vocabulary {vocabulary:,}'])}")
    target = " of the target" if has_sites else ""
    print(f"FLOPs are per token{target}; columns: qkablate cost --help")


def _short_key(key: str, value: Any) -> str:
    letter = {"model.d_model": "d", "model.heads": "h"}.get(key)
    return f"{letter}{value}" if letter else f"{key.rpartition('.')[2]}={value}"


_OF_MODEL = ("variant", "params", "training", "of first", "ms/step")
_FIGURES = (
    "attention_params_per_layer",
    "projection_flops_per_token",
    "score_flops_per_token",
    "value_flops_per_token",
    "training_flops_per_token",
)
