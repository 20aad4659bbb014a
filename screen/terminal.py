"""The terminal, as a screen has to take it.

The problem. Textual reads the terminal in a thread of its own, and writes to it in another. A byte
outside of UTF-8, or a sequence from no known terminal, ended the reading thread and the program; a
paste without an end swallowed Ctrl-C. When a terminal went away, the writing thread ended, and the
program waited for ever.

What this file keeps. No byte ends the screen: other bytes are shown as U+FFFD, and unknown keys are
dropped. Ctrl-C is always heard. When the terminal has gone, the screen is left as after a
hang-up. A mistake of ours in the thread that reads ends the screen with a traceback, and not with
exit code 0.

Where next: `widgets.py`, where the keys arrive.
"""

from __future__ import annotations

import os
import select
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import NoReturn, TextIO

from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

HUNG_UP = 129  # the exit code, as after SIGHUP
# From a terminal when the key is pressed, and nothing else at the same time
CTRL_C = (b"\x03", b"\x1b[99;5u")
# Alt and Enter, as most terminals send it, and as Textual's parser knows it
ALT_ENTER = (b"\x1b\r", b"\x1b[13;3u")


class Output:
    """A terminal may go away: from then on, all writing is dropped."""

    def __init__(self, file: TextIO, gone: Callable[[], None]):
        self._file = file
        self._gone = gone
        self.fileno = file.fileno

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError:
            self._gone()


class Terminal(LinuxDriver):
    """Textual's driver, for terminals with any bytes."""

    def __init__(self, app: App, **options):
        super().__init__(app, **options)
        self._file = Output(self._file, self._hang_up)
        self._parser = XTermParser()

    def run_input_thread(self) -> None:
        decode = getincrementaldecoder("utf-8")("replace").decode
        while not self.exit_event.is_set():
            if select.select([self.fileno], [], [], 0.1)[0]:
                try:
                    data = os.read(self.fileno, 4096)
                except OSError:
                    data = b""
                if not data:
                    self._hang_up()
                    return
                if data in CTRL_C:  # whatever was begun, such as a paste, is over
                    self._parser = XTermParser()
                for letter in decode(data.replace(*ALT_ENTER)):
                    self._feed(letter)
            for event in self._parser.tick():
                self.process_message(event)

    def _feed(self, letter: str) -> None:
        """An unreadable sequence ends the parser: the next one begins anew."""
        try:
            found = [*self._parser.feed(letter)]
        except Exception:
            self._parser = XTermParser()
            return
        for event in found:
            self.process_message(event)

    def _run_input_thread(self) -> None:
        try:
            self.run_input_thread()
        except BaseException as error:
            self._app.call_later(fail, error)

    def _hang_up(self) -> None:
        self._app.call_later(self._app.exit, return_code=HUNG_UP)


def fail(error: BaseException) -> NoReturn:
    """In the thread of the screen, so that the screen ends as after a mistake of its own."""
    raise error
