"""qkablate: ablation training that settles arguments about attention.

The names of the Python API are imported when they are used: `import qkablate` loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkablate.analysis.comparison.summary import GapSummary
    from qkablate.analysis.study.study import Record, Study
    from qkablate.api.catalogue import Variant, variants
    from qkablate.api.evaluate import Evaluation, evaluate
    from qkablate.api.read import gaps, load_curves, load_runs
    from qkablate.api.sweep import load_sweep, sweep
    from qkablate.api.train import train
    from qkablate.errors import UserError

__version__ = "0.1.0"

__all__ = [
    "Evaluation",
    "GapSummary",
    "Record",
    "Study",
    "UserError",
    "Variant",
    "evaluate",
    "gaps",
    "load_curves",
    "load_runs",
    "load_sweep",
    "sweep",
    "train",
    "variants",
]

_MODULES = {
    "GapSummary": "analysis.comparison.summary",
    **dict.fromkeys(("Record", "Study"), "analysis.study.study"),
    **dict.fromkeys(("Variant", "variants"), "api.catalogue"),
    **dict.fromkeys(("Evaluation", "evaluate"), "api.evaluate"),
    **dict.fromkeys(("gaps", "load_curves", "load_runs"), "api.read"),
    **dict.fromkeys(("load_sweep", "sweep"), "api.sweep"),
    "train": "api.train",
    "UserError": "errors",
}


if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name of the API."""
        if name not in _MODULES:
            raise AttributeError(f"module 'qkablate' has no attribute '{name}'")
        return getattr(import_module(f"qkablate.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """List the names of the API, too."""
    return sorted({*globals(), *__all__})
