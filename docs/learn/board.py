"""What the chapters share: the demo model, some prompts, and the picture that each of them draws.

No chapter is about this file. The picture is a timeline, as the screen (`tui.py`) draws it while the engine runs, with
the screen's own words and characters. A line is a slot, one sequence's place. A column is a step, and its character
says what the slot did then. In ▒1██ the digit is the request's number, written over its second step.

    ▒ prefill   a prompt goes in, or a part of it, its tokens side by side
    █ decode    the answer's newest token goes in, the next one comes out
    ▚ ghost     the same for an answer that has ended: what comes out is dropped
    ╳ blocked   nothing, though requests wait: the policy keeps them out
    · empty     nothing, and no request waits for it
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, from which nothing is installed

from parts.model.find import DEMO
from parts.model.layers import Model
from parts.model.load import read_model
from parts.text.tokens import Text
from screen.ink import GLYPHS, NAMES

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
WIDTH = 96  # steps in a line; a longer run goes on below


def load() -> tuple[Model, Text]:
    """The demo model: 2.7 million weights, which tell stories, count, spell and reverse words, and add up to 99."""
    model = read_model(DEMO)
    return model, Text(DEMO, model.config.V)


def launch(main: Callable[[], None]) -> None:
    """A chapter, as a program. If its output goes into `head`, it ends with it, as other programs do."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()


class Timeline:
    def __init__(self, slots: int):
        self.slots, self.steps = slots, []

    def step(self, cells: Mapping[int, tuple[str, int]]) -> None:
        """One step: for each slot that did something, what it was, and for which request (0: for none)."""
        self.steps.append([cells.get(slot, ("empty", 0)) for slot in range(self.slots)])

    @property
    def useful(self) -> float:
        """In how many percent of slots x steps something was computed for a request."""
        cells = [kind for cells in self.steps for kind, _ in cells]
        return 100 * sum(kind in ("prefill", "decode") for kind in cells) / len(cells)

    def show(self, title: str) -> None:
        lines = [[GLYPH[kind] for kind, _ in cells] for cells in zip(*self.steps, strict=True)]
        for line, cells in zip(lines, zip(*self.steps, strict=True), strict=True):
            owners = [request for _, request in cells]
            for at, owner in enumerate(owners):
                digits = str(owner)
                if owner and (at == 0 or owners[at - 1] != owner) and owners[at + 1 :][: len(digits)].count(owner):
                    line[at + 1 : at + 1 + len(digits)] = digits
        print(f"\n{title}")
        for first in range(0, len(self.steps), WIDTH):
            if first:
                print(f"from step {first + 1}")
            for slot, line in enumerate(lines):
                print(f"slot {slot}  {''.join(line[first : first + WIDTH])}")
        drawn = {kind for cells in self.steps for kind, _ in cells}
        print("        " + "  ".join(f"{glyph} {kind}" for kind, glyph in GLYPH.items() if kind in drawn))


def show_answers(text: Text, prompts: Sequence[str], answers: Sequence[Sequence[int]]) -> None:
    """Under each prompt its answer, without the token that ends it."""
    print()
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True), 1):
        print(f"{number:>3}  {prompt}\n     {text.tokenizer.decode(list(tokens))}  [{len(tokens)} tokens]")


def rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s"
