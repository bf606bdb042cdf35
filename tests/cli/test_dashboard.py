"""`qkablate dashboard`: a sweep's view, as JSON without a server, and saved at one on loopback.

W&B holds on to a process, so that what asks a server has a process of its own.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from qkablate.cli import main
from tests.cli.helpers import assert_refused
from tests.dashboard.view_server import ViewServer
from tests.tracking.wandb import log_reader
from tests.tracking.wandb.fake_server import dead_url

KEY = "0123456789abcdef0123456789abcdef01234567"
BOUND = 120  # seconds: then it hangs
WORDS = [
    *("sweep.name=small", "variant=standard,no_q", "seed=0,1", "workers=2"),
    "sweep.floor=false",
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "data=text"),
    *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "tracking.log_every=2"),
]
needs_workspaces = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None
    and not os.environ.get("QKABLATE_NEEDS_DASHBOARD"),
    reason="wandb-workspaces is not installed",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the outputs of a small sweep, recorded offline."""
    folder = tmp_path_factory.mktemp("dashboard")
    corpus = folder / "corpus.txt"
    corpus.write_text("the cat sat on the mat, ähnlich ∑\n" * 200, encoding="utf-8")
    paths = {"data.path": corpus, "data.cache": folder / "cache", "out": folder / "outputs"}
    words = [*WORDS, "tracking.wandb=offline", *(f"{key}={path}" for key, path in paths.items())]
    command = [sys.executable, "-m", "qkablate", "sweep", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return folder / "outputs"


def dashboard(*words, key=KEY, **variables):
    """Run the command in a separate process without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "qkablate", "dashboard", *words],
        env={**os.environ, "WANDB_API_KEY": key, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def without_ids(text):
    return re.sub(r'"__id__": *"[^"]*"', "", text)


# As JSON.


@pytest.mark.slow
@needs_workspaces
def test_view_as_json_on_the_screen(qkablate, sweep):
    """Without a key, as all tests are."""
    done = qkablate("dashboard", "--spec")
    assert (done.code, done.err) == (0, "")
    view = json.loads(done.out)
    assert view["displayName"] == sweep.name
    assert view["project"] == "qkablate"
    assert "entity" not in view
    assert qkablate("dashboard", "small", "--spec").out == done.out


@needs_workspaces
@pytest.mark.parametrize("words", [["--spec", "view.json"], ["--spec=view.json"]])
def test_view_as_json_in_a_file(qkablate, sweep, tmp_path, words):
    done = qkablate("dashboard", "small", *words, "--entity", "team")
    assert (done.code, done.err) == (0, "")
    assert re.match(r"view\.json  [\d.]+ kB\n", done.out)
    assert done.out.endswith("\nNext\n  qkablate dashboard small --entity team\n")
    assert json.loads((tmp_path / "view.json").read_text())["entity"] == "team"
    assert not (sweep / "dashboard.json").exists()


@needs_workspaces
def test_project_and_entity_from_the_variables(qkablate, sweep, monkeypatch):
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    view = json.loads(qkablate("dashboard", "--spec").out)
    assert (view["entity"], view["project"]) == ("team", "ours")
    view = json.loads(qkablate("dashboard", "--spec", "--project=theirs").out)
    assert (view["entity"], view["project"]) == ("team", "theirs")


@needs_workspaces
def test_panels_name_logged_metrics(qkablate, outputs):
    logs = [log_reader.read(log) for log in outputs.glob("runs/*/wandb/offline-run-*")]
    rows = {key for log in logs for row in log.rows for key in row}
    summary = {key for log in logs for key in log.summary}
    view = json.loads(qkablate("dashboard", "--spec").out)["spec"]["section"]
    text = json.dumps(view)
    lines = {key for found in re.findall(r'"metrics": \[([^\]]*)\]', text) for key in _words(found)}
    of_runs = {key for key in lines if not key.startswith(("system/", "final/"))}
    assert {"val/loss", "train/loss"} <= of_runs <= rows
    finals = {key for key in lines if key.startswith("final/")}
    assert finals | {*re.findall(r'"summary:([^"]*)"', text)} <= summary
    configs = re.findall(r'"config:(\w+)\.value\.?([\w.]*)"', text)
    assert configs
    for first, rest in configs:
        assert all(rest in log.config[first] if rest else first in log.config for log in logs)
    (group,) = view["runSets"][0]["filters"]["filters"]
    assert {log.group for log in logs} == {group["value"]}


def _words(found):
    return re.findall(r'"([^"]*)"', found)


# At a server.


@pytest.mark.slow
@needs_workspaces
def test_view_is_saved_and_then_updated(qkablate, outputs, sweep):
    spec = json.loads(qkablate("dashboard", "--spec", "--entity=somebody").out)["spec"]
    with ViewServer() as server:
        first = dashboard(WANDB_BASE_URL=server.url)
        (name,) = server.views
        saved = dict(server.views[name])
        server.views[name]["spec"] = saved["spec"].replace('"Loss"', '"Lost"')  # somebody's hand
        for log in outputs.glob("*/*/wandb/offline-run-*/*.wandb"):
            log.with_name(f"{log.name}.synced").touch()  # as `wandb sync` does
        second = dashboard(WANDB_BASE_URL=server.url)
        assert [*server.views] == [name]
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    link = f"{server.url}/somebody/qkablate?nw={name.removeprefix('nw-').removesuffix('-v')}"
    assert first.stdout.startswith(f"saved  {link}\n")
    assert second.stdout.startswith(f"updated  {link}\n")
    assert first.stdout.endswith(f"\nNext\n  qkablate report {sweep.name}\n")
    assert (saved["entityName"], saved["projectName"]) == ("somebody", "qkablate")
    assert (saved["displayName"], saved["type"]) == (sweep.name, "project-view")
    plain = without_ids(json.dumps(spec))
    assert without_ids(json.dumps(json.loads(saved["spec"]))) == plain
    assert without_ids(json.dumps(json.loads(server.views[name]["spec"]))) == plain
    assert json.loads((sweep / "dashboard.json").read_text()) == {"views": [link]}
    told = f"5 logs recorded offline and not uploaded yet: qkablate sync {sweep.name}\n"
    assert told in first.stderr
    assert second.stderr == ""
    told = first.stdout + first.stderr + (sweep / "dashboard.json").read_text()
    assert KEY not in told


@pytest.mark.exhaustive
@needs_workspaces
def test_each_project_has_a_view_and_a_deleted_one_is_replaced(sweep):
    with ViewServer() as server:
        where = {"WANDB_BASE_URL": server.url}
        assert dashboard(**where).returncode == 0
        assert dashboard("--entity", "team", "--project", "p", **where).stdout.startswith("saved")
        (one, other) = server.views
        assert server.views[other]["entityName"] == "team"
        assert server.views[other]["projectName"] == "p"
        assert dashboard(**where).stdout.startswith("updated")
        assert [*server.views] == [one, other]
        del server.views[one]
        done = dashboard(**where)
        assert done.stdout.startswith("saved")
        assert f"?nw={one[3:-2]} is gone or cannot be read: a new view was saved" in done.stderr
        (again,) = {*server.views} - {other}
        server.views[again]["spec"] = '{"section": 3}'
        assert "cannot be read: a new view was saved" in dashboard(**where).stderr
        done = dashboard(**where)
        assert done.stdout.startswith("updated")
    kept = json.loads((sweep / "dashboard.json").read_text())["views"]
    assert len(kept) == 2
    assert kept[0] in done.stdout


@pytest.mark.slow
@needs_workspaces
@pytest.mark.parametrize(
    "text",
    ["[", '{"views": 3}', '{"views": [1, null, "https://else.where/a/b?nw=c", "x"]}', "[]"],
)
def test_invalid_file_of_views_is_replaced(sweep, text):
    (sweep / "dashboard.json").write_text(text)
    with ViewServer() as server:
        done = dashboard(WANDB_BASE_URL=server.url)
        assert "View" not in server.operations
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("saved")


def test_nothing_is_written_through_a_link(sweep, tmp_path):
    pytest.importorskip("wandb_workspaces")
    (tmp_path / "mine.json").write_text("mine")
    (sweep / "dashboard.json").symlink_to(tmp_path / "mine.json")
    done = dashboard(WANDB_BASE_URL=dead_url())
    assert done.returncode == 2
    assert "is a link; qkablate does not write through links" in done.stderr
    assert (tmp_path / "mine.json").read_text() == "mine"


SERVERS = [
    ({"refuses": "UpsertView2"}, "W&B: the view is not saved: input: UpsertView2 is not allowed"),
    ({"status": 401}, "W&B: the view is not saved: Failed to verify credentials"),
    ({"status": 500}, "W&B: the view is not saved: "),
]


@pytest.mark.slow
@needs_workspaces
@pytest.mark.parametrize(("ways", "line"), SERVERS, ids=["refuses", "401", "500"])
def test_refusal_by_the_server_is_one_line(sweep, ways, line):
    with ViewServer(**ways) as server:
        done = dashboard(WANDB_BASE_URL=server.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"qkablate: {line}")
    assert done.stderr.count("\n") == 1
    assert not (sweep / "dashboard.json").exists()


@needs_workspaces
def test_dead_server_is_one_line(sweep):
    url = dead_url()
    done = dashboard(WANDB_BASE_URL=url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"W&B: {url} does not answer (" in done.stderr
    assert "--spec FILE needs no server" in done.stderr
    assert done.stderr.count("\n") == 1


@needs_workspaces
@pytest.mark.parametrize("url", ["foo", "http://:x"])
def test_invalid_address_is_rejected(sweep, url):
    done = dashboard(WANDB_BASE_URL=url)
    assert (done.returncode, done.stdout) == (2, "")
    line = f"qkablate: WANDB_BASE_URL: '{url}' is not the address of a server ("
    assert done.stderr.startswith(line)
    assert done.stderr.endswith("; --spec FILE needs no server\n")
    assert done.stderr.count("\n") == 1


@needs_workspaces
def test_reported_missing_logs_are_those_that_sync_uploads(sweep, outputs, tmp_path):
    """Logs of earlier attempts and incomplete uploads are reported, too."""
    one, other = sorted(path for path in (outputs / "runs").iterdir())[:2]
    (one / "attempts" / "1").mkdir(parents=True)
    shutil.copytree(one / "wandb", one / "attempts" / "1" / "wandb", symlinks=True)
    (log,) = other.glob("wandb/offline-run-*/*.wandb")
    online = log.parent.rename(log.parent.with_name(log.parent.name.removeprefix("offline-")))
    (online / f"{log.name}.unsent").touch()
    moved = outputs.rename(tmp_path / "else where")
    with ViewServer() as server:
        done = dashboard(f"out={moved}", WANDB_BASE_URL=server.url)
    command = f"qkablate sync {sweep.name} 'out={moved}'"
    assert f"6 logs recorded offline and not uploaded yet: {command}\n" in done.stderr


@pytest.mark.slow
@needs_workspaces
def test_unrecorded_runs_are_reported(outputs, tiny):
    with pytest.raises(SystemExit):
        main(["sweep", *tiny, "sweep.name=unsent", "variant=standard"])
    with ViewServer() as server:
        done = dashboard("unsent", WANDB_BASE_URL=server.url)
    assert done.returncode == 0, done.stderr
    assert "tracking.wandb is disabled: W&B has no data of runs" in done.stderr


# Mistakes.


@needs_workspaces
def test_without_a_key(qkablate, sweep):
    line = (
        "needs a key of W&B (`wandb login`, or WANDB_API_KEY); --spec FILE writes it without a key"
    )
    assert_refused(qkablate("dashboard"), line)


@needs_workspaces
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_disabled_wandb_is_respected(qkablate, sweep, monkeypatch, mode):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", mode)
    assert_refused(qkablate("dashboard"), f"WANDB_MODE is {mode}, and a view is saved online")


def test_without_the_library_the_extra_is_named(qkablate, sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    line = "this needs wandb_workspaces, of the extra 'dashboard': pip install '.[da"
    assert_refused(qkablate("dashboard"), line)
    assert_refused(qkablate("dashboard", "--spec"), line)


MISTAKES = [
    (["smal-0"], "there is no sweep 'smal-0' in 'outputs' (nearest: small"),
    (["out=nowhere"], "there is no sweep in 'nowhere', which does not exist; start one: qkablate"),
    (["one", "two"], "'two': one sweep at a time, and 'one' was given"),
    (["--spek"], "(nearest: --spec)"),
    (["--project"], "--project: a value is missing"),
    (["--spec="], "--spec: a value is missing"),
    (["--spec=a.json", "--spec=b.json"], "--spec is given twice"),
    (["--entity", KEY, f"--project=key={KEY}"], "keys and passwords must not be settings"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[w[0][0] for w in MISTAKES])
def test_mistakes(qkablate, sweep, words, line):
    assert_refused(qkablate("dashboard", *words), line)


@needs_workspaces
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere/view.json", "cannot be written: "),
        ("outputs", "cannot be written: "),
        ("~nobody-of-this-name/x", "names a user without a home directory"),
    ],
)
def test_unwritable_file_is_rejected(qkablate, sweep, path, reason):
    assert_refused(qkablate("dashboard", f"--spec={path}"), f"--spec: '{path}' {reason}")


# What every verb has.


def test_help(qkablate):
    done = qkablate("dashboard", "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("qkablate dashboard: ")
    assert "Examples" in done.out
    assert qkablate("dashboard", "-h").out == done.out
    assert "dashboard" in qkablate("--help").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, sweep, shell):
    def query(line):
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setattr(sys, "argv", ["qkablate"])
        return qkablate("-sc", f"query={shell}").out.split()

    assert query("qkablate dash") == ["dashboard"]
    assert {sweep.name, "--spec", "--entity", "--project"} <= {*query("qkablate dashboard ")}
    assert query("qkablate dashboard sm") == [sweep.name]


@pytest.mark.parametrize("words", [["--help"], ["nothing"], []])
def test_slow_imports_are_late(sweep, words):
    code = (
        "import sys, qkablate.cli\n"
        f"try: qkablate.cli.main(['dashboard', *{words}])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'wandb', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
