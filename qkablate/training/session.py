"""One sitting of a run: own the folder, go on from what is there, end in a result."""

import dataclasses
import math
import statistics
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate import example, predictions
from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.model import GPT
from qkablate.ownership import Lost, Observer, Owner
from qkablate.records import publish_json, read_json, sealed, write_atomic, write_json
from qkablate.redaction import redacted
from qkablate.runs import EXIT_CODES, Run, environment
from qkablate.tracking import Journal, Mirror, Terminal
from qkablate.training import account, checkpoint, hardware, start
from qkablate.training.exemplify import Exemplify
from qkablate.training.loop import Diverged, Interrupted, Trainer
from qkablate.training.plan import Plan
from qkablate.training.plan import plan as make_plan
from qkablate.training.predictor import Predictor
from qkablate.training.ranks import ALONE, Ranks
from qkablate.training.signals import Signals, Stopped
from qkablate.training.state import Progress

_CLOCK = "%Y-%m-%dT%H:%M:%S%z"


@dataclass(frozen=True)
class _Fence:
    """The first of the sinks: whoever has lost the run adds no row to its owner's."""

    owner: Owner

    def log(self, row: dict[str, Any]) -> None:
        self.owner.check()


@dataclass(frozen=True)
class Outcome:
    """The result of a run, and how it came to this process."""

    result: dict[str, Any]
    trained: bool  # now, not in an earlier sitting
    signal: int = 0  # that came too late to stop this run


def run(
    plan: Plan,
    *,
    rerun: bool = False,
    retry: bool = True,
    packed: int = 1,
    observer: Observer | None = None,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Train the run, as one of `packed` that share the machine, or find its result: a failed one is
    trained again, unless `retry` is false. Raises Owned, Stopped or Lost. Of several processes
    the first one calls this, and the others `follow`."""
    if plan.config.train.shard and ranks.count > 1 and plan.config.precision == "fp16":
        raise UserError("train.shard: true has no loss scaling for fp16 (allowed: bf16, fp32)")
    with plan.run.owned(observer) as owner:
        if rerun:
            plan.run.restart()
        result = plan.run.result
        if result is not None and (result["status"] != "failed" or not retry):
            return Outcome(result, trained=False)
        signals = Signals()
        with signals.listening(), hardware.process_state():
            result = _sit(plan, signals, owner, packed, ranks)
            return Outcome(result, trained=True, signal=signals.received)


def _sit(plan: Plan, signals: Signals, owner: Owner, packed: int, ranks: Ranks) -> dict[str, Any]:
    began = time.perf_counter()
    run, notes = plan.run, list[str]()
    if not checkpoint.newest_first(run.checkpoints):
        start.keep(plan)  # a mistake in `start` is told before anything is written
    plan = _recorded(plan, notes, ranks.count)
    config = plan.config
    ranks.tell(Brief(dataclasses.replace(config, device=config.device.partition(":")[0]), run.id))
    for rank, reason in enumerate(ranks.gather(None)):
        if reason is not None:  # another machine may lack what this one has
            raise UserError(f"process {rank}: {reason}")
    if run.result is None and (run.folder / "result.json").exists():
        notes.append("result.json is damaged: it is made anew")
    for name in ("result.json", "error.txt"):  # of a sitting that failed
        (run.folder / name).unlink(missing_ok=True)
    result = account.base_result(plan, packed, ranks.count)
    trainer: Trainer | None = None
    with ExitStack() as opened:
        try:
            hardware.prepare(config)
            resumed = checkpoint.load_newest(
                run.checkpoints, _whole_on(plan, ranks), run.metrics, notes.append
            )
            if resumed:
                notes.append(f"going on from step {resumed.progress.step}")
            else:  # None for all but those that begin from a trained run
                resumed = start.keep(plan)
            progress = resumed.progress if resumed else Progress()
            journal = Journal(run.metrics, progress.metrics_end)
            opened.callback(journal.close)
            terminal = Terminal(run.label, int(config.train.steps), progress.step)
            opened.callback(terminal.close)
            for note in account.header(plan, ranks.count) + notes:
                terminal.note(note)
            mirror = Mirror(
                config.track,
                account.wandb_identity(plan),
                run.folder,
                account.wandb_config(plan),
                terminal.note,
            )
            opened.callback(_close, mirror, plan, result)

            def save(state: checkpoint.Checkpoint) -> None:
                owner.verify()
                state.progress.metrics_end = journal.sync()
                checkpoint.save(run.checkpoints, state)

            def keep(about: predictions.About, log_PV: np.ndarray) -> None:
                owner.verify()
                predictions.write(run.folder, about, log_PV)

            def keep_example(
                about: example.About, tokens_T: np.ndarray, a_LHTT: np.ndarray
            ) -> None:
                owner.verify()
                example.write(run.folder, about, tokens_T, a_LHTT)

            def stop() -> bool:
                owner.check()
                return ranks.stopping(signals)

            resumed = _shared(ranks, resumed, _whole_on(plan, ranks))
            trainer = Trainer(
                plan,
                _model(plan, resumed, _whole_on(plan, ranks)),
                resumed,
                sinks=(_Fence(owner), journal, terminal, mirror),
                save=save,
                stop=stop,
                began=began,
                ranks=ranks,
                predict=Predictor(plan, keep),
                exemplify=Exemplify(plan, keep_example),
            )
            result |= _train(plan, trainer)
        except Interrupted:
            terminal.note("stopped; the same command goes on from here")
            raise Stopped(signals.received) from None
        except Lost:
            raise
        except Exception as error:
            if ranks.lost(error):
                raise
            owner.verify()  # what fails here is no result of a run that is someone else's
            # A failed run is a result too: what went wrong stands beside the others' numbers.
            first = (str(error).strip() or "no message").splitlines()[0]
            result |= {"status": "failed", "error": redacted(f"{type(error).__name__}: {first}")}
            result["out_of_memory"] = hardware.is_out_of_memory(error)
            write_atomic(run.folder / "error.txt", redacted(traceback.format_exc()))
        result["seconds"] = round(time.perf_counter() - began, 3)
        if trainer is not None:
            result["steps"] = result.get("diverged_at", trainer.progress.step)
            result["tokens"] = result["steps"] * plan.tokens_per_step
            result["seconds"] = round(trainer.seconds(), 3)
        result["peak_memory_bytes"] = hardware.peak_memory(config.device)
        result["ended"] = time.strftime(_CLOCK)
    _publish(plan.run, owner, result)
    return result


@dataclass(frozen=True)
class Brief:
    """What the first of several processes tells the others when there is something to train."""

    config: Config
    id: str


def follow(ranks: Ranks) -> int:
    """All that the processes but the first do: compute, and write nothing. The exit code; raises
    Stopped as `run` does."""
    word = ranks.hear()
    if not isinstance(word, Brief):
        return int(word)
    config = ranks.settled(word.config)
    refusal = None
    try:
        plan = make_plan(config, writes=False)
        if plan.run.id != word.id:
            refusal = f"its data or its variant is another: it would train {plan.run.id}"
    except UserError as mistake:
        refusal = str(mistake)
    if any(ranks.gather(refusal)):
        return 2
    signals = Signals()
    with signals.listening(), hardware.process_state():
        try:
            hardware.prepare(config)
            resumed = _shared(ranks, None, _whole_on(plan, ranks))
            trainer = Trainer(
                plan,
                _model(plan, resumed, _whole_on(plan, ranks)),
                resumed,
                sinks=(),
                save=lambda _: None,
                stop=lambda: ranks.stopping(signals),
                ranks=ranks,
                predict=Predictor(plan, lambda *_: None),
            )
            return EXIT_CODES[_train(plan, trainer)["status"]]
        except Interrupted:
            raise Stopped(signals.received) from None


def _shared(
    ranks: Ranks, resumed: checkpoint.Checkpoint | None, device: str
) -> checkpoint.Checkpoint | None:
    """What the first process has read, for all."""
    parts = resumed and (resumed.progress, resumed.weights, resumed.state)
    parts = ranks.share(parts, device)
    return parts and checkpoint.Checkpoint(*parts)


def _publish(run: Run, owner: Owner, result: dict[str, Any]) -> None:
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
            _publish(plan.run, owner, result)


def _close(mirror: Mirror, plan: Plan, result: dict[str, Any]) -> None:
    left = account.left(plan, result) if mirror.is_on else None
    code = EXIT_CODES.get(result.get("status", ""), 1)
    mirror.close(account.summary(result), code, left)
    result["wandb"] = mirror.address


def _train(plan: Plan, trainer: Trainer) -> dict[str, Any]:
    """Train, then read every split once; what the result says of it."""
    progress = trainer.progress
    try:
        trainer.fit()
        # As much of the training split as there is to validate on: how far the two are apart.
        sample, val = trainer.evaluate("train"), progress.val
        test = trainer.evaluate("test") if plan.config.train.read_test else {}
        read = {"train": sample, "val": val, "test": test}
        if not all(math.isfinite(m["loss"]) for m in read.values() if m):
            raise Diverged(progress.step)
    except Diverged as diverged:
        return {"status": "diverged", "diverged_at": diverged.step}
    return {
        "status": "done",
        "loss": {split: measures.get("loss") for split, measures in read.items()},
        **{name: {"val": val.get(name), "test": test.get(name)} for name in account.BESIDES_LOSS},
        "measures": {"val": val, "test": test},
        "tokens_per_second": statistics.median(progress.speeds) if progress.speeds else None,
    }


def _whole_on(plan: Plan, ranks: Ranks) -> str:
    """Where all weights have room at once."""
    return "cpu" if plan.config.train.shard and ranks.count > 1 else plan.config.device


def _model(plan: Plan, resumed: checkpoint.Checkpoint | None, device: str) -> GPT:
    model = plan.build().to_empty(device="cpu" if resumed is None else device)
    if resumed is None:
        return model.init_(plan.config.seeds.init).to(device)
    model.load_state_dict(resumed.weights)
    return model


def _recorded(plan: Plan, notes: list[str], processes: int) -> Plan:
    """The plan with the threads this run began with; begins the record where there is none."""
    folder, config = plan.run.folder, plan.config
    if plan.data.tokenizer is not None:
        write_json(folder / "tokenizer.json", plan.data.tokenizer)
    known = read_json(folder / "environment.json")
    now = environment(config, hardware.describe(config), processes)
    if known is None and (folder / "environment.json").exists():
        notes.append("environment.json is damaged: it is written anew, as things are now")
    if known is None or not (folder / "config.yaml").exists():
        plan.run.freeze(config, plan.identity)
        write_json(folder / "environment.json", now)
        return plan
    began = known.get("processes", 1)
    if began != processes:
        told = f"{began} process{'es' * (began > 1)}"
        notes.append(f"this run began with {told}, and goes on with {processes}")
    elif known["threads"] != config.threads:
        notes.append(f"threads: {known['threads']}, as this run began, not {config.threads}")
    for what in ("torch", "numpy", "qkablate"):
        before, after = known["versions"].get(what), now["versions"].get(what)
        if before != after:
            notes.append(f"this run began with {what} {before}, and goes on with {after}")
    if began == processes:  # else the sums have another order in any case
        config = dataclasses.replace(config, threads=known["threads"])
    plan.run.freeze(config, plan.identity)
    return dataclasses.replace(plan, config=config)
