"""What a run says of itself: on the terminal, in result.json, in W&B."""

import dataclasses
from typing import Any

from qkablate import __version__
from qkablate.runs.records import read_json, sealed
from qkablate.tracking.wandb.run import Identity, Left
from qkablate.training.checkpoint import newest_first
from qkablate.training.resolve import Plan

BESIDES_LOSS = ("bits_per_byte", "accuracy")  # of text and of tasks: null where there is none


def header(plan: Plan, processes: int = 1) -> list[str]:
    config, model = plan.config, plan.config.model
    sharded = " that share the weights" if config.train.shard else ""
    by = " by oneDNN" if config.products == "onednn" else ""
    together = f"{processes} processes{sharded} with " if processes > 1 else ""
    lines = [
        f"run      {plan.run.folder}",
        f"variant  {config.variant.name}: {plan.equation}",
        f"start    {_begun(plan)}; learning rates of the circuits:"
        f" QK × {plan.lr_multiplier['qk']:.3g}, OV × {plan.lr_multiplier['ov']:.3g}",
        f"model    {model.layers} layers, d {model.d_model}, {model.heads} heads, context"
        f" {model.context}: {plan.params['total']:,} parameters",
        f"data     {plan.data.told}",
        f"machine  {config.device}, {config.precision}{by}, {together}{config.threads} threads,"
        f" kernel {plan.kernel}{', compiled' if config.compile else ''}",
    ]
    if sharded and processes > 1 and config.diagnose.every:
        lines.append("diagnose nothing: with train.shard=true no process has all of the weights")
    return lines


def _begun(plan: Plan) -> str:
    start = plan.config.start
    if start.run is None:
        return f"matched to standard: {plan.match}"
    return f"from run {start.id} after {start.step:,} steps, put into this form"


def base_result(plan: Plan, packed: int, processes: int = 1) -> dict[str, Any]:
    config, model = plan.config, plan.config.model
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
        **{name: {"val": None, "test": None} for name in BESIDES_LOSS},
        "measures": {},
        "data": {key: value for key, value in vars(config.data).items() if value is not None},
        "params": plan.params,
        "flops_per_token": plan.flops_per_token,
        "init": {"mode": config.variant.init, "match": plan.match},
        "lr": {"mode": config.variant.lr, "multiplier": plan.lr_multiplier},
        "tokens_per_second": None,
        "packed": packed,  # beside others, a speed says little
        "precision": config.precision,
        "products": config.products,
        "device": config.device.partition(":")[0],
        "kernel": plan.kernel,
        "loss_blocks": plan.loss_blocks,
        "compile": config.compile,
        "threads": config.threads,
        "processes": processes,
        "data_fingerprint": plan.data.fingerprint,
        **({"start": plan.identity["start"]} if config.start.run is not None else {}),
        "attempt": plan.run.attempt,
        "version": __version__,
        "steps": 0,
        "tokens": 0,
        "seconds": 0.0,
        "peak_memory_bytes": 0,
    }


def wandb_identity(plan: Plan) -> Identity:
    config, run = plan.config, plan.run
    arm = run.label.rpartition("-s")[0]
    return Identity(
        id=f"{run.id}-{run.attempt}",
        name=run.label,
        group=config.track.group or arm,
        job_type=config.track.job_type or arm,
        tags=(config.variant.name, *config.track.tags),
    )


def wandb_config(plan: Plan) -> dict[str, Any]:
    config = dataclasses.asdict(plan.config)
    config["data"] = {k: v for k, v in config["data"].items() if k not in ("path", "cache")}
    del config["out"], config["track"], config["start"]["run"]
    config |= {"run_id": plan.run.id, "kernel": plan.kernel, "params": plan.params}
    return config | {"code": _code(plan)}


def _code(plan: Plan) -> dict[str, Any] | None:
    """The commit, and whether anything was changed since: the change itself is in the artifact."""
    known = read_json(plan.run.folder / "environment.json")
    found = known.get("code") if isinstance(known, dict) else None
    if not isinstance(found, dict):
        return None
    return {"commit": found.get("commit"), "changed": bool(found.get("diff"))}


def left(plan: Plan, result: dict[str, Any]) -> Left | None:
    """What W&B is given of a run that has ended."""
    run = plan.run
    if "status" not in result:
        return None
    names = ["config.yaml", "environment.json"]
    if result["status"] != "failed":  # it may be tried again, and then has other rows
        names.append("metrics.jsonl")
    model = {}
    newest = newest_first(run.checkpoints)
    if plan.config.track.artifacts and result["status"] == "done" and newest:
        paths = [*newest[0].iterdir(), run.folder / "config.yaml", run.folder / "tokenizer.json"]
        model = {str(path.relative_to(run.folder)): path for path in paths if path.exists()}
    files = {name: run.folder / name for name in names}
    return Left(sealed(result, run.metrics), files, model)


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """What W&B shows of the end, under the names of the metrics."""
    flat = {f"final/{split}_loss": value for split, value in result["loss"].items()}
    for name in BESIDES_LOSS:
        flat |= {f"final/{split}_{name}": value for split, value in result[name].items()}
    for name in ("status", "tokens", "seconds", "tokens_per_second"):
        flat[f"final/{name}"] = result.get(name)
    flat |= {"params": result["params"]["total"], "flops_per_token": result["flops_per_token"]}
    flat["final/flops"] = result["tokens"] * result["flops_per_token"]
    return {name: value for name, value in flat.items() if value is not None}
