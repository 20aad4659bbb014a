"""A folder to work in, and commands that work there, of which nothing is left behind.

The problem. A program that compiles may be ended at any moment: by Ctrl-C, by a signal, by a crash.
What it has started goes on then, and its folder stays. No `finally` helps against `os._exit` or
SIGKILL, and a thread that is no main thread hears of no signal.

The way out. The folder and the commands belong to a process of their own, the *keeper*, whose input
is a pipe from us. Whatever becomes of us, the system closes the pipe. When the keeper's input ends,
the keeper ends the command that runs, with all that the command has started in its group, and
removes the folder. So the usual end and the sudden one are the same.

    we      ["cc", "-o", ...]  ---->  keeper  ---->  cc
            [0, "what it said"] <----

This file is both ends. The keeper runs it as a program, without anything else of ours.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

PYTHON = [sys.executable or "python3", "-I", "-S"]  # the standard library, and nothing else
UNRUN = 127  # a shell's exit code for a command that cannot be run
LOOK_S = 0.01
MOST = 100_000  # characters of what a command has printed


class Keeper:
    """A new folder inside `place`, and commands that run there, until it is closed.

    OSError if there is none, or no process for it.
    """

    def __init__(self, place: str):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [*PYTHON, str(Path(__file__).resolve()), place]
        self._process = subprocess.Popen(command, start_new_session=True, **pipes)
        code, said = self._hear()
        if code:
            self.close()
            raise OSError(said[0])
        self.folder = Path(said[0])

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(self, command: list[str], patience: float) -> tuple[int, list[str]]:
        """The exit code of a command, and the lines that it has printed. TimeoutError if it does
        not end within so many seconds: then the keeper is of no use any more."""
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), json.dumps(command).encode() + b"\n")
        if not select.select([self._process.stdout], [], [], patience)[0]:
            raise TimeoutError(f"{command[0]} did not end within {patience} seconds")
        return self._hear()

    def _hear(self) -> tuple[int, list[str]]:
        code, said = json.loads(self._process.stdout.readline() or f'[{UNRUN}, "it was ended"]')
        return code, [line.strip()[:500] for line in said.splitlines() if line.strip()]


def keep(place: str) -> None:
    """What the keeper does."""
    try:
        folder = tempfile.TemporaryDirectory(
            prefix="nanobatch-", dir=place, ignore_cleanup_errors=True
        )
    except OSError as error:
        reply(UNRUN, str(error.strerror))
        return
    with folder:
        reply(0, folder.name)
        while line := sys.stdin.readline():
            reply(*obey(json.loads(line), folder.name))


def obey(command: list[str], folder: str) -> tuple[int, str]:
    """Run one command. It is ended when the keeper's input ends."""
    environment = os.environ | {"LC_ALL": "C", "TMPDIR": folder}
    # In memory, since the disk may be full: that is what the command would say
    with open(os.memfd_create("said"), "w+", errors="replace") as said:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        except OSError as error:
            return UNRUN, f"it cannot be run ({error.strerror})"
        # Who waits for an answer says nothing meanwhile: if there is something to read, it is the end
        while process.poll() is None and not select.select([sys.stdin], [], [], LOOK_S)[0]:
            pass
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what the command has left behind
        code = process.wait()
        said.seek(0)
        # 128: a signal's, as shells have it
        return code if code >= 0 else 128 - code, said.read(MOST)


def reply(code: int, said: str) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps([code, said]), flush=True)


if __name__ == "__main__":
    keep(sys.argv[1])
