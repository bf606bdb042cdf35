"""QK circuits by their names in configs."""

from qkablate.attention.qk.base import QK
from qkablate.attention.qk.factored import (
    CollaborativeQK,
    FourMatrixQK,
    GroupedQK,
    LowRankQK,
    ReassociatedQK,
    SeparateQK,
    WideQK,
)
from qkablate.attention.qk.latent import LatentQK
from qkablate.attention.qk.merged import MergedQK, SymmetricQK
from qkablate.attention.qk.shared import SharedQK, SymDiag, SymPairwise
from qkablate.attention.qk.unprojected import NoK, NoQ, NoQK, StaticScores, Uniform

QK_CIRCUITS: dict[str, type[QK]] = {
    "separate": SeparateQK,
    "merged": MergedQK,
    "low_rank": LowRankQK,
    "wide": WideQK,
    "symmetric": SymmetricQK,
    "no_q": NoQ,
    "no_k": NoK,
    "no_qk": NoQK,
    "shared": SharedQK,
    "sym_diag": SymDiag,
    "sym_pairwise": SymPairwise,
    "four_matrix": FourMatrixQK,
    "collaborative": CollaborativeQK,
    "grouped": GroupedQK,
    "static": StaticScores,
    "uniform": Uniform,
    "reassociated": ReassociatedQK,
    "latent": LatentQK,
}

__all__ = ["QK", "QK_CIRCUITS"]
