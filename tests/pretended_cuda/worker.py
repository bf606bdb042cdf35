"""A process with a pretended GPU: a line of JSON asks for a trace, a line of JSON answers."""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.pretended_cuda import device  # first: see there
from tests.pretended_cuda.faults import FAULTS
from tests.pretended_cuda.trace import trace


def answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a run does, with a fault if the request plants one."""
    planted = FAULTS[request["fault"]]() if request["fault"] else None
    try:
        if planted is not None:
            planted.__enter__()
        capability = tuple(request["capability"])
        settings, runs = request["settings"], request["runs"]
        return trace(settings, capability, request["blocks"], folder, runs)
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}", traceback.format_exc()]
        return {"error": lines[0], "traceback": lines[1]}
    finally:
        if planted is not None:
            planted.__exit__(None, None, None)


def main() -> None:
    """Answer until the input ends."""
    assert device.CAPABILITY
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), Path.cwd())), file=answers, flush=True)


if __name__ == "__main__":
    main()
