"""Who owns a run: one at a time, between processes by a lock, between machines by a heartbeat."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from qkablate.runs import lease
from qkablate.runs.lease import SILENCE, Lost, Observer, Owned, is_owned, owning


@pytest.fixture(autouse=True)
def no_beats(monkeypatch):
    """Hearts beat where a test says so."""
    monkeypatch.setattr(lease, "BEAT", 1e6)


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


def claims(folder):
    return sorted(os.listdir(folder / "owner"))


def newest(folder):
    return folder / "owner" / claims(folder)[-1]


def claim_elsewhere(folder):
    """Another machine makes the next claim."""
    (folder / "owner").mkdir(parents=True, exist_ok=True)
    number = max(map(int, claims(folder)), default=0) + 1
    claim = {"token": "t", "host": "far", "pid": 7, "boot": "b", "device": 1, "since": "then"}
    path = folder / "owner" / f"{number:08d}"
    path.write_text(json.dumps(claim) + "\n")
    return path


def beat(path):
    with path.open("a") as file:
        file.write(".")


def elsewhere(monkeypatch):
    """From here on this process is on another machine."""
    here = {"boot": "another kernel", "device": 1}
    monkeypatch.setattr(lease, "_where_locks_hold", lambda descriptor: here)


def start(code, *words):
    """A process of its own; one that shares nothing with this one but the file system."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_one_owner_at_a_time(tmp_path):
    run = tmp_path / "run"
    assert not is_owned(run)
    assert not run.exists()  # looking makes nothing
    for number in (1, 2, 3):
        with owning(run) as owner:
            assert owner.number == number
            assert not owner.lost()
            owner.verify()
            assert is_owned(run)
            told = re.escape(f"{run} is being trained by process {os.getpid()} on ")
            with pytest.raises(Owned, match=told + ".+ since .+"), owning(run):
                pass
        assert not is_owned(run)


def test_an_error_releases_too(tmp_path):
    with pytest.raises(KeyError), owning(tmp_path):
        raise KeyError
    assert not is_owned(tmp_path)


def test_what_is_left_does_not_pile_up(tmp_path):
    for _ in range(5):
        (tmp_path / "owner").mkdir(exist_ok=True)
        (tmp_path / "owner" / ".killed.tmp").touch()
        with owning(tmp_path):
            pass
    assert claims(tmp_path) == ["00000004", "00000005"]


@pytest.mark.parametrize("before", ["nothing", "released", "dead"])
def test_of_many_threads_one_wins(tmp_path, before):
    for attempt in range(20):
        run = tmp_path / str(attempt)
        if before == "released":
            with owning(run):
                pass
        elif before == "dead":
            with owning(run):
                claim = newest(run).read_bytes()
            newest(run).write_bytes(claim)  # without its release, and nobody holds the lock
        start, end = threading.Barrier(8), threading.Barrier(8)
        won = []

        def race(run=run, start=start, end=end, won=won):
            with ExitStack() as stack:
                start.wait()
                try:
                    won.append(stack.enter_context(owning(run)).number)
                except Owned:
                    pass
                finally:
                    end.wait()

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1


RACE = """
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from qkablate.runs.lease import Owned, owning

with ExitStack() as stack:
    sys.stdin.readline()
    for number in range(40):
        with suppress(Owned):
            stack.enter_context(owning(Path(sys.argv[1]) / str(number)))
            print(number)
    print("end", flush=True)
    sys.stdin.readline()
"""


def test_of_many_processes_one_wins(tmp_path):
    processes = [start(RACE, tmp_path) for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    won = []
    for process in processes:
        while (line := process.stdout.readline()) != "end\n":
            assert line, "it failed"
            won.append(int(line))
    for process in processes:
        process.communicate("\n")
    assert sorted(won) == list(range(40))


OWNER = """
import os, sys, time
from pathlib import Path
from qkablate.runs.lease import owning

with owning(Path(sys.argv[1])):
    if len(sys.argv) == 2 or not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("forked", [[], ["forked"]])
def test_kill_9_frees_at_once(tmp_path, forked):
    """Even if a child that was forked from the owner lives on."""
    process = start(OWNER, tmp_path, *forked)
    child = int(process.stdout.readline())  # or the process itself
    try:
        assert is_owned(tmp_path)
        with pytest.raises(Owned, match=f"process {process.pid} on"), owning(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_owned(tmp_path)
        with owning(tmp_path) as owner:
            assert owner.number == 2
    finally:
        process.kill()
        if forked:
            os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_forked_child_does_not_own(tmp_path):
    with owning(tmp_path) as owner:
        if not (child := os.fork()):
            lost = owner.lost()
            owner.release()
            os._exit(0 if lost else 1)
        assert os.waitpid(child, 0)[1] == 0
        owner.verify()
        assert is_owned(tmp_path)


def test_another_machine_is_alive_until_it_is_silent(tmp_path):
    claim_elsewhere(tmp_path)
    clock = Clock()
    observer = Observer(clock)
    assert is_owned(tmp_path)  # whoever looks once cannot know
    assert observer.is_owned(tmp_path)
    clock.time += SILENCE - 1
    assert observer.is_owned(tmp_path)
    with pytest.raises(Owned, match="process 7 on far since then"), owning(tmp_path, observer):
        pass
    clock.time += 1
    assert not observer.is_owned(tmp_path)
    assert is_owned(tmp_path)
    with owning(tmp_path, observer) as owner:
        assert owner.number == 2


def test_every_beat_counts_and_no_other_clock(tmp_path):
    path = claim_elsewhere(tmp_path)
    clock = Clock()
    observer = Observer(clock)
    for time in (0, 1e10, 5):  # of the file: long ago, in the future, standing still
        beat(path)
        os.utime(path, (time, time))
        assert observer.is_owned(tmp_path)
        clock.time += SILENCE - 1
        assert observer.is_owned(tmp_path)
    os.utime(path)  # touched, and yet no beat
    clock.time += 1
    assert not observer.is_owned(tmp_path)
    beat(path)
    assert observer.is_owned(tmp_path)
    claim_elsewhere(tmp_path)
    clock.time += SILENCE
    assert observer.is_owned(tmp_path)


def test_a_slow_look_is_no_silence(tmp_path, monkeypatch):
    """The server that nobody reaches for an hour stops the owner's heart and the observer."""
    path = claim_elsewhere(tmp_path)
    clock = Clock()
    observer = Observer(clock)
    observer.is_owned(tmp_path)

    def stalled(path, original=lease._read):
        clock.time += 3600
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(lease, "_read", stalled)
        assert observer.is_owned(tmp_path)
    beat(path)
    assert observer.is_owned(tmp_path)


@pytest.mark.parametrize("alive", [True, False])
def test_an_observer_settles(tmp_path, alive):
    path = claim_elsewhere(tmp_path)
    clock = Clock()
    observer = Observer(clock)
    slept = []

    def sleep(seconds):
        clock.time += seconds
        slept.append(seconds)
        if alive and len(slept) == 5:
            beat(path)

    observer.settle(tmp_path, sleep)
    assert observer.is_owned(tmp_path) == alive
    assert sum(slept) == 5 if alive else SILENCE <= sum(slept) <= SILENCE + 2


class Slow(Observer):
    """Something happens between its judgement and what it does."""

    def __init__(self, meanwhile, clock):
        super().__init__(clock)
        self.meanwhile = [meanwhile]

    def judge(self, folder):
        found = super().judge(folder)
        if not found.alive and self.meanwhile:
            self.meanwhile.pop()()
        return found


def test_of_two_that_see_it_free_one_wins(tmp_path):
    claim_elsewhere(tmp_path)
    clock = Clock()
    with ExitStack() as stack:
        fast = Observer(clock)
        slow = Slow(lambda: stack.enter_context(owning(tmp_path, fast)), clock)
        assert fast.is_owned(tmp_path)
        assert slow.is_owned(tmp_path)
        clock.time += SILENCE
        with pytest.raises(Owned, match=f"process {os.getpid()} on"), owning(tmp_path, slow):
            pass
        assert claims(tmp_path) == ["00000001", "00000002"]


def test_a_number_of_the_past_is_no_claim(tmp_path):
    """Slow enough, its number is not only taken but swept up."""

    def meanwhile():
        for _ in range(3):
            with owning(tmp_path):
                pass
        stack.enter_context(owning(tmp_path))

    with ExitStack() as stack:
        with pytest.raises(Owned), owning(tmp_path, Slow(meanwhile, Clock())):
            pass
        assert newest(tmp_path).name == "00000004"


def test_who_wakes_up_too_late_has_lost(tmp_path, monkeypatch):
    with ExitStack() as old_stack:
        with monkeypatch.context() as patch:
            elsewhere(patch)
            old = old_stack.enter_context(owning(tmp_path))
        clock = Clock()
        observer = Observer(clock)
        assert observer.is_owned(tmp_path)
        clock.time += SILENCE
        with owning(tmp_path, observer) as new:
            assert new.number > old.number
            monkeypatch.setattr(lease, "now", lambda now=lease.now: now() + 1e9)
            assert old.lost()
            with pytest.raises(Lost, match=f"taken over by process {os.getpid()} on .*; this"):
                old.verify()
            old_stack.close()  # its release is no one's business any more
            assert is_owned(tmp_path)
            assert not new.lost()
            new.verify()
        with owning(tmp_path) as newest:
            assert newest.number == new.number + 1


def test_an_owner_that_is_awake_finds_out(tmp_path):
    with owning(tmp_path) as owner:
        path = claim_elsewhere(tmp_path)
        owner.beat()
        assert owner.lost()
        with pytest.raises(Lost, match="process 7 on far since then"):
            owner.check()
    assert newest(tmp_path) == path
    assert b"released" not in path.read_bytes()


def test_verify_needs_no_beat(tmp_path):
    with owning(tmp_path) as owner:
        claim_elsewhere(tmp_path)
        with pytest.raises(Lost):
            owner.verify()
        assert owner.lost()


def test_a_removed_run_is_lost(tmp_path):
    """Also where a new one, with numbers from 1 on, has come in its place."""
    for again in (False, True):
        run = tmp_path / str(again)
        with owning(run) as owner:
            (run / "owner").rename(run / "removed")
            if again:
                claim_elsewhere(run)
            with pytest.raises(Lost):
                owner.verify()


def test_the_heart_beats(tmp_path, monkeypatch):
    beaten = threading.Event()

    def once(self, original=lease.Owner.beat):
        original(self)
        beaten.set()

    monkeypatch.setattr(lease, "BEAT", 0.001)
    monkeypatch.setattr(lease.Owner, "beat", once)
    with owning(tmp_path):
        before = newest(tmp_path).stat().st_size
        assert beaten.wait(60)
        beaten.clear()
        assert beaten.wait(60)
        assert newest(tmp_path).stat().st_size > before
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_disk_that_fails_stops_nothing(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with owning(tmp_path) as owner:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            patch.setattr(os, "listdir", fail)
            patch.setattr(lease, "now", lambda now=lease.now: now() + 1e9)
            owner.beat()
            assert not owner.lost()
            with pytest.raises(OSError, match="No space"):
                owner.verify()
        claim_elsewhere(tmp_path)
        owner.beat()
        assert owner.lost()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\n", b"[1]\n", b'{"boot": null}\n', b"[" * 100_000]
)
def test_of_a_damaged_claim_only_the_heartbeat_tells(tmp_path, content):
    with owning(tmp_path):
        pass
    path = newest(tmp_path)
    path.write_bytes(content)
    clock = Clock()
    observer = Observer(clock)
    assert observer.is_owned(tmp_path)
    with pytest.raises(Owned, match="another process"), owning(tmp_path, observer):
        pass
    clock.time += SILENCE
    beat(path)
    assert observer.is_owned(tmp_path)
    clock.time += SILENCE
    with owning(tmp_path, observer) as owner:
        assert owner.number == 2


def test_a_damaged_claim_is_still_its_owners(tmp_path):
    with owning(tmp_path) as owner:
        newest(tmp_path).write_bytes(b"")
        owner.verify()


def test_without_locks_the_heartbeat_speaks_alone(tmp_path, monkeypatch):
    """Else whoever can ask for a lock would find none, and the owner dead."""

    def fail(*arguments):
        raise OSError(38, "Function not implemented")

    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(lease.fcntl, "flock", fail)
            stack.enter_context(owning(tmp_path))
            assert is_owned(tmp_path)
        assert is_owned(tmp_path)
    assert not is_owned(tmp_path)


def test_other_files_are_no_claims(tmp_path):
    (tmp_path / "owner").mkdir()
    for name in ("7", "0000000x", "٠٠٠٠٠٠٠٩", "notes"):
        (tmp_path / "owner" / name).touch()
    assert not is_owned(tmp_path)
    with owning(tmp_path) as owner:
        assert owner.number == 1
