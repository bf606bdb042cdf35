"""Summaries of runs: short names are unique, damage is shown."""

from pathlib import Path

from qkablate.runs.lease import LeaseObserver
from qkablate.runs.listing import find_run_folders, format_age, shorten_names, summarize_run


def test_short_names_are_unique_beginnings():
    names = ["no_q-d8-s0-aaaa11112222", "no_q-d8-s0-aaaa13333333", "shared-d8-s0-aaaa99999999"]
    short = shorten_names(names)
    assert list(short.values()) == ["no_q-d8-s0-aaaa11", "no_q-d8-s0-aaaa13", "shared-d8-s0-aaaa"]
    assert all(name.startswith(short[name]) for name in names)


def test_damaged_config_is_a_status_not_an_error(tmp_path: Path):
    folder = tmp_path / "runs" / "odd-0123456789ab"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("a: [", encoding="utf-8")
    assert find_run_folders(tmp_path) == [folder]
    assert summarize_run(folder, LeaseObserver()).status == "damaged"


def test_ages():
    assert [*map(format_age, (3, 119, 120, 7200, 86400 * 3.5))] == [
        *("3 s", "119 s", "2 min", "2 h", "3 days")
    ]
