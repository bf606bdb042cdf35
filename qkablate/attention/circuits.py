"""The circuits as matrices: one QK circuit put into the form of another."""

from qkablate.attention.qk import QK, MergedQK


def merge(qk: QK) -> MergedQK:
    """The merged circuit with the very scores of `qk`: W_h = B_h, the scales reconciled."""
    b_HDD, u_HD = qk.circuit()
    merged = MergedQK(qk.spec).to(device=b_HDD.device, dtype=b_HDD.dtype)
    ratio = qk.scale / merged.scale
    merged.set_circuit_(b_HDD * ratio, None if u_HD is None else u_HD * ratio)
    return merged
