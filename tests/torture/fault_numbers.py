"""NaN and infinity: losses, gradients and weights that overflow, at any step.

A case is a run, or a sweep with an arm that diverges. It ends as `diverged` at the right step, with
exit code 3 for a run; it is left out of every mean and rank; and no JSON contains a NaN.
"""

import json
import math
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from qkablate.training import hardware
from qkablate.training.loop import Trainer
from qkablate.training.session import build_initial_model
from tests.torture.readers import SMALL, find_problem, prepare_text, run_command
from tests.torture.tally import Tally

SHORT = 4
FULL = 40
_STEPS, _EVAL_EVERY = 6, 3  # of SMALL
_BAD = (math.nan, math.inf, -math.inf)


def torture(cases: int, seed: int, folder: Path) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    words = [*SMALL, *prepare_text(folder / "data")]
    result = run_command("train", *words, f"out={folder / 'good'}")
    assert result.code == 0, result.err
    for n in range(cases):
        fault = _FAULTS[n % len(_FAULTS)]
        tally.cases += 1
        case = folder / str(n)
        name, problem = fault(rng, case, words)
        problem = problem or _find_nan(case)
        if problem:
            tally.wrong.append(f"{name}: {problem}")
    return tally


def _poison(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Poison the loss, a gradient or a weight at one step."""
    where, bad_value = rng.choice(["loss", "gradient", "weight"]), rng.choice(_BAD)
    step, precision = rng.randrange(_STEPS), rng.choice(["fp32", "bf16"])
    every = rng.choice([1, 2, 5])
    original = Trainer._step

    def patched_step(self: Trainer, number: int) -> torch.Tensor:
        if number != step:
            return original(self, number)
        weight = next(self.model.parameters())
        if where == "weight":
            with torch.no_grad():
                weight[:] = bad_value
        handle = None
        if where == "gradient":
            handle = weight.register_hook(lambda gradient: gradient * bad_value)
        try:
            if where != "loss":
                return original(self, number)
            loss = self.train_step.training_loss
            with mock.patch.object(
                self.train_step, "training_loss", lambda *args: loss(*args) * bad_value
            ):
                return original(self, number)
        finally:
            if handle is not None:
                handle.remove()

    with mock.patch.object(Trainer, "_step", patched_step):
        result = run_command(
            *(
                "train",
                *words,
                f"precision={precision}",
                f"tracking.log_every={every}",
                f"out={out}",
            )
        )
    # A gradient affects the loss of the next step, or an earlier validation.
    is_late = where == "gradient" and (step + 1) % _EVAL_EVERY
    expected = step + 1 + bool(is_late)
    return (
        f"{where} {bad_value} at step {step}, {precision}, logged every {every}",
        find_problem(result, (3,)) or _check_divergence(out, expected),
    )


def _absurd_settings(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Train with absurd settings, which may diverge or finish."""
    overrides = rng.choice(
        [
            ["optim.lr=1000", "optim.clip=0", "model.norm=none"],
            ["optim.lr=1000", "optim.clip=0", "precision=bf16", "model.norm=none"],
            ["optim.lr=1000", "optim.weight_decay=1000", "optim.clip=0"],
            ["optim.lr=1000", "optim.betas=[0.0,0.0]", "optim.clip=0"],
            ["optim=muon", "optim.lr=1000", "optim.clip=0", "model.norm=none"],
        ]
    )
    result = run_command("train", *words, *overrides, f"seed={rng.randrange(10**6)}", f"out={out}")
    status = _read_result(out)["status"]
    problem = f"exit code {result.code} of a {status} run" * (
        result.code != {"done": 0, "diverged": 3}[status]
    )
    return " ".join(overrides), find_problem(result, (0, 3)) or problem


def _rejected_settings(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    word = rng.choice(["optim.lr=1e6", "optim.lr=nan", "optim.lr=inf", "optim.clip=-inf"])
    return word, find_problem(run_command("train", *words, word, f"out={out}"), (2,))


def _scale_initial_weights(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Scale the initial weights so that the first validation diverges."""
    scale, precision = 10.0 ** rng.randrange(30, 300), rng.choice(["fp32", "bf16"])

    def build_scaled_model(*args: Any) -> Any:
        model = build_initial_model(*args)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(scale).mul_(scale)
        return model

    with mock.patch("qkablate.training.session.build_initial_model", build_scaled_model):
        result = run_command("train", *words, f"precision={precision}", f"out={out}")
    return f"start times {scale}, {precision}", find_problem(result, (3,)) or _check_divergence(
        out, 0
    )


def _overflow_fp16(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Overflow fp16: the scaler skips these steps and finds a scale, also across a resume.

    fp16 is for GPUs; here it is computed on the CPU.
    """
    exponent, stop = rng.randrange(22, 28), rng.randrange(1, 29)
    words = [*words, "train.steps=30", "train.checkpoint_every=7", "tracking.log_every=1"]
    scalers = []

    def scaler(device: str, enabled: bool, original: Any = torch.amp.GradScaler) -> Any:
        scalers.append(original(device, init_scale=2.0**exponent, growth_interval=4))
        return scalers[-1]

    def patched_stop(self: Trainer, number: int, original: Any = Trainer._step) -> torch.Tensor:
        if number == stop:
            raise KeyboardInterrupt
        return original(self, number)

    def half_precision(*_: Any) -> Any:
        return torch.autocast("cpu", torch.float16)

    with (
        mock.patch.object(torch.amp, "GradScaler", scaler),
        mock.patch.object(hardware, "autocast", half_precision),
    ):
        reference = run_command("train", *words, f"out={out / 'reference'}")
        with mock.patch.object(Trainer, "_step", patched_stop):
            run_command("train", *words, f"out={out / 'interrupted'}")
        interrupted = run_command("train", *words, f"out={out / 'interrupted'}")
    name = f"a scale of 2**{exponent}, interrupted at step {stop}"
    if problem := find_problem(reference, (0,)) or find_problem(interrupted, (0,)):
        return name, problem
    if not all(1 < each.get_scale() <= 2.0**20 for each in (scalers[0], scalers[-1])):
        return name, f"scales of {[each.get_scale() for each in scalers]}"
    reference_end, interrupted_end = (
        _read_result(out / each) for each in ("reference", "interrupted")
    )
    if reference_end["loss"]["test"] > 5.52:  # a uniform guess of 256 bytes has 5.55
        return name, f"nothing is learned: {reference_end['loss']}"
    return name, "" if reference_end["loss"] == interrupted_end[
        "loss"
    ] else "the resumed run computed other numbers"


def _read_result(out: Path) -> Any:
    (path,) = out.glob("runs/*/result.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _diverging_arm(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Let one run, or all runs of one arm, diverge in a sweep of two arms and three seeds.

    The results must contain no NaN, leave out these pairs, and not rank such an arm.
    """
    all_seeds = rng.random() < 0.5
    bad_seeds = ["0", "1", "2"] if all_seeds else [str(rng.randrange(3))]
    for arm in ("standard", "no_q"):
        for seed in range(3):
            loss = Trainer.evaluate
            is_broken = arm == "no_q" and str(seed) in bad_seeds

            def evaluate_nan(
                self: Trainer, split: str, loss: Any = loss, is_broken: bool = is_broken
            ) -> Any:
                return {**loss(self, split), **({"loss": math.nan} if is_broken else {})}

            with mock.patch.object(Trainer, "evaluate", evaluate_nan):
                run_command("train", *words, f"variant={arm}", f"seed={seed}", f"out={out}")
    grid = ["variant=standard,no_q", "seed=range(3)", "sweep.floor=false"]
    name = f"no_q diverges with seeds {','.join(bad_seeds)}"
    if problem := find_problem(run_command("sweep", *words, *grid, f"out={out}"), (0,)):
        return name, problem
    result = run_command("results", f"out={out}", "--format", "json")
    page = run_command("report", f"out={out}", "-o", str(out / "page.md"))
    if problem := find_problem(result, (0,)) or find_problem(page, (0,)):
        return name, problem
    summary = json.loads(result.out, parse_constant=_reject_constant)
    for arm in summary["arms"]:
        losses = [run["test_loss"] for run in arm["runs"] if run["test_loss"] is not None]
        expected_count = 3 if arm["variant"] == "standard" else 3 - len(bad_seeds)
        if (len(losses), arm["n"]) != (expected_count, expected_count):
            return name, f"{arm['arm']} has {len(losses)} losses, and {arm['n']} are counted"
        if losses and not math.isclose(arm["mean"], math.fsum(losses) / len(losses)):
            return name, f"{arm['arm']}: the mean of {losses} is not {arm['mean']}"
        if not losses and arm["mean"] is not None:
            return name, f"{arm['arm']}: the mean of nothing is {arm['mean']}"
    if counts := [gap["n"] for gap in summary["gaps"] if gap["n"] != 3 - len(bad_seeds)]:
        return name, f"a gap of {counts} pairs"
    ranked = {entry["arm"] for ranking in summary["rankings"] for entry in ranking["ranks"]}
    if all_seeds and ranked & {arm["arm"] for arm in summary["arms"] if arm["variant"] == "no_q"}:
        return name, f"{ranked} are ranked"
    text = (out / "page.md").read_text(encoding="utf-8").lower()
    return name, "a nan in the report" if re.search(r"\bnan\b", text) else ""


_FAULTS = (
    _poison,
    _diverging_arm,
    _overflow_fp16,
    _absurd_settings,
    _scale_initial_weights,
    _poison,
    _rejected_settings,
    _poison,
)


def _check_divergence(out: Path, step: int) -> str:
    result = _read_result(out)
    outcome = result["status"], result.get("diverged_at")
    return "" if outcome == ("diverged", step) else f"{outcome}, not diverged at {step}"


def _reject_constant(word: str) -> None:
    raise ValueError(f"a {word} in JSON")


def _find_nan(out: Path) -> str:
    """Return the JSON file that contains NaN, if any."""
    for path in [*out.rglob("*.json"), *out.rglob("*.jsonl")]:
        lines = path.read_text(encoding="utf-8")
        for line in lines.splitlines() if path.suffix == ".jsonl" else [lines]:
            try:
                json.loads(line, parse_constant=_reject_constant)
            except ValueError as error:
                return f"{path.name}: {error}"
    return ""
