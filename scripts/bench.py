"""Benchmarks of qkablate on this machine: kernels, training steps, sweeps, startup.

    make bench                            # all of it, some 20 minutes on 2 cores
    python scripts/bench.py --only variants --variants merged_w,no_q
    make bench NANOGPT=~/src/nanoGPT      # beside nanoGPT: one run, and a sweep

Everything that is compared takes turns in one process; tables show medians and goals.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import compare_nanogpt as compare
import numpy as np
import torch
from compare_nanogpt import DEFAULT, SHAPES, Shape, configure, get_corpus
from hydra import initialize_config_dir

from qkablate.compose.register import register
from qkablate.config import Config, conf_dir, variants
from qkablate.errors import UserError, nearest_hint
from qkablate.models.catalogue import make_attention, resolve_circuits
from qkablate.models.cost import (
    forward_flops_per_token,
    training_flops_per_token,
)
from qkablate.table import print_table
from qkablate.tracking.metrics_file import MetricsFile
from qkablate.tracking.wandb.run import RunIdentity, WandbRun
from qkablate.training import hardware
from qkablate.training.loop import Trainer
from qkablate.training.measure import check_memory, measure_step_times
from qkablate.training.resolve import build_empty_model, plan_run

LONG = Shape(2, 768, 12, 1024, 2, steps=1)
PRODUCT = 8192 if torch.cuda.is_available() else 2048  # rows and columns of a large product
ALLOWED = 1.25
RUN = "model.layers=4 model.d_model=128 model.heads=4 model.context=64 train.batch_size=12"
EMPTY = "model.layers=1 model.d_model=16 model.heads=2 model.context=16 train.steps=1"
LONG_RUN = "model.layers=2 model.d_model=768 model.heads=12 model.context=1024 train.batch_size=2"
SHORT = "data.val_tokens=15361 data.test_tokens=15361 tracking.wandb=disabled"  # 20 batches
STEPS = 200


def matmul(folder: Path, args: argparse.Namespace) -> None:
    """Speed of large matrix products, the upper bound for a training step."""
    rows = []
    for precision, backend in (("fp32", "torch"), ("fp32", "onednn"), ("bf16", "torch")):
        words = (f"precision={precision}", f"matmul={backend}")
        try:
            config = hardware.resolve(configure(SHAPES["small"], "standard", 1, folder, *words))
        except UserError:  # no oneDNN, or a GPU
            continue
        with hardware.preserve_process_state():
            hardware.configure_process(config)
            speeds = sorted(hardware.measure_peak_flops(config, PRODUCT) for _ in range(9))
        best = f"{speeds[-1] / 1e9:,.0f}"
        rows.append([f"{precision}, matmul={backend}", f"{speeds[4] / 1e9:,.0f}", best])
    print_table(["matrix product", "GFLOP/s", "best"], rows)


def steps(folder: Path, args: argparse.Namespace) -> None:
    """Training steps of every variant: forward, backward, optimizer."""
    for label, shape in (*((name, SHAPES[name]) for name in DEFAULT), ("long", LONG)):
        configs: list[Config] = []
        for name in dict.fromkeys(["standard", *args.variants]):
            try:
                configs.append(resolve_circuits(configure(shape, name, 1000, folder))[0])
            except UserError as refused:
                print(f"left out: {refused}")
        resolved = [hardware.resolve(config) for config in configs]
        models = [build_empty_model(config, 256) for config in resolved]
        tokens = shape.batch_size * shape.context
        flops = [training_flops_per_token(model, tokens) for model in models]
        check_memory(
            [sum(model.parameter_counts().values()) // 2 for model in models], resolved[0].device
        )
        peak = hardware.measure_peak_flops(resolved[0], PRODUCT)
        step_times = measure_step_times(configs, 256, lambda part: None)
        rows = []
        for config, model, work, times in zip(resolved, models, flops, step_times, strict=True):
            peak = max(peak, hardware.measure_peak_flops(resolved[0], PRODUCT))
            ratio = times.median / step_times[0].median
            allowed = ALLOWED * max(1.0, work / flops[0])
            rows.append(
                [
                    *(config.variant.name, model.attention_layers()[0].module.kernel),
                    *(f"{1000 * times.median:,.1f}", f"{tokens / times.median:,.0f}"),
                    f"{100 * work * tokens / times.median / peak:.0f} %",
                    *(f"{ratio:.2f}", f"{work / flops[0]:.2f}", f"{allowed:.2f}"),
                    "" if ratio <= allowed else "over",
                ]
            )
        print(
            f"\n{label}: L {shape.layers}, d {shape.d_model}, h {shape.heads}, T {shape.context},"
            f" B {shape.batch_size}, {resolved[0].precision}, {step_times[0].rounds} rounds"
        )
        head = ["variant", "kernel", "ms/step", "tokens/s", "of peak", "time", "FLOPs"]
        print_table([*head, f"× {ALLOWED}", ""], rows)
        over = sum(bool(row[-1]) for row in rows)
        print(f"goal: time ≤ {ALLOWED} × max(1, FLOPs); exceeded by {over} of {len(rows)}")


def memory(folder: Path, args: argparse.Namespace) -> None:
    """Memory of one attention layer, forward and backward, and of whole runs."""
    rows = []
    for name, kernel in (("standard", "auto"), ("merged_w", "auto"), ("merged_w", "folded")):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            used, chosen = pool.apply(_layer_memory, (name, kernel))
        rows.append([name, chosen, f"{used / 2**20:,.0f} MiB"])
    for name in ("standard", "merged_w"):
        words = f"train variant={name} {LONG_RUN} {SHORT} train.steps=3 train.eval_every=3"
        _timed(words, folder / f"memory-{name}")
        (path,) = folder.glob(f"memory-{name}/runs/*/result.json")
        used = json.loads(path.read_text(encoding="utf-8"))["peak_memory_bytes"]
        rows.append([f"{name}, a whole run", "auto", f"{used / 2**20:,.0f} MiB"])
    scores = 4 * LONG.batch_size * LONG.heads * LONG.context**2
    print_table([f"one layer, T {LONG.context}", "kernel", "memory"], rows)
    print(f"all scores at once would take {scores / 2**20:,.0f} MiB, and a gradient needs several")


def _layer_memory(name: str, kernel: str) -> tuple[int, str]:
    torch.set_num_threads(2)
    with initialize(), tempfile.TemporaryDirectory() as folder:
        config = resolve_circuits(configure(LONG, name, 1, Path(folder)))[0]
    layer = make_attention(config.model, config.variant, kernel=kernel)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x_BTD = torch.randn(LONG.batch_size, LONG.context, LONG.d_model, requires_grad=True)
    layer(x_BTD[:, :64]).sum().backward()  # one-time allocations of the matmul library
    before = _peak_bytes()
    layer(x_BTD).sum().backward()
    return _peak_bytes() - before, layer.kernel


def _peak_bytes() -> int:
    """Return the peak memory of this process; getrusage would include its parent's."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return hardware.peak_memory("cpu")


def sweep(folder: Path, args: argparse.Namespace) -> None:
    """Time of a sweep of 32 small runs, and the overhead of a run beside its training."""
    words = f"sweep variant=standard,no_q,no_k,shared_qk seed=range(8) train.steps={STEPS} {RUN}"
    words += f" train.eval_every={STEPS} {SHORT}"
    seconds, busy = _timed(words, folder / "sweep")
    cores = os.cpu_count() or 1
    rows = [["qkablate sweep, 32 runs", f"{seconds:.0f} s", f"{32 * 3600 / seconds:,.0f}"]]
    if args.nanogpt is not None:
        seconds_each = statistics.median(_nanogpt(args.nanogpt, folder) for _ in range(3))
        rows.append(
            [
                "nanoGPT's train.py, one by one",
                f"{32 * seconds_each:.0f} s",
                f"{3600 / seconds_each:,.0f}",
            ]
        )
    print_table([f"{STEPS} steps each", "32 runs", "runs/hour"], rows)
    print(f"busy: {100 * busy:.0f} % of {cores} cores (all processes of the machine; 0: unknown)")
    for label, mode in (("without W&B", "disabled"), ("W&B offline", "offline")):
        took = []
        for runs in (8, 40):
            words = f"sweep variant=standard seed=range({runs}) {EMPTY} data.val_tokens=65"
            words += f" data.test_tokens=65 tracking.wandb={mode}"
            took.append(_timed(words, folder / f"{mode}-{runs}")[0])
        each = (took[1] - took[0]) / 32
        print(f"a run of one step, {label}: {1000 * each:.0f} ms")
    print("goal: 3 × nanoGPT's runs per hour, 95 % busy, 150 ms per run")


def many(folder: Path, args: argparse.Namespace) -> None:
    """Time and files per run in sweeps of 10, 100 and 1,000 runs."""
    rows, before = [], (0, 0.0)
    for runs in (10, 100, 1000):
        out = folder / f"many-{runs}"
        words = f"sweep variant=standard seed=range({runs}) {EMPTY} data.val_tokens=65"
        seconds = _timed(words + " data.test_tokens=65 tracking.wandb=disabled", out)[0]
        each = (seconds - before[1]) / (runs - before[0])
        before = runs, seconds
        files = [path for path in out.rglob("*") if not path.is_dir()]
        size = sum(path.lstat().st_blocks * 512 for path in files)
        folders = sum(path.is_dir() for path in out.rglob("*"))
        rows.append(
            [
                *(str(runs), f"{seconds:.1f} s", f"{1000 * each:.0f} ms"),
                *(
                    f"{len(files) / runs:.1f}",
                    f"{folders / runs:.1f}",
                    f"{size / runs / 1000:.1f} kB",
                ),
            ]
        )
    head = ["runs", "time", "each further run", "files/run", "folders/run", "disk/run"]
    print_table(head, rows)
    print("goal: the same time for each further run")


def evaluation(folder: Path, args: argparse.Namespace) -> None:
    """Time of a token in evaluation relative to training, compared with its share of the FLOPs."""
    rows = []
    for label, shape in ((name, SHAPES[name]) for name in DEFAULT):
        for name in ("standard", "merged_w"):
            planned = plan_run(configure(shape, name, 1000, folder))
            tokens = len(get_corpus(planned).split("val")) - 1
            hardware.configure_process(planned.config)
            model = planned.build().to_empty(device="cpu").init_(0).to(planned.config.device)
            trainer = Trainer(planned, model, None)
            count = max(1, tokens // 4 // planned.tokens_per_step)
            training, evaluation = [], []
            for _ in range(3):
                began = time.perf_counter()
                for step in range(count):
                    trainer._step(step)
                between = time.perf_counter()
                trainer.evaluate("val")
                training.append((between - began) / count / planned.tokens_per_step)
                evaluation.append((time.perf_counter() - between) / tokens)
            ratio = statistics.median(evaluation) / statistics.median(training)
            batch_tokens = shape.batch_size * shape.context
            forward = forward_flops_per_token(model, batch_tokens)
            flops_ratio = forward / training_flops_per_token(model, batch_tokens)
            rows.append([label, name, f"{ratio:.2f}", f"{flops_ratio:.2f}"])
    print_table(["shape", "variant", "time of training", "FLOPs of training"], rows)


def _timed(words: str, out: Path) -> tuple[float, float]:
    """Return the seconds of a command, and the fraction of the machine's cores that were busy."""
    began, work = time.perf_counter(), _jiffies()
    command = [sys.executable, "-m", "qkablate", *shlex.split(words), f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{words}: {(done.stderr.strip() or 'it failed').splitlines()[-1]}")
    busy, total = (after - before for after, before in zip(_jiffies(), work, strict=True))
    return time.perf_counter() - began, busy / max(1, total)


def _jiffies() -> tuple[int, int]:
    """Return the busy and the total clock ticks of all cores since boot."""
    try:
        times = [
            *map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9])
        ]
    except OSError:
        return 0, 0
    idle, stolen = times[3] + times[4], times[7]  # stolen by other virtual machines
    return sum(times) - idle - stolen, sum(times) - stolen


def _nanogpt(checkout: Path, folder: Path) -> float:
    """Return the seconds of nanoGPT's train.py with the same shape, steps and evaluation tokens."""
    cwd = folder / "nanogpt"
    data = cwd / "data" / "ours"
    if not data.exists():
        data.mkdir(parents=True)
        (cwd / "configurator.py").symlink_to(checkout / "configurator.py")
        corpus = get_corpus(plan_run(configure(SHAPES["small"], "standard", 1, folder)))
        train_tokens = corpus.split("train")
        for split in ("train", "val"):
            train_tokens.astype(np.uint16).tofile(data / f"{split}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.vocabulary}))
    device = hardware.resolve(configure(SHAPES["small"], "standard", 1, folder)).device
    words = (
        f"--dataset=ours --device={device} --compile=False --eval_iters=20 --eval_interval={STEPS}"
    )
    words += " --log_interval=10 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4"
    words += f" --n_embd=128 --max_iters={STEPS} --lr_decay_iters={STEPS} --dropout=0.0"
    words += " --gradient_accumulation_steps=1 --warmup_iters=10 --always_save_checkpoint=False"
    began = time.perf_counter()
    command = [sys.executable, str(checkout / "train.py"), *words.split(), "--out_dir=out"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"--nanogpt: {(done.stderr.strip() or 'it failed').splitlines()[-1]}")
    return time.perf_counter() - began


def start(folder: Path, args: argparse.Namespace) -> None:
    """Time from the command to its first output, and to the first training step."""
    command = [sys.executable, "-m", "qkablate"]
    seconds = statistics.median(_seconds([*command, "--help"]) for _ in range(9))
    print(f"--help: {1000 * seconds:.0f} ms (goal: 100)")
    words = shlex.split(
        f"train {RUN} {SHORT} train.steps=20 tracking.log_every=1 out={folder / 'start'}"
    )
    firsts = [_first_row([*command, *words, f"seed={seed}"], folder / "start") for seed in range(5)]
    print(f"train to its first step: {statistics.median(firsts):.2f} s (goal: 3)")
    step_ms = (
        1000
        * measure_step_times(
            [configure(SHAPES["small"], "standard", 1000, folder)], 256, lambda part: None
        )[0].median
    )
    row = {"step": 1, "tokens": 768, "seconds": 1.0, "train/loss": 2.5, "train/grad_norm": 0.5}
    row |= {"train/lr": 1e-3, "perf/tokens_per_second": 2e4, "perf/mfu": 0.5, "flops": 1e12}
    config = configure(SHAPES["small"], "standard", 1, folder, "tracking.wandb=offline")
    metrics_file = MetricsFile(folder / "metrics.jsonl")
    wandb_run = WandbRun(
        config.tracking, RunIdentity("a", "a", "a", "a", ()), folder, {}, lambda note: None
    )
    took = []
    for number in range(500):
        row["step"] = number
        began = time.perf_counter()
        metrics_file.log(row)
        wandb_run.log(row)
        took.append(1000 * (time.perf_counter() - began))
    each = statistics.median(took)
    wandb_run.close({}, 0)
    metrics_file.close()
    part = each / config.tracking.log_every / step_ms
    print(
        f"metrics and W&B offline: {each:.2f} ms a row, {100 * part:.2f} % of the steps (goal: 1)"
    )


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - began


def _first_row(command: list[str], out: Path) -> float:
    before = {*out.glob("runs/*/metrics.jsonl")}
    began = time.perf_counter()
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while running.poll() is None:
        for metrics_file in {*out.glob("runs/*/metrics.jsonl")} - before:
            if b"train/loss" in metrics_file.read_bytes():
                took = time.perf_counter() - began
                running.wait()
                return took
        time.sleep(0.005)
    raise UserError(f"{shlex.join(command)} ended without a training step")


@contextmanager
def initialize() -> Iterator[None]:
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def comma_list(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument(
        "--only",
        type=comma_list,
        default=[*SECTIONS],
        help=f"default: all of {', '.join(SECTIONS)}",
    )
    parser.add_argument("--variants", type=comma_list, default=[*variants()], help="default: all")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    args = parser.parse_args()
    for flag, values, known in (
        ("--only", args.only, [*SECTIONS]),
        ("--variants", args.variants, [*variants()]),
    ):
        if wrong := next((name for name in values if name not in known), None):
            one_of = f"{', '.join(known)}{nearest_hint(wrong, known)}"
            raise UserError(f"{flag}: '{wrong}' is not one of {one_of}")
    if args.nanogpt is not None:
        args.nanogpt = args.nanogpt.expanduser().resolve()
        if not (args.nanogpt / "train.py").is_file():
            raise UserError(f"--nanogpt: there is no train.py in '{args.nanogpt}'")
    warnings.filterwarnings("ignore", module="torch")
    with initialize(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = hardware.resolve(configure(SHAPES["small"], "standard", 1, folder))
        print(compare.format_header(config, args.nanogpt and args.nanogpt / "model.py"))
        for name in args.only:
            print(f"\n{name}: {SECTIONS[name].__doc__}\n", flush=True)
            SECTIONS[name](folder, args)


SECTIONS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "matmul": matmul,
    "variants": steps,
    "memory": memory,
    "sweep": sweep,
    "many": many,
    "evaluation": evaluation,
    "start": start,
}

if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
