"""A few cases of every fault; `make torture` tries many."""

import importlib

import pytest

from tests.torture.tally import FAULTS


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_lost_and_nothing_wrong(name, tmp_path):
    fault = importlib.import_module(f"tests.torture.fault_{name}")
    folder = tmp_path / "torture"
    folder.mkdir()
    found = fault.torture(fault.SHORT, 0, folder)
    assert found.cases >= fault.SHORT
    assert (found.lost, found.wrong) == ([], [])
