"""Chapter 2: the cache, and why it pays.

    python docs/learn/2_cache.py

Chapter 1 read the whole list of tokens in every step. Almost all of that was done before. A token's path through the
model depends on the tokens before it, and never on those behind it. So what was computed for the old tokens is still
right when a new one comes.

Where does the new token need the old ones at all? In attention alone. There its *query* is compared with the *key* of
each token before it, and the result weights their *values*. So of each old token two vectors are enough in each
layer, its key and its value. To keep them is all that a KV cache does:

    step   goes into the model            is in the slab already         tokens computed
       1   What is 17 + 6?                                               11
       2   7                              What is 17 + 6?                 1
       3   +                              What is 17 + 6? 7               1

Step 1 is a prefill (▒), as before. The others are now of another kind, *decode* (█): the newest token goes in, alone,
and the next one comes out.

Compared with chapter 1 the slab is made once. Only the tokens from `start` on go in, and they are written to the rows
from `start` on: a row of the slab holds what is kept of one token. After a step, everything but the newest token is in
the slab. The newest one has come out of the model, but it has not yet gone in.

The answer is the same, token for token, and it is told twice here: first without keeping anything, then with the
cache. The tokens computed grow with every step in one column, and do not in the other. On a quiet machine, so do the
milliseconds.
"""

import time
from statistics import median

from board import Timeline, launch, load, rate, show_answers

from kv import Slab, Window
from llama import forward
from parts.device.mlx import mx
from parts.model.fit import slab_shape

PROMPT = "Tell me a very short story about an owl."
MODEL, TEXT = load()


def new_slab(length: int) -> Slab:
    """A place for so many tokens. (Rounded up to a multiple of 32, because attention reads so many at a time.)"""
    return Slab(*slab_shape(MODEL.config, 1, length, 32), MODEL.dtype)


def next_token(ids: list[int], slab: Slab, start: int) -> int:
    """The tokens from `start` on go in, those before are in the slab; the best next one comes out."""
    new = ids[start:]  # in all steps but the first, this is one token
    window = Window(slab, slots=[0], starts=[start], L=len(new))
    scores = forward(MODEL, mx.array(new), [window], asked=[len(new) - 1])  # (1, V)
    return mx.argmax(scores).item()


def answer(prompt: str, keeps: bool, timeline: Timeline) -> tuple[list[int], list[int], list[float]]:
    """The answer's tokens; for each of them, how many tokens were computed, and in how many milliseconds."""
    ids, computed, ms = TEXT.ask(prompt), [], []
    length, slab, start = len(ids), new_slab(256), 0
    while ids[-1] not in TEXT.end_tokens and len(ids) < 256:
        began = time.perf_counter()
        ids.append(next_token(ids, slab, start))
        ms.append(1000 * (time.perf_counter() - began))
        computed.append(len(ids) - 1 - start)
        timeline.step({0: ("decode" if start else "prefill", 1)})
        start = len(ids) - 1 if keeps else 0
    return ids[length:], computed, ms


def main() -> None:
    before, after = Timeline(slots=1), Timeline(slots=1)
    tokens, many, slow = answer(PROMPT, False, before)
    same, few, quick = answer(PROMPT, True, after)
    assert tokens == same, "the cache has changed the answer"

    print("           tokens computed    ms, median of ten steps")
    print(" step   no cache  with cache     no cache  with cache")
    for at in range(0, len(tokens) - 10, 20):
        typical = [median(ms[at : at + 10]) for ms in (slow, quick)]
        print(f"{at + 1:>5}   {many[at]:>8}  {few[at]:>10}   {typical[0]:>10.1f}  {typical[1]:>10.1f}")
    print(f"  all   {sum(many):>8}  {sum(few):>10}   {sum(slow):>10.0f}  {sum(quick):>10.0f}")
    show_answers(TEXT, [PROMPT], [tokens])
    before.show(f"One token a step, without a cache: {rate(len(tokens), sum(slow) / 1000)}")
    after.show(f"One token a step, with a cache: {rate(len(tokens), sum(quick) / 1000)}")
    print("""
Question: the rows of this story stay in the slab. The next request would begin at row 0 and write over the first few.
Why does it do no harm that the others are still there?
The real code answers: kv.py, Window.looks.
Next: python docs/learn/3_static.py""")


if __name__ == "__main__":
    launch(main)
