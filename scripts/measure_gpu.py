"""Measurements on a GPU as one table to paste: `make gpu`.

The tests that need a GPU; training steps of several variants, eager, compiled and as CUDA graphs,
with launches, memory and the share of the device's peak; memory of a layer by kernel; many seeds as
one program; and nanoGPT, if it is given. Without a GPU it ends with one line and code 2.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from compare_nanogpt import SHAPES, Shape, configure, format_header
from hydra import initialize_config_dir

from qkablate.compose.register import register
from qkablate.config import Config, conf_dir
from qkablate.errors import UserError
from qkablate.models.catalogue import make_attention, resolve_circuits
from qkablate.models.cost import training_flops_per_token
from qkablate.training import hardware
from qkablate.training.distributed.ranks import SINGLE_PROCESS
from qkablate.training.measure import make_training_step
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.vmapped.stack import RunStack, StackedStep

ROOT = Path(__file__).parent.parent
VOCABULARY = 256
WARM_UP = 3
GPT2 = Shape(12, 768, 12, 1024, 16, steps=5)
EXAMPLE = """examples
  make gpu
  make gpu NANOGPT=~/src/nanoGPT
"""


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurements."""

    folder: Path
    device: str = "cuda"
    shapes: dict[str, Shape] = field(default_factory=lambda: SHAPES | {"gpt2": GPT2})
    long: Shape = GPT2
    variants: tuple[str, ...] = ("standard", "merged_w", "wide_qk", "no_q")
    modes: tuple[str, ...] = ("false", "true", "graphs")
    kernels: tuple[str, ...] = ("auto", "folded", "efficient", "wide")
    rounds: int = 20
    seeds: tuple[int, ...] = (1, 4, 16, 64)
    peak_size: int | None = None  # of the product that measures the device's peak
    nanogpt: Path | None = None
    nanogpt_flags: tuple[str, ...] = ("--compile",)

    def configure(self, shape: Shape, variant: str, *words: str) -> Config:
        """Return a resolved config."""
        words = (f"device={self.device}", *words)
        config = configure(shape, variant, 1000, self.folder, *words)
        return hardware.resolve(resolve_circuits(config)[0])


def run_tests(settings: Settings) -> str:
    """Run the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/training/test_gpu.py"]
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
            for mode in settings.modes:
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
    """Measure the memory of one attention layer, forward and backward."""
    rows, notes, shape = [], [], settings.long
    for variant in settings.variants:
        for kernel in settings.kernels:
            try:
                config = settings.configure(shape, variant, f"attention.kernel={kernel}")
                used, chosen = _layer_memory(config)
            except (UserError, RuntimeError) as error:
                notes.append(f"{variant}, {kernel}: {_first_line(error)}")
                continue
            rows.append([variant, kernel, chosen, config.precision, _mebibytes(used)])
    title = f"L 1, d {shape.d_model}, h {shape.heads}, T {shape.context}, B {shape.batch_size}"
    return (
        f"{title}\n\n{_table(['variant', 'requested', 'kernel', 'precision', 'MiB'], rows, notes)}"
    )


def _layer_memory(config: Config) -> tuple[int, str]:
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
    return measure_peak(step, device, before), layer.kernel


def many_seeds(settings: Settings) -> str:
    """Measure seeds that train as one program (train.vmap), relative to one after the other."""
    rows, notes, base = [], [], 0.0
    label, shape = next(iter(settings.shapes.items()))
    for count in settings.seeds:
        try:
            seconds = _program_seconds(settings, shape, count)
        except (UserError, RuntimeError) as error:
            notes.append(f"{count}: {_first_line(error)}")
            continue
        base = base or seconds / count
        rows.append([str(count), f"{1000 * seconds:.2f}", f"{base * count / seconds:.2f}"])
    head = ["seeds", "ms for a step of all", "steps/s, × one seed"]
    return f"standard, {label}\n\n{_table(head, rows, notes)}"


def _program_seconds(settings: Settings, shape: Shape, count: int) -> float:
    words = (f"device={settings.device}", f"train.vmap={count}", "compile=false")
    plans: list[RunPlan] = [
        plan_run(configure(shape, "standard", 1000, settings.folder, f"seed={seed}", *words))
        for seed in range(count)
    ]
    device = plans[0].config.device
    models = [plan.build().to_empty(device="cpu").init_(0).to(device) for plan in plans]
    pairs = zip(plans, models, strict=True)
    steps = [StackedStep(plan, model, None, SINGLE_PROCESS) for plan, model in pairs]
    stack, seconds = RunStack(steps), []
    for number in range(WARM_UP + settings.rounds):
        seconds.append(hardware.time_action(lambda n=number: stack([n] * count), device))  # type: ignore[misc]
    return statistics.median(seconds[WARM_UP:])


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


SECTIONS = (run_tests, training_steps, layer_memory, many_seeds, nanogpt)


def measure(settings: Settings, show: Callable[[str], object]) -> None:
    """Show the machine, and every section once it is done."""
    shape = next(iter(settings.shapes.values()))
    model = settings.nanogpt and settings.nanogpt / "model.py"
    show(format_header(settings.configure(shape, "standard"), model))
    for section in SECTIONS:
        show(f"\n### {(section.__doc__ or '').rstrip('.')}\n")
        show(section(settings))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("torch sees no CUDA GPU here; `make bench` measures a CPU")
    folder = args.nanogpt and args.nanogpt.expanduser().resolve()
    if folder is not None and not (folder / "model.py").is_file():
        raise UserError(f"--nanogpt: there is no model.py in '{args.nanogpt}'")
    warnings.filterwarnings("ignore", module="torch")
    register()
    with (
        initialize_config_dir(str(conf_dir()), version_base="1.3"),
        tempfile.TemporaryDirectory() as temporary,
    ):
        measure(Settings(Path(temporary), nanogpt=folder), lambda text: print(text, flush=True))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"gpu: {error}", file=sys.stderr)
        sys.exit(2)
