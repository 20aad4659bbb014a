"""Exercise 6: keys and values in 8 bits.

    python -m pytest -x course/exercises/test_6_cache.py

The task. How many sequences fit into memory, and how long they may be, is decided by the slab: a row
of it holds the key and the value of a token, in each layer. They need not be as exact as they are.
As whole numbers of 8 bits, with a scale, they take little more than a quarter:

    key of one head    0.31  -1.20   0.05   2.54        scale 0.02 = 2.54 / 127
    in the slab          16    -60      3    127        and 0.02
    what is read       0.32  -1.20   0.06   2.54

An engine gets an option `cache_bits`; 8 does this, and 32, the default, leaves all as it is. Answers
change a little, since keys and values do. But one thing stays: an answer depends on its own
sequence alone, to the last bit, whoever stands beside it, and however its prompt is cut into chunks.
So which numbers may share a scale?

What is not finite must still be seen: a row that holds NaN or infinity spoils what is computed from
it, and a row that is scrubbed is 0 again.

Read first: `kv.py` as a whole; `attend` in `llama.py`; in `runner.py` `Runner.reset`.

Where: `kv.py`: `Slab` and `Window`. `nanobatch.py`: `Engine`, which hands the option to `Runner` in `runner.py`.

How to know: the command above, and `python -m pytest tests/core/test_runner.py
tests/core/test_prefix_caching.py tests/core/test_failures.py`. They take minutes. The solution in
`course/exercises/solutions` adds about 60 lines. (The screen and the line that an engine begins with still count
a slab of full width: `models/memory.py`.)
"""

import inspect
import random
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from harness import Tap, check
from hints import not_done, not_right

from nanobatch import Engine, SamplingParams

PROMPTS = [
    "Tell me a story about a fox.",
    "What is 17 + 6?",
    "Count from 3 to 20.",
    "Reverse the word stone.",
    "Is fox in this list: cat, dog, owl, bee, cow, hen, pig, fox?",
]
WISH = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3)


def load(bits: int = 8, **options) -> Engine:
    if "cache_bits" not in inspect.signature(Engine.__init__).parameters:
        not_done("nanobatch.py: Engine has no option cache_bits")
    sizes = {"slots": 4, "max_len": 128, "chunk": 96} | options
    return Engine.load("demo", cache_bits=bits, speculate=0, **sizes)


def nbytes(engine: Engine) -> int:
    return sum(array.nbytes for array in engine.runner.slab.arrays)


@cache
def alone(bits: int) -> list[tuple[list[int], list, np.ndarray]]:
    """Each prompt by itself: its tokens, their log probabilities, and all logits."""
    with load(bits, prefix_cache=False) as engine:
        tap = Tap(engine)
        handles = []
        for prompt in PROMPTS:
            handles.append(engine.submit(engine.text.ask(prompt), WISH))
            handles[-1].result()
            check(engine)
        return [(handle.tokens, handle.logprobs, tap.of(handle)) for handle in handles]


def test_the_slab_takes_little_more_than_a_quarter():
    with load(32) as plain, load(8) as small:
        Slab = type(small.runner.slab)
        if small.runner.slab.k[0].itemsize != 1:
            not_done(f"kv.py: {Slab.__name__}.k holds {small.runner.slab.k[0].dtype}")
        share = nbytes(small) / nbytes(plain)
        if not 0.25 < share < 0.3:
            not_right(f"the slab takes {share:.2f} of what it took; do `arrays` name the scales?")


def test_logits_move_a_little():
    """Those of each answer's first token: later ones follow other tokens as soon as one differs."""
    moved = []
    for (_, _, plain), (_, _, small) in zip(alone(32), alone(8), strict=True):
        moved.append(float(np.abs(plain[0] - small[0]).max()))
    if max(moved) == 0:
        not_right("no logit has moved: is anything in 8 bits?")
    if max(moved) > 0.5:
        not_right(f"a logit has moved by {max(moved):.2f}; 0.5 at most is to be had")


def test_an_answer_is_the_same_in_any_company():
    """In all bits: beside others that come and go, and with prompts cut in other places."""
    dice = random.Random(1)
    found: dict[int, object] = {}
    with load(8, slots=3, budget=20, chunk=32) as engine:
        while len(found) < 3 * len(PROMPTS) or engine.has_work:
            if len(found) < 3 * len(PROMPTS) and dice.random() < 0.4:
                number = len(found)
                prompt = PROMPTS[number % len(PROMPTS)]
                found[number] = engine.submit(engine.text.ask(prompt), WISH)
            engine.step()
            check(engine)
    for number, handle in found.items():
        tokens, logprobs, _ = alone(8)[number % len(PROMPTS)]
        if (handle.tokens, handle.logprobs) != (tokens, logprobs):
            not_right(f"beside others {handle.prompt!r} is answered otherwise, if only by a bit")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_and_what_is_scrubbed_is_zero(bad):
    with load(8) as engine:
        slab = engine.runner.slab
        from kv import Window

        ones = np.ones((3, slab.Hkv, slab.Dh), np.float32)
        ones[1, 0, 2] = bad
        window = Window(slab, [1], [4], 3)
        window.write(0, mx.array(ones), mx.array(ones))
        look = window.looks(None, lambda seen: seen)[0]
        k, v = (np.array(each) for each in window.read(0, look))
        if np.isfinite(k[0, 0, 5]).all() or np.isfinite(v[0, 0, 5]).all():
            not_right(f"a row with {bad} is read as {k[0, 0, 5][:4]}, all finite")
        if not np.allclose(k[0, :, 4], 1) or not np.allclose(k[0, :, 6], 1):
            not_right("rows beside a row that is not finite are spoilt")
        slab.scrub(1, 4, 7)
        window = Window(slab, [1], [4], 3)
        k, v = (np.array(each) for each in window.read(0, look))
        if k[0, :, 4:7].any() or v[0, :, 4:7].any():
            not_right("rows that were scrubbed are not 0")
