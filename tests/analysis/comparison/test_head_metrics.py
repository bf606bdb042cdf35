"""Head metrics: hostile rows, means over the heads present, order without names."""

import json

import numpy as np
import pytest

from qkablate.analysis.comparison.head_metrics import (
    SPECTRUM,
    read_head_metrics,
    read_head_rows,
    relative_spectra,
    sort_heads,
)
from qkablate.runs.records import encode_row

NAMES = ("qk/stable_rank", "attention/entropy", SPECTRUM)
PER_STEP = 32


def row(step, mechanism):
    return {"step": step, "tokens": step * PER_STEP, "seconds": 1.0, "diagnostics": mechanism}


def write(folder, *rows, more=""):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (folder / "metrics.jsonl").write_text(text + more)


def of(value, layers=2, heads=3):
    return {"qk": {"stable_rank": [[value + i for i in range(heads)] for _ in range(layers)]}}


def test_rows_are_read_by_tokens(tmp_path):
    loss = {"step": 2, "tokens": 64, "val/loss": 2.0}
    write(tmp_path, row(0, of(1.0)), loss, row(4, of(5.0)))
    found = read_head_rows(tmp_path, NAMES, 10)
    assert [*found] == [0, 4 * PER_STEP]
    assert found[128]["qk/stable_rank"].tolist() == [[5.0, 6.0, 7.0]] * 2
    assert "attention/entropy" not in found[128]


def test_null_becomes_nan(tmp_path):
    mechanism = {"qk": {"stable_rank": [None, [1.0, None]]}, "attention": {"entropy": [None, None]}}
    write(tmp_path, row(0, mechanism))
    found = read_head_rows(tmp_path, NAMES, 10)[0]
    assert np.isnan(found["qk/stable_rank"]).tolist() == [[True, True], [False, True]]
    assert "attention/entropy" not in found


BAD = {
    "no map": [1, 2],
    "a word": "diagnostics",
    "no list": {"qk": {"stable_rank": 3.0}},
    "flat": {"qk": {"stable_rank": [1.0, 2.0]}},
    "ragged": {"qk": {"stable_rank": [[1.0], [1.0, 2.0]]}},
    "empty": {"qk": {"stable_rank": []}},
    "empty heads": {"qk": {"stable_rank": [[], []]}},
    "words": {"qk": {"stable_rank": [["1", "2"]]}},
    "true": {"qk": {"stable_rank": [[True, False]]}},
    "huge": {"qk": {"stable_rank": [[1e300]]}},
    "too many": {"qk": {"stable_rank": [[1.0] * 5000]}},
    "a bomb": {"qk": {"stable_rank": [[1.0] + [None] * 999] + [None] * 999}},
    "spectrum without values": {"qk": {"singular": [[1.0]]}},
    "no part": {"qk": None},
}


@pytest.mark.parametrize("name", BAD)
def test_foreign_rows_are_skipped(tmp_path, name):
    write(tmp_path, row(0, BAD[name]), row(1, of(1.0)))
    assert [*read_head_rows(tmp_path, NAMES, 10)] == [PER_STEP]


@pytest.mark.parametrize(
    "more",
    [
        '{"tokens": 99, "diagnostics": {"qk"',
        '{"diagnostics": {}}\n',
        '{"tokens": -3, "diagnostics": {}}\n',
        '{"tokens": 99, "diagnostics": ' + "[" * 10_000,
        '{"tokens": 99, "diagnostics": {"qk": {"stable_rank": [[NaN, Infinity]]}}}\n',
        "\x00\xff mechanism\n",
    ],
)
def test_torn_and_hostile_lines_are_passed_over(tmp_path, more):
    write(tmp_path, row(1, of(1.0)), more=more)
    assert [*read_head_rows(tmp_path, NAMES, 10)] == [PER_STEP]


def test_row_without_its_checksum_is_skipped_with_a_warning(tmp_path, capsys):
    lines = [encode_row(row(step, of(1.0))) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(
        lines[0].replace(b"1.0", b"9.0") + b"\n" + lines[1] + b"\n"
    )
    assert [*read_head_rows(tmp_path, NAMES, 10)] == [2 * PER_STEP]
    assert "rows of head metrics skipped: 1" in capsys.readouterr().err


def test_number_of_rows_is_limited(tmp_path):
    write(tmp_path, *(row(step, of(1.0)) for step in range(101)))
    found = [tokens // PER_STEP for tokens in read_head_rows(tmp_path, NAMES, 5)]
    assert found == [0, 25, 50, 75, 100]
    assert len(read_head_rows(tmp_path, NAMES, 1000)) == 101


def test_course_that_is_not_the_results_is_not_read(tmp_path):
    write(tmp_path, row(1, of(1.0)))
    assert read_head_rows(tmp_path, NAMES, 10)
    result = {"status": "diverged", "diverged_at": 1, "tokens": 1, "seconds": 1, "loss": {}}
    (tmp_path / "result.json").write_text(json.dumps({**result, "metrics_sha256": "0" * 64}))
    assert read_head_rows(tmp_path, NAMES, 10) == {}


# Means


def test_heads_are_sorted_by_value():
    one = np.array([[1.0, 9.0, 5.0], [3.0, 2.0, 1.0]])
    other = np.array([[7.0, 3.0, 11.0], [1.0, 1.0, 4.0]])
    assert sort_heads([one, other]).tolist() == [[10.0, 6.0, 2.0], [3.5, 1.5, 1.0]]
    shuffled = other[:, [2, 0, 1]]
    assert sort_heads([one, shuffled]).tolist() == sort_heads([one, other]).tolist()


def test_unknown_heads_are_sorted_last():
    one = np.array([[np.nan, 2.0, 1.0]])
    found = sort_heads([one, np.array([[5.0, 4.0, 3.0]])])
    assert found.tolist() == [[3.5, 2.5, 3.0]]
    nothing = sort_heads([np.full((1, 2), np.nan)])
    assert np.isnan(nothing).all()


def test_spectrum_is_by_its_largest():
    one = np.array([[[4.0, 2.0, 1.0], [10.0, 10.0, 0.0]]])
    assert relative_spectra([one]).tolist() == [[1.0, 0.75, 0.125]]
    assert relative_spectra([one, 7 * one]).tolist() == [[1.0, 0.75, 0.125]]
    zero = np.array([[[0.0, 0.0, 0.0], [2.0, 1.0, 1.0]]])
    assert relative_spectra([zero]).tolist() == [[1.0, 0.5, 0.5]]


@pytest.fixture
def watched(cached_world):
    """Return no_q with four seeds, whose value is the seed and grows with the step."""
    world = cached_world("variant=standard,no_q", "seed=range(4)").finish(lambda run: 2.0)
    for run in world.runs():
        if run.arm.startswith("no_q"):
            seed = run.changes["seed"]
            write(world.run_folder(run), *(row(step, of(seed + step)) for step in (0, 6, 12)))

    def make(change=lambda world: None):
        change(world)
        entry = next(e for e in world.study().entries if e.arm.variant == "no_q")
        return read_head_metrics(entry, NAMES, 10)

    return make


def test_curve_is_the_mean_over_heads_with_a_sample_of_runs(watched):
    curve = watched().curve("qk/stable_rank", 10)
    assert curve.tokens == [6 * PER_STEP, 12 * PER_STEP]
    assert curve.samples[-1].values == (13.0, 14.0, 15.0, 16.0)  # 12 + seed + the mean of 0, 1, 2
    assert watched().curve("attention/entropy", 10) is None


def test_end_is_that_of_training(watched):
    found = watched()
    ranks = found.at("qk/stable_rank", found.entry.tokens)
    assert [one[0, 0] for one in ranks] == [12.0, 13.0, 14.0, 15.0]
    assert found.at("attention/entropy", found.entry.tokens) == []

    def cut(world):
        for run in world.runs():
            write(world.run_folder(run), row(6, of(1.0)))

    assert watched(cut).at("qk/stable_rank", found.entry.tokens) == []


def test_only_runs_that_are_done_are_watched(watched):
    def fail(world):
        world.write(next(r for r in world.runs() if r.arm.startswith("no_q")), "failed")

    assert len(watched(fail).runs) == 3


def test_runs_of_another_shape_are_left_out(watched):
    def reshape(world):
        run = [r for r in world.runs() if r.arm.startswith("no_q")][-1]
        write(world.run_folder(run), row(12, of(1.0, layers=5)))

    found = watched(reshape)
    assert len(found.at("qk/stable_rank", found.entry.tokens)) == 3
