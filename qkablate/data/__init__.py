"""Text → tokens on disk → batches. Knows no model."""

from qkablate.data.batches import Batches, windows
from qkablate.data.store import Dataset, open_dataset

__all__ = ["Batches", "Dataset", "open_dataset", "windows"]
