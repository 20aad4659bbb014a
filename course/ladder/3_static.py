"""Rung 3: several at a time, with padding.

    python course/ladder/3_static.py

For each token, a machine reads every weight of the model. That takes most of the time, and it costs
the same for four sequences as for one: each weight is read once, and multiplied by four vectors
instead of one. So we answer several prompts at a time. That is a batch.

A batch of what shape? The simplest is a rectangle. Two things do not fit into it:

- The prompts have different lengths. So the short ones are padded with zeros at their right end, to
  the length of the longest. The padding's keys are written to rows after the prompt. No token sees
  a row that comes after its own, and the answer's tokens overwrite those rows, one by one.
- The answers have different lengths. So an answer that ends early stays in the batch as a *ghost*
  (▚) until the whole batch is done: its last token goes in again and again, and what comes out is
  dropped. Meanwhile, requests 5 to 8 wait. (Others call this padding, too: `generate` in Hugging
  Face's transformers gives a finished sequence pad tokens until the longest one has finished.)

slot 0  ▒1██████████████████████████████████████████████▒5█████████████████████████████████████████
slot 1  ▒2███████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▒6███████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚
slot 2  ▒3█████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▒7████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚
slot 3  ▒4███████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▒8█████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚

This is static batching. Compared with rung 2, the slab has several slots, one for each sequence,
and a sequence is a record that keeps prompt and answer apart. `next_token` has become two
functions, `prefill` and `decode`. In `prefill` the prompts go in side by side, each through a
window of its own. In `decode` one window holds the newest token of every slot.

Two figures show what the rectangle wastes: the percentage of slots x steps that is *useful*,
because ghosts run in the others, and the number of computed tokens that are padding or a ghost's.
"""

import time
from dataclasses import dataclass, field

from board import PROMPTS, Timeline, launch, load, rate, show_answers

from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.memory import slab_shape

LONGEST = 128
MODEL, TEXT = load()


@dataclass
class Sequence:
    number: int  # the request's number
    prompt: list[int]
    answer: list[int] = field(default_factory=list)  # tokens so far
    has_ended: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


def new_slab(slots: int) -> Slab:
    shape = slab_shape(MODEL.config, slots, LONGEST, 32)
    return Slab(*shape, MODEL.dtype)


def prefill(slab: Slab, batch: list[Sequence]) -> list[int]:
    """Put the prompts in, padded to a rectangle. Return the first token of each answer."""
    longest = max(sequence.length for sequence in batch)
    ids = []
    windows = []
    logits_at = []
    for slot, sequence in enumerate(batch):
        ids += sequence.prompt
        logits_at.append(len(ids) - 1)  # the prompt's last token, before the padding
        ids += [0] * (longest - sequence.length)
        window = Window(slab, slots=[slot], starts=[0], L=longest)
        windows.append(window)
    states = forward(MODEL, mx.array(ids), windows, logits_at)  # (B, D)
    scores = MODEL.head(states)  # (B, V)
    return mx.argmax(scores, axis=-1).tolist()


def decode(slab: Slab, batch: list[Sequence]) -> list[int]:
    """Put the newest token of each sequence in. Return the next one of each."""
    slots = list(range(len(batch)))
    newest = [sequence.answer[-1] for sequence in batch]
    rows = [sequence.length - 1 for sequence in batch]  # tokens before the newest are in the slab
    window = Window(slab, slots=slots, starts=rows, L=1)
    states = forward(MODEL, mx.array(newest), [window], logits_at=slots)  # (B, D)
    scores = MODEL.head(states)  # (B, V)
    return mx.argmax(scores, axis=-1).tolist()


def commit(batch: list[Sequence], tokens: list[int]) -> None:
    """Give each sequence its token. The token of a ghost is dropped."""
    for sequence, token in zip(batch, tokens, strict=True):
        if sequence.has_ended:
            continue
        sequence.answer.append(token)
        sequence.has_ended = token in TEXT.end_tokens or sequence.length == LONGEST


def draw(timeline: Timeline, batch: list[Sequence], kind: str) -> None:
    """Draw a column of the picture: what each slot does in this step."""
    cells = {}
    for slot, sequence in enumerate(batch):
        shown = "ghost" if sequence.has_ended else kind
        cells[slot] = (shown, sequence.number)
    timeline.step(cells)


def serve(batch: list[Sequence], timeline: Timeline) -> int:
    """Run a batch until its longest answer has ended. Return the number of tokens computed."""
    slab = new_slab(len(batch))
    longest = max(sequence.length for sequence in batch)
    draw(timeline, batch, "prefill")
    tokens = prefill(slab, batch)
    commit(batch, tokens)
    computed = longest * len(batch)
    while not all(sequence.has_ended for sequence in batch):
        draw(timeline, batch, "decode")
        tokens = decode(slab, batch)
        commit(batch, tokens)
        computed += len(batch)
    return computed


def main() -> None:
    for slots in (1, 4):
        sequences = []
        for number, prompt in enumerate(PROMPTS, 1):
            sequences.append(Sequence(number, TEXT.ask(prompt)))
        timeline = Timeline(slots)
        computed = 0
        began = time.perf_counter()
        for first in range(0, len(sequences), slots):
            batch = sequences[first : first + slots]
            computed += serve(batch, timeline)
        seconds = time.perf_counter() - began
        answers = [sequence.answer for sequence in sequences]
        written = sum(len(answer) for answer in answers)
        took = rate(written, len(timeline.steps), seconds)
        timeline.show(f"{slots} at a time, {took}, {timeline.useful:.0f} % useful")
        needed = sum(sequence.length - 1 for sequence in sequences)  # the last token never goes in
        wasted = computed - needed
        print(f"        {computed} tokens computed, {wasted} of them padding or a ghost's")
    show_answers(TEXT, PROMPTS, answers)
    print("""
Question: most slots are ghosts for most of a batch, while requests wait. What has a forward pass to
know of each slot, so that the next request can have it at once, in the midst of its neighbours'
answers?
The real code answers: kv.py, Window.
Next: python course/ladder/4_continuous.py""")


if __name__ == "__main__":
    launch(main)
