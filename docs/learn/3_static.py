"""Chapter 3: several at a time, with padding.

    python docs/learn/3_static.py

For each token a machine reads every weight of the model. That reading takes most of the time, and it costs the same for
four sequences as for one: each weight is read once, and multiplied with four rows instead of one. So we answer several
prompts at a time. That is a batch.

A batch of what shape? The simplest is a rectangle. Two things do not fit into it:

- The prompts have different lengths. So the short ones are padded with zeros at their right end, up to the longest.
  The padding's keys land in rows behind the prompt. No token sees a row that stands behind its own, and the answer's
  tokens write over those rows, one by one.
- The answers have different lengths. So an answer that ends early stays in the batch: its last token goes in again and
  again, and what comes out is dropped. Its slot is *shut* (╳) until the whole batch is done.

    slot 0  ▒1███████████████████        four requests came together;
    slot 1  ▒2██████╳╳╳╳╳╳╳╳╳╳╳╳╳        the next four wait for the longest of them
    slot 2  ▒3███████████████╳╳╳╳
    slot 3  ▒4█████████╳╳╳╳╳╳╳╳╳╳

This is static batching. Compared with chapter 2 the slab has several slots, one for each sequence, and `next_token` has
become two functions. In `prefill` the prompts go in side by side, each through a window of its own. In `decode` one
window holds the newest token of every slot.
"""

import time

from board import DECODE, PREFILL, SHUT, Timeline, load, rate, show_answers

from kv import Slab, Window
from nanobatch import forward
from parts.device import mx
from parts.load import slab_shape

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
MODEL, TEXT = load()


def new_slab(slots: int, length: int) -> Slab:
    return Slab(*slab_shape(MODEL.config, slots, length, 32), MODEL.dtype)


def prefill(slab: Slab, batch: list[list[int]]) -> list[int]:
    """The prompts go in, padded to a rectangle; the first token of each answer comes out."""
    longest = max(map(len, batch))
    padded = [mx.array([ids + [0] * (longest - len(ids))]) for ids in batch]  # (1, longest) each
    windows = [Window(slab, [slot], [0], longest, [len(ids)]) for slot, ids in enumerate(batch)]
    states = forward(MODEL, padded, windows)  # (longest, D) each
    return best(mx.stack([state[len(ids) - 1] for state, ids in zip(states, batch, strict=True)]))  # before the padding


def decode(slab: Slab, batch: list[list[int]]) -> list[int]:
    """The newest token of each sequence goes in; the next one of each comes out."""
    lengths = [len(ids) for ids in batch]
    window = Window(slab, list(range(len(batch))), [length - 1 for length in lengths], 1, lengths)
    (states,) = forward(MODEL, [mx.array([ids[-1] for ids in batch])], [window])  # (B, D)
    return best(states)


def best(states: mx.array) -> list[int]:  # (B, D) -> B tokens
    return mx.argmax(MODEL.head(states), axis=-1).tolist()


def answer(prompts: list[str], numbers: range, timeline: Timeline) -> list[list[int]]:
    """One batch, from its prompts to the end of its longest answer."""
    batch = [TEXT.ask(prompt) for prompt in prompts]
    slab, lengths = new_slab(len(batch), 128), [len(ids) for ids in batch]
    tokens, glyph = prefill(slab, batch), PREFILL
    done = [False] * len(batch)
    while True:
        timeline.step({slot: (SHUT if done[slot] else glyph, number) for slot, number in enumerate(numbers)})
        for slot, token in enumerate(tokens):
            if not done[slot]:
                batch[slot].append(token)
                done[slot] = token in TEXT.end_tokens or len(batch[slot]) == 128
        if all(done):
            return [ids[length:] for ids, length in zip(batch, lengths, strict=True)]
        tokens, glyph = decode(slab, batch), DECODE


def main() -> None:
    for slots in (1, 4):
        answers, timeline, began = [], Timeline(slots), time.perf_counter()
        for first in range(0, len(PROMPTS), slots):
            batch = PROMPTS[first : first + slots]
            answers += answer(batch, range(first + 1, first + 1 + len(batch)), timeline)
        took = rate(sum(map(len, answers)), time.perf_counter() - began)
        timeline.show(f"{slots} at a time, {len(timeline.steps)} steps: {took}, {timeline.useful:.0f} % useful")
    show_answers(TEXT, PROMPTS, answers)
    print("""
Question: slots 1 to 3 stand shut for most of a batch, while requests wait. What must a slot be able to do, so that the
next request can have it at once, in the midst of its neighbours' answers?
The real code answers: sched.py, Scheduler._room. There the three policies stand, a line for each.
Next: python docs/learn/4_continuous.py""")


if __name__ == "__main__":
    main()
