"""Outputs of a finished claim, to publish."""

from tests.cli.conftest import finished, finished_study, outputs

__all__ = ["finished", "finished_study", "outputs"]
