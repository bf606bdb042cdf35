"""One sitting of a run: own the folder, go on from what is there, end in a result."""

import dataclasses
import math
import signal
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from qkablate import __version__
from qkablate.model import GPT
from qkablate.runs import EXIT_CODES, environment, read_json, write_atomic, write_json
from qkablate.tracking import Journal, Mirror, Terminal
from qkablate.tracking.mirror import Identity
from qkablate.training import checkpoint, hardware
from qkablate.training.loop import Diverged, Interrupted, Trainer
from qkablate.training.plan import Plan
from qkablate.training.state import Progress

_BESIDES_LOSS = ("bits_per_byte", "accuracy")  # of text and of tasks: null where there is none


class Stopped(Exception):
    """A signal ended the sitting; a checkpoint is written."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Signals:
    """SIGINT and SIGTERM ask for an end at the next step; a second SIGINT takes it."""

    def __init__(self) -> None:
        self.received = 0

    def __bool__(self) -> bool:
        return bool(self.received)

    def _handle(self, number: int, frame: Any) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        try:
            before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are someone else's
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class Outcome:
    """The result of a run, and how it came to this process."""

    result: dict[str, Any]
    trained: bool  # now, not in an earlier sitting
    signal: int = 0  # that came too late to stop this run


def run(plan: Plan, *, rerun: bool = False) -> Outcome:
    """Train the run, or find its result. Raises Owned or Stopped."""
    with plan.run.owned():
        if rerun:
            plan.run.restart()
        result = plan.run.result
        if result is not None and result["status"] != "failed":
            return Outcome(result, trained=False)
        signals = Signals()
        with signals.listening(), hardware.process_state():
            return Outcome(_sit(plan, signals), trained=True, signal=signals.received)


def _sit(plan: Plan, signals: Signals) -> dict[str, Any]:
    began = time.perf_counter()
    run, notes = plan.run, list[str]()
    plan = _recorded(plan, notes)
    config = plan.config
    for name in ("result.json", "error.txt"):  # of a sitting that failed
        (run.folder / name).unlink(missing_ok=True)
    result = _base_result(plan)
    trainer: Trainer | None = None
    with ExitStack() as opened:
        try:
            hardware.prepare(config)
            resumed = checkpoint.load_newest(
                run.checkpoints, config.device, run.metrics, notes.append
            )
            progress = resumed.progress if resumed else Progress()
            if resumed:
                notes.append(f"going on from step {progress.step}")
            journal = Journal(run.metrics, progress.metrics_end)
            opened.callback(journal.close)
            terminal = Terminal(run.label, int(config.train.steps), progress.step)
            opened.callback(terminal.close)
            for note in _header(plan) + notes:
                terminal.note(note)
            mirror = Mirror(
                config.track,
                _wandb_identity(plan),
                run.folder,
                _wandb_config(plan),
                terminal.note,
            )
            opened.callback(_close, mirror, result)

            def save(state: checkpoint.Checkpoint) -> None:
                state.progress.metrics_end = journal.sync()
                checkpoint.save(run.checkpoints, state)

            trainer = Trainer(
                plan,
                _model(plan, resumed),
                resumed,
                sinks=(journal, terminal, mirror),
                save=save,
                stop=signals.__bool__,
                began=began,
            )
            result |= _train(plan, trainer)
        except Interrupted:
            terminal.note("stopped; the same command goes on from here")
            raise Stopped(signals.received) from None
        except Exception as error:
            # A failed run is a result too: what went wrong stands beside the others' numbers.
            first = (str(error).strip() or "no message").splitlines()[0]
            result |= {"status": "failed", "error": f"{type(error).__name__}: {first}"}
            write_atomic(run.folder / "error.txt", traceback.format_exc())
    result["seconds"] = round(time.perf_counter() - began, 3)
    if trainer is not None:
        result["steps"] = result.get("diverged_at", trainer.progress.step)
        result["tokens"] = result["steps"] * plan.tokens_per_step
        result["seconds"] = round(trainer.seconds(), 3)
    result["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_json(run.folder / "result.json", result)
    if result["status"] == "done":
        checkpoint.keep_newest(run.checkpoints, 1)
    return result


def _close(mirror: Mirror, result: dict[str, Any]) -> None:
    mirror.close(_summary(result), EXIT_CODES.get(result.get("status", ""), 1))
    result["wandb"] = mirror.address


def _train(plan: Plan, trainer: Trainer) -> dict[str, Any]:
    """Train, then read every split once; what the result says of it."""
    progress = trainer.progress
    try:
        trainer.fit()
        # As much of the training split as there is to validate on: how far the two are apart.
        sample, val, test = trainer.evaluate("train"), progress.val, trainer.evaluate("test")
        read = {"train": sample, "val": val, "test": test}
        if not all(math.isfinite(measures["loss"]) for measures in read.values()):
            raise Diverged(progress.step)
    except Diverged as diverged:
        return {"status": "diverged", "diverged_at": diverged.step}
    return {
        "status": "done",
        "loss": {split: measures["loss"] for split, measures in read.items()},
        **{name: {"val": val.get(name), "test": test.get(name)} for name in _BESIDES_LOSS},
        "measures": {"val": val, "test": test},
        "tokens_per_second": statistics.median(progress.speeds) if progress.speeds else None,
    }


def _model(plan: Plan, resumed: checkpoint.Checkpoint | None) -> GPT:
    model = plan.build().to_empty(device="cpu" if resumed is None else plan.config.device)
    if resumed is None:
        return model.init_(plan.config.seeds.init).to(plan.config.device)
    model.load_state_dict(resumed.weights)
    return model


def _recorded(plan: Plan, notes: list[str]) -> Plan:
    """The plan with the threads this run began with; begins the record where there is none."""
    folder, config = plan.run.folder, plan.config
    if plan.data.tokenizer is not None:
        write_json(folder / "tokenizer.json", plan.data.tokenizer)
    known = read_json(folder / "environment.json")
    now = environment(config, hardware.describe(config))
    if known is None or not (folder / "config.yaml").exists():
        plan.run.freeze(config, plan.identity)
        write_json(folder / "environment.json", now)
        return plan
    if known["threads"] != config.threads:
        notes.append(f"threads: {known['threads']}, as this run began, not {config.threads}")
    for what in ("torch", "numpy", "qkablate"):
        before, after = known["versions"].get(what), now["versions"].get(what)
        if before != after:
            notes.append(f"this run began with {what} {before}, and goes on with {after}")
    config = dataclasses.replace(config, threads=known["threads"])
    plan.run.freeze(config, plan.identity)
    return dataclasses.replace(plan, config=config)


def _header(plan: Plan) -> list[str]:
    config, model = plan.config, plan.config.model
    return [
        f"run      {plan.run.folder}",
        f"variant  {config.variant.name}: {plan.equation}",
        f"start    matched to standard: {plan.match}; learning rates of the circuits:"
        f" QK × {plan.lr_multiplier['qk']:.3g}, OV × {plan.lr_multiplier['ov']:.3g}",
        f"model    {model.layers} layers, d {model.d_model}, {model.heads} heads, context"
        f" {model.context}: {plan.params['total']:,} parameters",
        f"data     {plan.data.told}",
        f"machine  {config.device}, {config.precision}, {config.threads} threads,"
        f" kernel {plan.kernel}{', compiled' if config.compile else ''}",
    ]


def _base_result(plan: Plan) -> dict[str, Any]:
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
        **{name: {"val": None, "test": None} for name in _BESIDES_LOSS},
        "measures": {},
        "data": {key: value for key, value in vars(config.data).items() if value is not None},
        "params": plan.params,
        "flops_per_token": plan.flops_per_token,
        "init": {"mode": config.variant.init, "match": plan.match},
        "lr": {"mode": config.variant.lr, "multiplier": plan.lr_multiplier},
        "tokens_per_second": None,
        "precision": config.precision,
        "device": config.device.partition(":")[0],
        "kernel": plan.kernel,
        "compile": config.compile,
        "threads": config.threads,
        "data_fingerprint": plan.data.fingerprint,
        "attempt": plan.run.attempt,
        "version": __version__,
        "steps": 0,
        "tokens": 0,
        "seconds": 0.0,
    }


def _wandb_identity(plan: Plan) -> Identity:
    config, run = plan.config, plan.run
    arm = run.label.rpartition("-s")[0]
    return Identity(
        id=f"{run.id}-{run.attempt}",
        name=run.label,
        group=config.track.group or arm,
        job_type=arm,
        tags=(config.variant.name, *config.track.tags),
    )


def _wandb_config(plan: Plan) -> dict[str, Any]:
    config = dataclasses.asdict(plan.config)
    config["data"] = {k: v for k, v in config["data"].items() if k not in ("path", "cache")}
    del config["out"], config["track"]
    return config | {"run_id": plan.run.id, "kernel": plan.kernel, "params": plan.params}


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    """What W&B shows of the end, under the names of the metrics."""
    flat = {f"final/{split}_loss": value for split, value in result["loss"].items()}
    for name in _BESIDES_LOSS:
        flat |= {f"final/{split}_{name}": value for split, value in result[name].items()}
    flat |= {"final/status": result.get("status"), "params": result["params"]["total"]}
    return {name: value for name, value in flat.items() if value is not None}
