"""Wait until it is known which runs are being trained."""

from pathlib import Path

from qkablate.errors import print_stderr
from qkablate.runs.lease import TIMEOUT, LeaseObserver
from qkablate.table import format_list


def observe_leases(folders: list[Path]) -> LeaseObserver:
    """Return an observer that knows whether these runs are being trained.

    A lease of another machine, or from before a reboot, can only be judged by its heartbeat.
    """
    observer = LeaseObserver()
    unsure = [folder for folder in folders if not observer.observe(folder).sure]
    if unsure:
        holder = observer.observe(unsure[0]).holder if len(unsure) == 1 else "other processes"
        names = format_list([folder.name for folder in unsure], 3)
        print_stderr(
            f"qkablate: waiting up to {TIMEOUT:.0f} s for a heartbeat of {holder} ({names})"
        )
    for folder in unsure:
        observer.wait_until_sure(folder)
    return observer
