"""`qkablate claim` as a user types it: from a file to a verdict, with edits and mistakes."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from qkablate.analysis.claims.parse import claim_names, load_claim
from qkablate.sweeps.planning import estimate
from qkablate.sweeps.running.state import link_run
from tests.cli.helpers import assert_refused, complete, proposed_commands

PUBLISHED = Path(__file__).parents[2] / "docs" / "study" / "results"
PART = {"arm": "no_q", "kind": "noninferior", "margin": 3}
CLAIM = {
    "says": "Keys alone are enough.",
    "source": "a comment",
    "seeds": 3,
    "tuning_seeds": 0,
    "grid": {"variant": "standard,no_q"},
    "parts": {"within": PART},
}


@pytest.fixture
def write(tmp_path):
    """Write a modified claim and return its path."""

    def write_claim(margin=3, **changes):
        content = CLAIM | {"parts": {"within": PART | {"margin": margin}}} | changes
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        return str(tmp_path / "mine.yaml")

    return write_claim


@pytest.fixture
def claim(qkablate, tiny, write):
    """Run `qkablate claim` on a tiny claim."""
    path = write()

    def say(action, *words):
        return qkablate("claim", action, path, *tiny, *words)

    return say


class Pretended:
    """Fake training: each run ends with `outcome`; None leaves it unfinished."""

    def __init__(self):
        self.outcome = self.by_gap(0.0)
        self.trained = []
        self.code = None  # the launcher's, if it is not to be told by how the runs ended

    @staticmethod
    def by_gap(gap, spread=0.001):
        """Return a loss with this gap for all arms but standard."""

        def loss(run):
            own = 0.0 if run.arm.startswith("standard") else gap + spread * (run.place % 2 - 0.5)
            floor = 10.0 * run.arm.startswith("uniform")
            return 2 + run.place / 10 + own + floor

        return loss

    def run(self, launcher):
        manifest, sweep_state = launcher.manifest, launcher.sweep_state
        seeds = list(dict.fromkeys(run.changes["seed"] for run in manifest.runs))
        for state in list(sweep_state.states.values()):
            run = state.run
            if state.status in ("done", "diverged"):
                continue
            object.__setattr__(run, "place", seeds.index(run.changes["seed"]))
            outcome = self.outcome(run)
            if outcome is not None:
                self.trained.append(run.id)
                self._write(manifest, run, outcome)
                sweep_state.refresh_run(state)
                link_run(manifest, state)
        sweep_state.refresh()
        finished = all(s.status in ("done", "diverged") for s in sweep_state.states.values())
        return int(not finished) if self.code is None else self.code

    def _write(self, manifest, run, outcome):
        arm = manifest.arms[run.arm]
        loss = None if isinstance(outcome, str) else outcome
        result = {
            **{"id": run.id, "label": run.label, "packed": 1, "threads": 1, "attempt": 1},
            **{"status": outcome if loss is None else "done", "diverged_at": 3, "error": "no"},
            **{"loss": dict.fromkeys(("train", "val", "test"), loss), "precision": "fp32"},
            **{"device": "cpu", "kernel": "flash", "compile": False, "version": "0"},
            **{"data_fingerprint": arm.facts["data_fingerprint"], "seconds": 1.0},
            **{"steps": 12, "tokens": arm.tokens, "params": {"total": arm.total_params}},
            **{"init": {"mode": "matched", "match": "exact"}, "lr": {"mode": "matched"}},
        }
        folder = Path(manifest.out) / "runs" / run.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture
def pretended(monkeypatch):
    found = Pretended()
    monkeypatch.setattr(
        "qkablate.sweeps.running.launcher.Launcher.run", lambda launcher: found.run(launcher)
    )
    return found


def registered(tmp_path):
    return sorted((tmp_path / "outputs").glob("claims/*/claim.json"))


def test_help(qkablate):
    done = qkablate("claim", "--help")
    assert (done.code, done.err) == (0, "")
    assert qkablate("claim", "-h").out == qkablate("claim").out == done.out
    verdicts = ("SUPPORTED", "EQUIVALENT", "REFUTED", "UNDERPOWERED", "INCOMPLETE", "exploratory")
    for word in (*verdicts, "--dry-run", "--more N", "--retry failed", "--json", "Exit codes"):
        assert word in done.out


@pytest.mark.slow
def test_user_claim_is_trained_to_a_verdict(claim, qkablate, tmp_path, write):
    """Train real runs, which take seconds."""
    done = claim("show")
    assert (done.code, done.err) == (1, "")
    assert "mine (small): Keys alone are enough." in done.out
    assert "no_q is not worse than standard by 3, at equal tokens" in done.out
    assert "not run yet" in done.out
    assert registered(tmp_path) == []

    done = claim("run")
    assert done.code == 0, done.err
    assert "\nINSENSITIVE\n" in done.out  # standard does not beat uniform by 9 nats
    assert "exploratory" not in done.out
    (path,) = registered(tmp_path)
    content = json.loads(path.read_text())
    seeds = {r["seed"] for r in map(_result, tmp_path.glob("outputs/runs/*/result.json"))}
    assert seeds == {*content["final_seeds"]}
    results, report = proposed_commands(done)
    assert (results[1], report[1]) == ("results", "report")
    assert qkablate(*results[1:]).code == 0
    assert qkablate(*report[1:], "--format", "md").code == 0

    done = claim("show")
    assert (done.code, done.err) == (0, "")
    assert "\nINSENSITIVE\n" in done.out
    output = json.loads(claim("show", "--json").out, parse_constant=pytest.fail)
    assert (output["verdict"], output["seeds"], output["exploratory"]) == ("INSENSITIVE", 3, [])
    assert output["hash"] == content["hash"]
    losses = {
        (r["seed"], r["label"].partition("-")[0]): r["loss"]["test"]
        for r in map(_result, tmp_path.glob("outputs/runs/*/result.json"))
    }
    gaps = [losses[seed, "no_q"] - losses[seed, "standard"] for seed in sorted(seeds)]
    assert sorted(output["parts"][0]["values"]) == pytest.approx(sorted(gaps))

    # The same again trains nothing and writes nothing of the claim anew.
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("outputs/runs/*/result.json")}
    before = path.read_bytes()
    done = claim("run")
    assert done.code == 0
    assert "\nINSENSITIVE\n" in done.out
    assert times == {p: p.stat().st_mtime_ns for p in tmp_path.glob("outputs/runs/*/result.json")}
    assert path.read_bytes() == before


def _result(path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_margin_that_is_edited_after_the_runs_is_exploratory(claim, pretended, write, tmp_path):
    assert claim("run").code == 0
    write(margin=2)
    done = claim("show")
    assert done.code == 0
    assert "SUPPORTED at these rates (exploratory)" in done.out
    assert "edited after the runs of " in done.out
    assert "parts.within.margin: 3.0 → 2.0" in done.out
    output = json.loads(claim("show", "--json").out)
    assert any("3.0 → 2.0" in reason for reason in output["exploratory"])
    # Its own runs have other seeds, and it stays what it is.
    before = {*pretended.trained}
    done = claim("run")
    assert done.code == 0
    assert "SUPPORTED at these rates (exploratory)" in done.out
    assert "parts.within.margin: 3.0 → 2.0" in done.out
    assert len({*pretended.trained} - before) == 9  # three arms: the floor, too
    one, other = (json.loads(path.read_text()) for path in registered(tmp_path))
    assert not {*one["final_seeds"]} & {*other["final_seeds"]}
    # As it was written first, it is what it was.
    write()
    assert "\nSUPPORTED at these rates\n" in claim("show").out


@pytest.mark.slow
def test_wording_can_be_edited(claim, pretended, write):
    assert claim("run").code == 0
    write(source="elsewhere")
    done = claim("show")
    assert "source    elsewhere" in done.out
    assert "\nSUPPORTED at these rates\n" in done.out
    write(says="Otherwise said.", source="elsewhere")
    assert "\nSUPPORTED at these rates (exploratory)\n" in claim("show").out
    write(source="elsewhere")
    trained = list(pretended.trained)
    assert claim("run").code == 0
    assert pretended.trained == trained


@pytest.mark.slow
def test_edit_before_the_runs_does_not_count(claim, pretended, write):
    assert claim("run", "--dry-run").code == 0
    write(margin=2)
    done = claim("run")
    assert done.code == 0
    assert "\nSUPPORTED at these rates\n" in done.out


@pytest.mark.slow
def test_verdict_before_an_edit_can_be_shown(claim, pretended, write):
    """Report an arm that was absent before without an interval."""
    assert claim("run").code == 0
    arm = {"within": PART | {"arm": "shared_qk"}}
    write(grid={"variant": "standard,shared_qk"}, parts=arm)
    done = claim("show")
    assert done.code in (1, 2)
    assert "Traceback" not in done.err
    assert claim("run").code == 0


@pytest.mark.slow
def test_more_seeds_are_exploratory_and_say_how_many_were_declared(claim, pretended, tmp_path):
    assert_refused(claim("run", "--more", "1"), "--more: run the declared seeds first")
    assert claim("run").code == 0
    assert len(pretended.trained) == 9
    done = claim("run", "--more", "1")
    assert done.code == 0, done.err
    assert "SUPPORTED at these rates (exploratory)" in done.out
    assert "4 seeds were run, but 3 were declared" in done.out
    assert len(pretended.trained) == 12
    done = claim("show")
    assert "SUPPORTED at these rates (exploratory)" in done.out
    # From then on: also when it is run as it was declared.
    done = claim("run")
    assert "4 seeds were run, but 3 were declared" in done.out
    assert len(pretended.trained) == 12
    (folder,) = (path.parent for path in registered(tmp_path))
    assert {path.name for path in folder.iterdir()} == {"claim.json", "n3", "n4"}


@pytest.mark.slow
def test_interrupted_additional_seeds_are_resumed(claim, qkablate, pretended):
    assert claim("run").code == 0
    outcome, pretended.outcome, pretended.code = pretended.outcome, lambda run: None, 130
    assert claim("run", "--more", "1").code == 130
    pretended.outcome, pretended.code = outcome, None
    words = proposed_commands(claim("show"))[0]
    assert words[-2:] == ["--more", "1"]
    done = qkablate(*words[1:])
    assert done.code == 0, done.err
    assert "4 seeds were run, but 3 were declared" in done.out


def test_dry_run_writes_nothing(claim, tmp_path, monkeypatch):
    from qkablate.sweeps.planning.estimate import Timing

    timed = Timing(1e6, 1e-3, 1.0, 10**8)
    monkeypatch.setattr("qkablate.sweeps.planning.estimate._measure", lambda *_: timed)
    done = claim("run", "--dry-run")
    assert done.code == 0, done.err
    assert "mine (small): Keys alone are enough." in done.out
    assert "1 comparison of 3 pairs" in done.out
    assert "no_q-d16-h2" in done.out
    assert registered(tmp_path) == []
    assert list(tmp_path.glob("outputs/runs/*")) == []
    assert list(tmp_path.glob("outputs/sweeps/*/manifest.json")) == []
    (words,) = proposed_commands(done)
    assert words[:3] == ["qkablate", "claim", "run"]
    assert "--dry-run" not in words


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupted", "failed", "half"])
def test_unfinished_runs_give_no_verdict(claim, pretended, how):
    good = pretended.outcome
    if how == "interrupted":
        pretended.outcome, pretended.code = (lambda run: None), 130
    elif how == "failed":
        pretended.outcome = lambda run: "failed" if run.place else good(run)
    else:
        pretended.outcome = lambda run: None if run.place else good(run)
    done = claim("run")
    assert done.code == (130 if how == "interrupted" else 1)
    assert "SUPPORTED" not in done.out
    done = claim("show")
    assert done.code == 1
    assert "\nINCOMPLETE\n" in done.out
    ended = 0 if how == "interrupted" else 3
    assert f"{ended} of 9 runs have ended; the verdict needs all of them" in done.out
    assert json.loads(claim("show", "--json").out)["verdict"] == "INCOMPLETE"
    assert claim("show", "--json").code == 1
    assert_refused(claim("run", "--more", "1"), "--more: run the declared seeds first")
    pretended.outcome, pretended.code = good, None
    done = claim("run", *(["--retry", "failed"] if how == "failed" else []))
    assert done.code == 0
    assert "\nSUPPORTED at these rates\n" in done.out


def test_retry_of_failed_runs_is_proposed(claim, pretended):
    pretended.outcome = lambda run: "failed"
    assert claim("run").code == 1
    assert proposed_commands(claim("show"))[0][-2:] == ["--retry", "failed"]


def looks(write, margin):
    write(margin, seeds=[3, 4, 6])


@pytest.mark.slow
def test_looks_stop_at_the_first_conclusive_one(claim, pretended, write, tmp_path):
    looks(write, 3)
    done = claim("run")
    assert done.code == 0, done.err
    assert len(pretended.trained) == 9
    assert "\nSUPPORTED at these rates\n" in done.out
    assert json.loads(claim("show", "--json").out)["seeds"] == 3
    assert {path.name for path in registered(tmp_path)[0].parent.iterdir()} == {"claim.json", "n3"}
    trained = list(pretended.trained)
    assert claim("run").code == 0
    assert pretended.trained == trained


@pytest.mark.slow
def test_looks_continue_until_conclusive(claim, pretended, write):
    looks(write, 0.01)
    pretended.outcome = pretended.by_gap(0.01, 0.1)  # on the margin
    done = claim("run")
    assert done.code == 0, done.err
    assert len(pretended.trained) == 18
    assert "\nUNDERPOWERED\n" in done.out
    output = json.loads(claim("show", "--json").out)
    assert (output["seeds"], output["declared_seeds"], output["exploratory"]) == (6, [3, 4, 6], [])
    assert 0 < output["alpha"] < 0.05


@pytest.mark.slow
def test_unfinished_look_is_the_last(claim, pretended, write):
    looks(write, 0.01)
    hard = pretended.by_gap(0.01, 0.1)
    pretended.outcome = lambda run: None if run.place == 3 else hard(run)
    assert claim("run").code == 1
    output = json.loads(claim("show", "--json").out)
    assert (output["verdict"], output["seeds"]) == ("INCOMPLETE", 4)


def test_refuted_and_underpowered_are_verdicts_too(claim, pretended, write):
    pretended.outcome = pretended.by_gap(5)
    done = claim("run")
    assert done.code == 0
    assert "\nREFUTED at these rates\n" in done.out
    assert claim("show").code == 0


def test_folder_may_be_quoted(qkablate):
    """Hydra, which reads the words of the runs, needs the quotes."""
    done = qkablate("claim", "show", "directed", 'out="a (1)"')
    assert "not run yet in 'a (1)', which does not exist" in done.out


def test_show_refuses_what_run_would(claim, write):
    write(grid={"variant": "standard,no_q,noq"})
    assert_refused(claim("show"), "variant: 'noq' (nearest: no_q) is not one of")


def test_claim_of_ones_own_is_found_by_its_keys(claim, pretended, qkablate, tiny):
    """Its file is not needed once it is registered."""
    assert claim("run").code == 0
    assert "\nSUPPORTED at these rates\n" in qkablate("claim", "show", "mine").out
    keys = [word for word in tiny if not word.startswith("out=")]
    assert "\nSUPPORTED at these rates\n" in qkablate("claim", "show", "mine", *keys).out
    for word in ("scale=gpu", "model.layers=7"):
        assert_refused(qkablate("claim", "show", "mine", word), "give its file, mine.yaml")


@pytest.mark.slow
def test_other_data_under_the_same_name_is_rejected(claim, pretended, text):
    assert claim("run").code == 0
    text.write_text(text.read_text() * 2)
    done = claim("run")
    assert_refused(done, "use another out=FOLDER")


def test_registration_changed_by_hand_is_reported(claim, pretended, tmp_path):
    assert claim("run").code == 0
    (path,) = registered(tmp_path)
    path.write_text(path.read_text().replace('"margin": 3.0', '"margin": 4.0'))
    for action in ("show", "run"):
        assert_refused(claim(action), f"'{path}' is damaged, or was changed by hand")


def test_moved_folder_shows_the_same(claim, qkablate, pretended, tiny, tmp_path):
    assert claim("run").code == 0
    shutil.move(tmp_path / "outputs", tmp_path / "moved")
    words = [word for word in tiny if not word.startswith("out=")]
    done = qkablate("claim", "show", "mine.yaml", *words, "out=moved")
    assert done.code == 0
    assert "\nSUPPORTED at these rates\n" in done.out


# The list.

UNTESTABLE = "not testable yet"


def test_list_has_every_claim_and_says_which_cannot_be_tested(qkablate, monkeypatch):
    monkeypatch.setattr(estimate, "measure_pace", lambda config, vocabulary: 0.5)
    done = qkablate("claim", "list")
    assert (done.code, done.err) == (0, "")
    blocks = {block.split()[0]: " ".join(block.split()) for block in done.out.split("\n\n")}
    for name in claim_names():
        found = load_claim(name)
        assert blocks[name].startswith(f"{name} · {UNTESTABLE if found.untestable else 'not run'}")
        assert found.says in blocks[name]
        assert found.source in blocks[name]  # the words of the discussion
        if found.untestable:
            assert found.untestable in blocks[name]
        else:
            assert f"n = {found.seeds[0]} · {round(found.minutes / 2)} min" in blocks[name]
    assert max(map(len, done.out.splitlines())) <= 100
    output = json.loads(qkablate("claim", "list", "--json").out)
    assert [row["claim"] for row in output] == claim_names()
    assert all(row["source"] and row["verdicts"] == [] for row in output)
    assert {row["minutes_here"] / row["minutes"] for row in output if row["minutes"]} == {0.5}
    untestable = [row["claim"] for row in output if row["untestable"]]
    assert untestable == [name for name in claim_names() if load_claim(name).untestable]
    for words in proposed_commands(done):
        assert words[:3] == ["qkablate", "claim", "run"]


def test_list_tells_the_time_here(qkablate):
    """The longer claims take longer here, too, and all by the same factor."""
    rows = json.loads(qkablate("claim", "list", "--json").out)
    factors = [row["minutes_here"] / row["minutes"] for row in rows if row["minutes"]]
    assert min(factors) > 0
    assert max(factors) == pytest.approx(min(factors), rel=0.02)


def test_list_says_which_claims_are_published(qkablate, monkeypatch):
    monkeypatch.setattr(estimate, "measure_pace", lambda config, vocabulary: 0.5)
    monkeypatch.chdir(Path(__file__).parents[2])
    done = qkablate("claim", "list", "out=nowhere")
    assert "\nqq_worse · not run here, has published runs · gap" in done.out
    assert proposed_commands(done)[0] == ["qkablate", "claim", "list", "out=docs/study/results"]
    rows = json.loads(qkablate("claim", "list", "out=nowhere", "--json").out)
    archives = [path.name for path in Path("docs/study/results").glob("*.json.gz")]
    published = {row["claim"] for row in rows if row["published"]}
    assert published == {name.partition("-small-")[0] for name in archives}


@pytest.mark.slow
def test_list_has_the_verdicts(qkablate, claim, pretended, tmp_path):
    assert claim("run").code == 0
    out = f"out={tmp_path / 'outputs'}"
    output = {r["claim"]: r for r in json.loads(qkablate("claim", "list", out, "--json").out)}
    (own,) = output["mine"]["verdicts"]
    assert own.startswith("SUPPORTED at these rates ! (small, model.layers=2")  # no rate was tuned
    assert own.endswith(", n = 3)")
    assert output["one_head"]["verdicts"] == []
    assert own in " ".join(qkablate("claim", "list", out).out.split())
    assert "SUPPORTED" not in qkablate("claim", "list", "out=elsewhere").out
    assert claim("run", "--more", "1").code == 0
    blocks = qkablate("claim", "list", out).out.split("\n\n")
    (row,) = [" ".join(block.split()) for block in blocks if block.startswith("mine ")]
    assert "SUPPORTED at these rates ! (small" in row
    assert ", n = 4, exploratory)" in row


@pytest.mark.slow
def test_damaged_registration_does_not_affect_the_list(qkablate, claim, pretended, tmp_path):
    assert claim("run").code == 0
    (file,) = tmp_path.glob("outputs/claims/*/claim.json")
    file.write_text("{")
    done = qkablate("claim", "list", f"out={tmp_path / 'outputs'}")
    assert done.code == 0
    assert "one_head" in done.out
    assert "claim.json' is damaged" in done.err


# Mistakes.

MISTAKES = [
    (["shw"], "'shw' (nearest: show) is not one of list, run, show"),
    (["run"], "give a claim: qkablate claim run NAME"),
    (["show"], "give a claim: qkablate claim show NAME"),
    (["run", "one_hed"], "claim 'one_hed' (nearest: one_head)"),
    (["show", "nowhere.yaml"], "there is no file 'nowhere.yaml'; `qkablate claim list`"),
    (["run", "one_head", "gpu"], "'gpu' is not key=value"),
    (["run", "directed", f"out={PUBLISHED}"], "has archives of published runs, which"),
    (["run", "one_head", "=3"], "'=3' is not key=value"),
    (["show", "one_head", "workers=99999"], "workers: 99999 is not auto, or a number from 1"),
    (["show", "one_head", "variant.norm=foo"], "variant.norm: 'foo' is not one of none, qk"),
    (["show", "one_head", "scale=smal"], "scale: 'smal' (nearest: small) is not one of small, gpu"),
    (["run", "one_head", "seed=3"], "seed: is fixed by the claim; --more N adds seeds"),
    (["run", "one_head", "control=flops"], "grid: control is set by the claim itself"),
    (["run", "one_head", "sweep.tune=false"], "grid: sweep.tune is set by the claim itself"),
    (["run", "one_head", "+seed=3"], "seed"),
    (["run", "one_head", "modl.layers=3"], "modl.layers: there is no such key (nearest: model.l"),
    (["run", "one_head", "model.layrs=3"], "(nearest: model.layers)"),
    (["run", "one_head", "model.heads=3"], "does not divide"),
    (["run", "one_head", "--more", "0"], "--more: '0' is not a whole number from 1"),
    (["run", "one_head", "--more", "-1"], "--more: '-1' is not a whole number from 1"),
    (["run", "one_head", "--more", "x"], "--more: 'x' is not a whole number from 1"),
    (["run", "one_head", "--more"], "--more: a value is missing"),
    (["run", "one_head", "--retry", "all"], "--retry: 'all' is not one of failed"),
    (["run", "one_head", "--json"], "--json has no meaning with claim run"),
    (["show", "one_head", "--dry-run"], "--dry-run has no meaning with claim show"),
    (["show", "one_head", "--more", "1"], "--more has no meaning with claim show"),
    (["list", "--retry", "failed"], "--retry has no meaning with claim list"),
    (["list", "one_head"], "'one_head': claim list takes only out=FOLDER"),
    (["run", "one_head", "--dryrun"], "(nearest: --dry-run)"),
    (["run", "one_head", "--dry-run=1"], "--dry-run takes no value"),
    (["run", "one_head", "out=/proc/here"], "out: cannot write in '/proc/here'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(w) for w, _ in MISTAKES])
def test_mistakes(qkablate, pretended, tmp_path, words, line):
    assert_refused(qkablate("claim", *words), line)
    assert registered(tmp_path) == []


@pytest.mark.parametrize("key", ["model.d_model", "optim.lr", "workers", "tracking.log_every"])
def test_number_of_400_digits_is_rejected(qkablate, key):
    done = qkablate("claim", "show", "one_head", f"{key}={'9' * 400}")
    assert_refused(done, f"{key}: a number of 400 digits is not")


@pytest.mark.parametrize("action", ["run", "show"])
@pytest.mark.parametrize("name", [n for n in claim_names() if load_claim(n).untestable])
def test_untestable_claim_gives_its_reason(qkablate, action, name):
    done = qkablate("claim", action, name)
    assert_refused(done, f"{name} is not testable yet: {load_claim(name).untestable}")


FILES = {
    "a kind": ({"parts": {"within": PART | {"kind": "noninferor"}}}, "(nearest: noninferior)"),
    "an arm": (
        {"parts": {"within": PART | {"arm": "merged_w"}}},
        "mine: parts.within: the grid has no variant=merg",
    ),
    "a variant": (
        {"grid": {"variant": "standard,no_qq"}},
        "variant: 'no_qq' (nearest: no_q) is not one of",
    ),
    "a predicate": ({"filter": ["model.d_modl > 3"]}, "there is no key 'model.d_modl'"),
    "no arm left": ({"filter": ["model.d_model > 999"]}, "excludes all arms"),
    "a baseline": ({"baseline": 5}, "baseline: '5' is not a variant"),
    "growth": ({"parts": {"within": PART | {"horizon": "growth"}}}, "2 lengths of training"),
    "seeds": ({"seeds": 1}, "seeds: 1 is not a number from 3 to 1,000"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "line"), FILES.values(), ids=FILES)
def test_mistakes_in_a_file(claim, pretended, write, tmp_path, changes, line):
    write(**changes)
    assert_refused(claim("run"), line)
    assert registered(tmp_path) == []
    assert pretended.trained == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, shell):
    assert complete(qkablate, monkeypatch, "qkablate cla", shell) == ["claim"]
    offered = {*complete(qkablate, monkeypatch, "qkablate claim ", shell)}
    assert {"list", "run", "show", *claim_names(), "scale=small", "scale=gpu"} <= offered
    assert complete(qkablate, monkeypatch, "qkablate claim sh", shell) == ["show"]
    assert complete(qkablate, monkeypatch, "qkablate claim run one_h", shell) == ["one_head"]
    assert complete(qkablate, monkeypatch, "qkablate claim run one_head sc", shell) == [
        "scale=book",
        "scale=gpu",
        "scale=small",
    ]
    assert complete(qkablate, monkeypatch, "qkablate claim run one_head --d", shell) == [
        "--dry-run"
    ]
