"""Standard error of a gap over documents, from arrays and from the files of runs."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from qkablate.analysis.comparison.audit import NOTE, OK, WARNING
from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.lr_curves import find_lr_curves
from qkablate.analysis.comparison.summary import audit_gap, describe_study
from qkablate.analysis.study.document_error import document_error, error_of_difference
from qkablate.report.text.tables import make_tables
from qkablate.runs.document_losses import (
    FILE_NAME,
    DocumentLosses,
    DocumentLossesHeader,
    read_document_losses,
    write_document_losses,
)

PAIR = ("variant=standard,no_q", "seed=range(3)")
TOKENS = [100, 200, 50, 150]


def pair(difference, tokens):
    """Return the losses of two runs that differ by this much."""
    header, tokens = DocumentLossesHeader("run", "data"), np.array(tokens)
    losses = 2.0 * tokens
    return (
        DocumentLosses(header, losses + difference, tokens),
        DocumentLosses(header, losses, tokens),
    )


def test_error_is_the_spread_of_means_over_samples_of_documents():
    """Against the definition: draw other documents from the same population, again and again."""
    rng = np.random.default_rng(0)

    def draw():
        tokens = rng.integers(50, 400, 60)
        return tokens * rng.normal(0.1, 0.05, 60), tokens

    samples = [draw() for _ in range(2000)]
    gaps = [difference.sum() / tokens.sum() for difference, tokens in samples]
    errors = [document_error([pair(*sample)]).se for sample in samples]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(gaps), rel=0.06)


def test_error_of_a_difference_is_that_of_the_documents_both_have_read():
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 400, 60)
    shared, own = (rng.normal(0.1, size, 60) * tokens for size in (0.2, 0.01))
    both = [pair(shared + own, tokens)], [pair(shared, tokens)]
    assert error_of_difference(*both).se == pytest.approx(document_error([pair(own, tokens)]).se)
    assert error_of_difference(both[0], [pair(shared[1:], tokens[1:])]) is None


def test_error_is_that_of_leaving_out_one_document_at_a_time():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 400, 9)
    difference = rng.normal(0.1, 0.2, 9) * tokens
    means = [np.delete(difference, i).sum() / np.delete(tokens, i).sum() for i in range(9)]
    gap = difference.sum() / tokens.sum()
    expected = np.sqrt(8 / 9 * np.square(np.array(means) - gap).sum())
    assert document_error([pair(difference, tokens)]).se == pytest.approx(expected)


def test_error_over_files_covers_where_that_over_pairs_is_too_small():
    """Pairs of a file share an effect on the gap, and a few files have most pairs."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(3, 1, 50), 1, None).astype(int)
    starts = np.cumsum(sizes) - sizes
    truth, rounds, covered = 0.05, 1000, np.zeros(2)
    errors, gaps = [], []
    for _ in range(rounds):
        tokens = rng.integers(5, 40, sizes.sum())
        effects = np.repeat(rng.normal(0, 0.1, len(sizes)), sizes)
        difference = tokens * (truth + effects + rng.normal(0, 0.2, len(tokens)))
        gap = difference.sum() / tokens.sum()
        by_file = (np.add.reduceat(values, starts) for values in (difference, tokens))
        found = [document_error([pair(*sums)]) for sums in (by_file, (difference, tokens))]
        quantiles = [stats.t.ppf(0.975, error.documents - 1) for error in found]
        covered += [
            abs(gap - truth) < quantile * error.se
            for quantile, error in zip(quantiles, found, strict=True)
        ]
        errors.append([error.se for error in found])
        gaps.append(gap)
    over_files, over_pairs = np.sqrt(np.mean(np.square(errors), axis=0)) / np.std(gaps)
    assert over_files == pytest.approx(1, abs=0.07)
    assert over_pairs < 0.5
    assert covered[0] / rounds == pytest.approx(0.95, abs=0.025)
    assert covered[1] / rounds < 0.7


def test_error_is_zero_where_all_documents_agree():
    tokens = np.array(TOKENS)
    assert document_error([pair(0.2 * tokens, tokens)]).se == pytest.approx(0, abs=1e-12)


def test_seeds_are_averaged_before_documents():
    tokens = np.array(TOKENS)
    noise = np.array([1.0, -1, 2, -2])
    error = document_error([pair(0.2 * tokens + noise, tokens), pair(0.2 * tokens - noise, tokens)])
    assert error.se == pytest.approx(0, abs=1e-12)
    assert error.documents == 4


def test_error_of_one_document_is_unknown():
    assert document_error([pair([1.0], [9])]) is None
    assert document_error([]) is None


def test_error_of_runs_with_other_documents_is_unknown():
    assert document_error([pair([1.0, 2], [9, 9]), pair([1.0, 2], [9, 8])]) is None


def record(world, spread, source="text"):
    """Give every run its losses by document; `spread` is that of the gaps between documents."""
    effect = np.array([1, -1, 1, -1]) * spread
    for run in world.runs():
        folder = world.run_folder(run)
        path = folder / "result.json"
        result = json.loads(path.read_text()) | {"data": {"source": source}}
        path.write_text(json.dumps(result))
        mean = 2.0 + effect * run.arm.startswith("no_q")
        losses = (mean * TOKENS).tolist()
        header = DocumentLossesHeader(run.id, world.result(run)["data_fingerprint"])
        write_document_losses(folder, header, losses, TOKENS)
    return world


def loss_of(run):
    return 2.0 + run.changes["seed"] / 70 + (0.3 if run.arm.startswith("no_q") else 0.0)


@pytest.fixture
def measured(world):
    return world(*PAIR).finish(loss_of)


def audited(world, margin=None):
    study = world.study()
    family = find_families(study)[0]
    found = audit_gap(family, 0, find_lr_curves(study), margin)
    return next(check for check in found if check.name == "documents")


def test_error_is_read_from_the_files_of_runs(measured):
    record(measured, 0.03)
    gap = find_families(measured.study())[0].gaps[0]
    error = gap.document_error
    assert error.documents == 4
    tokens = np.array(TOKENS)
    difference = np.array([1, -1, 1, -1]) * 0.03 * tokens
    expected = document_error([pair(difference, tokens)])
    assert error.se == pytest.approx(expected.se)


def test_audit_warns_where_documents_matter(measured):
    assert audited(record(measured, 0.03), margin=0.01).state == WARNING
    assert "of the margin (0.0100)" in audited(measured, margin=0.01).message
    check = audited(measured, margin=1.0)
    assert check.state == WARNING
    assert "half width" in check.message  # all seeds agree, so the interval is narrow


def test_audit_names_what_reads_more_documents(measured):
    record(measured, 0.03)
    assert "raise data.test_tokens" in audited(measured, margin=0.01).message
    for run in measured.runs():
        path = measured.run_folder(run) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"test_tokens": 64}))
    assert "train.test_tokens=all reads more" in audited(measured, margin=0.01).message


def test_audit_is_satisfied_where_documents_agree(measured):
    check = audited(record(measured, 1e-6), margin=0.01)
    assert check.state == OK
    assert "4 test documents" in check.message


@pytest.mark.parametrize(
    ("source", "documents"),
    [("stdlib_pairs", "files"), ("stdlib_tags", "files"), ("pairs", "pairs")],
)
def test_audit_names_the_documents_of_pairs_and_tags(measured, source, documents):
    check = audited(record(measured, 0.03, source), margin=0.01)
    assert check.state == WARNING
    assert f"over 4 test {documents} is" in check.message


def test_tasks_have_no_documents(measured):
    check = audited(record(measured, 0.03, "reverse"), margin=0.01)
    assert (check.state, check.message) == (OK, "a task, without documents")


def test_table_shows_the_error(measured):
    def table():
        summary = describe_study(measured.study())
        return next(t for t in make_tables(summary) if t.title.startswith("gaps"))

    assert "SE over documents" not in table().columns
    record(measured, 0.03)
    shown = table()
    row = dict(zip(shown.columns, shown.rows[0], strict=True))
    assert float(row["SE over documents"]) > 0
    assert any("SE over documents" in note for note in shown.notes)


@pytest.mark.parametrize("damage", ["missing", "of another run", "cut off"])
def test_unreadable_losses_make_the_error_unknown(measured, damage):
    record(measured, 0.03)
    run = measured.runs()[-1]
    folder = measured.run_folder(run)
    path = folder / FILE_NAME
    if damage == "missing":
        path.unlink()
    elif damage == "cut off":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        found = read_document_losses(folder)
        header = dataclasses.replace(found.header, run="another")
        write_document_losses(folder, header, found.losses.tolist(), found.tokens.tolist())
    assert audited(measured).state == NOTE
    study = measured.study()
    gap = find_families(study)[0].gaps[0]
    assert gap.document_error is None
    problems = [problem for record in study.records for problem in record.problems]
    assert bool(problems) == (damage != "missing")
