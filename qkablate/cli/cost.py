"""`qkablate cost`: what variants cost at a size, by formula and by the clock."""

import sys
from typing import Any

from qkablate.cli.hydra.configs import Job, built, jobs, next_commands, proposed, take_flags, varies
from qkablate.cli.verify import MOST_STEPS, steps
from qkablate.config import Config, flatten, variants
from qkablate.errors import UserError, nearest
from qkablate.table import counted, print_csv, print_json, print_table, short, short_bytes

# What `--at` takes: a model of conf/model, and the vocabulary it is known with.
SIZES = {"gpt-j": 50400, "gpt2": 50257, "300m": 50304, "baby": 256, "nano": 256}

HELP = """qkablate cost: parameters, FLOPs and memory of variants at a size.

Usage: qkablate cost [key=value …] [--at SIZE] [--measure] [--json | --csv] [--vocabulary N]

Without `variant=…` all variants are shown. Keys are those of `qkablate train`; several values are
separated by commas.

Examples
  qkablate cost variant=standard,merged_w model.d_model=256,512
  qkablate cost --at gpt-j                          16 heads of 256 at d 4096
  qkablate cost --at 300m variant=standard,shared_qk,tied_kv,tied_qkv
  qkablate cost variant=standard,merged_w --measure step times on this machine, too
  qkablate cost --csv > cost.csv

Columns
  params         of the whole model
  attention      parameters of one attention layer
  project, scores, values
                 FLOPs of one attention layer, forward, per token: the projections, q kᵀ, and the
                 average of the values. 2 per multiply-add; a causal query sees (T + 1)/2 keys on
                 average, and only those count. What a pass computes once, whatever its tokens,
                 is shared by the tokens of a batch (train.batch_size × model.context).
  training       FLOPs of the whole model per token, forward and backward
  of first       the column before it, as a part of the first row's
  score matrix   what one sequence's scores take in one layer, where a kernel holds them whole
  KV/token       what a decoder keeps per token, all layers
Bytes are those of 16-bit numbers; with precision=fp32, of 32-bit ones.

Flags
  --at SIZE       gpt-j, gpt2, 300m, baby, nano: the shape of conf/model/SIZE and its vocabulary. It
                  is this program's GPT in that shape: tied embedding, model.position as you say
  --vocabulary N  where no SIZE says it; the default is that of data.tokenizer=bytes
  --measure       time training steps: one model at a time, taking turns, medians
  --json, --csv   all figures, unrounded
"""


def main(argv: list[str]) -> int:
    flags, words = take_flags(
        argv, ("--help", "-h", "--measure", "--json", "--csv"), ("--at", "--vocabulary")
    )
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    if "--json" in flags and "--csv" in flags:
        raise UserError("--json and --csv: give one of the two")
    vocabulary = _vocabulary(flags)
    if "--at" in flags:
        if any(word.lstrip("+").startswith("model=") for word in words):
            raise UserError("--at and model=…: give one of the two")
        words = [f"model={flags['--at']}", *words]
    implied = "" if varies(words, "variant") else f"variant={','.join(variants())}"
    rows, kept = _rows(jobs(words, implied), vocabulary)
    settled = [job.config for job in kept]
    if "--measure" in flags:
        _measure(settled, rows, vocabulary)
    if "--json" in flags:
        print_json(rows)
    elif "--csv" in flags:
        print_csv(rows)
    else:
        _print(rows, settled, vocabulary)
        job = proposed(kept)
        verify = [["verify", *job.words]] if steps([job]) <= MOST_STEPS else []
        next_commands(*verify, ["train", *job.words])
    return 0


def _vocabulary(flags: dict[str, str]) -> int:
    size, given = flags.get("--at"), flags.get("--vocabulary")
    if size is not None and size not in SIZES:
        raise UserError(f"--at: '{size}' is not one of {', '.join(SIZES)}{nearest(size, SIZES)}")
    if given is None:
        return SIZES.get(size or "", 256)
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"--vocabulary: '{given}' is not a whole number from 1 on")
    return int(given)


def _rows(planned: list[Job], vocabulary: int) -> tuple[list[dict[str, Any]], list[Job]]:
    """A row for each job that has a meaning, and those jobs."""
    from qkablate.models.cost import cost
    from qkablate.training import hardware
    from qkablate.training.resolve import empty_model

    rows: list[dict[str, Any]] = []
    models = built(planned, lambda config: empty_model(hardware.resolve(config), vocabulary))
    kept = [job for job, _ in models]
    for job, model in models:
        config = job.config
        per_pass = config.train.batch_size * config.model.context
        number_bytes = 4 if config.precision == "fp32" else 2
        found = cost(model, tokens_per_pass=per_pass, number_bytes=number_bytes)
        rows.append(
            {
                "variant": config.variant.name,
                "d_model": config.model.d_model,
                "heads": config.model.heads,
                "layers": config.model.layers,
                "context": config.model.context,
                "vocabulary": vocabulary,
                "params": found.params["total"],
                "attention_params_per_layer": found.layer.params,
                "projection_flops_per_token": found.layer.projections,
                "score_flops_per_token": found.layer.scores,
                "value_flops_per_token": found.layer.values,
                "forward_flops_per_token": found.forward,
                "training_flops_per_token": found.training,
                "training_flops_ratio": found.training / rows[0]["training_flops_per_token"]
                if rows
                else 1.0,
                "score_matrix_bytes": found.score_bytes,
                "kv_bytes_per_token": found.cache_bytes,
            }
        )
    varied = _varied([job.config for job in kept])
    for row, values in zip(rows, varied, strict=True):
        row |= {key: value for key, value in values.items() if key.rpartition(".")[2] not in row}
    return rows, kept


def _varied(configs: list[Config]) -> list[dict[str, Any]]:
    """What tells the rows apart, besides the variant: key → value, for each."""
    flat = [flatten(config) for config in configs]
    keys = [key for key in flat[0] if not key.startswith("variant.")]
    differing = [key for key in keys if len({str(one[key]) for one in flat}) > 1]
    if "seed" in differing:  # the three seeds follow it
        differing = [key for key in differing if not key.startswith("seeds.")]
    return [{key: one[key] for key in differing} for one in flat]


def _measure(settled: list[Config], rows: list[dict[str, Any]], vocabulary: int) -> None:
    from tqdm import tqdm

    from qkablate.training import hardware
    from qkablate.training.measure import check_memory, step_times

    device = hardware.resolve(settled[0])
    check_memory([row["params"] for row in rows], device.device)
    print(
        f"timing steps of {device.train.batch_size} × {device.model.context} tokens on"
        f" {device.device}, {device.precision}, {device.threads} threads",
        file=sys.stderr,
    )
    with tqdm(
        total=100, unit="%", bar_format="{l_bar}{bar}", disable=not sys.stderr.isatty()
    ) as bar:
        found = step_times(settled, vocabulary, lambda part: bar.update(int(100 * part) - bar.n))
    for row, times in zip(rows, found, strict=True):
        row["step_ms"] = 1000 * times.median
        row["step_ratio"] = times.median / found[0].median
        row["step_rounds"] = times.rounds


def _print(rows: list[dict[str, Any]], configs: list[Config], vocabulary: int) -> None:
    head = ["variant", "params", "attention", "project", "scores", "values", "training", "of first"]
    head += ["score matrix", "KV/token"]
    timed = "step_ms" in rows[0]
    table = []
    varied = _varied(configs)
    for r, values in zip(rows, varied, strict=True):
        cells = [" ".join([r["variant"], *(_short_key(*pair) for pair in values.items())])]
        cells += [f"{r['params']:,}", *(short(r[key]) for key in _FIGURES)]
        cells += [f"× {r['training_flops_ratio']:.2f}", short_bytes(r["score_matrix_bytes"])]
        cells += [short_bytes(r["kv_bytes_per_token"])]
        if timed:
            cells += [f"{r['step_ms']:.1f}", f"× {r['step_ratio']:.2f}"]
        table.append(cells)
    print_table(head + (["ms/step", "of first"] if timed else []), table)
    model, differing = configs[0].model, varied[0]
    shared = {
        "model.layers": counted(model.layers, "layer"),
        "model.d_model": f"d {model.d_model:,}",
        "model.heads": counted(model.heads, "head"),
        "model.context": f"context {model.context:,}",
        "precision": f"{32 if configs[0].precision == 'fp32' else 16}-bit numbers",
    }
    said = [text for key, text in shared.items() if key not in differing]
    print(f"\n{', '.join([*said, f'vocabulary {vocabulary:,}'])}")
    print("FLOPs are per token; what the columns are: qkablate cost --help")


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
