"""Strangers' programs are tried out where they can be ended: in a child process.

The problem. A chat template and a grammar are programs of another author. Either may loop for ever,
or ask for gigabytes. Jinja and the library for grammars cannot be interrupted. A thread that waits
for one of them may give up, but the work goes on, in the process that serves everybody.

The way out. A child process does the work first, and the system holds it to limits of time and
memory. What the child survives is harmless, and this process may do it, too.

    this process    `Trials.run` sends a job and one end of a pipe, and waits at the other end
    the nursery     a child that has read what all trials need, and forks for each job
    a watcher       its child, which forks once more. It says how the trial ended, if the trial cannot
    the trial       has the limits, does the job, and writes what it has found into the pipe

The nursery stays, since reading a tokenizer takes a second and a fork takes milliseconds. It has
one thread, as a fork needs. (This process has the threads of MLX.) When its line to this process is
cut, it ends, with all that it has forked.

What this file keeps. `Trials.run` takes a bounded time, whatever the job does. A trial that is ended
takes nothing with it.

Where next: `template.py` and `grammar.py`, which say what is tried.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from parts.checks import one_line

ROOT = Path(__file__).resolve().parents[2]
HEAD = 8  # bytes: how long the message behind them is
STACK = 128 * 2**20  # of a trial: who walks down a text by recursion needs it
NICE = 5  # a trial takes what the others leave of the processor
START = 60.0  # seconds until a nursery is ready: on a busy machine a tokenizer takes six
GRACE = 5.0  # seconds: the nursery answers so long after its trial had to end, or it is gone


class Allowance(NamedTuple):
    """What a trial may take."""

    seconds: float  # of a processor
    patience: float  # seconds by the clock: on a busy machine a trial waits for its turn
    memory: int  # bytes, beside what the nursery has. macOS ignores this limit
    at_once: int = 1  # so many trials may run at a time


class LimitError(ValueError):
    """A job that needs more than a trial may take, in words that follow its name."""


class BusyError(RuntimeError):
    """Nobody could try the job: too many others are being tried, or the machine is too busy."""


# --- in this process ----------------------------------------------------------------------------


class Trials:
    """Does jobs in processes that can be ended.

    `module`: its `prepare(given)` is called in the nursery, and makes the function that does a job.
    What is given, a job and what the function finds cross as JSON.
    """

    def __init__(self, module: str, given: Any, limits: Allowance):
        self.limits = limits
        self._first = {"module": module, "given": given, "limits": limits}
        self._turns = threading.BoundedSemaphore(limits.at_once)
        self._sending = threading.Lock()
        self._nursery: weakref.finalize | None = None  # ends the nursery
        self._line: socket.socket | None = None

    def run(self, job: Any) -> Any:
        """What the function finds. Raises LimitError or BusyError."""
        if not self._turns.acquire(timeout=self.limits.patience):
            raise BusyError("too many others are being tried; try again")
        try:
            return self._try(job)
        finally:
            self._turns.release()

    def close(self) -> None:
        """End the nursery. The next job starts another one."""
        if self._nursery is not None:
            self._nursery()
            self._nursery = None

    def _try(self, job: Any) -> Any:
        ours, theirs = os.pipe()
        with open(ours, "rb") as pipe:
            try:
                self._send(job, theirs)
            except OSError as error:
                raise BusyError(f"no process can be started ({one_line(error)})") from None
            finally:
                os.close(theirs)
            said = read_all(pipe.fileno(), self.limits.patience + GRACE)
        if said is None:
            self.close()  # it hangs, or was killed
            raise BusyError("the process that tries it is gone; try again")
        # If a trial has answered and was ended all the same, the second line says so
        answer = json.loads(said.splitlines()[-1])
        if "ended" in answer:
            raise self._reason(answer["ended"])
        return answer["found"]

    def _send(self, job: Any, pipe: int) -> None:
        message = json.dumps(job).encode()
        with self._sending:
            if self._nursery is not None:
                try:
                    self._write(message, pipe)
                    return
                except OSError:  # the nursery has been killed
                    self.close()
            self._begin()
            self._write(message, pipe)

    def _write(self, message: bytes, pipe: int) -> None:
        socket.send_fds(self._line, [len(message).to_bytes(HEAD, "big")], [pipe])
        self._line.sendall(message)

    def _begin(self) -> None:
        """Start the nursery.

        It finds the packages where this process has them, and reads no settings of a user's. `-S`
        saves it the search for packages. It has a session of its own, so Ctrl-C does not reach it.
        """
        self._line, theirs = socket.socketpair()
        path = [str(ROOT), *sys.path]
        program = f"import sys; sys.path += {path}; from parts.text.trials import nurse; nurse({theirs.fileno()})"
        with theirs:
            try:
                process = subprocess.Popen(
                    [str(sys.executable), "-I", "-S", "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError:
                self._line.close()
                raise
        self._nursery = weakref.finalize(self, end, process, self._line)
        first = json.dumps(self._first).encode()
        self._line.settimeout(START)
        try:
            self._line.sendall(len(first).to_bytes(HEAD, "big") + first)
            if not self._line.recv(1):
                raise OSError("it ended at once")
        except OSError:
            self.close()
            raise

    def _reason(self, code: int | str) -> Exception:
        """Why a trial was ended. `code`: that of its process, or what it could still say."""
        limits = self.limits
        if code == -signal.SIGPROF:
            return LimitError(f"takes more than {limits.seconds:g} s")
        if code in ("memory", -signal.SIGABRT):  # Rust aborts when it gets no memory
            return LimitError(f"takes more than {limits.memory // 2**20} MB")
        if code == -signal.SIGALRM:
            return BusyError(f"it could not be tried within {limits.patience:g} s; try again")
        return LimitError(f"ended the process that tried it (exit code {code})")


def end(process: subprocess.Popen, line: socket.socket) -> None:
    """End the nursery, with the trials in its session."""
    line.close()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_all(pipe: int, seconds: float) -> bytes | None:
    """What comes through a pipe to its end; None if nothing came, or no end within so long."""
    until = time.monotonic() + seconds
    said = b""
    while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(pipe, 65536)
        if not part:
            return said or None
        said += part
    return None


# --- in the nursery -----------------------------------------------------------------------------


def nurse(fileno: int) -> None:
    """The nursery's program. When the line is cut, this nursery is not needed any more, nor is any
    of its trials."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries its children
    with socket.socket(fileno=fileno) as line:
        first = json.loads(receive(line, line.recv(HEAD, socket.MSG_WAITALL)))
        function = importlib.import_module(first["module"]).prepare(first["given"])
        limits = Allowance(*first["limits"])
        line.sendall(b"!")  # ready
        while True:
            head, pipes, *_ = socket.recv_fds(line, HEAD, 1)
            if not head:
                os.killpg(0, signal.SIGKILL)
            job = json.loads(receive(line, head))
            if os.fork() == 0:
                watch(function, job, limits, pipes[0])
            os.close(pipes[0])


def watch(function: Callable[[Any], Any], job: Any, limits: Allowance, pipe: int) -> NoReturn:
    """Between the nursery and a trial. Says how the trial has ended, if it could not say so itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    trial = os.fork()
    if trial == 0:
        run(function, job, limits, pipe)
    _, status = os.waitpid(trial, 0)
    if status:
        send(pipe, {"ended": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def receive(line: socket.socket, head: bytes) -> bytes:
    """The message behind this head."""
    size = int.from_bytes(head, "big")
    message = line.recv(size, socket.MSG_WAITALL)
    if len(message) < size:
        sys.exit()  # this nursery is not needed any more
    return message


def run(function: Callable[[Any], Any], job: Any, limits: Allowance, pipe: int) -> NoReturn:
    """A trial, from its first moment to its last."""
    try:
        hold(limits)
        thread = threading.Thread(target=attempt, args=(function, job, pipe))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def hold(limits: Allowance) -> None:
    """From here on the system ends this process when it has taken too much."""
    os.nice(NICE)
    threading.stack_size(STACK)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.patience)
    most = data() + STACK + limits.memory
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, most)):
        with suppress(ValueError, OSError):  # the limit is lower already, or the system has none
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def data() -> int:
    """How many bytes this process can write to, as the limit counts them."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[5]
        return int(pages) * resource.getpagesize()
    except OSError:  # not on macOS, which ignores the limit, too
        return 0


def attempt(function: Callable[[Any], Any], job: Any, pipe: int) -> None:
    try:
        answer = {"found": function(job)}
    except MemoryError:
        answer = {"ended": "memory"}
    except BaseException as error:  # a panic in a library's Rust is no Exception
        answer = {"ended": one_line(error)}
    send(pipe, answer)


def send(pipe: int, answer: Any) -> None:
    with suppress(BrokenPipeError), open(pipe, "wb") as end:  # nobody may wait any more
        end.write(json.dumps(answer).encode() + b"\n")
