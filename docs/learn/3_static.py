"""Chapter 3: several at a time, with padding.

    python docs/learn/3_static.py

For each token a machine reads every weight of the model. That reading takes most of the time, and it costs the same for
four sequences as for one: each weight is read once, and multiplied with four vectors instead of one. So we answer
several prompts at a time. That is a batch.

A batch of what shape? The simplest is a rectangle. Two things do not fit into it:

- The prompts have different lengths. So the short ones are padded with zeros at their right end, up to the longest.
  The padding's keys land in rows behind the prompt. No token sees a row that stands behind its own, and the answer's
  tokens write over those rows, one by one.
- The answers have different lengths. So an answer that ends early stays in the batch as a *ghost* (▚): its last token
  goes in again and again, and what comes out is dropped, until the whole batch is done. Requests 5 to 8 wait for that.

    slot 0  ▒1██████████████████████████████████████████████▒5█████████████████████████████████████████
    slot 1  ▒2███████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▒6███████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚
    slot 2  ▒3█████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▒7████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚
    slot 3  ▒4███████████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▒8█████████▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚

This is static batching. Compared with chapter 2 the slab has several slots, one for each sequence, and `next_token` has
become two functions, `prefill` and `decode`. In `prefill` the prompts go in side by side, each through a window of its
own. In `decode` one window holds the newest token of every slot.

Two figures say what the rectangle wastes. Of all slots x steps some percent are *useful*: in the others ghosts ran. And
of all tokens that were computed, some were padding, or a ghost's.
"""

import time

from board import PROMPTS, Timeline, launch, load, rate, show_answers

from kv import Slab, Window
from llama import forward
from parts.device.mlx import mx
from parts.model.fit import slab_shape

MODEL, TEXT = load()


def new_slab(slots: int, length: int) -> Slab:
    return Slab(*slab_shape(MODEL.config, slots, length, 32), MODEL.dtype)


def prefill(slab: Slab, batch: list[list[int]]) -> list[int]:
    """The prompts go in, padded to a rectangle; the first token of each answer comes out."""
    longest = max(map(len, batch))
    padded, windows, asked = [], [], []
    for slot, ids in enumerate(batch):
        asked.append(len(padded) + len(ids) - 1)  # the prompt's last token, before the padding
        padded += ids + [0] * (longest - len(ids))
        windows.append(Window(slab, slots=[slot], starts=[0], L=longest))
    return best(forward(MODEL, mx.array(padded), windows, asked))


def decode(slab: Slab, batch: list[list[int]]) -> list[int]:
    """The newest token of each sequence goes in; the next one of each comes out."""
    slots = list(range(len(batch)))
    window = Window(slab, slots=slots, starts=[len(ids) - 1 for ids in batch], L=1)
    newest = mx.array([ids[-1] for ids in batch])  # (B,)
    return best(forward(MODEL, newest, [window], asked=slots))


def best(scores: mx.array) -> list[int]:  # (B, V) -> B tokens
    return mx.argmax(scores, axis=-1).tolist()


def answer(prompts: list[str], numbers: range, timeline: Timeline) -> tuple[list[list[int]], int]:
    """One batch, from its prompts to the end of its longest answer; and how many tokens were computed for it."""
    batch = [TEXT.ask(prompt) for prompt in prompts]
    slab, lengths = new_slab(len(batch), 128), [len(ids) for ids in batch]
    tokens, kind, computed = prefill(slab, batch), "prefill", len(batch) * max(lengths)
    done = [False] * len(batch)
    while True:
        timeline.step({slot: ("ghost" if done[slot] else kind, number) for slot, number in enumerate(numbers)})
        for slot, token in enumerate(tokens):
            if not done[slot]:
                batch[slot].append(token)
                done[slot] = token in TEXT.end_tokens or len(batch[slot]) == 128
        if all(done):
            return [ids[length:] for ids, length in zip(batch, lengths, strict=True)], computed
        tokens, kind, computed = decode(slab, batch), "decode", computed + len(batch)


def main() -> None:
    for slots in (1, 4):
        answers, computed, timeline, began = [], 0, Timeline(slots), time.perf_counter()
        for first in range(0, len(PROMPTS), slots):
            batch = PROMPTS[first : first + slots]
            more, cost = answer(batch, range(first + 1, first + 1 + len(batch)), timeline)
            answers, computed = answers + more, computed + cost
        took = rate(sum(map(len, answers)), time.perf_counter() - began)
        timeline.show(f"{slots} at a time, {len(timeline.steps)} steps: {took}, {timeline.useful:.0f} % useful")
        needed = sum(map(len, map(TEXT.ask, PROMPTS))) + sum(len(tokens) - 1 for tokens in answers)
        print(f"        {computed} tokens computed, {computed - needed} of them padding or a ghost's")
    show_answers(TEXT, PROMPTS, answers)
    print("""
Question: most slots are ghosts for most of a batch, while requests wait. What has a forward pass to know of each slot,
so that the next request can have it at once, in the midst of its neighbours' answers?
The real code answers: kv.py, Window.
Next: python docs/learn/4_continuous.py""")


if __name__ == "__main__":
    launch(main)
