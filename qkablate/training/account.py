"""What a run says of itself: on the terminal, in result.json, in W&B."""

import dataclasses
from typing import Any

from qkablate import __version__
from qkablate.tracking.mirror import Identity
from qkablate.training.plan import Plan

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
    return config | {"run_id": plan.run.id, "kernel": plan.kernel, "params": plan.params}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """What W&B shows of the end, under the names of the metrics."""
    flat = {f"final/{split}_loss": value for split, value in result["loss"].items()}
    for name in BESIDES_LOSS:
        flat |= {f"final/{split}_{name}": value for split, value in result[name].items()}
    flat |= {"final/status": result.get("status"), "params": result["params"]["total"]}
    return {name: value for name, value in flat.items() if value is not None}
