"""Inspection of a sweep from outside, while it runs and afterwards."""

import json
import time

import torch
from safetensors.torch import load_file


def status(qkablate, *words):
    """Return the output of `status --json`, and each run's status by variant and seed."""
    found = json.loads(qkablate("status", *words, "--json").out)
    return found, {(s["variant"], s["seed"]): s["status"] for s in found["states"]}


def wait_for_progress(launcher, tmp_path, word="train/loss", above=0):
    """Wait until a run has trained past a step."""
    while launcher.poll() is None:
        for path in tmp_path.glob("outputs/runs/*/metrics.jsonl"):
            lines = path.read_text().splitlines()[:-1]
            if any(word in line and json.loads(line)["step"] > above for line in lines):
                return
        time.sleep(0.02)
    raise AssertionError(launcher.communicate())


def results(tmp_path, out="outputs"):
    return {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"{out}/runs/*/result.json")}


def final_state(folder):
    """Return the weights and all metrics that do not depend on the clock."""
    (newest,) = folder.glob("checkpoints/step-*")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for key in [key for key in row if key.startswith(("perf/", "seconds", "crc32"))]:
            del row[key]
    return load_file(newest / "weights.safetensors"), rows


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, other[0][name]), name
