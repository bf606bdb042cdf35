"""Test loss of a run by document: sums and counts, small enough for any run.

Of pairs and tags a document is a file, or the pair itself where no files are known.

With them, the uncertainty of a gap that the choice of the documents causes can be estimated.
Imports no torch.

<run>/document_losses.safetensors
    loss      float64, sum over the tokens of each document, in nats
    tokens    int64, their number
    its header    run, fingerprint of the data, checksum
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkablate.runs.tensor_file import TensorFile

FILE_NAME = "document_losses.safetensors"


@dataclass(frozen=True)
class DocumentLossesHeader:
    """Origin of the losses; runs with the same data have the same documents."""

    run: str
    data_fingerprint: str


@dataclass(frozen=True)
class DocumentLosses:
    """Sums of the loss, in nats, and numbers of tokens by document."""

    header: DocumentLossesHeader
    losses: np.ndarray
    tokens: np.ndarray


_FILE = TensorFile(DocumentLossesHeader, {"loss": (np.float64, 1), "tokens": (np.int64, 1)}, 2**20)


def write_document_losses(
    folder: Path, header: DocumentLossesHeader, losses: Sequence[float], tokens: Sequence[int]
) -> None:
    """Write the losses into a run's folder."""
    _FILE.write(folder / FILE_NAME, header, np.array(losses), np.array(tokens))


def read_document_losses(folder: Path) -> DocumentLosses:
    """Read the losses of a run; ValueError if they are missing or damaged."""
    header, (losses, tokens) = _FILE.read(folder / FILE_NAME)
    if len(losses) != len(tokens) or not np.isfinite(losses).all() or (tokens < 1).any():
        raise ValueError("its losses are not those of documents")
    return DocumentLosses(header, losses, tokens)
