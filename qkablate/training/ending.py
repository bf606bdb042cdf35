"""How a sitting ends: what becomes of the run's result, and that it is written once."""

import time
import traceback
from typing import Any

from qkablate.redaction import redacted
from qkablate.runs.lease import Lost, Owner
from qkablate.runs.records import publish_json, sealed, write_atomic
from qkablate.runs.run import EXIT_CODES, Run
from qkablate.tracking import Mirror
from qkablate.training import checkpoint, hardware
from qkablate.training import result as account
from qkablate.training.loop import Trainer
from qkablate.training.resolve import Plan

_CLOCK = "%Y-%m-%dT%H:%M:%S%z"


def failed(run: Run, error: Exception) -> dict[str, Any]:
    """A failed run is a result too: what went wrong stands beside the others' numbers."""
    first = (str(error).strip() or "no message").splitlines()[0]
    write_atomic(run.folder / "error.txt", redacted(traceback.format_exc()))
    return {
        "status": "failed",
        "error": redacted(f"{type(error).__name__}: {first}"),
        "out_of_memory": hardware.is_out_of_memory(error),
    }


def spent(
    plan: Plan, trainer: Trainer | None, result: dict[str, Any], began: float
) -> dict[str, Any]:
    """How much of everything the run has taken."""
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 3)}
    if trainer is not None:
        steps = result.get("diverged_at", trainer.progress.step)
        found = {"seconds": round(trainer.seconds(), 3), "steps": steps}
        found["tokens"] = steps * plan.tokens_per_step
    found["peak_memory_bytes"] = hardware.peak_memory(plan.config.device)
    return found | {"ended": time.strftime(_CLOCK)}


def publish(run: Run, owner: Owner, result: dict[str, Any]) -> None:
    result.setdefault("ended", time.strftime(_CLOCK))
    owner.verify()
    try:
        publish_json(run.folder / "result.json", sealed(result, run.metrics))
    except FileExistsError:
        raise Lost(f"{run.folder} has another process's result; this process stopped") from None
    if result["status"] == "done":
        checkpoint.keep_newest(run.checkpoints, 1)


def record_failure(plan: Plan, reason: str, *, out_of_memory: bool, packed: int) -> None:
    """The result of a run whose process died before it could write one."""
    with plan.run.owned() as owner:
        if plan.run.result is None:
            result = account.base_result(plan, packed)
            result |= {"status": "failed", "error": reason, "out_of_memory": out_of_memory}
            publish(plan.run, owner, result)


def close(mirror: Mirror, plan: Plan, result: dict[str, Any]) -> None:
    left = account.left(plan, result) if mirror.is_on else None
    code = EXIT_CODES.get(result.get("status", ""), 1)
    mirror.close(account.summary(result), code, left)
    result["wandb"] = mirror.address
