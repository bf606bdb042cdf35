"""The two circuits of attention. This package knows torch and nothing of the project."""

from qkablate.attention.layer import Attention
from qkablate.attention.ov import OV, OV_CIRCUITS
from qkablate.attention.qk import QK, QK_CIRCUITS
from qkablate.attention.spec import Spec

__all__ = ["OV", "OV_CIRCUITS", "QK", "QK_CIRCUITS", "Attention", "Spec"]
