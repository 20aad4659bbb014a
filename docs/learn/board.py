"""What the chapters share: the demo model, and the picture that each of them draws. No chapter is about this file.

The picture is a timeline. Each line is a slot (one sequence's place), each column is a step, and a character says what
the slot did in that step. The number behind a first character is the number of the request. The screen (`tui.py`)
draws the same picture while the engine runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, from which nothing is installed

from parts.checkpoint import DEMO
from parts.load import Model
from parts.text import Text

PREFILL, DECODE, FREE, SHUT, GHOST = "▒█┈╳·"
WIDTH = 96  # steps in a line; a longer run goes on below


def load() -> tuple[Model, Text]:
    """The demo model: 2.7 million weights, which tell stories, count, spell and reverse words, and add up to 99."""
    model = Model.load(DEMO)
    return model, Text(DEMO, model.config.V)


class Timeline:
    def __init__(self, slots: int):
        self.slots, self.steps = slots, []

    def step(self, cells: Mapping[int, tuple[str, int]]) -> None:
        """One step: for each slot that did something, what it was, and for which request."""
        self.steps.append([cells.get(slot, (FREE, 0)) for slot in range(self.slots)])

    @property
    def useful(self) -> float:
        """In how many percent of slots x steps something was computed for a request."""
        cells = [glyph for cells in self.steps for glyph, _ in cells]
        return 100 * sum(glyph in (PREFILL, DECODE) for glyph in cells) / len(cells)

    def show(self, title: str) -> None:
        lines = [[glyph for glyph, _ in cells] for cells in zip(*self.steps, strict=True)]
        for line, cells in zip(lines, zip(*self.steps, strict=True), strict=True):
            owners = [request for _, request in cells]
            for at, owner in enumerate(owners):
                digits = str(owner)
                if owner and (at == 0 or owners[at - 1] != owner) and owners[at + 1 :][: len(digits)].count(owner):
                    line[at + 1 : at + 1 + len(digits)] = digits
        print(f"\n{title}")
        for first in range(0, len(self.steps), WIDTH):
            for slot, line in enumerate(lines):
                print(f"slot {slot}  {''.join(line[first : first + WIDTH])}")
        legend = {PREFILL: "prefill", DECODE: "decode", FREE: "free", SHUT: "shut", GHOST: "ghost"}
        drawn = {glyph for cells in self.steps for glyph, _ in cells}
        print("        " + "  ".join(f"{glyph} {name}" for glyph, name in legend.items() if glyph in drawn))


def show_answers(text: Text, prompts: Sequence[str], answers: Sequence[Sequence[int]]) -> None:
    """Under each prompt its answer, without the token that ends it."""
    print()
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True), 1):
        print(f"{number:>3}  {prompt}\n     {text.tokenizer.decode(list(tokens))}  [{len(tokens)} tokens]")


def rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s"
