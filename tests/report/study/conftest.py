"""The published study, and outputs of a finished claim to publish."""

from pathlib import Path

import pytest

from qkablate.report.study.claims import read_claims
from tests.cli.conftest import finished, finished_study, outputs

__all__ = ["finished", "finished_study", "outputs"]


@pytest.fixture(scope="session")
def studied(tmp_path_factory):
    """Read the claims of the study in the documents, unpacked anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return read_claims(Path(__file__).parents[3] / "docs" / "study")
