"""A program in a pseudo-terminal, and what the terminal would show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.cells import cell_len

ROOT = Path(__file__).parents[2]
# What the screen sends: cursor moves, colours, modes, then everything else that a terminal obeys
# instead of showing it.
MOVE = re.compile(r"\x1b\[(\d*);?(\d*)H")
OTHER = re.compile(
    r"\x1b\[[0-9;?<>=$!]*[a-zA-Z~]|\x1b[=>c78]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bP[^\x1b]*\x1b\\|\x1b."
)


class Terminal:
    """A program in a terminal of this size, with a picture of its content. `spoiled` is Python code that
    runs before the `main` of the screen."""

    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int] = (100, 30),
        environment: Mapping[str, str] | None = None,
        spoiled: str = "",
        program: str = "tui.py",
        **how,
    ):
        self.width, self.height = size
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", self.height, self.width, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        ours = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "NANOBATCH_HISTORY": "off"}
        env = os.environ | ours | (environment or {})
        command = [sys.executable, str(ROOT / program), *arguments]
        if spoiled:
            code = f"import sys, tui\nfrom cli import options as cli\n{spoiled}\ncli.run(tui.main)"
            env["PYTHONPATH"] = str(ROOT)
            command = [sys.executable, "-c", code, *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, cwd="/", **how
        )
        self.raw = b""
        self.rows = [[" "] * self.width for _ in range(self.height)]
        self.x = self.y = self._drawn = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.vanish()

    def vanish(self) -> None:
        """Close the terminal, like a window that the user closes."""
        for handle in (self.master, self.slave):
            with suppress(OSError):  # already closed
                os.close(handle)

    def read(self, wait: float) -> None:
        while select.select([self.master], [], [], wait)[0]:
            self.raw += os.read(self.master, 65536)
            wait = 0

    def text(self) -> str:
        self._draw()
        return "\n".join("".join(row).rstrip() for row in self.rows)

    def _draw(self) -> None:
        """Apply cursor moves, skip colours, and write the rest, which is all that Textual needs from a
        terminal."""
        data = self.raw.decode(errors="replace")
        end = max(data.rfind("\x1b", 0, len(data)), 0) if "\x1b" in data[-40:] else len(data)
        i = self._drawn
        while i < end:
            if match := MOVE.match(data, i):
                self.y, self.x = int(match[1] or 1) - 1, int(match[2] or 1) - 1
                i = match.end()
            elif match := OTHER.match(data, i):
                if match[0] == "\x1b[2J":
                    self.rows = [[" "] * self.width for _ in range(self.height)]
                i = match.end()
            else:
                self._put(data[i])
                i += 1
        self._drawn = i

    def _put(self, char: str) -> None:
        if char == "\n":
            self.y += 1
        elif char == "\r":
            self.x = 0
        elif char >= " " and self.y < self.height and self.x < self.width:
            self.rows[self.y][self.x] = char
            for extra in range(1, cell_len(char)):
                if self.x + extra < self.width:
                    self.rows[self.y][self.x + extra] = ""
            self.x += cell_len(char)

    def type(self, keys: str | bytes) -> None:
        os.write(self.master, keys.encode() if isinstance(keys, str) else keys)

    def resize(self, width: int, height: int) -> None:
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
        self.process.send_signal(signal.SIGWINCH)

    def sees(self, *parts: str, without: str = "\0") -> None:
        """Wait until all parts are shown and the text in `without` is gone."""
        deadline = time.monotonic() + 120
        while without in self.text() or not all(part in self.text() for part in parts):
            assert time.monotonic() < deadline, f"{parts} not seen:\n{self.text()}"
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}:\n{self.text()}"
            )
            self.read(0.05)

    def ends(self, code: int, saying: str = "") -> None:
        """Assert that the program exits with this code, restores the terminal, and prints `saying` or totals last."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            self.read(0.02)
        self.read(0.05)
        assert self.process.returncode == code, self.raw[-2000:].decode(errors="replace")
        tail = self.raw.decode(errors="replace")
        entered, left = tail.rfind("\x1b[?1049h"), tail.rfind("\x1b[?1049l")
        assert entered < left, "the alternate screen is still on"
        assert tail.rfind("\x1b[?25l") < tail.rfind("\x1b[?25h"), "the cursor is hidden"
        for mode in (1000, 1003, 1006, 2004):
            assert tail.rfind(f"\x1b[?{mode}h") < tail.rfind(f"\x1b[?{mode}l"), (
                f"mode {mode} is still on"
            )
        assert termios.tcgetattr(self.slave)[:4] == self.before[:4], (
            "the terminal's settings have changed"
        )
        self.said = OTHER.sub("", tail[left:])
        table = r"[ ▶](policy|continuous|static|serial|On the engine's|interruptions,|\d+ requests? not) "
        rest = [line for line in self.said.splitlines() if not re.match(table, line)]
        last = " ".join("".join(rest).split())
        assert saying in last if saying else not last, f"rubbish after the end: {tail[left:]!r}"
