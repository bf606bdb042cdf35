"""Numbers that are none: losses, gradients and weights that overflow, at any step.

A case is a run, or a sweep with an arm that goes wrong. It ends as `diverged` at the step where it
did, with exit code 3 of a run; it stays out of every mean and rank; and no JSON has a NaN in it.
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
from tests.torture.readers import SMALL, command, text, wrong
from tests.torture.tally import Tally

SHORT = 4
FULL = 40
_STEPS, _EVAL_EVERY = 6, 3  # of SMALL
_BAD = (math.nan, math.inf, -math.inf)


def torture(cases: int, seed: int, folder: Path) -> Tally:
    chance = random.Random(seed)
    tally = Tally()
    words = [*SMALL, *text(folder / "data")]
    said = command("train", *words, f"out={folder / 'good'}")
    assert said.code == 0, said.err
    for n in range(cases):
        what = _WHAT[n % len(_WHAT)]
        tally.cases += 1
        case = folder / str(n)
        name, found = what(chance, case, words)
        found = found or _no_nan(case)
        if found:
            tally.wrong.append(f"{name}: {found}")
    return tally


def _poisoned(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Poison the loss, a gradient or a weight at one step."""
    where, bad = chance.choice(["loss", "gradient", "weight"]), chance.choice(_BAD)
    step, half = chance.randrange(_STEPS), chance.choice(["fp32", "bf16"])
    every = chance.choice([1, 2, 5])
    original = Trainer._step

    def stepped(self: Trainer, at: int) -> torch.Tensor:
        if at != step:
            return original(self, at)
        weight = next(self.model.parameters())
        if where == "weight":
            with torch.no_grad():
                weight[:] = bad
        handle = None
        if where == "gradient":
            handle = weight.register_hook(lambda gradient: gradient * bad)
        try:
            if where != "loss":
                return original(self, at)
            loss = self.train_step.training_loss
            with mock.patch.object(
                self.train_step, "training_loss", lambda *given: loss(*given) * bad
            ):
                return original(self, at)
        finally:
            if handle is not None:
                handle.remove()

    with mock.patch.object(Trainer, "_step", stepped):
        said = command(
            *("train", *words, f"precision={half}", f"tracking.log_every={every}", f"out={out}")
        )
    # A gradient shows in the loss of the next step, or in a validation before that.
    late = where == "gradient" and (step + 1) % _EVAL_EVERY
    expected = step + 1 + bool(late)
    return (
        f"{where} {bad} at step {step}, {half}, logged every {every}",
        wrong(said, (3,)) or _diverged_at(out, expected),
    )


def _absurd(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Rates, and starts, that no number survives; where one does, it is a result."""
    more = chance.choice(
        [
            ["optim.lr=1000", "optim.clip=0", "model.norm=none"],
            ["optim.lr=1000", "optim.clip=0", "precision=bf16", "model.norm=none"],
            ["optim.lr=1000", "optim.weight_decay=1000", "optim.clip=0"],
            ["optim.lr=1000", "optim.betas=[0.0,0.0]", "optim.clip=0"],
        ]
    )
    said = command("train", *words, *more, f"seed={chance.randrange(10**6)}", f"out={out}")
    status = _end(out)["status"]
    told = f"exit code {said.code} of a {status} run" * (
        said.code != {"done": 0, "diverged": 3}[status]
    )
    return " ".join(more), wrong(said, (0, 3)) or told


def _refused(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    word = chance.choice(["optim.lr=1e6", "optim.lr=nan", "optim.lr=inf", "optim.clip=-inf"])
    return word, wrong(command("train", *words, word, f"out={out}"), (2,))


def _started(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Weights that are too large from the start: the first reading of validation says so."""
    scale, half = 10.0 ** chance.randrange(30, 300), chance.choice(["fp32", "bf16"])

    def grown(*given: Any) -> Any:
        model = build_initial_model(*given)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(scale).mul_(scale)
        return model

    with mock.patch("qkablate.training.session.build_initial_model", grown):
        said = command("train", *words, f"precision={half}", f"out={out}")
    return f"start times {scale}, {half}", wrong(said, (3,)) or _diverged_at(out, 0)


def _overflowing(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Overflow fp16: the scaler skips these steps and finds a scale, also across a resume.

    fp16 is for GPUs; here it is computed on the CPU.
    """
    exponent, stop = chance.randrange(22, 28), chance.randrange(1, 29)
    words = [*words, "train.steps=30", "train.checkpoint_every=7", "tracking.log_every=1"]
    scalers = []

    def scaler(device: str, enabled: bool, original: Any = torch.amp.GradScaler) -> Any:
        scalers.append(original(device, init_scale=2.0**exponent, growth_interval=4))
        return scalers[-1]

    def stopped(self: Trainer, at: int, original: Any = Trainer._step) -> torch.Tensor:
        if at == stop:
            raise KeyboardInterrupt
        return original(self, at)

    def half(*_: Any) -> Any:
        return torch.autocast("cpu", torch.float16)

    with (
        mock.patch.object(torch.amp, "GradScaler", scaler),
        mock.patch.object(hardware, "autocast", half),
    ):
        calm = command("train", *words, f"out={out / 'calm'}")
        with mock.patch.object(Trainer, "_step", stopped):
            command("train", *words, f"out={out / 'rough'}")
        rough = command("train", *words, f"out={out / 'rough'}")
    name = f"a scale of 2**{exponent}, interrupted at step {stop}"
    if found := wrong(calm, (0,)) or wrong(rough, (0,)):
        return name, found
    if not all(1 < one.get_scale() <= 2.0**20 for one in (scalers[0], scalers[-1])):
        return name, f"scales of {[one.get_scale() for one in scalers]}"
    calm_end, rough_end = (_end(out / each) for each in ("calm", "rough"))
    if calm_end["loss"]["test"] > 5.52:  # of 256 bytes, 5.55 is nothing learned
        return name, f"nothing is learned: {calm_end['loss']}"
    return name, "" if calm_end["loss"] == rough_end["loss"] else "it went on otherwise"


def _end(out: Path) -> Any:
    (path,) = out.glob("runs/*/result.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _swept(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Let one run, or all runs of one arm, go wrong in a sweep of two arms and three seeds.

    The results must have no NaN, leave out these pairs, and not rank such an arm.
    """
    whole = chance.random() < 0.5
    bad = ["0", "1", "2"] if whole else [str(chance.randrange(3))]
    for arm in ("standard", "no_q"):
        for seed in range(3):
            loss = Trainer.evaluate
            broken = arm == "no_q" and str(seed) in bad

            def none(self: Trainer, split: str, loss: Any = loss, broken: bool = broken) -> Any:
                return {**loss(self, split), **({"loss": math.nan} if broken else {})}

            with mock.patch.object(Trainer, "evaluate", none):
                command("train", *words, f"variant={arm}", f"seed={seed}", f"out={out}")
    grid = ["variant=standard,no_q", "seed=range(3)"]
    name = f"no_q diverges with seeds {','.join(bad)}"
    if found := wrong(command("sweep", *words, *grid, f"out={out}"), (0,)):
        return name, found
    said = command("results", f"out={out}", "--format", "json")
    page = command("report", f"out={out}", "-o", str(out / "page.md"))
    if found := wrong(said, (0,)) or wrong(page, (0,)):
        return name, found
    found = json.loads(said.out, parse_constant=_refuse)
    for arm in found["arms"]:
        losses = [run["test_loss"] for run in arm["runs"] if run["test_loss"] is not None]
        wanted = 3 if arm["variant"] == "standard" else 3 - len(bad)
        if (len(losses), arm["n"]) != (wanted, wanted):
            return name, f"{arm['arm']} has {len(losses)} losses, and {arm['n']} are counted"
        if losses and not math.isclose(arm["mean"], math.fsum(losses) / len(losses)):
            return name, f"{arm['arm']}: the mean of {losses} is not {arm['mean']}"
        if not losses and arm["mean"] is not None:
            return name, f"{arm['arm']}: the mean of nothing is {arm['mean']}"
    if counts := [gap["n"] for gap in found["gaps"] if gap["n"] != 3 - len(bad)]:
        return name, f"a gap of {counts} pairs"
    ranked = {one["arm"] for ranking in found["rankings"] for one in ranking["ranks"]}
    if whole and ranked & {arm["arm"] for arm in found["arms"] if arm["variant"] == "no_q"}:
        return name, f"{ranked} are ranked"
    told = (out / "page.md").read_text(encoding="utf-8").lower()
    return name, "a nan in the report" if re.search(r"\bnan\b", told) else ""


_WHAT = (_poisoned, _swept, _overflowing, _absurd, _started, _poisoned, _refused, _poisoned)


def _diverged_at(out: Path, step: int) -> str:
    result = _end(out)
    found = result["status"], result.get("diverged_at")
    return "" if found == ("diverged", step) else f"{found}, not diverged at {step}"


def _refuse(word: str) -> None:
    raise ValueError(f"a {word} in JSON")


def _no_nan(out: Path) -> str:
    """Return the JSON that contains NaN, if any."""
    for path in [*out.rglob("*.json"), *out.rglob("*.jsonl")]:
        lines = path.read_text(encoding="utf-8")
        for line in lines.splitlines() if path.suffix == ".jsonl" else [lines]:
            try:
                json.loads(line, parse_constant=_refuse)
            except ValueError as error:
                return f"{path.name}: {error}"
    return ""
