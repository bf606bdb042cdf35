"""Where a run stands."""

from dataclasses import dataclass, field


@dataclass
class Progress:
    """All of a run's course that is neither weights nor optimiser. Plain numbers, for JSON."""

    step: int = 0  # steps done
    evaluated: int = -1  # the last step at which validation was read
    diagnosed: int = -1  # the last step whose diagnostics are written
    predicted: int = -1  # the last step whose predictions were kept
    loss_sum: float = 0.0  # training loss since the last row of metrics
    loss_count: int = 0
    loss_shares: list[float] = field(default_factory=list)  # of each of several processes
    metrics_end: int = 0  # where metrics.jsonl ended
    seconds: float = 0.0  # everything, over all sittings
    speeds: list[float] = field(default_factory=list)  # tokens/s of each clean stretch of steps
    val: dict[str, float] = field(default_factory=dict)  # the last evaluation

    def own_loss_sum(self, rank: int, count: int) -> float:
        """Where one of `count` processes goes on to sum."""
        if len(self.loss_shares) == count:
            return self.loss_shares[rank]
        return self.loss_sum if rank == 0 else 0.0
