"""Run untrusted templates, tokenizers and grammars in a sandboxed child process.

Jinja and llguidance cannot be interrupted: if a thread gave up waiting for them, the work would go on
in the process that serves all clients. So a child process does the work first, with limits on time and
memory that the system enforces. If the child succeeds, the work may run in this process, too.

    this process       `Sandbox.run` sends one end of a socket and waits at the other end
    the fork server    a child that has loaded what all jobs need, and forks for each job
    the watcher        a child of the fork server; it forks the job, and reports a job that was killed
    the job            sets the limits, reads its input from the socket, writes its result

Loading a tokenizer takes a second and a fork takes milliseconds, so the fork server keeps running. It
has a single thread, because forking a process with threads (MLX starts some in this one) is unsafe.
When its socket closes, it exits and kills all its children.

The invariant: `Sandbox.run` takes a bounded time, whatever the job does.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from base.validation import one_line

STACK = 128 * 2**20  # stack of a job, for recursive parsers
NICE = 5  # jobs yield to the server's threads
START = 60.0  # seconds that the fork server may take to start: with a large tokenizer it takes six
READY = b"!\n"
GRACE = 5.0  # seconds after a job's deadline until the fork server is considered dead


class SandboxLimits(NamedTuple):
    """The limits of a job."""

    seconds: float  # of processor time
    patience: float  # seconds of wall-clock time: on a busy machine a job may have to wait
    memory: int  # bytes in addition to the fork server's. macOS ignores this limit
    at_once: int = 1  # maximum number of concurrent jobs


class LimitError(ValueError):
    """A job exceeded a limit or crashed. The message is a predicate, to be put after the job's name."""


class BusyError(RuntimeError):
    """A job could not run to its end: too many other jobs, a busy machine, or a killed process. A retry may work."""


# --- in this process ------------------------------------------------------------------------------


class Sandbox:
    """Runs jobs in processes that can be killed.

    `module`: its `prepare(given)` runs in the fork server and returns the function that runs a job.
    `given`, jobs and results are sent as JSON.
    """

    def __init__(self, module: str, given: Any, limits: SandboxLimits):
        self.limits = limits
        self._first = [module, given, limits]
        self._turns = threading.BoundedSemaphore(limits.at_once)
        self._sending = threading.Lock()
        self._fork_server: weakref.finalize | None = None  # kills the fork server when called
        self._line: socket.socket | None = None
        self._unfit = ""  # why `prepare` failed

    def run(self, job: Any) -> Any:
        """Run a job and return its result. Raise LimitError or BusyError; ValueError if `prepare`
        fails."""
        if self._unfit:
            raise ValueError(self._unfit)
        if not self._turns.acquire(timeout=self.limits.patience):
            raise BusyError("too many others are being checked; try again")
        try:
            return self._try(job)
        finally:
            self._turns.release()

    def close(self) -> None:
        """Kill the fork server. The next job starts another one."""
        if self._fork_server is not None:
            self._fork_server()
            self._fork_server = None

    def _try(self, job: Any) -> Any:
        try:
            end = self._send()
        except OSError as error:
            raise BusyError(f"cannot start a process ({one_line(error)})") from None
        try:
            with end:
                end.sendall(json.dumps(job).encode())
                end.shutdown(socket.SHUT_WR)
                answers = end.makefile("rb").readlines()
        except OSError:  # the job was killed, or hangs
            answers = []
        if not answers:
            self.close()
            raise BusyError("the process that checks it is gone; try again")
        # A job that is killed after its answer leaves two answers; the last one counts
        answer = json.loads(answers[-1])
        if "ended" in answer:
            raise self._reason(answer["ended"])
        return answer["found"]

    def _send(self) -> socket.socket:
        """Start a job. Return our end of its socket."""
        ours, theirs = socket.socketpair()
        ours.settimeout(self.limits.patience + GRACE)
        with theirs, self._sending:
            if self._fork_server is not None:
                with suppress(OSError):  # the fork server has been killed
                    socket.send_fds(self._line, [b"!"], [theirs.fileno()])
                    return ours
                self.close()
            self._begin()
            socket.send_fds(self._line, [b"!"], [theirs.fileno()])
            return ours

    def _begin(self) -> None:
        """Start the fork server.

        It gets this process's `sys.path` and no user site settings; `-S` skips the search for
        packages. It has its own session, so that Ctrl-C does not reach it.
        """
        self._line, theirs = socket.socketpair()
        serve = f"from {__name__} import fork_server; fork_server()"
        program = f"import sys; sys.path += {sys.path}; {serve}"
        with theirs:
            try:
                process = subprocess.Popen(
                    [str(sys.executable), "-I", "-S", "-c", program],
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                self._line.close()
                raise
        self._fork_server = weakref.finalize(self, end, process, self._line)
        self._line.settimeout(START)
        try:
            self._line.sendall(json.dumps(self._first).encode() + b"\n")
            said = self._line.makefile("rb").readline()
            if not said:
                raise OSError("it exited at once")
            if said != READY:
                self._unfit = said.decode().strip()
                raise ValueError(self._unfit)
        except (OSError, ValueError):
            self.close()
            raise

    def _reason(self, code: int | str) -> Exception:
        """Return the error for a failed job. `code`: its exit code, or the reason that it reported."""
        limits = self.limits
        if code == -signal.SIGPROF:
            return LimitError(f"takes more than {limits.seconds:g} s")
        if code in ("memory", -signal.SIGABRT):  # Rust aborts if an allocation fails
            return LimitError(f"takes more than {limits.memory // 2**20} MB")
        if code == -signal.SIGALRM:
            return BusyError(f"it could not be checked within {limits.patience:g} s; try again")
        return LimitError(f"crashed the process that checked it (exit code {code})")


def end(process: subprocess.Popen, line: socket.socket) -> None:
    """Kill the fork server with all jobs in its session."""
    line.close()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- in the fork server ---------------------------------------------------------------------------


def fork_server() -> None:
    """The main function of the fork server. Its standard input is the socket; when the socket closes, kill
    the whole process group."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # let the system reap the children
    with socket.socket(fileno=0) as line:
        module, given, limits = json.loads(line.makefile("rb").readline())
        try:
            function = importlib.import_module(module).prepare(given)
        except MemoryError:
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            line.sendall(f"{one_line(error)}\n".encode())
            return
        line.sendall(READY)
        while True:
            _, ends, *_ = socket.recv_fds(line, 1, 1)
            if not ends:
                os.killpg(0, signal.SIGKILL)
            with socket.socket(fileno=ends[0]) as end:
                if os.fork() == 0:
                    watch(function, SandboxLimits(*limits), end)


def watch(function: Callable[[Any], Any], limits: SandboxLimits, end: socket.socket) -> NoReturn:
    """The main function of the watcher: fork the job, and report its exit code unless it exits with 0."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job = os.fork()
    if job == 0:
        run(function, limits, end)
    _, status = os.waitpid(job, 0)
    if status:
        send(end, {"ended": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def run(function: Callable[[Any], Any], limits: SandboxLimits, end: socket.socket) -> NoReturn:
    """The main function of a job: set the limits, then run it in a thread with a large stack."""
    try:
        limit_process(limits)
        thread = threading.Thread(target=attempt, args=(function, end))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def limit_process(limits: SandboxLimits) -> None:
    """Set this process's limits: out of time, the system kills it; out of memory, an allocation fails."""
    os.nice(NICE)
    threading.stack_size(STACK)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.patience)
    most = data() + STACK + limits.memory
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, most)):
        # The hard limit may be lower, and a system may not support the limit
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def data() -> int:
    """Return the number of bytes of this process that count towards RLIMIT_DATA."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[5]
        return int(pages) * resource.getpagesize()
    except OSError:  # macOS has no /proc, and ignores the limit
        return 0


def attempt(function: Callable[[Any], Any], end: socket.socket) -> None:
    try:
        answer = {"found": function(json.load(end.makefile("rb")))}
    except MemoryError:
        answer = {"ended": "memory"}
    except BaseException as error:  # a Rust panic is not an Exception
        answer = {"ended": one_line(error)}
    send(end, answer)


def send(end: socket.socket, answer: Any) -> None:
    """Send the answer on its own line, even if a previous answer was cut off."""
    with suppress(OSError):  # the parent is gone
        end.sendall(b"\n" + json.dumps(answer).encode())
