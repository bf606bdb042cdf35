"""OV circuits by their names in configs."""

from qkablate.attention.ov.base import OV
from qkablate.attention.ov.factored import FourOV, GroupedOV, MergedOV, SeparateOV, TiedOV
from qkablate.attention.ov.latent import LatentOV
from qkablate.attention.ov.unprojected import NoO, NoV, NoVO

OV_CIRCUITS: dict[str, type[OV]] = {
    "separate": SeparateOV,
    "no_v": NoV,
    "no_o": NoO,
    "no_vo": NoVO,
    "merged": MergedOV,
    "four": FourOV,
    "tied": TiedOV,
    "grouped": GroupedOV,
    "latent": LatentOV,
}

__all__ = ["OV", "OV_CIRCUITS"]
