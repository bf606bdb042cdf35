"""The published study, and outputs of a finished claim to publish."""

from pathlib import Path

import pytest

from qkablate.report.study.claims import read_claims
from tests.cli.conftest import finished, finished_study, outputs

__all__ = ["finished", "finished_study", "outputs"]


@pytest.fixture(scope="session")
def studied():
    """Read the claims of the study in the documents."""
    return read_claims(Path(__file__).parents[3] / "docs" / "study")
