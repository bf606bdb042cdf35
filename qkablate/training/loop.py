"""The loop: batches in, steps, rows out. Everything around it is in session.py."""

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad_norm_

from qkablate.data import IGNORE, Tally
from qkablate.diagnostics import Panel
from qkablate.models.gpt import GPT
from qkablate.randomness import key
from qkablate.runs import predictions
from qkablate.training import hardware
from qkablate.training.checkpoint import Checkpoint
from qkablate.training.distributed.ranks import ALONE, Ranks
from qkablate.training.feed import Feed, on_device
from qkablate.training.optimizer import learning_rate, make_optimizer
from qkablate.training.recorders.diagnostics import starts_of, validation_tokens
from qkablate.training.resolve import Plan
from qkablate.training.state import Progress

# In one forward pass of an evaluation; on a CPU more are no faster.
EVAL_TOKENS = {"cpu": 4096, "cuda": 8192, "mps": 8192}
EVAL_LOGITS = 2**25  # and as many logits at most
NEVER = 2**62  # a step that is not reached
WARM_UP = 5  # steps of a sitting that do not count for tokens per second


class Diverged(Exception):
    """The loss is not a number any more. A result, not an error."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss is not finite at step {step}")
        self.step = step


class Interrupted(Exception):
    """Someone asked for an end; the checkpoint is written."""


class Sink(Protocol):
    def log(self, row: dict[str, Any]) -> None: ...


class Trainer:
    """One run's training, from a checkpoint or from the start."""

    def __init__(
        self,
        plan: Plan,
        model: GPT,
        resumed: Checkpoint | None,
        *,
        sinks: Iterable[Sink],
        save: Callable[[Checkpoint], None],
        stop: Callable[[], bool],
        began: float | None = None,
        ranks: Ranks = ALONE,
        predict: Callable[[GPT, int], None] | None = None,
        exemplify: Callable[[GPT, int], None] | None = None,
    ) -> None:
        config = plan.config
        self.plan, self.config, self.device = plan, config, config.device
        self.model, self.sinks, self.save, self.stop = model, list(sinks), save, stop
        self.ranks, self.predict, self.exemplify = ranks, predict, exemplify
        if config.train.shard:
            ranks.spread(model, self.device)
        self.optimizer = make_optimizer(model, config)
        self.scaler = torch.amp.GradScaler(
            config.device.partition(":")[0], enabled=config.precision == "fp16"
        )
        self.progress = Progress()
        if resumed is not None:
            self.progress = resumed.progress
        if resumed is not None and resumed.state:  # none where a trained run is begun from
            self.optimizer.load_state_dict(ranks.parts(resumed.state["optimizer"], self.optimizer))
            self.scaler.load_state_dict(resumed.state["scaler"])
        # dynamic=False: else what was compiled first would decide what is compiled next, and a
        # resumed run would compute in another way than an undisturbed one.
        self.loss, self.graded = model.loss, model.graded
        if config.compile:
            self.loss = torch.compile(model.loss, dynamic=False)
            self.graded = torch.compile(model.graded, dynamic=False)
        self.training_loss = ranks.parallel(model, self.loss)
        steps = plan.data.batches(
            seed=config.seeds.data,
            batch_size=config.train.batch_size,
            accumulate=config.train.accumulate,
            context=config.model.context,
        )
        # Steps are counted from where a trained run that this one begins from has come to.
        self._first = config.start.step or 0
        self.feed = Feed(steps, self.device, ranks.own, self._first)
        # Kept on the device, so that steps need not wait for each other.
        self._loss_sum = torch.tensor(
            self.progress.own_loss_sum(ranks.rank, ranks.count), device=self.device
        )
        self._first_bad = torch.tensor(-1, device=self.device)
        self._saved = -1 if resumed is None else resumed.progress.step
        self._peak = hardware.peak_flops(config) * ranks.count
        self._mark = time.perf_counter()
        self._began = self._mark if began is None else began
        self._paused = 0.0
        self._stretch = 0  # steps since the last mark
        self._warming = WARM_UP

    def fit(self) -> None:
        """Train to the last step, or until Interrupted or Diverged."""
        train, progress = self.config.train, self.progress
        assert isinstance(train.steps, int)
        if self.ranks.count > 1 and progress.step < train.steps:
            self._settle_buckets()
        while True:
            step = progress.step
            last = step == train.steps
            if (last or step % train.eval_every == 0) and progress.evaluated < step:
                self._pausing(self._validate)
            if self._diagnoses(step) and progress.diagnosed < step:
                self._pausing(self._diagnose)
            if progress.predicted < step and predictions.are_kept(self.config, step):
                self._pausing(self._predict)
            if last or (step and step % train.checkpoint_every == 0):
                self._pausing(self.checkpoint)
            if last:
                return
            if self.stop():
                self._interrupt()
            norm = self._step(step)
            progress.step += 1
            if progress.step % self.config.track.log_every == 0 or progress.step == train.steps:
                self._log_training(norm)

    def _step(self, step: int) -> torch.Tensor:
        rate = learning_rate(self.config.optim, step, int(self.config.train.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_multiplier"]
        accumulate = self.config.train.accumulate
        own = self.ranks.own(range(accumulate))
        for micro, batch in zip(own, self.feed.take(step), strict=True):
            at = self._first + step
            hardware.seed(self.device, key(self.config.seeds.dropout, "dropout", at, micro, 0))
            with self.ranks.averaging(self.training_loss, now=micro == own[-1]):
                with hardware.autocast(self.config):
                    loss = self.training_loss(*batch[:3])
                self.scaler.scale(loss / len(own)).backward()
            self._loss_sum += loss.detach() / accumulate
        self.feed.fetch_ahead(step + 1)
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), self.config.optim.clip or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.loss_count += 1
        self._stretch += 1
        if self._warming:  # the first steps compile, warm caches and allocate
            self._warming -= 1
            hardware.synchronize(self.device)
            self._mark, self._paused, self._stretch = time.perf_counter(), 0.0, 0
        fine = torch.isfinite(self._loss_sum) | (self._first_bad >= 0)
        self._first_bad = torch.where(fine, self._first_bad, step + 1)
        return norm

    def _settle_buckets(self) -> None:
        """DDP orders its buckets by the first pass, and an order is a rounding of its own: without
        a pass before all others, a resumed run would go on as no undisturbed one does.
        """
        batch = self.feed.take(self.progress.step)[0]
        with hardware.autocast(self.config):
            loss = self.training_loss(*batch[:3])
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _log_training(self, norm: torch.Tensor) -> None:
        self._check_finite()
        progress = self.progress
        loss = sum(self.ranks.gather(float(self._loss_sum))) / progress.loss_count
        self._loss_sum.zero_()
        progress.loss_count = 0
        row = {
            "train/loss": loss,
            "train/lr": self.optimizer.param_groups[0]["lr"],
            "train/grad_norm": float(self.ranks.whole(norm)),
        }
        if self._stretch:
            seconds = time.perf_counter() - self._mark - self._paused
            speed = self._stretch * self.plan.tokens_per_step / seconds
            progress.speeds.append(speed)
            row["perf/tokens_per_second"] = speed
            flops = speed * self.plan.flops_per_token
            self._peak = max(self._peak, flops)  # measured on a machine that was busy then
            row["perf/mfu"] = flops / self._peak
        self._log(row)
        self._mark, self._paused, self._stretch = time.perf_counter(), 0.0, 0

    def _validate(self) -> None:
        self._check_finite()
        measures = self.evaluate("val")
        if not math.isfinite(measures["loss"]):
            raise Diverged(self.progress.step)
        self.progress.val = measures
        self._log({f"val/{name}": value for name, value in measures.items()})
        self.progress.evaluated = self.progress.step

    def _diagnoses(self, step: int) -> bool:
        every = self.config.diagnose.every
        assert isinstance(every, int)
        if not every or self.ranks.in_parts(self.config):
            return False
        return step % every == 0 or step == self.config.train.steps

    def _diagnose(self) -> None:
        """The first process looks, at what all of them have."""
        self._check_finite()
        if self.ranks.first:
            self._log({"mechanism": self._panel.row()})
            if self.exemplify is not None and self.progress.step == self.config.train.steps:
                self.exemplify(self.model, self.progress.step)
        self.progress.diagnosed = self.progress.step

    @functools.cached_property
    def _panel(self) -> Panel:
        tokens_NT = validation_tokens(self.plan.data, self.config.model.context)
        return Panel(
            self.model,
            tokens_NT.to(self.device),
            starts=starts_of(self.model, self.config, self.plan.run.start),
            autocast=lambda: hardware.autocast(self.config),
        )

    def _predict(self) -> None:
        """Keep what the model says now, for those that compare runs."""
        if self.predict is not None:
            self.predict(self.model, self.progress.step)
        self.progress.predicted = self.progress.step

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """What every token of a split says. Draws nothing."""
        data, context = self.plan.data, self.config.model.context
        tokens = EVAL_TOKENS[self.device.partition(":")[0]]
        most = min(tokens, int(EVAL_LOGITS / data.vocabulary / data.answers))
        tally = Tally()
        self.model.eval()
        try:
            reading = data.reading(split, batch_size=max(1, most // context), context=context)
            for batch, counts in self.ranks.deal(reading):
                if self.stop():
                    self._interrupt()
                inputs = on_device(batch, self.device)
                with hardware.autocast(self.config):
                    if batch.slices is None:
                        loss = self.loss(*inputs[:3], reduction="sum").item()
                        if counts:
                            tally.add(loss, int((batch.targets_NA != IGNORE).sum()))
                    else:
                        losses, hits = self.graded(*inputs[:3])
                        if counts:
                            tally.grade(batch, losses.cpu().numpy(), hits.cpu().numpy())
        finally:
            self.model.train()
        tally, *others = self.ranks.gather(tally)
        for other in others:
            tally.merge(other)
        return data.measures(split, tally)

    def checkpoint(self) -> None:
        """Write where we stand, unless it is written already."""
        if self._saved == self.progress.step:
            return
        self._check_finite()
        shares = self.ranks.gather(float(self._loss_sum))
        self.progress.loss_sum = sum(shares)
        self.progress.loss_shares = shares if len(shares) > 1 else []
        now = time.perf_counter()
        self.progress.seconds += now - self._began
        self._began = now
        weights = {name: value.detach() for name, value in self.model.state_dict().items()}
        state = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        weights, state = self.ranks.whole((weights, state), keep=self.ranks.first)
        self.save(Checkpoint(self.progress, weights, state))
        self._saved = self.progress.step

    def seconds(self) -> float:
        """Of all sittings until now."""
        return self.progress.seconds + time.perf_counter() - self._began

    def _interrupt(self) -> None:
        self.checkpoint()
        raise Interrupted

    def _check_finite(self) -> None:
        first = int(self._first_bad)
        if (first := self.ranks.least(first if first >= 0 else NEVER)) < NEVER:
            raise Diverged(first)

    def _pausing(self, action: Callable[[], None]) -> None:
        """Keep evaluation and checkpoints out of tokens per second."""
        hardware.synchronize(self.device)
        began = time.perf_counter()
        action()
        self._paused += time.perf_counter() - began

    def _log(self, row: dict[str, Any]) -> None:
        step = self.progress.step
        tokens = step * self.plan.tokens_per_step
        flops = tokens * self.plan.flops_per_token
        position = {"step": step, "tokens": tokens, "flops": flops}
        for sink in self.sinks:
            sink.log({**position, "seconds": round(self.seconds(), 3), **row})
