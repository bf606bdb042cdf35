"""The result of a run: on the terminal, in result.json, in W&B."""

import dataclasses
import time
import traceback
from collections import defaultdict
from typing import Any, TypeVar

from qkablate import __version__
from qkablate.attention.layer import MATCHES
from qkablate.config import ModelConfig, read_limit
from qkablate.data import Corpus, TaggedSentences
from qkablate.data.text.references import measure_text_references
from qkablate.disk import write_atomic
from qkablate.models.catalogue import encoder_layers
from qkablate.redaction import redact
from qkablate.runs import text_references
from qkablate.runs.lease import Lease, LeaseLost, LeaseObserver
from qkablate.runs.records import read_json, seal_result, write_json_once
from qkablate.runs.run import Run
from qkablate.table import format_count
from qkablate.tracking.wandb.run import RunArtifacts, RunIdentity
from qkablate.training import checkpoint, hardware
from qkablate.training.resolve import RunPlan

T = TypeVar("T")

OTHER_METRICS = ("bits_per_byte", "accuracy", "exact")  # of text and of tasks; null for the other


def format_header(plan: RunPlan, processes: int = 1) -> list[str]:
    """Return the lines that describe a run on the terminal before it trains."""
    config, model = plan.config, plan.config.model
    first, *_ = plan.sites.values()
    matches = {site: layer.match for site, layer in plan.sites.items()}
    multipliers = {
        site: f"QK × {by_circuit['qk']:.3g}, OV × {by_circuit['ov']:.3g}"
        for site, by_circuit in plan.lr_multipliers.items()
    }
    if config.init_from.run is None:
        start = f"matched to standard: {_format_sites(matches)}"
    else:
        start = f"projected from run {config.init_from.id} after {config.init_from.step:,} steps"
    sharded = " with sharded weights" if config.train.fsdp else ""
    backend = " by oneDNN" if config.matmul == "onednn" else ""
    threads = format_count(int(config.threads), "thread")
    together = f"{processes} processes{sharded} of " if processes > 1 else ""
    lines = [
        f"run      {plan.run.folder}",
        f"variant  {config.variant.name}: {first.equation}",
        f"init     {start}; learning rates of the circuits: {_format_sites(multipliers)}",
        f"model    {_format_layers(model)}, d {model.d_model},"
        f" {format_count(model.heads, 'head')}, context"
        f" {model.context}: {plan.params['total']:,} parameters",
        f"data     {_describe_data(plan)}",
        f"machine  {config.device}, {config.precision}{backend}, {together}"
        f"{threads}, kernel {_format_sites(plan.kernels)}{', compiled' if config.compile else ''}",
    ]
    if sharded and processes > 1 and config.diagnostics.every:
        lines.append("no diagnostics: with train.fsdp=true no process has all of the weights")
    return lines


def _describe_data(plan: RunPlan) -> str:
    if isinstance(plan.data, TaggedSentences):
        return plan.data.describe(read_limit(plan.config, "test"))
    return plan.data.description


def _measure_chance(plan: RunPlan) -> float | None:
    """Return the accuracy of guessing on what the run reads of the test split, if it is known."""
    if isinstance(plan.data, TaggedSentences):
        return plan.data.measure_baselines(read_limit(plan.config, "test")).chance
    return plan.data.chance


def make_base_result(
    plan: RunPlan, packed: int, processes: int = 1, program_runs: int = 1
) -> dict[str, Any]:
    """Return the content of result.json before training."""
    config, model = plan.config, plan.config.model
    limit, test_limit = (read_limit(config, split) for split in ("val", "test"))
    test_tokens = plan.data.test_tokens(test_limit)
    return {
        "id": plan.run.id,
        "label": plan.run.label,
        "variant": config.variant.name,
        "seed": config.seed,
        "d_model": model.d_model,
        "heads": model.heads,
        "layers": model.layers,
        "context": model.context,
        "loss": {"train": None, "val": None, "test": None},
        **{name: {"val": None, "test": None} for name in OTHER_METRICS},
        # Tokens that the losses of val and train, and of test, were read of; null: of all.
        "eval_tokens": None if limit is None or limit >= plan.data.tokens["val"] else limit,
        "test_tokens": None if test_tokens == plan.data.tokens["test"] else test_tokens,
        "chance": _measure_chance(plan),
        text_references.KEY: None,
        "measures": {},
        "data": {key: value for key, value in vars(config.data).items() if value is not None},
        "params": plan.params,
        "flops_per_token": plan.flops_per_token,
        "init": {
            "mode": config.variant.init,
            # The worst of the sites.
            "match": min((layer.match for layer in plan.sites.values()), key=MATCHES.index),
        },
        "lr": {
            "factor": config.variant.lr,
            "matched": plan.matched_lr,
            "multiplier": _merge_sites(plan.lr_multipliers),
        },
        "tokens_per_second": None,
        "packed": packed,  # speeds of packed runs are not comparable
        "optimizer": config.optim.optimizer,
        "precision": config.precision,
        "matmul": config.matmul,
        "device": config.device.partition(":")[0],
        "kernel": _format_sites(plan.kernels),
        "loss_blocks": plan.loss_blocks,
        "compile": config.compile,
        "vmap": config.train.vmap != 1,  # trained with other runs as one program
        "program_runs": program_runs,  # of its last program, which share the seconds of that
        "threads": config.threads,
        "processes": processes,
        "data_fingerprint": plan.data.fingerprint,
        **({"init_from": plan.identity["init_from"]} if config.init_from.run is not None else {}),
        "attempt": plan.run.attempt,
        "version": __version__,
        "steps": 0,
        "tokens": 0,
        "seconds": 0.0,
        "peak_memory_bytes": 0,
    }


def _merge_sites(values: dict[str, T]) -> T | dict[str, T]:
    """Return the value of all sites, or the values by site where they differ."""
    first, *others = values.values()
    return first if all(other == first for other in others) else values


def _format_sites(values: dict[str, str]) -> str:
    """Format the value of all sites, or each value with its sites."""
    sites: defaultdict[str, list[str]] = defaultdict(list)
    for site, value in values.items():
        sites[value].append(site)
    if len(sites) == 1:
        return next(iter(sites))
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in sites.items())


def _format_layers(model: ModelConfig) -> str:
    if model.form != "encoder_decoder":
        return format_count(model.layers, "layer")
    encoder = format_count(encoder_layers(model), "encoder layer")
    return f"{encoder}, {format_count(model.layers, 'decoder layer')}"


def make_failure(run: Run, error: Exception) -> dict[str, Any]:
    """Return the result of a failed run, and write the traceback to error.txt."""
    first_line = (str(error).strip() or "no message").splitlines()[0]
    write_atomic(run.folder / "error.txt", redact(traceback.format_exc()))
    return {
        "status": "failed",
        "error": redact(f"{type(error).__name__}: {first_line}"),
        "out_of_memory": hardware.is_out_of_memory(error),
    }


def now() -> str:
    """Return the time as result.json holds it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def measure_references(plan: RunPlan, result: dict[str, Any]) -> dict[str, Any] | None:
    """Return the losses of n-grams and a compressor on the text that a run was tested on.

    They learn from as many tokens as the run has seen, up to a limit. Measured once for many runs,
    after training: no run waits for them at its start.
    """
    data = plan.data
    if not isinstance(data, Corpus) or result["status"] != "done" or result["loss"]["test"] is None:
        return None
    try:
        limit = read_limit(plan.config, "test")
        measured = measure_text_references(data, result["tokens"], limit)
    except (MemoryError, OSError):  # no reason to lose the run
        return None
    return {"tokens": measured.tokens, "ngram": measured.ngram, "lzma": measured.lzma}


def write_result(run: Run, lease: Lease, result: dict[str, Any]) -> None:
    """Write result.json once; raise LeaseLost if another process has written one."""
    lease.verify()
    try:
        write_json_once(run.folder / "result.json", seal_result(result, run.metrics))
    except FileExistsError:
        raise LeaseLost(
            f"{run.folder} has another process's result; this process stopped"
        ) from None
    if result["status"] == "done":
        checkpoint.keep_newest(run.checkpoints, 1)


def record_failure(
    plan: RunPlan,
    reason: str,
    *,
    out_of_memory: bool,
    packed: int,
    observer: LeaseObserver | None = None,
) -> None:
    """Write the result of a run whose process died before it could."""
    with plan.run.hold_lease(observer) as lease:
        if plan.run.result is None:
            failure = {"status": "failed", "error": reason, "out_of_memory": out_of_memory}
            result = make_base_result(plan, packed) | failure | {"ended": now()}
            write_result(plan.run, lease, result)


def make_wandb_identity(plan: RunPlan) -> RunIdentity:
    """Return the names of the run in W&B."""
    config, run = plan.config, plan.run
    arm = run.label.rpartition("-s")[0]
    return RunIdentity(
        id=f"{run.id}-{run.attempt}",
        name=run.label,
        group=config.tracking.group or arm,
        job_type=config.tracking.job_type or arm,
        tags=(config.variant.name, f"data={config.data.source}", *config.tracking.tags),
    )


def make_wandb_config(plan: RunPlan) -> dict[str, Any]:
    """Return the config in W&B: of local paths the last name, with the commit."""
    config = dataclasses.asdict(plan.config)
    del config["out"], config["tracking"], config["init_from"]["run"]
    del config["data"]["path"], config["data"]["cache"]
    for section, key in (("variant", "file"), ("data", "files"), ("data", "name")):
        text = config[section][key]
        if text is not None and (key != "name" or text.startswith(("/", ".", "~"))):
            config[section][key] = text.rstrip("/").rpartition("/")[2]
    environment = read_json(plan.run.folder / "environment.json")
    code = environment.get("code") if isinstance(environment, dict) else None
    config |= {"run_id": plan.run.id, "kernel": _format_sites(plan.kernels), "params": plan.params}
    config["code"] = None
    if isinstance(code, dict):  # the diff itself is in the artifact
        config["code"] = {"commit": code.get("commit"), "changed": bool(code.get("diff"))}
    return config


def collect_artifacts(plan: RunPlan, result: dict[str, Any]) -> RunArtifacts | None:
    """Return the files of an ended run that W&B receives."""
    run = plan.run
    if "status" not in result:
        return None
    names = ["config.yaml", "environment.json"]
    if result["status"] != "failed":  # a retry would have other rows
        names.append("metrics.jsonl")
    model = {}
    newest = checkpoint.find_checkpoints(run.checkpoints)
    if plan.config.tracking.artifacts and result["status"] == "done" and newest:
        paths = [*newest[0].iterdir(), run.folder / "config.yaml", run.folder / "tokenizer.json"]
        model = {str(path.relative_to(run.folder)): path for path in paths if path.exists()}
    files = {name: run.folder / name for name in names}
    return RunArtifacts(seal_result(result, run.metrics), files, model)


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of the run in W&B."""
    summary = {f"final/{split}_loss": value for split, value in result["loss"].items()}
    for name in OTHER_METRICS:
        values = result.get(name) or {}
        summary |= {f"final/{split}_{name}": value for split, value in values.items()}
    if result["chance"] is not None:
        summary["final/chance_accuracy"] = result["chance"]
    if references := result[text_references.KEY]:
        summary |= {f"text/ngram_{n}": loss for n, loss in enumerate(references["ngram"], 1)}
        summary["text/lzma"] = references["lzma"]
        summary["text/beats_ngrams"] = text_references.has_beaten_ngrams(result)
    for name in ("status", "tokens", "seconds", "tokens_per_second"):
        summary[f"final/{name}"] = result.get(name)
    summary |= {"params": result["params"]["total"], "flops_per_token": result["flops_per_token"]}
    summary["final/flops"] = result["tokens"] * result["flops_per_token"]
    return {name: value for name, value in summary.items() if value is not None}
