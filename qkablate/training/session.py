"""One session of a run: hold its lease, resume from its folder, end with a result."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from qkablate.config.variant import layer_names
from qkablate.disk import read_file
from qkablate.errors import UserError
from qkablate.models.base import Model
from qkablate.runs import text_references
from qkablate.runs.lease import Lease, LeaseLost, LeaseObserver
from qkablate.runs.prefix import NO_BRANCHING, Branching
from qkablate.runs.records import decode_row
from qkablate.runs.run import EXIT_CODES, Run
from qkablate.tracking import MetricsFile, Terminal, WandbRun
from qkablate.training import checkpoint, environment, hardware, result
from qkablate.training.distributed.broadcast import broadcast
from qkablate.training.distributed.ranks import SINGLE_PROCESS, Ranks
from qkablate.training.loop import Diverged, Interrupted, Trainer
from qkablate.training.recorders.branches import write_branch
from qkablate.training.recorders.checkpoint_writer import CheckpointWriter
from qkablate.training.recorders.examples import make_example_tables
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.signals import Signals, Stopped
from qkablate.training.step import StepFactory, TrainStep
from qkablate.training.warm_start.branch import start_from_branch
from qkablate.training.warm_start.start import load_or_project


@dataclass(frozen=True)
class _RunWriter:
    """Writes into the run's folder; as the first logger, it ends logging once the lease is lost."""

    lease: Lease
    plan: RunPlan
    metrics: MetricsFile
    checkpoints: CheckpointWriter

    @property
    def run(self) -> Run:
        return self.plan.run

    def log(self, row: dict[str, Any]) -> None:
        self.lease.check()

    def save(self, state: checkpoint.Checkpoint) -> None:
        self.lease.verify()
        state.progress.metrics_end = self.metrics.sync()
        self.checkpoints.save(state)

    def branch(self, state: checkpoint.Checkpoint) -> None:
        self.lease.verify()
        state.progress.metrics_end = self.metrics.sync()
        write_branch(self.plan, state, self.lease.verify)

    def write(self, function: Callable[..., None], *content: Any) -> None:
        self.lease.verify()
        function(self.run.folder, *content)


@dataclass(frozen=True)
class Outcome:
    """The result of a run, and how this process got it."""

    result: dict[str, Any]
    trained: bool  # now, not in an earlier session
    signal: int = 0  # arrived too late to stop this run


# A session as a generator: it yields the number of each step before computing it, and returns the
# content of result.json. So several can be advanced together: see vmapped/program.py.
Session = Generator[int, None, dict[str, Any]]


def train_run(
    plan: RunPlan,
    *,
    rerun: bool = False,
    retry: bool = True,
    packed: int = 1,
    observer: LeaseObserver | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    branching: Branching = NO_BRANCHING,
) -> Outcome:
    """Train the run, as one of `packed` on this machine, or return the result it has.

    A failed run is trained again unless `retry` is false. Raises AlreadyRunning, Stopped or
    LeaseLost. Of several processes, rank 0 calls this and the others `follow`.
    """
    if ranks.has_sharded_weights(plan.config) and plan.config.precision == "fp16":
        raise UserError("train.fsdp: true has no loss scaling for fp16 (allowed: bf16, fp32)")
    with plan.run.hold_lease(observer) as lease:
        if rerun:
            plan.run.restart()
        if existing := find_result(plan.run, retry=retry):
            return Outcome(existing, trained=False)
        signals = Signals()
        with signals.listen(), hardware.preserve_process_state(), ranks.report_peer_failure():
            session = train_session(plan, signals, lease, packed, ranks, branching)
            return Outcome(_run(session), trained=True, signal=signals.received)


def find_result(run: Run, *, retry: bool) -> dict[str, Any] | None:
    """Return the result of a run that need not be trained."""
    existing = run.result
    return existing if existing and (existing["status"] != "failed" or not retry) else None


def _run(session: Session) -> dict[str, Any]:
    """Run a session to its end; return the result."""
    while True:
        try:
            next(session)
        except StopIteration as end:
            return dict(end.value)


def _measure_cost(plan: RunPlan, trainer: Trainer | None, began: float = 0.0) -> dict[str, Any]:
    """Return the duration of all sessions, or since `began`, and the peak memory."""
    seconds = time.perf_counter() - began if trainer is None else trainer.seconds()
    peak = hardware.peak_memory(plan.config.device)
    return {"seconds": round(seconds, 3), "peak_memory_bytes": peak}


def train_session(
    plan: RunPlan,
    signals: Signals,
    lease: Lease,
    packed: int,
    ranks: Ranks,
    branching: Branching,
    *,
    program_runs: int = 1,
    make_step: StepFactory = TrainStep,
    is_recoverable: Callable[[Exception], bool] = lambda _: False,
) -> Session:
    """Train until the run ends; write and return its result.

    Of an error that `is_recoverable`, the caller tries again: it is no result of the run.
    """
    began = time.perf_counter()
    run = plan.run
    plan, notes = environment.restore_environment(plan, ranks.count)
    notes += plan.notes
    resumes = bool(checkpoint.find_checkpoints(run.checkpoints))
    start = None if resumes else _load_start(plan)  # raises UserError before anything is written
    lease.verify()  # this process may have been suspended, and another one train the run by now
    environment.write(plan, ranks.count, resumes=resumes)
    _send_job(ranks, plan)
    notes += _remove_failure(run, lease)
    content = result.make_base_result(plan, packed, ranks.count, program_runs)
    trainer: Trainer | None = None
    branched: checkpoint.Checkpoint | None = None
    with ExitStack() as stack:
        try:
            hardware.configure_process(plan.config)
            device = _load_device(plan, ranks)
            resumed = checkpoint.load_newest(run.checkpoints, device, run.metrics, notes.append)
            if resumed:
                notes.append(f"resuming from step {resumed.progress.step}")
            else:
                branched = start_from_branch(plan, branching, device, notes.append, lease.verify)
                resumed = branched or start or _load_start(plan)
            progress = resumed.progress if resumed else checkpoint.TrainProgress()
            lease.verify()
            metrics = MetricsFile(run.metrics, progress.metrics_end)
            stack.callback(metrics.close)
            terminal = Terminal(run.label, int(plan.config.train.steps), progress.step)
            stack.callback(terminal.close)
            for note in result.format_header(plan, ranks.count) + notes:
                terminal.note(note)
            identity, config = result.make_wandb_identity(plan), result.make_wandb_config(plan)
            names = layer_names(plan.config.model)
            tracking = plan.config.tracking
            wandb_run = WandbRun(tracking, identity, run.folder, config, terminal.note, names)
            stack.callback(_close_wandb, wandb_run, plan, content)
            if branched and wandb_run.is_on:
                for line in read_file(run.metrics).splitlines():
                    row = decode_row(line)
                    row.pop("crc32", None)
                    wandb_run.log(row)
            write = partial(checkpoint.save, run.checkpoints, verify=lease.verify)
            checkpoints = CheckpointWriter(plan.config.device, write)
            writer = _RunWriter(lease, plan, metrics, checkpoints)

            def stop() -> bool:
                lease.check()
                return ranks.agree_to_stop(signals)

            resumed = _broadcast(ranks, resumed, device)
            trainer = Trainer(
                plan,
                build_initial_model(plan, resumed, device),
                resumed,
                loggers=(writer, metrics, terminal, wandb_run),
                save=writer.save,
                branch=writer.branch,
                horizons=branching.horizons,
                stop=stop,
                write=writer.write,
                began=began,
                ranks=ranks,
                make_step=make_step,
            )
            with checkpoints:
                content |= yield from _train(plan, trainer)
            content |= _measure_cost(plan, trainer)  # before the examples, which are no training
            is_whole = not ranks.has_sharded_weights(plan.config)
            if wandb_run.is_on and content["status"] == "done" and is_whole:
                tables = make_example_tables(plan, trainer.model, terminal.note)
                if tables is not None:
                    wandb_run.log_tables(tables, trainer.progress.step)
        except Interrupted:
            terminal.note("stopped; run again, it resumes from here")
            raise Stopped(signals.received) from None
        except LeaseLost:
            raise
        except Exception as error:
            if ranks.is_peer_failure(error) or is_recoverable(error):
                raise
            lease.verify()  # without the lease, a failure is no result of the run
            content |= result.make_failure(run, error)
        if "seconds" not in content:  # it failed
            content |= _measure_cost(plan, trainer, began)
        if trainer is not None:
            steps = content.get("diverged_at", trainer.progress.step)
            content |= {"steps": steps, "tokens": steps * plan.tokens_per_step}
            content[text_references.KEY] = result.measure_references(plan, content)
        content["ended"] = result.now()
    result.write_result(run, lease, content)
    return content


def _load_start(plan: RunPlan) -> checkpoint.Checkpoint | None:
    """Return the projected weights of a run that begins from a trained one."""
    if plan.config.init_from.run is None:
        return None
    return load_or_project(plan.run, plan.config, plan.data, plan.build())


def _remove_failure(run: Run, lease: Lease) -> list[str]:
    """Remove what a failed session left; return notes."""
    damaged = run.result is None and (run.folder / "result.json").exists()
    lease.verify()
    for name in ("result.json", "error.txt"):
        (run.folder / name).unlink(missing_ok=True)
    return ["result.json is damaged: it is written again"] * damaged


def _close_wandb(wandb_run: WandbRun, plan: RunPlan, content: dict[str, Any]) -> None:
    artifacts = result.collect_artifacts(plan, content) if wandb_run.is_on else None
    code = EXIT_CODES.get(content.get("status", ""), 1)
    # A session without an outcome leaves what another has logged, perhaps the final losses.
    wandb_run.close(result.summarize(content) if "status" in content else {}, code, artifacts)
    content["wandb"] = wandb_run.address


def _send_job(ranks: Ranks, plan: RunPlan) -> None:
    """Send the run to the other ranks; raise UserError if one of them cannot train it."""
    config = plan.config
    kind = config.device.partition(":")[0]
    ranks.send_job((dataclasses.replace(config, device=kind), plan.run.id))
    for rank, reason in enumerate(ranks.all_gather(None)):
        if reason is not None:  # another machine may lack what this one has
            raise UserError(f"process {rank}: {reason}")


def follow(ranks: Ranks) -> int:
    """Train as a rank after the first, without writing; return the exit code or raise Stopped."""
    job = ranks.exchange_job()
    if isinstance(job, int):
        return job
    config, id = ranks.resolve(job[0]), job[1]
    refusal = None
    try:
        plan = plan_run(config, is_writer=False)
        if plan.run.id != id:
            refusal = f"its data or its variant differs: it would train {plan.run.id}"
    except UserError as mistake:
        refusal = str(mistake)
    if any(ranks.all_gather(refusal)):
        return 2
    signals = Signals()
    with signals.listen(), hardware.preserve_process_state():
        try:
            hardware.configure_process(config)
            device = _load_device(plan, ranks)
            resumed = _broadcast(ranks, None, device)
            trainer = Trainer(
                plan,
                build_initial_model(plan, resumed, device),
                resumed,
                stop=lambda: ranks.agree_to_stop(signals),
                ranks=ranks,
            )
            return EXIT_CODES[_run(_train(plan, trainer))["status"]]
        except Interrupted:
            raise Stopped(signals.received) from None


def _broadcast(
    ranks: Ranks, resumed: checkpoint.Checkpoint | None, device: str
) -> checkpoint.Checkpoint | None:
    """Return the checkpoint that rank 0 has read."""
    if ranks.count == 1:
        return resumed
    parts = resumed and (resumed.progress, resumed.weights, resumed.state)
    parts = broadcast(parts, device, ranks.is_first)
    return parts and checkpoint.Checkpoint(*parts)


def _train(plan: RunPlan, trainer: Trainer) -> Session:
    """Train, then evaluate every split; return the outcome for result.json."""
    progress = trainer.progress
    try:
        yield from trainer.fit()
        # As many tokens of the training split as validation has, to measure the generalization gap.
        train, val = trainer.evaluate("train"), progress.val
        test = trainer.evaluate("test") if plan.config.train.evaluate_test else {}
        splits = {"train": train, "val": val, "test": test}
        if not all(math.isfinite(metrics["loss"]) for metrics in splits.values() if metrics):
            raise Diverged(progress.step)
    except Diverged as diverged:
        return {"status": "diverged", "diverged_at": diverged.step}
    return {
        "status": "done",
        "loss": {split: metrics.get("loss") for split, metrics in splits.items()},
        **{name: {"val": val.get(name), "test": test.get(name)} for name in result.OTHER_METRICS},
        "measures": {"val": val, "test": test},
        "tokens_per_second": statistics.median(progress.speeds) if progress.speeds else None,
    }


def _load_device(plan: RunPlan, ranks: Ranks) -> str:
    """Return the device that can hold all weights."""
    return "cpu" if ranks.has_sharded_weights(plan.config) else plan.config.device


def build_initial_model(plan: RunPlan, resumed: checkpoint.Checkpoint | None, device: str) -> Model:
    """Return the model on its device, with initial weights or those of a checkpoint."""
    model = plan.build().to_empty(device="cpu" if resumed is None else device)
    if resumed is None:
        return model.init_(plan.config.seeds.init).to(device)
    model.load_state_dict(resumed.weights)
    return model
