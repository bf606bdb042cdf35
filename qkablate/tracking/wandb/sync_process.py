"""`wandb sync`, in a process that ends with the one that waits for it. Run as a file: it needs
nothing of the project.
"""

import os
import runpy
import sys
import threading


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = "wandb"
    runpy.run_module("wandb", run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    """Nobody writes to our input; it ends with who holds its other end. So does W&B's process."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
