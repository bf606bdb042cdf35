"""One sitting of a run: own the folder, go on from what is there, end in a result."""

import dataclasses
import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.models.gpt import GPT
from qkablate.runs import attention_map, predictions
from qkablate.runs.lease import Lost, Observer, Owner
from qkablate.runs.run import EXIT_CODES, Run
from qkablate.tracking import Journal, Mirror, Terminal
from qkablate.training import checkpoint, ending, environment, hardware
from qkablate.training import result as account
from qkablate.training.distributed.ranks import ALONE, Ranks
from qkablate.training.loop import Diverged, Interrupted, Trainer
from qkablate.training.recorders.attention_map import Exemplify
from qkablate.training.recorders.predictions import Predictor
from qkablate.training.resolve import Plan
from qkablate.training.resolve import plan as make_plan
from qkablate.training.signals import Signals, Stopped
from qkablate.training.state import Progress
from qkablate.training.warm_start import start


@dataclass(frozen=True)
class _Fence:
    """The first of the sinks: whoever has lost the run adds no row to its owner's."""

    owner: Owner

    def log(self, row: dict[str, Any]) -> None:
        self.owner.check()


@dataclass(frozen=True)
class _Keeper:
    """What a run's folder keeps, written by its owner alone."""

    owner: Owner
    run: Run
    journal: Journal

    def save(self, state: checkpoint.Checkpoint) -> None:
        self.owner.verify()
        state.progress.metrics_end = self.journal.sync()
        checkpoint.save(self.run.checkpoints, state)

    def predicted(self, about: predictions.About, log_PV: np.ndarray) -> None:
        self.owner.verify()
        predictions.write(self.run.folder, about, log_PV)

    def exemplified(
        self, about: attention_map.About, tokens_T: np.ndarray, a_LHTT: np.ndarray
    ) -> None:
        self.owner.verify()
        attention_map.write(self.run.folder, about, tokens_T, a_LHTT)


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
    the first one calls this, and the others `follow`.
    """
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
    run = plan.run
    plan, notes = environment.as_begun(plan, ranks.count)
    if not checkpoint.newest_first(run.checkpoints):
        start.keep(plan)  # a mistake in `start` is told before anything is written
    environment.write(plan, ranks.count)
    _tell(ranks, plan)
    notes += _cleared(run)
    result = account.base_result(plan, packed, ranks.count)
    trainer: Trainer | None = None
    with ExitStack() as opened:
        try:
            hardware.prepare(plan.config)
            whole_on = _whole_on(plan, ranks)
            resumed = checkpoint.load_newest(run.checkpoints, whole_on, run.metrics, notes.append)
            if resumed:
                notes.append(f"going on from step {resumed.progress.step}")
            else:  # None for all but those that begin from a trained run
                resumed = start.keep(plan)
            progress = resumed.progress if resumed else Progress()
            journal = Journal(run.metrics, progress.metrics_end)
            opened.callback(journal.close)
            terminal = Terminal(run.label, int(plan.config.train.steps), progress.step)
            opened.callback(terminal.close)
            for note in account.header(plan, ranks.count) + notes:
                terminal.note(note)
            mirror = _mirror(plan, terminal)
            opened.callback(ending.close, mirror, plan, result)
            keeper = _Keeper(owner, run, journal)

            def stop() -> bool:
                owner.check()
                return ranks.stopping(signals)

            resumed = _shared(ranks, resumed, whole_on)
            trainer = Trainer(
                plan,
                _model(plan, resumed, whole_on),
                resumed,
                sinks=(_Fence(owner), journal, terminal, mirror),
                save=keeper.save,
                stop=stop,
                began=began,
                ranks=ranks,
                predict=Predictor(plan, keeper.predicted),
                exemplify=Exemplify(plan, keeper.exemplified),
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
            result |= ending.failed(run, error)
        result |= ending.spent(plan, trainer, result, began)
    ending.publish(plan.run, owner, result)
    return result


def _tell(ranks: Ranks, plan: Plan) -> None:
    """Tell the other processes what there is to train; UserError where one of them cannot."""
    config = plan.config
    kind = config.device.partition(":")[0]
    ranks.tell(Brief(dataclasses.replace(config, device=kind), plan.run.id))
    for rank, reason in enumerate(ranks.gather(None)):
        if reason is not None:  # another machine may lack what this one has
            raise UserError(f"process {rank}: {reason}")


def _cleared(run: Run) -> list[str]:
    """Take away what a sitting that failed has left; what there is to say of it."""
    damaged = run.result is None and (run.folder / "result.json").exists()
    for name in ("result.json", "error.txt"):
        (run.folder / name).unlink(missing_ok=True)
    return ["result.json is damaged: it is made anew"] * damaged


def _mirror(plan: Plan, terminal: Terminal) -> Mirror:
    identity, config = account.wandb_identity(plan), account.wandb_config(plan)
    return Mirror(plan.config.track, identity, plan.run.folder, config, terminal.note)


@dataclass(frozen=True)
class Brief:
    """What the first of several processes tells the others when there is something to train."""

    config: Config
    id: str


def follow(ranks: Ranks) -> int:
    """All that the processes but the first do: compute, and write nothing. The exit code; raises
    Stopped as `run` does.
    """
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
