"""Lease of a run: by a lock between processes, by a heartbeat between machines."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from qkablate.runs import lease
from qkablate.runs.lease import (
    TIMEOUT,
    AlreadyRunning,
    LeaseLost,
    LeaseObserver,
    hold_lease,
    is_leased,
)


@pytest.fixture(autouse=True)
def no_heartbeats(monkeypatch):
    """Disable heartbeats but for those of the test."""
    monkeypatch.setattr(lease, "HEARTBEAT", 1e6)


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


def records(folder):
    return sorted(os.listdir(folder / "lease"))


def newest(folder):
    return folder / "lease" / records(folder)[-1]


def write_record_elsewhere(folder):
    """Write the next record as another machine."""
    (folder / "lease").mkdir(parents=True, exist_ok=True)
    number = max(map(int, records(folder)), default=0) + 1
    record = {"token": "t", "host": "far", "pid": 7, "boot": "b", "device": 1, "since": "then"}
    path = folder / "lease" / f"{number:08d}"
    path.write_text(json.dumps(record) + "\n")
    return path


def beat(path):
    with path.open("a") as file:
        file.write(".")


def pretend_other_machine(monkeypatch):
    """Make this process look like one on another machine."""
    here = {"boot": "another kernel", "device": 1}
    monkeypatch.setattr(lease, "_lock_scope", lambda descriptor: here)


def start(code, *words):
    """Start a separate process, which shares nothing but the file system."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_one_process_holds_the_lease(tmp_path):
    run = tmp_path / "run"
    assert not is_leased(run)
    assert not run.exists()  # observing creates nothing
    for number in (1, 2, 3):
        with hold_lease(run) as held:
            assert held.number == number
            assert not held.is_lost()
            held.verify()
            assert is_leased(run)
            message = re.escape(f"{run} is being trained by process {os.getpid()} on ")
            with pytest.raises(AlreadyRunning, match=message + ".+ since .+"), hold_lease(run):
                pass
        assert not is_leased(run)


def test_lease_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyError), hold_lease(tmp_path):
        raise KeyError
    assert not is_leased(tmp_path)


def test_old_records_are_removed(tmp_path):
    for _ in range(5):
        (tmp_path / "lease").mkdir(exist_ok=True)
        (tmp_path / "lease" / ".killed.tmp").touch()
        with hold_lease(tmp_path):
            pass
    assert records(tmp_path) == ["00000004", "00000005"]


@pytest.mark.parametrize("before", ["nothing", "released", "dead"])
def test_one_of_many_threads_gets_the_lease(tmp_path, before):
    for attempt in range(20):
        run = tmp_path / str(attempt)
        if before == "released":
            with hold_lease(run):
                pass
        elif before == "dead":
            with hold_lease(run):
                record = newest(run).read_bytes()
            newest(run).write_bytes(record)  # not released, not locked
        start, end = threading.Barrier(8), threading.Barrier(8)
        winners = []

        def race(run=run, start=start, end=end, winners=winners):
            with ExitStack() as stack:
                start.wait()
                try:
                    winners.append(stack.enter_context(hold_lease(run)).number)
                except AlreadyRunning:
                    pass
                finally:
                    end.wait()

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1


RACE = """
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from qkablate.runs.lease import AlreadyRunning, hold_lease

with ExitStack() as stack:
    sys.stdin.readline()
    for number in range(40):
        with suppress(AlreadyRunning):
            stack.enter_context(hold_lease(Path(sys.argv[1]) / str(number)))
            print(number)
    print("end", flush=True)
    sys.stdin.readline()
"""


def test_one_of_many_processes_gets_the_lease(tmp_path):
    processes = [start(RACE, tmp_path) for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    winners = []
    for process in processes:
        while (line := process.stdout.readline()) != "end\n":
            assert line, "it failed"
            winners.append(int(line))
    for process in processes:
        process.communicate("\n")
    assert sorted(winners) == list(range(40))


HOLDER = """
import os, sys, time
from pathlib import Path
from qkablate.runs.lease import hold_lease

with hold_lease(Path(sys.argv[1])):
    if len(sys.argv) == 2 or not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("forked", [[], ["forked"]])
def test_kill_9_frees_the_lease_at_once(tmp_path, forked):
    """Even if a forked child of the holder lives on."""
    process = start(HOLDER, tmp_path, *forked)
    child = int(process.stdout.readline())  # or the process itself
    try:
        assert is_leased(tmp_path)
        with pytest.raises(AlreadyRunning, match=f"process {process.pid} on"), hold_lease(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_leased(tmp_path)
        with hold_lease(tmp_path) as held:
            assert held.number == 2
    finally:
        process.kill()
        if forked:
            os.kill(child, signal.SIGKILL)
        process.communicate()


def test_forked_child_does_not_hold_the_lease(tmp_path):
    with hold_lease(tmp_path) as held:
        if not (child := os.fork()):
            lost = held.is_lost()
            held.release()
            os._exit(0 if lost else 1)
        assert os.waitpid(child, 0)[1] == 0
        held.verify()
        assert is_leased(tmp_path)


def test_other_machine_holds_the_lease_until_the_timeout(tmp_path):
    write_record_elsewhere(tmp_path)
    clock = Clock()
    observer = LeaseObserver(clock)
    assert is_leased(tmp_path)  # a single look cannot tell
    assert observer.is_leased(tmp_path)
    clock.time += TIMEOUT - 1
    assert observer.is_leased(tmp_path)
    with (
        pytest.raises(AlreadyRunning, match="process 7 on far since then"),
        hold_lease(tmp_path, observer),
    ):
        pass
    clock.time += 1
    assert not observer.is_leased(tmp_path)
    assert is_leased(tmp_path)
    with hold_lease(tmp_path, observer) as held:
        assert held.number == 2


def test_heartbeats_count_and_file_times_do_not(tmp_path):
    path = write_record_elsewhere(tmp_path)
    clock = Clock()
    observer = LeaseObserver(clock)
    for written in (0, 1e10, 5):  # long ago, in the future, constant
        beat(path)
        os.utime(path, (written, written))
        assert observer.is_leased(tmp_path)
        clock.time += TIMEOUT - 1
        assert observer.is_leased(tmp_path)
    os.utime(path)  # touched, without a heartbeat
    clock.time += 1
    assert not observer.is_leased(tmp_path)
    beat(path)
    assert observer.is_leased(tmp_path)
    write_record_elsewhere(tmp_path)
    clock.time += TIMEOUT
    assert observer.is_leased(tmp_path)


def test_lists_go_by_file_times(tmp_path):
    """They look once, also at what a machine has left that was switched off."""
    path = write_record_elsewhere(tmp_path)
    observer = LeaseObserver(by_file_times=True)
    assert observer.is_leased(tmp_path)
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    assert not observer.is_leased(tmp_path)
    assert not observer.observe(tmp_path).sure
    assert is_leased(tmp_path)
    beat(path)
    assert observer.is_leased(tmp_path)


def test_slow_read_is_not_a_timeout(tmp_path, monkeypatch):
    """A server that is unreachable for an hour stops the holder and the observer."""
    path = write_record_elsewhere(tmp_path)
    clock = Clock()
    observer = LeaseObserver(clock)
    observer.is_leased(tmp_path)

    def stalled(path, original=lease._read):
        clock.time += 3600
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(lease, "_read", stalled)
        assert observer.is_leased(tmp_path)
    beat(path)
    assert observer.is_leased(tmp_path)


@pytest.mark.parametrize("alive", [True, False])
def test_observer_waits_until_it_is_sure(tmp_path, alive):
    path = write_record_elsewhere(tmp_path)
    clock = Clock()
    observer = LeaseObserver(clock)
    slept = []

    def sleep(seconds):
        clock.time += seconds
        slept.append(seconds)
        if alive and len(slept) == 5:
            beat(path)

    observer.wait_until_sure(tmp_path, sleep)
    assert observer.is_leased(tmp_path) == alive
    assert sum(slept) == 5 if alive else TIMEOUT <= sum(slept) <= TIMEOUT + 2


class Slow(LeaseObserver):
    """Observer after whose first free observation something else happens."""

    def __init__(self, meanwhile, clock):
        super().__init__(clock)
        self.meanwhile = [meanwhile]

    def observe(self, folder):
        found = super().observe(folder)
        if not found.alive and self.meanwhile:
            self.meanwhile.pop()()
        return found


def test_one_of_two_that_see_it_free_gets_the_lease(tmp_path):
    write_record_elsewhere(tmp_path)
    clock = Clock()
    with ExitStack() as stack:
        fast = LeaseObserver(clock)
        slow = Slow(lambda: stack.enter_context(hold_lease(tmp_path, fast)), clock)
        assert fast.is_leased(tmp_path)
        assert slow.is_leased(tmp_path)
        clock.time += TIMEOUT
        with (
            pytest.raises(AlreadyRunning, match=f"process {os.getpid()} on"),
            hold_lease(tmp_path, slow),
        ):
            pass
        assert records(tmp_path) == ["00000001", "00000002"]


def test_used_number_gives_no_lease(tmp_path):
    """The number of a slow process may be taken and already removed."""

    def meanwhile():
        for _ in range(3):
            with hold_lease(tmp_path):
                pass
        stack.enter_context(hold_lease(tmp_path))

    with ExitStack() as stack:
        with pytest.raises(AlreadyRunning), hold_lease(tmp_path, Slow(meanwhile, Clock())):
            pass
        assert newest(tmp_path).name == "00000004"


def test_suspended_holder_loses_the_lease(tmp_path, monkeypatch):
    with ExitStack() as old_stack:
        with monkeypatch.context() as patch:
            pretend_other_machine(patch)
            old = old_stack.enter_context(hold_lease(tmp_path))
        clock = Clock()
        observer = LeaseObserver(clock)
        assert observer.is_leased(tmp_path)
        clock.time += TIMEOUT
        with hold_lease(tmp_path, observer) as new:
            assert new.number > old.number
            monkeypatch.setattr(lease, "now", lambda now=lease.now: now() + 1e9)
            assert old.is_lost()
            with pytest.raises(LeaseLost, match=f"taken over by process {os.getpid()} on .*; this"):
                old.verify()
            old_stack.close()  # releasing it changes nothing
            assert is_leased(tmp_path)
            assert not new.is_lost()
            new.verify()
        with hold_lease(tmp_path) as newest:
            assert newest.number == new.number + 1


def test_holder_notices_a_newer_record(tmp_path):
    with hold_lease(tmp_path) as held:
        path = write_record_elsewhere(tmp_path)
        held.beat()
        assert held.is_lost()
        with pytest.raises(LeaseLost, match="process 7 on far since then"):
            held.check()
    assert newest(tmp_path) == path
    assert b"released" not in path.read_bytes()


def test_verify_reads_the_disk(tmp_path):
    with hold_lease(tmp_path) as held:
        write_record_elsewhere(tmp_path)
        with pytest.raises(LeaseLost):
            held.verify()
        assert held.is_lost()


def test_removed_folder_loses_the_lease(tmp_path):
    """Even if a new folder, with numbers from 1 on, has replaced it."""
    for again in (False, True):
        run = tmp_path / str(again)
        with hold_lease(run) as held:
            (run / "lease").rename(run / "removed")
            if again:
                write_record_elsewhere(run)
            with pytest.raises(LeaseLost):
                held.verify()


def test_heartbeat_thread_writes(tmp_path, monkeypatch):
    beaten = threading.Event()

    def once(self, original=lease.Lease.beat):
        original(self)
        beaten.set()

    monkeypatch.setattr(lease, "HEARTBEAT", 0.001)
    monkeypatch.setattr(lease.Lease, "beat", once)
    with hold_lease(tmp_path):
        before = newest(tmp_path).stat().st_size
        assert beaten.wait(60)
        beaten.clear()
        assert beaten.wait(60)
        assert newest(tmp_path).stat().st_size > before
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_failing_disk_does_not_lose_the_lease(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with hold_lease(tmp_path) as held:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            patch.setattr(os, "listdir", fail)
            patch.setattr(lease, "now", lambda now=lease.now: now() + 1e9)
            held.beat()
            assert not held.is_lost()
            with pytest.raises(OSError, match="No space"):
                held.verify()
        write_record_elsewhere(tmp_path)
        held.beat()
        assert held.is_lost()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\n", b"[1]\n", b'{"boot": null}\n', b"[" * 100_000]
)
def test_damaged_record_is_judged_by_its_heartbeat(tmp_path, content):
    with hold_lease(tmp_path):
        pass
    path = newest(tmp_path)
    path.write_bytes(content)
    clock = Clock()
    observer = LeaseObserver(clock)
    assert observer.is_leased(tmp_path)
    with pytest.raises(AlreadyRunning, match="another process"), hold_lease(tmp_path, observer):
        pass
    clock.time += TIMEOUT
    beat(path)
    assert observer.is_leased(tmp_path)
    clock.time += TIMEOUT
    with hold_lease(tmp_path, observer) as held:
        assert held.number == 2


def test_damaged_record_stays_with_its_holder(tmp_path):
    with hold_lease(tmp_path) as held:
        newest(tmp_path).write_bytes(b"")
        held.verify()


def test_heartbeat_alone_counts_without_locks(tmp_path, monkeypatch):
    """Otherwise a process with locks would find none, and the holder dead."""

    def fail(*arguments):
        raise OSError(38, "Function not implemented")

    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(lease.fcntl, "flock", fail)
            stack.enter_context(hold_lease(tmp_path))
            assert is_leased(tmp_path)
        assert is_leased(tmp_path)
    assert not is_leased(tmp_path)


def test_other_files_are_no_records(tmp_path):
    (tmp_path / "lease").mkdir()
    for name in ("7", "0000000x", "٠٠٠٠٠٠٠٩", "notes"):
        (tmp_path / "lease" / name).touch()
    assert not is_leased(tmp_path)
    with hold_lease(tmp_path) as held:
        assert held.number == 1
