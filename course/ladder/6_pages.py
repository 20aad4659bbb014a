"""Rung 6: pages and block tables, by hand.

    python course/ladder/6_pages.py

A slot is as long as the longest sequence may be. In a slab of 384 rows there is room for three slots
of 128, and most of their rows stay empty: the answers below take 20 to 60. So other engines cut the
memory into *pages* of a few rows (PagedAttention). A sequence takes a page when its next row needs
one. Its *block table* lists its pages, in order; they need not be neighbours:

    request 1    pages 0 and 9        row 40 is in page 9 (40 = 1 * 32 + 8), at place 8
    request 2    page 1

slot 0  ▒1██████████████████████████████████████████████
slot 1  ▒2███████████████·······························
slot 2  ▒3█████████████·································
slot 3  ▒4███████████████·······························
slot 4  ▒5█████████████████████████████████████████·····
slot 5  ▒6███████████████·······························
slot 6  ▒7████████······································
slot 7  ▒8█████████·····································

Compared with rung 4, a request needs no slot, only free pages: all eight run at once, where there
was room for three. (A slot in the picture is only a place in the batch.) The price: attention needs
the rows of a sequence in one piece. So `read` copies them out of their pages, in every layer, in
every step. A slot is read in place.

The forward pass is the real one. It asks a window to write and to read, and does not care where the
rows are.
"""

import time
from dataclasses import dataclass, field, replace

from board import PROMPTS, Timeline, launch, load, rate, show_answers

from kernels.device import mx
from kv import AttentionGroup, Slab
from llama import forward
from models.memory import slab_shape

PAGE = 32  # rows
PAGES = 12
MODEL, TEXT = load()
MODEL = replace(MODEL, attention="formula")  # it reads whatever a window returns


@dataclass
class Sequence:
    number: int  # the request's number
    prompt: list[int]
    answer: list[int] = field(default_factory=list)  # tokens so far
    table: list[int] = field(default_factory=list)  # its pages, in order

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


class PagedWindow:
    """The new rows of one sequence: L of them, from `start` on."""

    B = 1

    def __init__(self, slab: Slab, table: list[int], start: int, L: int):
        self.slab = slab
        self.table = table
        self.start = start
        self.L = L
        self.positions = mx.arange(start, start + L)
        positions = self.positions.reshape(1, 1, L, 1)
        self.groups = [AttentionGroup(slice(0, 1), start + L, positions)]

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        new = self.slab.narrowed(mx.concatenate([k, v], axis=1))  # (L, 2 Hkv, Dh)
        for i in range(self.L):
            entry, place = divmod(self.start + i, PAGE)
            self.slab.arrays[layer][self.table[entry], :, place] = new[i]

    def read(self, layer: int, group: AttentionGroup) -> list[mx.array]:
        """Gather the rows: copy all pages, one after the other."""
        pages = [self.slab.arrays[layer][page, :, :PAGE] for page in self.table]
        rows = mx.concatenate(pages, axis=1)[None, :, : group.T]  # (1, 2 Hkv, T, Dh)
        return mx.split(rows, 2, axis=1)


def step(slab: Slab, running: list[Sequence], free: list[int]) -> list[int]:
    """Run one forward pass. Each prompt or newest token goes into the pages of its own sequence."""
    ids = []
    windows = []
    logits_at = []
    for sequence in running:
        new = sequence.answer[-1:] or sequence.prompt
        while len(sequence.table) * PAGE < sequence.length:
            sequence.table.append(free.pop(0))  # raises IndexError if none is free
        start = sequence.length - len(new)
        windows.append(PagedWindow(slab, sequence.table, start, len(new)))
        ids += new
        logits_at.append(len(ids) - 1)
    states = forward(MODEL, mx.array(ids), windows, logits_at)  # (n, D)
    return mx.argmax(MODEL.head(states), axis=-1).tolist()


def commit(sequence: Sequence, token: int, free: list[int]) -> bool:
    """Append the token. If it ends the answer, free the pages. Return whether the answer goes on."""
    sequence.answer.append(token)
    if token not in TEXT.end_tokens:
        return True
    print(f"request {sequence.number}: {sequence.length} tokens in pages {sequence.table}")
    free += sequence.table
    return False


def main() -> None:
    shape = slab_shape(MODEL.config, PAGES, PAGE, PAGE)
    slab = Slab(*shape, MODEL.dtype)  # its slots are our pages
    sequences = [Sequence(number, TEXT.ask(prompt)) for number, prompt in enumerate(PROMPTS, 1)]
    running = list(sequences)
    free = list(range(PAGES))
    timeline = Timeline(slots=len(sequences))
    copied = 0
    began = time.perf_counter()
    while running:
        cells = {}
        for sequence in running:
            kind = "decode" if sequence.answer else "prefill"
            cells[sequence.number - 1] = (kind, sequence.number)
        timeline.step(cells)
        tokens = step(slab, running, free)
        # `read` copies whole pages
        copied = max(copied, PAGE * sum(len(sequence.table) for sequence in running))
        pairs = zip(running, tokens, strict=True)
        running = [sequence for sequence, token in pairs if commit(sequence, token, free)]
    seconds = time.perf_counter() - began
    answers = [sequence.answer for sequence in sequences]
    written = sum(len(answer) for answer in answers)
    took = rate(written, len(timeline.steps), seconds)
    timeline.show(f"{PAGES} pages of {PAGE} rows: {took}")
    print(f"        a step copies up to {copied} rows in each layer")
    show_answers(TEXT, PROMPTS, answers)
    print("""
Question: all pages are taken, and eight answers still grow. Which of them should have to wait, what
becomes of its pages, and what does its reader see?
The real code answers: course/from_zero/reference/pages.py, Pool.grow.
Next: the engine keeps slots, and docs/slots.md says why. Now read llama.py and the other core files; or
write them yourself, pages too: python course/from_zero/start.py mine""")


if __name__ == "__main__":
    launch(main)
