"""`qkablate train`: a Hydra application."""

import shlex
import sys
from pathlib import Path
from typing import Any

from qkablate.cli.hydra_app import run_hydra
from qkablate.config import load


def main(argv: list[str]) -> int:
    """Take the verb's own flags off, and give the rest to Hydra."""
    from qkablate.cli.multirun import CheckedSweeper

    rerun = "--rerun" in argv
    words = [word for word in argv if word != "--rerun"]
    single: list[dict[str, Any]] = []
    CheckedSweeper.outcomes = []

    def task(composed: Any) -> dict[str, Any]:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.get().mode.name == "MULTIRUN":
            return _job(composed, rerun)
        single.append(_train(composed, rerun))
        _print_next(single[0], HydraConfig.get().overrides.task)
        return single[0]

    run_hydra("train", words, task)
    if CheckedSweeper.outcomes:
        _print_table(CheckedSweeper.outcomes)
    return max((int(o["exit_code"]) for o in single + CheckedSweeper.outcomes), default=0)


def _job(composed: Any, rerun: bool) -> dict[str, Any]:
    """One run of several: what goes wrong in it does not stop the others."""
    try:
        return _train(composed, rerun)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"qkablate: {first}", file=sys.stderr)
        return {"run": first, "status": "failed", "loss": {}, "seconds": None, "exit_code": 1}


def _train(composed: Any, rerun: bool) -> dict[str, Any]:
    """Train one run; what became of it, small enough to travel between processes."""
    config = load(composed)
    from qkablate.runs import Owned
    from qkablate.training.plan import plan
    from qkablate.training.session import EXIT_CODES, Stopped, run

    planned = plan(config)
    folder = planned.run.folder
    try:
        result, trained = run(planned, rerun=rerun)
    except Owned as owned:
        print(f"qkablate: {owned}", file=sys.stderr)
        result, trained = {"status": "owned by another", "loss": {}, "seconds": None}, True
    except Stopped as stopped:
        # In a multirun, too: whoever interrupts does not want the next job to start.
        raise SystemExit(stopped.exit_code) from None
    else:
        _print_result(result, trained, folder)
    return {
        "run": str(folder),
        "variant": config.variant.name,
        **{key: result[key] for key in ("status", "loss", "seconds")},
        "exit_code": EXIT_CODES.get(result["status"], 1),
    }


def _print_result(result: dict[str, Any], trained: bool, folder: Path) -> None:
    if not trained:
        print(f"this run has ended before ({result['ended']}); --rerun trains it anew")
    print(f"\n{result['label']}: {result['status']}")
    if result["status"] == "done":
        loss, bits = result["loss"], result["bits_per_byte"]
        print(f"  loss      val {loss['val']:.4f}   test {loss['test']:.4f}   train {loss['train']:.4f}"
              "   nats per token")
        print(f"  bits      val {bits['val']:.4f}   test {bits['test']:.4f}   per byte")
    elif result["status"] == "diverged":
        print(f"  the loss was not finite any more at step {result['diverged_at']}")
    else:
        print(f"  {result['error']} (all of it in {folder / 'error.txt'})")
    speed = result["tokens_per_second"]
    pace = f", {speed:,.0f} tokens/s" if speed else ""
    print(f"  time      {result['seconds']:.1f} s for {result['tokens']:,} tokens{pace}")
    print(f"  folder    {folder}")


def _print_next(outcome: dict[str, Any], overrides: list[str]) -> None:
    """The commands one types next."""
    folder = Path(outcome["run"])
    lines = []
    if outcome["status"] in ("done", "diverged"):
        others = [word for word in overrides if not word.startswith(("variant=", "hydra."))]
        other = "standard" if outcome["variant"] != "standard" else "merged_w"
        rest = "".join(f" {shlex.quote(word)}" for word in others)
        lines.append(f"qkablate train variant={other}{rest}   # the other side of the comparison")
        if not any(word.startswith("seed=") for word in others):
            lines.append(f"qkablate train -m variant={other},{outcome['variant']} seed=0,1,2{rest}")
    from qkablate.runs import read_json

    result = read_json(folder / "result.json") or {}
    if result.get("wandb"):
        lines.append(f"{result['wandb']}")
    if lines:
        print("\nNext\n" + "\n".join(f"  {line}" for line in lines))


def _print_table(outcomes: list[dict[str, Any]]) -> None:
    width = max(len(Path(o["run"]).name) for o in outcomes)
    print(f"\n{'run':<{width}}  {'status':<9}  {'val':>7}  {'test':>7}  {'seconds':>8}")
    for o in outcomes:
        val, test = (_number(o["loss"].get(split), 7, 4) for split in ("val", "test"))
        print(f"{Path(o['run']).name:<{width}}  {o['status']:<9}  {val}  {test}"
              f"  {_number(o['seconds'], 8, 1)}")


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
