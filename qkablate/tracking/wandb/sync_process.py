"""`wandb sync`, in a process that exits with its parent.

It is run as a file and imports nothing of the project.
"""

import os
import runpy
import sys
import threading


def main() -> None:
    """Run `wandb sync` with the arguments of this process."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.argv[0] = "wandb"
    runpy.run_module("wandb", run_name="__main__", alter_sys=True)


def _exit_with_parent() -> None:
    """Wait for stdin to close with the parent; W&B's process exits with this one."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
