"""Code that the rungs share: the demo model, some prompts, and the picture that each rung draws.

You need not read this file to understand the rungs. The picture is a timeline, with the words and
characters of the screen (`tui.py`). A line is a slot, the place of one sequence. A column is a
step, and each character says what a slot did in that step. In ▒1██ the digit is the request's
number, written over the request's second step.

    ▒ prefill   a prompt goes in, or a part of one, all tokens side by side
    █ decode    the answer's newest token goes in, the next one comes out
    ▚ ghost     the same for an answer that has ended: what comes out is dropped
    ╳ blocked   nothing, though requests wait: the policy keeps them out
    · free      nothing, and no request waits for it
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Import from this checkout, which need not be installed:
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.layers import Model
from models.load import read_model
from models.model_finder import DEMO
from screen.draw.style import GLYPHS, NAMES
from text.tokenizer import Tokenizer

Cell = tuple[str, int]  # what a slot did in a step, and for which request (0: for none)
PROMPTS = [
    "Count from 3 to 20.",
    "What is 17 + 6?",
    "Spell lantern.",
    "Is fox in this list: owl, fox, bee?",
    "What is a slot?",
    "Reverse the word stone.",
    "Name the months from March to June.",
    "Count from 5 to 9.",
]
GLYPH = dict(zip(NAMES, GLYPHS, strict=True))
WIDTH = 96  # steps in a line; a longer run continues below


def load() -> tuple[Model, Tokenizer]:
    """Load the demo model, which has 2.7 million weights."""
    model = read_model(DEMO)
    text = Tokenizer(DEMO, model.config.V)
    return model, text


def launch(main: Callable[[], None]) -> None:
    """Run a rung. If its output is piped into `head`, it stops with `head`, without an error."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()


class Timeline:
    def __init__(self, slots: int):
        self.slots = slots
        self.steps: list[list[Cell]] = []  # in each step, a cell for each slot

    def step(self, cells: Mapping[int, Cell]) -> None:
        """Add a step. Slots that are not named were free."""
        column = [cells.get(slot, ("free", 0)) for slot in range(self.slots)]
        self.steps.append(column)

    @property
    def useful(self) -> float:
        """The percentage of slots x steps in which something was computed for a request."""
        kinds = [kind for column in self.steps for kind, _ in column]
        useful = kinds.count("prefill") + kinds.count("decode")
        return 100 * useful / len(kinds)

    def show(self, title: str) -> None:
        print(f"\n{title}")
        lines = [self.picture(slot) for slot in range(self.slots)]
        for first in range(0, len(self.steps), WIDTH):
            if first:
                print(f"from step {first + 1}")
            for slot, line in enumerate(lines):
                print(f"slot {slot}  {line[first : first + WIDTH]}")
        drawn = {kind for column in self.steps for kind, _ in column}
        legend = [f"{glyph} {kind}" for kind, glyph in GLYPH.items() if kind in drawn]
        print("        " + "  ".join(legend))

    def picture(self, slot: int) -> str:
        """Draw all steps of a slot. A request's number follows its first step, if it fits."""
        cells = [column[slot] for column in self.steps]
        owners = [owner for _, owner in cells]
        glyphs = [GLYPH[kind] for kind, _ in cells]
        before = 0
        for at, owner in enumerate(owners):
            if owner and owner != before:
                digits = str(owner)
                behind = slice(at + 1, at + 1 + len(digits))
                if owners[behind] == [owner] * len(digits):
                    glyphs[behind] = digits
            before = owner
        return "".join(glyphs)


def show_answers(text: Tokenizer, prompts: Sequence[str], answers: Sequence[Sequence[int]]) -> None:
    """Print each prompt and its answer, without the token that ends it."""
    print()
    for number, prompt in enumerate(prompts, 1):
        tokens = list(answers[number - 1])
        answer = text.tokenizer.decode(tokens)
        print(f"{number:>3}  {prompt}")
        print(f"     {answer}  [{len(tokens)} tokens]")


def rate(tokens: int, steps: int, seconds: float) -> str:
    """Format a rate, with the steps first: unlike seconds, they are the same on every machine."""
    return f"{steps} steps for {tokens} tokens, {tokens / steps:.1f} a step ({seconds:.2f} s)"


def price(tokens: int, computed: int, seconds: float) -> str:
    return f"{computed} tokens computed for {tokens} ({seconds:.2f} s)"
