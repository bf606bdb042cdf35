"""Measurements on a GPU as one table to paste: `make gpu`.

The tests that need a GPU; training steps of several variants, eager, compiled and as CUDA graphs,
with launches, memory and the share of the device's peak; memory and time of a layer by kernel; many
seeds as one program; and nanoGPT, if it is given. Without a GPU it ends with one line and code 2.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from compare_nanogpt import SHAPES, Shape, configure, format_header
from hydra import initialize_config_dir

from qkablate.compose.register import register
from qkablate.config import Config, conf_dir, variants
from qkablate.errors import UserError, nearest_hint
from qkablate.models.catalogue import make_attention, resolve_circuits
from qkablate.models.cost import training_flops_per_token
from qkablate.training import hardware
from qkablate.training.distributed.ranks import SINGLE_PROCESS
from qkablate.training.measure import make_training_step
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.step import TrainStep
from qkablate.training.vmapped.stack import RunStack, StackedStep

ROOT = Path(__file__).parent.parent
VOCABULARY = 256
WARM_UP = 5  # the fourth step of a program is captured
TESTS = (
    *("tests/training/test_gpu.py", "tests/training/test_prefetcher.py"),
    "tests/attention/kernels/test_gpu.py",
)
EXAMPLE = """examples
  make gpu
  make gpu NANOGPT=~/src/nanoGPT
  python scripts/measure_gpu.py --sections steps,seeds --variants standard,merged_w
"""


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurements."""

    folder: Path
    device: str = "cuda"
    shapes: dict[str, Shape] = field(
        default_factory=lambda: {name: SHAPES[name] for name in ("small", "gpt2")}
    )
    long: Shape = SHAPES["gpt2"]
    variants: tuple[str, ...] = ("standard", "merged_w", "wide_qk", "no_q")
    # Of `compile`, by shape: where a step takes long its launches do not.
    modes: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"small": ("false", "true", "graphs"), "gpt2": ("false", "true")}
    )
    kernels: tuple[str, ...] = ("auto", "folded", "efficient", "wide")
    rounds: int = 20
    seeds: tuple[int, ...] = (1, 4, 16, 64)
    peak_size: int | None = None  # of the product that measures the device's peak
    nanogpt: Path | None = None
    nanogpt_flags: tuple[str, ...] = ("--compile", "--shapes", "small,gpt2")

    def configure(self, shape: Shape, variant: str, *words: str) -> Config:
        """Return a resolved config."""
        words = (f"device={self.device}", *words)
        config = configure(shape, variant, 1000, self.folder, *words)
        return hardware.resolve(resolve_circuits(config)[0])


def run_tests(settings: Settings) -> str:
    """Run the tests that need a GPU."""
    workers = str(min(8, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", workers, *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*failures, lines[-1] if lines else f"pytest ended with {done.returncode}"])


def training_steps(settings: Settings) -> str:
    """Measure training steps: forward, backward, optimizer."""
    rows, notes = [], []
    for label, shape in settings.shapes.items():
        measured, tokens = [], shape.batch_size * shape.context
        torch.compiler.reset()  # guards of the last shape would slow this one down
        for variant in settings.variants:
            for mode in settings.modes[label]:
                try:
                    config = settings.configure(shape, variant, f"compile={mode}")
                    measured.append(_Measured(config))
                except (UserError, RuntimeError) as error:  # not possible here, or out of memory
                    notes.append(f"{label}, {variant}, compile={mode}: {_first_line(error)}")
        for turn in range(settings.rounds):
            for one in measured[turn % len(measured) :] + measured[: turn % len(measured)]:
                one.time()
        for one in measured:
            seconds = statistics.median(one.seconds)
            peak = hardware.measure_peak_flops(one.config, settings.peak_size)
            rows.append(
                [
                    *(label, one.config.variant.name, one.kernel, one.config.precision),
                    str(one.config.compile).lower(),
                    *(f"{1000 * seconds:.2f}", f"{tokens / seconds:,.0f}"),
                    f"{100 * one.flops * tokens / seconds / peak:.0f} %",
                    *(str(one.launches), _mebibytes(one.memory)),
                ]
            )
    head = ["shape", "variant", "kernel", "precision", "compile", "ms/step", "tokens/s", "of peak"]
    return _table([*head, "launches", "MiB"], rows, notes)


class _Measured:
    """A training step of a config, with what it takes."""

    def __init__(self, config: Config) -> None:
        self.config, self.seconds = config, list[float]()
        before = _allocated(config.device)
        model, self.step = make_training_step(config, VOCABULARY)
        self.kernel = model.kernel
        tokens = config.train.batch_size * config.model.context
        self.flops = training_flops_per_token(model, tokens)
        for _ in range(WARM_UP):
            self.step()
        self.memory = measure_peak(self.step, config.device, before)
        self.launches = count_launches(self.step, config.device)

    def time(self) -> None:
        self.seconds.append(hardware.time_action(self.step, self.config.device))


def count_launches(action: Callable[[], object], device: str) -> int:
    """Return the kernels that an action starts on a GPU; on a CPU, the operators that it calls."""
    kind = device.partition(":")[0].upper()
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if kind == "CUDA" else [activity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        action()
        hardware.synchronize(device)
    return sum(event.device_type.name == kind for event in profile.events() or ())


def measure_peak(action: Callable[[], object], device: str, before: int) -> int:
    """Return the peak memory of an action in bytes, without what was allocated before."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    action()
    hardware.synchronize(device)
    return max(0, hardware.peak_memory(device) - before)


def _allocated(device: str) -> int:
    is_cuda = device.startswith("cuda")
    return torch.cuda.memory_allocated(device) if is_cuda else hardware.peak_memory(device)


def layer_memory(settings: Settings) -> str:
    """Measure memory and time of one attention layer, forward and backward."""
    rows, notes, shape = [], [], settings.long
    for variant in settings.variants:
        for kernel in settings.kernels:
            try:
                config = settings.configure(shape, variant, f"attention.kernel={kernel}")
                used, seconds, chosen = _measure_layer(config, settings.rounds)
            except (UserError, RuntimeError) as error:
                notes.append(f"{variant}, {kernel}: {_first_line(error)}")
                continue
            measured = [_mebibytes(used), f"{1000 * seconds:.2f}"]
            rows.append([variant, kernel, chosen, config.precision, *measured])
    title = f"L 1, d {shape.d_model}, h {shape.heads}, T {shape.context}, B {shape.batch_size}"
    head = ["variant", "requested", "kernel", "precision", "MiB", "ms"]
    return f"{title}\n\n{_table(head, rows, notes)}"


def _measure_layer(config: Config, rounds: int) -> tuple[int, float, str]:
    device, model = config.device, config.model
    layer = make_attention(
        model,
        config.variant,
        device=device.partition(":")[0],
        precision=config.precision,
        gpu=hardware.find_gpu(config),
        kernel=config.attention.kernel,
    ).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    shape = (config.train.batch_size, model.context, model.d_model)
    x_BTD = torch.randn(shape, device=device, requires_grad=True)

    def step() -> None:
        with hardware.autocast(config):
            out = layer(x_BTD)
        out.float().sum().backward()

    before = _allocated(device)
    used = measure_peak(step, device, before)
    times = [hardware.time_action(step, device) for _ in range(WARM_UP + rounds)]
    return used, statistics.median(times[WARM_UP:]), layer.kernel


def many_seeds(settings: Settings) -> str:
    """Measure seeds that train as one program (train.vmap), relative to one after the other."""
    label, shape = next(iter(settings.shapes.items()))
    alone = _alone_seconds(settings, shape)
    rows, notes = [["alone", f"{1000 * alone:.2f}", "1.00", ""]], []
    for count in settings.seeds:
        before = _allocated(settings.device)
        try:
            seconds = _program_seconds(settings, shape, count)
        except (UserError, RuntimeError) as error:
            notes.append(f"{count}: {_first_line(error)}")
            continue
        used = max(0, hardware.peak_memory(settings.device) - before)
        speed = f"{alone * count / seconds:.2f}"
        rows.append([str(count), f"{1000 * seconds:.2f}", speed, _mebibytes(used)])
    head = ["seeds", "ms for a step of all", "steps/s, × one alone", "MiB"]
    return f"standard, {label}\n\n{_table(head, rows, notes)}"


def _alone_seconds(settings: Settings, shape: Shape) -> float:
    words = (f"device={settings.device}", "compile=false")
    plan = plan_run(configure(shape, "standard", 1000, settings.folder, *words))
    model = plan.build().to_empty(device="cpu").init_(0).to(plan.config.device)
    step = TrainStep(plan, model, None, SINGLE_PROCESS)
    return _median_seconds(settings, lambda number: step(number))


def _median_seconds(settings: Settings, action: Callable[[int], object]) -> float:
    hardware.reset_peak_memory(settings.device)
    seconds = [
        hardware.time_action(lambda n=number: action(n), settings.device)  # type: ignore[misc]
        for number in range(WARM_UP + settings.rounds)
    ]
    return statistics.median(seconds[WARM_UP:])


def _program_seconds(settings: Settings, shape: Shape, count: int) -> float:
    words = (f"device={settings.device}", f"train.vmap={count}", "compile=false")
    plans: list[RunPlan] = [
        plan_run(configure(shape, "standard", 1000, settings.folder, f"seed={seed}", *words))
        for seed in range(count)
    ]
    device = plans[0].config.device
    models = [plan.build().to_empty(device="cpu").init_(0).to(device) for plan in plans]
    pairs = zip(plans, models, strict=True)
    stack = RunStack([StackedStep(plan, model, None, SINGLE_PROCESS) for plan, model in pairs])
    return _median_seconds(settings, lambda number: stack([number] * count))


def nanogpt(settings: Settings) -> str:
    """Compare with nanoGPT, eager and compiled."""
    if settings.nanogpt is None:
        return "not given: make gpu NANOGPT=FOLDER"
    script = [sys.executable, str(ROOT / "scripts" / "compare_nanogpt.py")]
    command = [*script, "--nanogpt", str(settings.nanogpt), *settings.nanogpt_flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
    return f"```\n{done.stdout.strip()}\n```"


def _table(head: list[str], rows: list[list[str]], notes: list[str]) -> str:
    """Return a table in Markdown, with a line for everything that was left out."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        [*(f"| {' | '.join(cells)} |" for cells in lines), *(f"\nleft out: {n}" for n in notes)]
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


SECTIONS = {
    "tests": run_tests,
    "steps": training_steps,
    "memory": layer_memory,
    "seeds": many_seeds,
    "nanogpt": nanogpt,
}


def measure(settings: Settings, sections: list[str], show: Callable[[str], object]) -> None:
    """Show the machine, and every section once it is done."""
    shape = next(iter(settings.shapes.values()))
    model = settings.nanogpt and settings.nanogpt / "model.py"
    show(format_header(settings.configure(shape, "standard"), model))
    for name in sections:
        section = SECTIONS[name]
        show(f"\n### {(section.__doc__ or '').rstrip('.')}\n")
        show(section(settings))


def _names(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names of a list; UserError for one that is not known."""
    names = text.split(",")
    if wrong := next((name for name in names if name not in known), None):
        listed = f"{', '.join(known)}{nearest_hint(wrong, known)}"
        raise UserError(f"{flag}: '{wrong}' is not one of {listed}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    everything, some = ",".join(SECTIONS), ",".join(Settings.variants)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--sections", default=everything, help=f"default: {everything}")
    parser.add_argument("--variants", default=some, help=f"default: {some}")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("torch sees no CUDA GPU here; `make bench` measures a CPU")
    sections = _names("--sections", args.sections, SECTIONS)
    names = tuple(_names("--variants", args.variants, variants()))
    folder = args.nanogpt and args.nanogpt.expanduser().resolve()
    if folder is not None and not (folder / "model.py").is_file():
        raise UserError(f"--nanogpt: there is no model.py in '{args.nanogpt}'")
    warnings.filterwarnings("ignore", module="torch")
    register()
    with (
        initialize_config_dir(str(conf_dir()), version_base="1.3"),
        tempfile.TemporaryDirectory() as temporary,
    ):
        settings = Settings(Path(temporary), nanogpt=folder, variants=names)
        measure(settings, sections, lambda text: print(text, flush=True))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"gpu: {error}", file=sys.stderr)
        sys.exit(2)
