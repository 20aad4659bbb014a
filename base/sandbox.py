"""Run untrusted templates, tokenizers and grammars in a sandboxed child process.

Jinja and llguidance cannot be interrupted: a thread that gives up on one of them leaves the work
running in the process that serves everybody. So a child does the work first, with limits of time
and memory that the system enforces. What the child survives may run here, too.

    this process       `Sandbox.run` sends one end of a socket and waits at the other end
    the fork server    a child that has loaded what all jobs need, and forks for each job
    the watcher        its child, which forks once more and reports how the job ended, if the job cannot
    the job            sets the limits, reads its input from the socket, writes its result

Loading a tokenizer takes a second and a fork milliseconds, so the fork server stays. It has one
thread, because forking a process with threads (this one has MLX's) is unsafe. When its socket
closes, it ends with all its children.

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

STACK = 128 * 2**20  # of a job: recursive parsers need it
NICE = 5  # jobs yield to the server's threads
START = 60.0  # seconds until the fork server is ready: a large tokenizer may take six
READY = b"!\n"
GRACE = 5.0  # seconds after a job's deadline until the fork server counts as gone


class SandboxLimits(NamedTuple):
    """The limits of a job."""

    seconds: float  # of processor time
    patience: float  # seconds by the clock: on a busy machine a job may have to wait
    memory: int  # bytes on top of the fork server's. macOS ignores this limit
    at_once: int = 1  # jobs at the same time


class LimitError(ValueError):
    """A job that exceeds a limit. The message follows the job's name."""


class BusyError(RuntimeError):
    """The job could not be run: too many others are running, or the machine is too busy."""


# --- in this process ------------------------------------------------------------------------------


class Sandbox:
    """Run jobs in processes that can be killed.

    `module`: its `prepare(given)` runs in the fork server and returns the function that does a job.
    `given`, jobs and results are sent as JSON.
    """

    def __init__(self, module: str, given: Any, limits: SandboxLimits):
        self.limits = limits
        self._first = [module, given, limits]
        self._turns = threading.BoundedSemaphore(limits.at_once)
        self._sending = threading.Lock()
        self._fork_server: weakref.finalize | None = None  # ends it
        self._line: socket.socket | None = None
        self._unfit = ""  # why `prepare` failed

    def run(self, job: Any) -> Any:
        """Return the function's result. Raise LimitError or BusyError; ValueError if `prepare`
        fails."""
        if self._unfit:
            raise ValueError(self._unfit)
        if not self._turns.acquire(timeout=self.limits.patience):
            raise BusyError("too many others are being tried; try again")
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
            raise BusyError(f"no process can be started ({one_line(error)})") from None
        try:
            with end:
                end.sendall(json.dumps(job).encode())
                end.shutdown(socket.SHUT_WR)
                answers = end.makefile("rb").readlines()
        except OSError:  # the job was killed, or hangs
            answers = []
        if not answers:
            self.close()
            raise BusyError("the process that tries it is gone; try again")
        # A job that has answered and was killed all the same has two lines; the last one counts
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

        It imports packages from where this process has them, and no user's site settings. `-S`
        skips the search for packages. A session of its own keeps Ctrl-C away.
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
                raise OSError("it ended at once")
            if said != READY:
                self._unfit = said.decode().strip()
                raise ValueError(self._unfit)
        except (OSError, ValueError):
            self.close()
            raise

    def _reason(self, code: int | str) -> Exception:
        """The reason for which a job was ended. `code`: its exit code, or what it could still report."""
        limits = self.limits
        if code == -signal.SIGPROF:
            return LimitError(f"takes more than {limits.seconds:g} s")
        if code in ("memory", -signal.SIGABRT):  # Rust aborts when it gets no memory
            return LimitError(f"takes more than {limits.memory // 2**20} MB")
        if code == -signal.SIGALRM:
            return BusyError(f"it could not be tried within {limits.patience:g} s; try again")
        return LimitError(f"ended the process that tried it (exit code {code})")


def end(process: subprocess.Popen, line: socket.socket) -> None:
    """Kill the fork server with all jobs in its session."""
    line.close()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- in the fork server ---------------------------------------------------------------------------


def fork_server() -> None:
    """The fork server's program. Its standard input is the socket; when that closes, kill the whole
    process group."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with socket.socket(fileno=0) as line:
        module, given, limits = json.loads(line.makefile("rb").readline())
        try:
            function = importlib.import_module(module).prepare(given)
        except MemoryError:
            raise
        except BaseException as error:  # a Rust panic is no Exception
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
    """The process between fork server and job: report how the job has ended, if it could not do so
    itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job = os.fork()
    if job == 0:
        run(function, limits, end)
    _, status = os.waitpid(job, 0)
    if status:
        send(end, {"ended": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def run(function: Callable[[Any], Any], limits: SandboxLimits, end: socket.socket) -> NoReturn:
    """The main function of a job's process."""
    try:
        limit_process(limits)
        thread = threading.Thread(target=attempt, args=(function, end))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def limit_process(limits: SandboxLimits) -> None:
    """Make the system end this process when it exceeds a limit."""
    os.nice(NICE)
    threading.stack_size(STACK)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.patience)
    most = data() + STACK + limits.memory
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, most)):
        with suppress(ValueError, OSError):  # the limit is lower already, or the system has none
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def data() -> int:
    """Bytes that this process can write to, as RLIMIT_DATA counts them."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[5]
        return int(pages) * resource.getpagesize()
    except OSError:  # not on macOS, which ignores the limit, too
        return 0


def attempt(function: Callable[[Any], Any], end: socket.socket) -> None:
    try:
        answer = {"found": function(json.load(end.makefile("rb")))}
    except MemoryError:
        answer = {"ended": "memory"}
    except BaseException as error:  # a panic in a library's Rust is no Exception
        answer = {"ended": one_line(error)}
    send(end, answer)


def send(end: socket.socket, answer: Any) -> None:
    """Send the answer on a line of its own, even after one that was cut off."""
    with suppress(OSError):  # the parent has gone
        end.sendall(b"\n" + json.dumps(answer).encode())
