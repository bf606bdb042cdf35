"""Learning rates chosen on validation loss, per arm and on seeds of their own.

Every arm is searched in `optim.lr`, and in `variant.lr`, the rate of its changed circuit or, as in
standard, of QK; one without either, as uniform attention, in `optim.lr` alone. All arms get the
same number of runs to begin with: where there are three circuit rates to one, each point has a
third of the seeds. Rates beside the best are added until it lies inside, then some half a step from
it, where the loss is nearly quadratic. Rates chosen on a third of the seeds are trained with the
other seeds, too, and lower ones if these end far above the loss that was found: a seed may be lucky
at rates at which most fail. The next runs are a pure function of the results, so that every process
derives the same ones at any time.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qkablate.config import KEYS
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm, Changes, Manifest, Rates, SweepRun
from qkablate.sweeps.planning.tuning_losses import (
    OUTLIER,
    RULES,
    Losses,
    find_best_rates,
    find_outlying_rates,
    loss_near,
    lower_rates,
    mean_losses,
)

FACTOR = 2.0
POINTS = 5
CIRCUITS = 3  # rates of the circuit, to begin with
TUNING_RUNS = 23  # of an arm, with three seeds: 15 first ones, 6 between, 2 that confirm
LOWER = 3  # the most lower rates that are tried where the chosen ones fail with other seeds
EXTENSIONS = 6  # the most rates beyond the ladder; times CIRCUITS where the circuit has several
_BOUNDS = {key: KEYS[key].bounds or (0, 1) for key in ("optim.lr", "variant.lr")}
FindResult = Callable[[SweepRun], Mapping[str, Any] | None]


@dataclass(frozen=True)
class LrSearch:
    """Validation loss by learning rates, of one arm."""

    arm: str
    losses: Losses  # by rates and tuning seed; None: diverged
    rates: Rates | None  # the choice, once there is one
    state: str  # tuning, chosen, on the edge, stuck (a run failed), diverged (everywhere)
    at_minimum: bool = False  # the choice is a minimum between the rates tried
    confirmed: Losses = field(default_factory=dict)  # losses with the seeds that search did not use

    @property
    def runs(self) -> int:
        tried = [*self.losses.values(), *self.confirmed.values()]
        return sum(len(by_seed) for by_seed in tried)

    def to_json(self) -> dict[str, Any]:
        """Return the search as JSON values."""
        return {
            "arm": self.arm,
            "state": self.state,
            "chosen": self.rates and self.rates._asdict(),
            "at_minimum": self.at_minimum,
            "runs": self.runs,
            "outliers": [rates._asdict() for rates in find_outlying_rates(self.losses)],
            "val_loss": _losses_to_json(self.losses),
            "confirmed": _losses_to_json(self.confirmed),
        }


def _losses_to_json(losses: Losses) -> list[dict[str, Any]]:
    return [{**rates._asdict(), "by_seed": [*losses[rates].values()]} for rates in sorted(losses)]


Searches = dict[str, tuple[list[SweepRun], LrSearch]]  # by arm, with the runs that follow


def tuning_runs(arm: Arm, rates: list[float], seeds: list[int]) -> list[SweepRun]:
    """Return the first runs of an arm's search, at the given rates or around a single one."""
    circuits = [arm.default_rates.circuit]
    if _searches_circuit(arm):
        seeds = seeds[: max(1, len(seeds) // CIRCUITS)]
        circuits = circuit_ladder(arm.matched_lr)
    ladder = lr_ladder(rates, arm.config.optim.lr)
    points = itertools.product(ladder, circuits, seeds)
    return [_run(arm, Rates(lr, circuit), seed) for lr, circuit, seed in points]


def refinement_sizes(manifest: Manifest) -> dict[str, int]:
    """Return the number of runs that end a search: half a step from the best, and to confirm it.

    Those at lower rates, where the chosen ones fail, are not counted.
    """
    seeds = defaultdict[str, set[int]](set)
    for run in manifest.runs:
        seeds[run.arm].add(int(run.changes["seed"]))
    arms = manifest.arms if manifest.finals else {}  # otherwise none is searched
    others = {name: _other_seeds(manifest, seeds[name]) for name in arms}
    return {
        name: len(seeds[name]) * len(_half_steps(arm)) + len(others[name])
        for name, arm in arms.items()
    }


def _other_seeds(manifest: Manifest, used: set[int]) -> list[int]:
    """Return the tuning seeds that an arm's search has not used, to confirm its choice."""
    if manifest.tuning_rules < 3:
        return []
    return [seed for seed in manifest.tuning_seeds if seed not in used]


def lr_ladder(rates: list[float], own: float) -> list[float]:
    """Return the first rates to try: those given, or five around a single one."""
    if len(rates) > 1:
        rates = sorted({*rates})
        if len(rates) < POINTS:
            raise UserError(
                f"optim.lr: {len(rates)} rates given; the search takes {POINTS} or more, or one,"
                f" around which it tries {POINTS}"
            )
        if any(high / low > FACTOR * 1.01 for low, high in itertools.pairwise(rates)):
            raise UserError(
                "optim.lr: neighboring rates may differ by a factor of two at most; add some"
            )
        return rates
    middle = rates[0] if rates else own
    rates = [middle * FACTOR**k for k in range(-(POINTS // 2), POINTS // 2 + 1)]
    least, most = _BOUNDS["optim.lr"]
    if not all(least <= rate <= most for rate in rates):
        raise UserError(f"optim.lr: {middle} leaves no room for rates around it")
    return rates


def circuit_ladder(matched: float) -> list[float]:
    """Return the first rates of the circuit: the mean of matched and same, and a step from it."""
    step = _circuit_step(matched)
    return [_rounded(math.sqrt(matched) * step**k) for k in (-1, 0, 1)]


def _circuit_step(matched: float) -> float:
    # At least a factor of two, so that losses can be told apart.
    return max(FACTOR, math.sqrt(max(matched, 1 / matched)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _searches_circuit(arm: Arm) -> bool:
    """Return whether a circuit has a learning rate of its own that the user has not set."""
    has_rate = arm.has_circuit_lr or arm.matched_lr != 1
    return has_rate and "variant.lr" not in arm.overrides


def _changes(arm: Arm, rates: Rates) -> Changes:
    circuit: Changes = {"variant.lr": rates.circuit} if _searches_circuit(arm) else {}
    return {"optim.lr": rates.lr, **circuit}


def _run(arm: Arm, rates: Rates, seed: int) -> SweepRun:
    return arm.run({"seed": seed, **_changes(arm, rates)}, tuning=True)


def next_runs(
    manifest: Manifest, find_result: FindResult, finished: Searches
) -> tuple[list[SweepRun], list[LrSearch]]:
    """Return the runs that follow from the results, and the searches so far.

    Arms whose search has ended are kept in `finished`: they do not change any more.
    """
    tried = defaultdict(list)
    for run in manifest.runs:
        tried[run.arm].append(run)
    all_runs, searches = [], []
    for name, arm in manifest.arms.items():
        others = _other_seeds(manifest, {int(run.changes["seed"]) for run in tried[name]})
        runs, search = finished.get(name) or _search(
            arm, tried[name], find_result, manifest.tuning_rules, others
        )
        if search.rates is not None and name not in finished:
            changes = _changes(arm, search.rates)
            runs += [arm.run({**final, **changes}) for final in manifest.finals]
        if search.state in ("chosen", "on the edge", "diverged"):
            finished[name] = runs, search
        all_runs += runs
        searches.append(search)
    return all_runs, searches


def _search(
    arm: Arm,
    tried: list[SweepRun],
    find_result: FindResult,
    rules: int = RULES,
    others: Sequence[int] = (),  # seeds to confirm the choice by
) -> tuple[list[SweepRun], LrSearch]:
    """Return the runs beyond the ladder that this arm needs, and its search."""
    seeds = sorted({int(run.changes["seed"]) for run in tried})
    tried = sorted(tried, key=lambda run: (arm.rates_of(run), run.changes["seed"]))
    most = EXTENSIONS * (CIRCUITS if _searches_circuit(arm) else 1)
    first = len({arm.rates_of(run) for run in tried})
    beyond: list[SweepRun] = []
    refined: list[SweepRun] = []
    losses: dict[Rates, dict[int, float | None]] = {}
    while True:
        for run in [*tried, *beyond, *refined]:
            result = find_result(run)
            if result is None or result["status"] == "failed":
                state = "tuning" if result is None else "stuck"
                return beyond + refined, LrSearch(arm.name, losses, None, state)
            loss = result["loss"]["val"] if result["status"] == "done" else None
            losses.setdefault(arm.rates_of(run), {})[int(run.changes["seed"])] = loss
        if refined:
            from qkablate.sweeps.planning.surface import choose_rates  # numpy and scipy are slow

            chosen, surface = choose_rates(losses, rules)
            confirming, confirmed, state = _confirm(arm, chosen, losses, others, find_result)
            runs = beyond + refined + confirming
            if state != "chosen":
                return runs, LrSearch(arm.name, losses, None, state, confirmed=confirmed)
            rates = _choose_confirmed(chosen, confirmed)
            at_minimum = surface is not None and rates == chosen
            return runs, LrSearch(arm.name, losses, rates, state, at_minimum, confirmed)
        means, wanted = mean_losses(losses), _rates_beside_best(arm, losses, rules)
        within = [rates for rates in wanted if _is_allowed(rates)]
        if not wanted:
            refined = [
                _run(arm, rates, seed)
                for rates in _rates_between(arm, losses, rules)
                for seed in seeds
            ]
            continue
        if len(losses) - first + len(within) > most or len(within) < len(wanted):
            if not means:
                return beyond, LrSearch(arm.name, losses, None, "diverged")
            rates = min(means, key=means.__getitem__)
            return beyond, LrSearch(arm.name, losses, rates, "on the edge")
        beyond += [_run(arm, rates, seed) for rates in within for seed in seeds]


def _confirm(
    arm: Arm, chosen: Rates, losses: Losses, seeds: Sequence[int], find_result: FindResult
) -> tuple[list[SweepRun], dict[Rates, dict[int, float | None]], str]:
    """Return runs of the chosen rates with other seeds, their losses, and the search's state.

    While one of them ends far above the loss that the search has found, lower rates follow.
    """
    runs: list[SweepRun] = []
    confirmed: dict[Rates, dict[int, float | None]] = {}
    for rates in [chosen, *lower_rates(losses, chosen, math.sqrt(FACTOR), LOWER)] if seeds else []:
        runs += [_run(arm, rates, seed) for seed in seeds]
        for run in runs[-len(seeds) :]:
            result = find_result(run)
            if result is None or result["status"] == "failed":
                return runs, confirmed, "tuning" if result is None else "stuck"
            loss = result["loss"]["val"] if result["status"] == "done" else None
            confirmed.setdefault(rates, {})[int(run.changes["seed"])] = loss
        found = loss_near(losses, rates)
        limit = math.inf if found is None else found + OUTLIER
        if all(loss is not None and loss <= limit for loss in confirmed[rates].values()):
            break
    return runs, confirmed, "chosen"


def _choose_confirmed(chosen: Rates, confirmed: Losses) -> Rates:
    """Return the chosen rates, or lower ones where other seeds end far above them there."""
    means = mean_losses(confirmed)
    best = min(means, key=means.__getitem__, default=chosen)
    # All seeds may end higher than that of the search, at any rates.
    is_failure = means.get(chosen, math.inf) > means.get(best, math.inf) + OUTLIER
    return best if is_failure else chosen


def _rates_beside_best(arm: Arm, losses: Losses, rules: int) -> list[Rates]:
    """Return the rates beside the best that were not tried yet; lower ones if all diverge."""
    lrs, circuits = (sorted({*values}) for values in zip(*losses, strict=True))
    if (best := find_best_rates(losses, rules)) is None:
        return [Rates(lrs[0] / FACTOR, circuit) for circuit in circuits]
    lrs = [lrs[0] / FACTOR, *lrs, lrs[-1] * FACTOR]
    if _searches_circuit(arm):
        step = _circuit_step(arm.matched_lr)
        circuits = [_rounded(circuits[0] / step), *circuits, _rounded(circuits[-1] * step)]
    near = [
        values[max(0, at - 1) : at + 2]
        for values, at in ((lrs, lrs.index(best.lr)), (circuits, circuits.index(best.circuit)))
    ]
    return [
        rates
        for lr, circuit in itertools.product(*near)
        if (rates := Rates(lr, circuit)) not in losses
    ]


def _rates_between(arm: Arm, losses: Losses, rules: int) -> list[Rates]:
    """Return rates half a step from the best ones, where the surface is nearly quadratic."""
    best = find_best_rates(losses, rules)
    assert best is not None
    lr_step, step = math.sqrt(FACTOR), math.sqrt(_circuit_step(arm.matched_lr))
    return [
        Rates(best.lr * lr_step**a, _rounded(best.circuit * step**b) if b else best.circuit)
        for a, b in _half_steps(arm)
    ]


def _half_steps(arm: Arm) -> list[tuple[int, int]]:
    """Return the directions, in half steps of both rates, in which the best ones are refined.

    There are as many runs for an arm with one rate as for one with two: of the latter's corners,
    those at which the two rates make up for each other.
    """
    ends = [(-1, 0), (1, 0)]
    return [*ends, (0, -1), (0, 1), (-1, 1), (1, -1)] if _searches_circuit(arm) else ends


def _is_allowed(rates: Rates) -> bool:
    return all(
        least <= rate <= most for rate, (least, most) in zip(rates, _BOUNDS.values(), strict=True)
    )
