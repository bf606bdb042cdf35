"""One optimizer step: forward and backward passes, clipping, update."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from qkablate.data.batches import weigh
from qkablate.models.base import Model
from qkablate.randomness import derive_key
from qkablate.training import hardware
from qkablate.training.checkpoint import Checkpoint, TrainProgress
from qkablate.training.distributed.ranks import Ranks
from qkablate.training.optim import learning_rate, make_optimizer
from qkablate.training.prefetcher import Prefetcher, batch_reader
from qkablate.training.resolve import RunPlan

# Makes the step of a run with this model, from a checkpoint.
StepFactory = Callable[[RunPlan, Model, Checkpoint | None, Ranks], "TrainStep"]
NEVER = 2**62  # later than any step


class TrainStep:
    """The step of one run: model, optimizer, gradient scaler, batches, and sums on the device."""

    def __init__(
        self, plan: RunPlan, model: Model, resumed: Checkpoint | None, ranks: Ranks
    ) -> None:
        config = plan.config
        self.config, self.device, self.model, self.ranks = config, config.device, model, ranks
        if config.train.fsdp:
            ranks.shard_model(model, self.device)
        self.optimizer = make_optimizer(model, config)
        self.scaler = torch.amp.GradScaler(
            config.device.partition(":")[0], enabled=config.precision == "fp16"
        )
        if resumed is not None and resumed.state:  # empty if the run begins from a trained one
            self.optimizer.load_state_dict(
                ranks.shard_optimizer_state(resumed.state["optimizer"], self.optimizer)
            )
            self.scaler.load_state_dict(resumed.state["scaler"])
        self.loss = hardware.compile_loss(model.loss, config, graphs=True)
        self.loss_and_hits = hardware.compile_loss(model.loss_and_hits, config)
        self.training_loss = ranks.data_parallel(model, self.loss)
        batches = batch_reader(config, plan.data)
        self.prefetcher = Prefetcher(lambda step: ranks.shard(weigh(batches(step))), self.device)
        # Only dropout draws, and circuits of the user may; seeding takes time.
        outside = plan.identity["circuits_from_outside"]
        self.draws_random_numbers = bool(config.model.dropout or outside)
        # Kept on the device, so that steps need not wait for each other.
        progress = TrainProgress() if resumed is None else resumed.progress
        self.loss_sum = torch.tensor(
            progress.initial_loss_sum(ranks.rank, ranks.count), device=self.device
        )
        self.nonfinite = torch.tensor(NEVER, device=self.device)

    def __call__(self, step: int) -> Tensor:
        """Update the weights; return the gradient norm before clipping."""
        self.set_learning_rate(step)
        grad_accum = self.config.train.grad_accum
        micro_steps = self.ranks.shard(range(grad_accum))
        for micro, batch in zip(micro_steps, self.prefetcher.take(step), strict=True):
            if self.draws_random_numbers:
                # After the parent's last step, if the run begins from a trained one.
                position = (self.config.init_from.step or 0) + step
                seed = derive_key(self.config.seeds.dropout, "dropout", position, micro, 0)
                hardware.seed_generators(self.device, seed)
            with self.ranks.sync_gradients(self.training_loss, enabled=micro == micro_steps[-1]):
                with hardware.autocast(self.config):
                    loss = self.training_loss(*batch.inputs, batch.targets_NA, batch.positions_NA)
                loss = loss * batch.weight
                self.scaler.scale(loss / len(micro_steps)).backward()
            self.loss_sum += loss.detach() / grad_accum
        self.prefetcher.prefetch(step + 1)
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), self.config.optim.clip or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        nonfinite = torch.where(torch.isfinite(self.loss_sum), NEVER, step + 1)
        self.nonfinite = torch.minimum(self.nonfinite, nonfinite)
        return norm

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rates of a step; return the one before a group's multiplier."""
        rate = learning_rate(self.config.optim, step, int(self.config.train.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_multiplier"]
        return rate

    def fix_bucket_order(self, step: int) -> None:
        """Run one pass before all others, which determines DDP's order of buckets.

        The order affects rounding: a resumed run would otherwise differ from an uninterrupted one.
        """
        batch = self.prefetcher.take(step)[0]
        with hardware.autocast(self.config):
            loss = self.training_loss(*batch.inputs, batch.targets_NA, batch.positions_NA)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def first_nonfinite(self) -> int | None:
        """Return the first step with a loss that is not finite, on any rank."""
        first = -self.ranks.all_max(-int(self.nonfinite))
        return first if first < NEVER else None

    def checkpoint(self, progress: TrainProgress) -> Checkpoint:
        """Return the full state of training, with all tensors on the first rank."""
        shares = self.ranks.all_gather(float(self.loss_sum))
        progress.loss_sum = sum(shares)
        progress.loss_shares = shares if len(shares) > 1 else []
        weights = {name: value.detach() for name, value in self.model.state_dict().items()}
        state = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        weights, state = self.ranks.unshard((weights, state), keep=self.ranks.is_first)
        return Checkpoint(progress, weights, state)
