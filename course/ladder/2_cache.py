"""Rung 2: the cache, and why it pays.

    python course/ladder/2_cache.py

Rung 1 put the whole list of tokens through the model in every step. Almost all of that work had
been done before. A token's path through the model depends on the tokens before it, and never on
those after it. So what was computed for the old tokens is still right when a new token comes.

Where does the new token need the old ones at all? Only in attention. There its *query* is compared
with the *key* of each token before it, and the result weights their *values*. So two vectors of
each old token are enough in each layer: its key and its value. A KV cache keeps them, and does
nothing else:

    step   goes into the model            is in the slab already         tokens computed
       1   What is 17 + 6?                                               11
       2   7                              What is 17 + 6?                 1
       3   +                              What is 17 + 6? 7               1

Step 1 is a prefill (▒), as before. The other steps are of a new kind, *decode* (█): the newest
token goes in, alone, and the next one comes out.

Compared with rung 1, the slab is made only once. Only the tokens from `start` on go in, and they
are written to the rows from `start` on: a row of the slab holds what is kept of one token. After a
step, everything but the newest token is in the slab. The newest token has come out of the model,
but it has not yet gone in.

The program tells the same story twice: first without a cache, then with it. The answers are equal,
token for token. Without the cache, each step computes one token more than the step before. With it,
each step computes one token. On an idle machine, the times show the difference.
"""

import time
from statistics import median
from typing import NamedTuple

from board import Timeline, launch, load, price, show_answers

from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.memory import slab_shape

PROMPT = "Tell me a very short story about an owl."
LONGEST = 256
MODEL, TEXT = load()


class Answer(NamedTuple):
    """The tokens of an answer, and what each of its steps took."""

    tokens: list[int]
    computed: list[int]  # number of tokens that went into the model
    ms: list[float]


def new_slab(length: int) -> Slab:
    """Return a slab with room for this many tokens.

    The length is rounded up to a multiple of 32, because attention reads 32 rows at a time.
    """
    shape = slab_shape(MODEL.config, 1, length, 32)
    return Slab(*shape, MODEL.dtype)


def next_token(ids: list[int], slab: Slab, start: int) -> int:
    """Put the tokens from `start` on in, and return the best next one.

    The tokens before `start` are in the slab already.
    """
    new = ids[start:]  # in all steps but the first, this is one token
    window = Window(slab, slots=[0], starts=[start], L=len(new))
    last = len(new) - 1
    states = forward(MODEL, mx.array(new), [window], logits_at=[last])  # (1, D)
    scores = MODEL.head(states)  # (1, V)
    return mx.argmax(scores).item()


def answer(prompt: str, timeline: Timeline, keeps: bool) -> Answer:
    """Answer a prompt. `keeps`: use the rows in the slab in the next step."""
    ids = TEXT.ask(prompt)
    length = len(ids)
    computed = []
    ms = []
    slab = new_slab(LONGEST)
    start = 0
    while ids[-1] not in TEXT.end_tokens and len(ids) < LONGEST:
        began = time.perf_counter()
        token = next_token(ids, slab, start)
        seconds = time.perf_counter() - began
        ms.append(1000 * seconds)
        computed.append(len(ids) - start)
        kind = "decode" if start else "prefill"
        timeline.step({0: (kind, 1)})
        if keeps:
            start = len(ids)
        ids.append(token)
    return Answer(ids[length:], computed, ms)


def show_costs(plain: Answer, cached: Answer) -> None:
    print("           tokens computed    ms, median of ten steps")
    print(" step   no cache  with cache     no cache  with cache")
    for at in range(0, len(plain.tokens) - 10, 20):
        slow = median(plain.ms[at : at + 10])
        quick = median(cached.ms[at : at + 10])
        many = plain.computed[at]
        few = cached.computed[at]
        print(f"{at + 1:>5}   {many:>8}  {few:>10}   {slow:>10.1f}  {quick:>10.1f}")
    slow = sum(plain.ms)
    quick = sum(cached.ms)
    many = sum(plain.computed)
    few = sum(cached.computed)
    print(f"  all   {many:>8}  {few:>10}   {slow:>10.0f}  {quick:>10.0f}")


def main() -> None:
    before = Timeline(slots=1)
    after = Timeline(slots=1)
    plain = answer(PROMPT, before, keeps=False)
    cached = answer(PROMPT, after, keeps=True)
    assert plain.tokens == cached.tokens, "the cache has changed the answer"

    show_costs(plain, cached)
    count = len(plain.tokens)
    show_answers(TEXT, [PROMPT], [plain.tokens])
    many = price(count, sum(plain.computed), sum(plain.ms) / 1000)
    few = price(count, sum(cached.computed), sum(cached.ms) / 1000)
    before.show(f"One token a step, without a cache: {many}")
    after.show(f"One token a step, with a cache: {few}")
    print("""
Question: the rows of this story stay in the slab. The next request would begin at row 0 and write
over the first few. Why does it do no harm that the others are still there?
The real code answers: llama.py, seen.
Next: python course/ladder/3_static.py""")


if __name__ == "__main__":
    launch(main)
