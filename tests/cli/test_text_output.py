"""Text wrapped and shown in a terminal (`cli/text_output.py`)."""

import io
import random
import re
from collections.abc import Iterable

from rich.cells import cell_len

from base.status_line import StatusLine
from cli.text_output import WordWrap, wait_for_text
from engine.prefill_progress import PrefillProgress


def wrapped(pieces: Iterable[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join(map(wrap.push, pieces)) + wrap.flush()


def test_words_are_not_broken_at_the_edge():

    text = "The capital of France is Paris, which lies on the Seine."
    assert wrapped([text], 20).split("\n") == [
        "The capital of",
        "France is Paris,",
        "which lies on the",
        "Seine.",
    ]


def test_line_breaks_and_indentation_stay():
    text = "def f():\n    return 1\n\n  - a\n"
    assert wrapped([text], 40) == text


def test_escapes_take_no_room():
    text = "\x1b[2mone two\x1b[22m three"
    assert wrapped([text], 13) == text
    assert wrapped([text], 12) == "\x1b[2mone two\x1b[22m\nthree"


def test_wide_characters_may_be_broken_anywhere():
    assert wrapped(["日本語日本語"], 4) == "日本\n語日\n本語"


def test_random_cuts_lose_nothing():
    """Wrapping changes only whitespace, and a line may be too wide only if it is a single long word."""
    dice = random.Random(1)
    letters = ["a", "bc", "défg", "日", " ", "  ", "\n", "\t", "longerword", "\x1b[2m", "👍"]
    for seed in range(300):
        pieces = dice.choices(letters, k=60)
        text = "".join(pieces)
        width = dice.randrange(12, 40)
        whole = wrapped([text], width)
        assert whole == wrapped(pieces, width)
        assert re.sub(r"\s", "", whole) == re.sub(r"\s", "", text)
        for line in whole.split("\n"):
            bare = re.sub(r"\x1b\[2m", "", line).rstrip()
            widest = max(map(cell_len, bare.split()), default=0)
            assert cell_len(bare) <= width or widest > width, (seed, line)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Waiting:
    """A handle whose prompt is prefilled after three polls."""

    looks = 0

    def wait_for_text(self, timeout: float) -> bool:
        self.looks += 1
        return self.looks > 3

    @property
    def prefill(self) -> PrefillProgress:
        return PrefillProgress(100 * self.looks, 400, 0, 5.0 * self.looks, 20.0, 5.0)


def test_progress_line_of_a_long_prompt():
    terminal = Terminal()
    wait_for_text(Waiting(), StatusLine(terminal).show)
    *lines, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert lines[0] == "    reading: 100 of 400 tokens, 20 tokens/s, about 5 s"
    assert len(lines) == 3 and last == "", "the line is cleared before the answer begins"


def test_a_pipe_gets_no_status_line():
    pipe = io.StringIO()
    wait_for_text(Waiting(), StatusLine(pipe).show)
    assert pipe.getvalue() == ""
