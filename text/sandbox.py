"""Strangers' programs are tried out where they can be ended: in a child process.

The problem. A chat template and a grammar are programs of another author. Either may loop for ever,
or ask for gigabytes. Jinja and the library for grammars cannot be interrupted. A thread that waits
for one of them may give up, but the work goes on, in the process that serves everybody.

The way out. A child process does the work first, and the system holds it to limits of time and
memory. What the child survives is harmless, and this process may do it, too.

    this process    `Trials.run` sends one end of a socket, and waits at the other end
    the nursery     a child that has read what all trials need, and forks for each job
    a watcher       its child, which forks once more. It says how the trial ended, if the trial cannot
    the trial       has the limits, reads the job from the socket, does it, and writes what it has found

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

from runtime.validation import one_line

STACK = 128 * 2**20  # of a trial: who walks down a text by recursion needs it
NICE = 5  # a trial takes what the others leave of the processor
START = 60.0  # seconds until a nursery is ready: on a busy machine a tokenizer takes six
READY = b"!\n"
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
        self._first = [module, given, limits]
        self._turns = threading.BoundedSemaphore(limits.at_once)
        self._sending = threading.Lock()
        self._nursery: weakref.finalize | None = None  # ends the nursery
        self._line: socket.socket | None = None
        self._unfit = ""  # why a nursery cannot prepare what it was given

    def run(self, job: Any) -> Any:
        """What the function finds. Raises LimitError or BusyError; ValueError if `prepare` fails."""
        if self._unfit:
            raise ValueError(self._unfit)
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
        try:
            end = self._send()
        except OSError as error:
            raise BusyError(f"no process can be started ({one_line(error)})") from None
        try:
            with end:
                end.sendall(json.dumps(job).encode())
                end.shutdown(socket.SHUT_WR)
                answers = end.makefile("rb").readlines()
        except OSError:  # the trial was killed, or hangs
            answers = []
        if not answers:
            self.close()
            raise BusyError("the process that tries it is gone; try again")
        # If a trial has answered and was ended all the same, the last line says so
        answer = json.loads(answers[-1])
        if "ended" in answer:
            raise self._reason(answer["ended"])
        return answer["found"]

    def _send(self) -> socket.socket:
        """Have the nursery begin a trial. Answers with our end of its socket."""
        ours, theirs = socket.socketpair()
        ours.settimeout(self.limits.patience + GRACE)
        with theirs, self._sending:
            if self._nursery is not None:
                with suppress(OSError):  # the nursery has been killed
                    socket.send_fds(self._line, [b"!"], [theirs.fileno()])
                    return ours
                self.close()
            self._begin()
            socket.send_fds(self._line, [b"!"], [theirs.fileno()])
            return ours

    def _begin(self) -> None:
        """Start the nursery.

        It finds the packages where this process has them, and reads no settings of a user's. `-S`
        saves it the search for packages. It has a session of its own, so Ctrl-C does not reach it.
        """
        self._line, theirs = socket.socketpair()
        program = f"import sys; sys.path += {sys.path}; from {__name__} import nurse; nurse()"
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
        self._nursery = weakref.finalize(self, end, process, self._line)
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


# --- in the nursery -----------------------------------------------------------------------------


def nurse() -> None:
    """The nursery's program. Its standard input is the line. When the line is cut, this nursery is
    not needed any more, nor is any of its trials."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries its children
    with socket.socket(fileno=0) as line:
        module, given, limits = json.loads(line.makefile("rb").readline())
        try:
            function = importlib.import_module(module).prepare(given)
        except MemoryError:
            raise
        except BaseException as error:  # a panic in a library's Rust is no Exception
            line.sendall(f"{one_line(error)}\n".encode())
            return
        line.sendall(READY)
        while True:
            _, ends, *_ = socket.recv_fds(line, 1, 1)
            if not ends:
                os.killpg(0, signal.SIGKILL)
            with socket.socket(fileno=ends[0]) as end:
                if os.fork() == 0:
                    watch(function, Allowance(*limits), end)


def watch(function: Callable[[Any], Any], limits: Allowance, end: socket.socket) -> NoReturn:
    """Between the nursery and a trial. Says how the trial has ended, if it could not say so itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    trial = os.fork()
    if trial == 0:
        run(function, limits, end)
    _, status = os.waitpid(trial, 0)
    if status:
        send(end, {"ended": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def run(function: Callable[[Any], Any], limits: Allowance, end: socket.socket) -> NoReturn:
    """A trial, from its first moment to its last."""
    try:
        hold(limits)
        thread = threading.Thread(target=attempt, args=(function, end))
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


def attempt(function: Callable[[Any], Any], end: socket.socket) -> None:
    try:
        answer = {"found": function(json.load(end.makefile("rb")))}
    except MemoryError:
        answer = {"ended": "memory"}
    except BaseException as error:  # a panic in a library's Rust is no Exception
        answer = {"ended": one_line(error)}
    send(end, answer)


def send(end: socket.socket, answer: Any) -> None:
    """In a line of its own, also behind an answer that was cut off."""
    with suppress(OSError):  # nobody may wait any more
        end.sendall(b"\n" + json.dumps(answer).encode())
