"""A few cases of every fault; `make torture` tries many."""

import importlib

import pytest

from tests.torture.tally import FAULTS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_faults_lose_nothing_and_change_no_number(name, tmp_path):
    fault = importlib.import_module(f"tests.torture.fault_{name}")
    folder = tmp_path / "torture"
    folder.mkdir()
    tally = fault.torture(fault.SHORT, 0, folder)
    assert tally.cases >= fault.SHORT
    assert (tally.lost, tally.wrong) == ([], [])
