"""Jobs in sandboxed processes: limits, failures, and what they leave behind."""

import errno
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import state_of
from waiting import wait_for

from base.sandbox import BusyError, LimitError, Sandbox, SandboxLimits

ROOT = Path(__file__).parents[2]
LIMITS = SandboxLimits(seconds=0.3, patience=20.0, memory=64 * 2**20, at_once=3)


@pytest.fixture
def sandbox():
    sandbox = Sandbox("sandbox_jobs", "from its parent", LIMITS)
    yield sandbox
    sandbox.close()


def is_alive(process: int) -> bool:
    """Return True if the process runs. A zombie does not count as alive."""
    return state_of(process) not in ("", "Z")


def test_jobs_share_what_was_prepared(sandbox):
    assert sandbox.run(["given"]) == "from its parent"
    assert sandbox.run(["double", "ä\u2028" * 100_000]) == "ä\u2028" * 200_000
    servers, workers = zip(*(sandbox.run(["processes"]) for _ in range(5)), strict=True)
    assert len({*servers}) == 1 and len({*workers}) == 5 and os.getpid() not in servers


@pytest.mark.parametrize(
    "job, words",
    [
        (["loop"], "takes more than 0.3 s"),
        (["eat", 2**30], "takes more than 64 MB"),
        (["signal", signal.SIGSEGV], "crashed the process that checked it (exit code -11)"),
        (["signal", signal.SIGKILL], "crashed the process that checked it (exit code -9)"),
        (["fail", "some\nwords"], "crashed the process that checked it (exit code some words)"),
    ],
)
def test_job_over_a_limit_is_killed(sandbox, job, words):
    with pytest.raises(LimitError) as refusal:
        sandbox.run(job)
    assert str(refusal.value) == words
    assert sandbox.run(["double", "x"]) == "xx"


def test_job_gets_its_memory_and_stack(sandbox):
    assert sandbox.run(["eat", 32 * 2**20]) == 32 * 2**20
    assert sandbox.run(["nest", 900]) == 900


def test_sleeping_job_is_killed():
    """A job that gets no processor time is killed. The error reports a busy machine, because the job may not
    be at fault."""
    sandbox = Sandbox("sandbox_jobs", None, LIMITS._replace(patience=0.5))
    with pytest.raises(BusyError, match=r"could not be checked within 0\.5 s; try again"):
        sandbox.run(["sleep", 60])
    assert sandbox.run(["double", "x"]) == "xx"
    sandbox.close()


def test_too_many_jobs_are_busy():
    sandbox = Sandbox("sandbox_jobs", None, SandboxLimits(30.0, 2.0, 2**26, at_once=1))
    sandbox.run(["given"])

    def wait(_: int) -> str:
        with pytest.raises(BusyError) as busy:
            sandbox.run(["sleep", 60])
        return str(busy.value)

    with ThreadPoolExecutor(3) as pool:
        assert all("try again" in said for said in pool.map(wait, range(3)))
    assert sandbox.run(["double", "x"]) == "xx"
    sandbox.close()


def test_failed_prepare_is_remembered(monkeypatch):
    """Regression: a failure to prepare was reported as a busy machine, and each request with a grammar
    started another process."""
    sandbox = Sandbox("sandbox_jobs", "broken", LIMITS)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^some words$"):
            sandbox.run(["given"])
        monkeypatch.setattr(sys, "executable", "/no/such/python")


def test_killed_fork_server_is_replaced(sandbox):
    fork_server_pid, _ = sandbox.run(["processes"])
    with pytest.raises(BusyError):
        sandbox.run(["kill the fork server"])
    another, _ = sandbox.run(["processes"])
    assert another != fork_server_pid
    os.kill(another, signal.SIGKILL)  # between two jobs
    wait_for(lambda: not is_alive(another))
    assert sandbox.run(["double", "x"]) == "xx"


def test_fork_server_leaves_nothing(sandbox):
    """Neither the fork server nor its jobs outlive the process that started them, however it exits."""
    fork_server_pid, _ = sandbox.run(["processes"])
    assert os.getpgid(fork_server_pid) != os.getpgid(0), "a terminal's Ctrl-C would end it"
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        sandbox.run(["double", "x"])
    assert len(os.listdir("/dev/fd")) == before
    sandbox.close()
    assert not is_alive(fork_server_pid)
    program = (
        "import os, sys; sys.path[:0] = sys.argv[1:]\n"
        "from base.sandbox import SandboxLimits, Sandbox\n"
        "sandbox = Sandbox('sandbox_jobs', None, SandboxLimits(0.3, 20.0, 2**26))\n"
        "print(*sandbox.run(['processes']), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", program, str(ROOT), str(ROOT / "tests" / "lib")]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == -9, said.stderr
    wait_for(lambda: not is_alive(int(said.stdout.split()[0])))


def test_concurrent_jobs_get_their_own_results(sandbox):
    """Run 25 jobs in random order, some of them hostile."""
    dice = random.Random(1)
    jobs = [(["double", f"<{n}>"], f"<{n}><{n}>") for n in range(20)]
    jobs += [(["loop"], None)] * 2 + [(["signal", signal.SIGABRT], None)] * 3
    dice.shuffle(jobs)

    def is_right(job: list, expected: str | None) -> bool:
        try:
            return sandbox.run(job) == expected
        except LimitError:
            return expected is None

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(is_right, *zip(*jobs, strict=True))] == [True] * 25


def test_no_process_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(BusyError, match="cannot start a process"):
        Sandbox("sandbox_jobs", None, LIMITS).run(["given"])


def test_no_file_descriptor_is_reported(monkeypatch, sandbox):
    """Regression: a server that had reached its limit on open files reported an internal error."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("base.sandbox.socket.socketpair", refuse)
    with pytest.raises(BusyError, match=r"cannot start a process .*Too many open files"):
        sandbox.run(["given"])
