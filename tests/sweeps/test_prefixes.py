"""The steps that a sweep saves by sharing them."""

from qkablate.sweeps.planning.text import format_plan, plan_to_json
from qkablate.sweeps.prefixes import count_trained_steps, find_run_prefix

LENGTHS = "train.steps=1000,2000,4000,8000"


def test_four_doublings_cost_little_more_than_the_longest(plan_grid):
    manifest = plan_grid("optim.schedule=wsd", LENGTHS)
    counted = count_trained_steps(manifest, manifest.runs)
    assert (counted.trained, counted.whole) == (9_400, 15_000)
    (line,) = [line for line in format_plan(manifest, 1) if line.startswith("prefix")]
    assert line == "prefix   3 of 4 runs branch off a longer one: 9,400 of 15,000 steps are trained"
    assert plan_to_json(manifest, 1, None, {})["steps"] == {"whole": 15_000, "trained": 9_400}


def test_seeds_and_variants_share_nothing(plan_grid):
    manifest = plan_grid("optim.schedule=wsd", LENGTHS, "variant=standard,no_q", "seed=0,1")
    prefixes = [find_run_prefix(manifest, run) for run in manifest.runs]
    assert len({prefix.id for prefix in prefixes}) == 4
    assert count_trained_steps(manifest, manifest.runs).trained == 4 * 9_400


def test_done_runs_are_not_counted(plan_grid):
    """The longest of those that are left trains the prefix."""
    manifest = plan_grid("optim.schedule=wsd", LENGTHS)
    done = [run.id for run in manifest.runs if "8000" in run.arm]
    text = "\n".join(format_plan(manifest, 1, done=done))
    assert f"{4000 + 400 + 200:,} of 7,000 steps" in text


def test_nothing_is_shared_on_request_or_with_another_schedule(plan_grid):
    cosine = plan_grid(LENGTHS)
    assert count_trained_steps(cosine, cosine.runs).trained == 15_000
    assert not any(line.startswith("prefix") for line in format_plan(cosine, 1))
    wsd = plan_grid("optim.schedule=wsd", LENGTHS)
    lines = format_plan(wsd, 1, share_prefix=False)
    assert not any(line.startswith("prefix") for line in lines)
