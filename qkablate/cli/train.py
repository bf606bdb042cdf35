"""`qkablate train`: a Hydra application."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkablate.cli.hydra.app import run_hydra
from qkablate.cli.hydra.configs import built, jobs, next_commands
from qkablate.config import load, variants
from qkablate.errors import UserError, tell
from qkablate.runs.lease import SILENCE, Lost, Observer, Owned
from qkablate.runs.run import EXIT_CODES
from qkablate.training.distributed.ranks import Ranks

# What belongs to one variant, and not to the one that is proposed beside it.
_OF_A_VARIANT = tuple(
    f"variant.{key}" for key in ("name", "qk", "ov", "norm", "mask_self", "rank", "groups", "file")
)

# With these it is not our configuration that Hydra reads.
_OTHER_CONFIGS = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"}


def main(argv: list[str]) -> int:
    """The verb, by one process or by several that torchrun has started."""
    ranks = Ranks.found()
    ranks.keep_quiet()
    try:
        return _main(argv, ranks)
    except UserError as mistake:
        if ranks.first:
            raise
        ranks.refuse(str(mistake))
        return 2


def _main(argv: list[str], ranks: Ranks) -> int:
    """Take the verb's own flags off, and give the rest to Hydra."""
    from qkablate.cli.hydra import multirun

    if ranks.count > 1 and {"-m", "--multirun"} & {*argv}:
        raise UserError(
            "-m: several processes train one run together; without torchrun, -m trains many"
        )
    rerun = "--rerun" in argv
    codes: list[int] = []
    multirun.CheckEveryJob.runs = []

    def task(composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        several = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            codes.append(_train(composed, rerun, several, ranks))
        except UserError as mistake:  # told here: Hydra would add lines of its own
            if not ranks.first:
                raise
            tell(f"qkablate: {mistake}")
            codes.append(2)
        except OSError as error:  # before training began: a full disk, say
            tell(f"qkablate: {error}")
            codes.append(1)
        ranks.tell(codes[-1])
        if codes[-1] != 1:
            ranks.leave()

    argv = [word for word in argv if word != "--rerun"]
    flags = {word.partition("=")[0] for word in argv}
    if flags & {"--cfg", "-c"} and not flags & _OTHER_CONFIGS:
        _check([word for word in argv if "=" in word and not word.startswith(("-", "hydra"))])
    run_hydra("train", argv, task)
    if multirun.CheckEveryJob.runs:
        outcomes = multirun.results()
        with suppress(BrokenPipeError):
            _print_table(outcomes)
        codes += [EXIT_CODES.get(o["status"], 1) for o in outcomes]
    return next((code for code in (2, 1, 3) if code in codes), 0)


def _check(words: list[str]) -> None:
    """Hydra would show a configuration that no run can have."""
    from qkablate.training import hardware
    from qkablate.training.resolve import empty_model

    built(jobs(words), lambda config: empty_model(hardware.resolve(config), 1))


def _train(composed: Any, rerun: bool, several: bool, ranks: Ranks) -> int:
    """Train one run, tell what became of it, and give its exit code."""
    from hydra.core.hydra_config import HydraConfig

    config = ranks.settled(load(composed))
    from qkablate.data.corpus import look

    look(config.data)
    from qkablate.training.resolve import plan
    from qkablate.training.session import follow, run
    from qkablate.training.signals import Stopped

    ranks.join(config.device)
    try:
        if not ranks.first:
            return follow(ranks)
        planned = plan(config)
        observer = settled(planned.run.folder)
        outcome = run(planned, rerun=rerun, observer=observer, ranks=ranks)
    except (Owned, Lost) as other:
        tell(f"qkablate: {other}")
        return 1
    except Stopped as stopped:
        ranks.leave()
        # In a multirun, too: whoever interrupts does not want the next job to start.
        raise SystemExit(stopped.exit_code) from None
    except RuntimeError as error:
        if not ranks.lost(error):
            raise
        others = f"another of the {ranks.count} processes has ended"
        tell(f"qkablate: {others}; the same command goes on from the last checkpoint")
        return 1
    with suppress(BrokenPipeError):  # nobody reads on, as in `| head`; the run is done all the same
        _print_result(outcome.result, outcome.trained, planned.run.folder)
        if not several:
            words = list(HydraConfig.get().overrides.task)
            _print_next(outcome.result, words, planned.run.folder)
    if several and outcome.signal:
        raise SystemExit(128 + outcome.signal)
    return EXIT_CODES[outcome.result["status"]]


def settled(folder: Path) -> Observer:
    """An observer that knows whether the run is owned. What another machine, or this one before it
    was switched off, left behind shows only in time.
    """
    observer = Observer()
    found = observer.judge(folder)
    if not found.sure:
        tell(f"qkablate: waiting up to {SILENCE:.0f} s for a sign of life of {found.by}")
        observer.settle(folder)
    return observer


def _print_result(result: dict[str, Any], trained: bool, folder: Path) -> None:
    if not trained:
        print(f"this run has ended before ({result['ended']}); --rerun trains it anew")
    print(f"\n{result['label']}: {result['status']}")
    if result["status"] == "done":
        loss, bits, right = (result[key] for key in ("loss", "bits_per_byte", "accuracy"))
        read = [split for split in ("val", "test", "train") if loss[split] is not None]
        losses = "   ".join(f"{split} {loss[split]:.4f}" for split in read)
        print(f"  loss      {losses}   nats per token")
        if bits["val"] is not None:
            told = "   ".join(f"{split} {bits[split]:.4f}" for split in read if split in bits)
            print(f"  bits      {told}   per byte")
        if right["val"] is not None:
            told = "   ".join(f"{split} {right[split]:.1%}" for split in read if split in right)
            print(f"  accuracy  {told}")
    elif result["status"] == "diverged":
        print(f"  the loss was not finite any more at step {result['diverged_at']}")
    else:
        print(f"  {result['error']} (all of it in {folder / 'error.txt'})")
    speed = result["tokens_per_second"]
    pace = f", {speed:,.0f} tokens/s" if speed else ""
    print(f"  time      {result['seconds']:.1f} s for {result['tokens']:,} tokens{pace}")
    print(f"  folder    {folder}")


def _print_next(result: dict[str, Any], overrides: list[str], folder: Path) -> None:
    """The commands one types next."""
    lines = []
    if result["status"] == "done":
        own = ("variant=", *_OF_A_VARIANT, "seed=", "~", "hydra")
        rest = [word for word in overrides if not word.startswith(own)]
        words = shlex.join(rest)
        other = "standard" if result["variant"] != "standard" else "merged_w"
        lines.append(f"qkablate train variant={other} seed={result['seed']} {words}".rstrip())
        pair = f"variant={other},{result['variant']}"
        begun = any(word.startswith("start.") for word in overrides)
        if result["variant"] in variants() and not begun:  # those would have parents of their own
            lines.append(f"qkablate train -m {pair} seed=0,1,2 {words}".rstrip())
    if _is_recorded(result):
        lines.append(shlex.join(["qkablate", "sync", str(folder)]))
    elif result.get("wandb"):
        lines.append(result["wandb"])
    if lines:
        print("\nNext\n" + "\n".join(f"  {line}" for line in lines))


def _print_table(outcomes: list[dict[str, Any]]) -> None:
    width = max(len(o["folder"].name) for o in outcomes)
    varied = max(len(o["varied"]) for o in outcomes)
    # Of text in bits, which compare across tokenizers; of tasks what part is right.
    beside = {"bits_per_byte": "bits/byte", "accuracy": "accuracy"}
    shown = {
        key: told
        for key, told in beside.items()
        if any(o.get(key, {}).get("test") is not None for o in outcomes)
    }
    head = f"{'run':<{width}}  {'':<{varied}}  {'status':<8}  {'val':>7}  {'test':>7}"
    print("\n" + "  ".join([head, *(f"{told:>9}" for told in shown.values()), f"{'seconds':>8}"]))
    for o in outcomes:
        val, test = (_number(o["loss"].get(split), 7, 4) for split in ("val", "test"))
        name = f"{o['folder'].name:<{width}}  {o['varied']:<{varied}}"
        more = [_number(o.get(key, {}).get("test"), 9, 4) for key in shown]
        line = [f"{name}  {o['status']:<8}  {val}  {test}", *more, _number(o["seconds"], 8, 1)]
        print("  ".join(line))
    if any(map(_is_recorded, outcomes)):
        out = str(outcomes[0]["folder"].parent.parent)
        next_commands(["sync", *([] if out == "outputs" else [f"out={out}"])])


def _is_recorded(result: dict[str, Any]) -> bool:
    """Whether W&B's server does not have it yet."""
    from qkablate.tracking.wandb.run import OFFLINE

    return result.get("wandb") == OFFLINE


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
