"""What the stages must keep: the checks that `check.py` runs, each stage in a process of its own.

A check is a function without arguments. It raises `Wrong` with what came out, and what should have;
and it may `tell` something that is worth seeing when all is right. What comes out of a function is
compared with what comes out of ours (`our`), with a drawing, or with what is known of the demo model.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from story import Story, name, timeline

import kv
import llama
import sampling
import sched
from nanobatch import (
    Decoding,
    Engine,
    Flight,
    Handle,
    Order,
    Pick,
    Picks,
    Prefill,
    Runner,
    Sampling,
)
from parts.api.faults import LOG
from parts.book import our_file
from parts.device.mlx import device_lock, mx
from parts.model import ops, rope
from parts.model.find import DEMO
from parts.model.fit import Sizes, slab_shape
from parts.model.load import read_model
from parts.replay import Stuck
from parts.text.tokens import Text
from policies import POLICIES

ANSWERS = {
    "What is 17 + 6?": "7 + 6 = 13, so 17 + 6 = 23.",
    "Spell lantern.": "l-a-n-t-e-r-n.",
    "Reverse the word stone.": "s-t-o-n-e becomes enots.",
    "Count from 5 to 9.": "5, 6, 7, 8, 9.",
    "Is fox in this list: owl, fox, bee?": "owl, fox: yes, fox is in the list.",
    "Name the months from March to June.": "March, April, May, June.",
}
SUM = "What is 17 + 6?"
STEPS = 300  # a story that has not ended by then will not end


class Wrong(AssertionError):
    """What came out, and what should have."""


class Check(NamedTuple):
    says: str
    function: Callable[[], None]
    about: str  # the functions that a hint should be about; empty: all of the stage


CHECKS: dict[int, list[Check]] = {}
told: list[str] = []  # by the checks of this process


def check(stage: int, says: str, about: str = "") -> Callable:
    def note(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS.setdefault(stage, []).append(Check(says, function, about))
        return function

    return note


def tell(line: str) -> None:
    told.append(line)


# --- comparing ----------------------------------------------------------------------------------


def compare(what: str, found: object, wanted: mx.array, tolerance: float = 1e-4) -> None:
    """Are these numbers the same, but for rounding?"""
    if not isinstance(found, mx.array):
        raise Wrong(f"{what} is {found!r}, and should be an mx.array")
    if found.shape != wanted.shape:
        raise Wrong(f"{what}: the shape is {found.shape}, and should be {wanted.shape}")
    found = found.astype(mx.float32)
    wanted = wanted.astype(mx.float32)
    largest = mx.where(mx.isfinite(wanted), mx.abs(wanted), 0).max().item()
    is_close = mx.abs(found - wanted) <= tolerance * max(1.0, largest)
    is_close = is_close | (found == wanted)  # infinities, too
    if not mx.all(is_close).item():
        place = mx.argmin(is_close).item()  # the first that is not
        came = found.flatten()[place].item()
        right = wanted.flatten()[place].item()
        at: list[int] = []
        for size in reversed(found.shape):
            at.insert(0, place % size)
            place //= size
        raise Wrong(f"{what}: {came:.6g} came out at {at}, and should be {right:.6g}")


def as_ours(theirs: Callable, ours: Callable, *given, returns: str = "") -> None:
    """Does a function return what ours does? `returns`: names of several results."""
    what = theirs.__name__
    found = theirs(*given)
    wanted = ours(*given)
    if not returns:
        compare(what, found, wanted)
        return
    names = returns.split(", ")
    if not isinstance(found, (tuple, list)) or len(found) != len(names):
        raise Wrong(f"{what} returned a {type(found).__name__}, and should return {returns}")
    for each, came, right in zip(names, found, wanted, strict=True):
        compare(f"{what}: {each}", came, right)


def is_same(found: object, wanted: mx.array) -> bool:
    try:
        compare("", found, wanted)
    except Wrong:
        return False
    return True


def beside(came: Sequence[str], wanted: Sequence[str], what: str) -> None:
    """Two pictures side by side, and a mark where they begin to differ."""
    if list(came) == list(wanted):
        return
    width = max(20, *(len(line) for line in (*came, *wanted)))
    lines = [f"{what}:", f"  {'came out':<{width}}   should come out"]
    is_first = True
    for left, right in itertools.zip_longest(came, wanted, fillvalue=""):
        mark = ""
        if left != right and is_first:
            mark = "   <- here"
            is_first = False
        lines.append(f"  {left:<{width}}   {right:<{width}}{mark}".rstrip())
    raise Wrong("\n".join(lines))


LONG = 40  # entries of a list that are shown whole


def equal(what: str, found: object, wanted: object) -> None:
    if found == wanted:
        return
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted) > LONG:
        place = next(
            i for i, pair in enumerate(zip(found, wanted, strict=True)) if len({*pair}) > 1
        )
        what = f"from place {place} on, {what}"
        found = [*found[place : place + 8], "..."]
        wanted = [*wanted[place : place + 8], "..."]
    raise Wrong(f"{what} is {found!r}, and should be {wanted!r}")


# --- the demo model, and our chapters -----------------------------------------------------------


def our(chapter: str) -> ModuleType:
    """A chapter of ours, beside the reader's."""
    name = f"our_{chapter}"
    spec = spec_from_file_location(name, our_file(chapter))
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


our_kv = our("kv")
our_llama = our("llama")
our_ops = our("parts.model.ops")
our_rope = our("parts.model.rope")
our_sampling = our("sampling")


@cache
def demo() -> tuple:
    return read_model(DEMO), Text(DEMO, 1536)


def ids_of(prompt: str = SUM) -> tuple[int, ...]:
    return tuple(demo()[1].ask(prompt))


def new_slab(slots: int = 1, length: int = 128) -> kv.Slab:
    model, _ = demo()
    return kv.Slab(*slab_shape(model.config, slots, length, 32), model.dtype)


def logits(
    ids: Sequence[int], slab: kv.Slab, start: int = 0, asked=None, kv=kv, llama=llama
) -> mx.array:
    """By the book: these tokens go into slot 0, from row `start` on."""
    model, _ = demo()
    window = kv.Window(slab, [0], [start], len(ids))
    asked = range(len(ids)) if asked is None else asked
    return model.head(llama.forward(model, mx.array(list(ids)), [window], asked))


def our_logits(ids: Sequence[int]) -> mx.array:  # (N, V)
    return logits(ids, new_slab(), kv=our_kv, llama=our_llama)


def answer(prompt: str, keeps: bool) -> tuple[str, int]:
    """An answer, token by token, and how many tokens were computed for it."""
    _, text = demo()
    ids = list(ids_of(prompt))
    length = len(ids)
    slab = new_slab()
    start = 0
    computed = 0
    while ids[-1] not in text.end_tokens and len(ids) < 120:
        new = ids[start:]
        found = logits(new, slab, start, asked=[len(new) - 1])
        computed += len(new)
        if keeps:
            start = len(ids)
        ids.append(mx.argmax(found).item())
    return text.tokenizer.decode(ids[length:]), computed


def drawn(shape: Sequence[int], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


# --- 1: one token says something ----------------------------------------------------------------


def try_attention(H: int, Hkv: int, B: int, L: int, T: int) -> None:
    """The tokens of each sequence are its last ones."""
    kind = demo()[0].kinds[0]
    q = drawn((B * L, H, 8), 1)
    k = drawn((B, Hkv, T, 8), 2)
    v = drawn((B, Hkv, T, 8), 3)
    seen = mx.arange(T) <= mx.arange(T - L, T)[:, None]
    mask = mx.broadcast_to(mx.where(seen, 0.0, -mx.inf), (B, 1, L, T))
    found = llama.attention(q, k, v, mask, kind)
    key_heads = mx.arange(H) % Hkv
    mistakes = {
        "the scores are not divided by sqrt(Dh)": (q * math.sqrt(8), k, v, mask),
        "the mask is not added": (q, k, v, mx.zeros_like(mask)),
        "query head h takes key head h % Hkv, and should take h // G": (
            q,
            k[:, key_heads],
            v[:, key_heads],
            mask,
        ),
    }
    what = f"attention (H={H}, Hkv={Hkv}, B={B}, L={L}, T={T})"
    try:
        compare(what, found, our_llama.attention(q, k, v, mask, kind))
    except Wrong as error:
        lines = [str(error)]
        for mistake, given in mistakes.items():
            if is_same(found, our_llama.attention(*given, kind)):
                lines.append(f"so it would be if {mistake}")
        raise Wrong("\n".join(lines)) from None


@check(1, "a query weighs the values by their keys", "attention")
def _() -> None:
    try_attention(H=1, Hkv=1, B=1, L=1, T=4)


@check(1, "no query sees what the mask hides", "attention")
def _() -> None:
    try_attention(H=1, Hkv=1, B=1, L=3, T=5)


@check(1, "neighbouring query heads share a key head", "attention")
def _() -> None:
    try_attention(H=6, Hkv=2, B=1, L=1, T=5)
    try_attention(H=6, Hkv=2, B=1, L=3, T=5)


@check(1, "several sequences stand beside each other, and none sees another", "attention")
def _() -> None:
    try_attention(H=6, Hkv=2, B=3, L=1, T=7)
    try_attention(H=6, Hkv=2, B=2, L=3, T=7)


@check(1, "queries and keys are turned, values are not", "heads")
def _() -> None:
    model, _ = demo()
    x = drawn((5, model.config.D), 4)
    given = (model, model.layers[0], x, lambda x: 3 * x)
    as_ours(llama.heads, our_llama.heads, *given, returns="q, k, v")


@check(1, "the logits of a prompt are right", "forward")
def _() -> None:
    ids = ids_of()
    compare("the logits", logits(ids, new_slab()), our_logits(ids), 1e-3)


@check(1, "only the tokens that are asked come out", "forward")
def _() -> None:
    ids = ids_of()
    few = logits(ids, new_slab(), asked=[3, 7])
    compare("the logits of tokens 3 and 7", few, our_logits(ids)[mx.array([3, 7])], 1e-3)


@check(1, "positions are those of the windows, wherever these begin", "forward")
def _() -> None:
    ids = ids_of()
    slab = new_slab()
    logits(ids[:5], slab)
    rest = logits(ids[5:], slab, start=5)
    compare("the logits of tokens 5 and behind, alone", rest, our_logits(ids)[5:], 1e-3)


@check(1, "one token says something")
def _() -> None:
    _, text = demo()
    ids = ids_of()
    token = mx.argmax(logits(ids, new_slab(), asked=[len(ids) - 1])).item()
    said = text.tokenizer.decode([token])
    equal(f"what follows on {SUM!r}", said, "7")
    tell(f"{SUM}  ->  {said}")


# --- 2: norms and rotation ----------------------------------------------------------------------


def try_norm(x: mx.array, weight: mx.array) -> None:
    norm = ops.rms_norm(weight, 1e-5)
    if not callable(norm):
        raise Wrong(f"rms_norm returned a {type(norm).__name__}, and should return a function of x")
    compare("the norm", norm(x), our_ops.rms_norm(weight, 1e-5)(x))


@check(2, "a norm gives each row the same size", "rms_norm")
def _() -> None:
    try_norm(drawn((3, 12), 6) * mx.array([[1.0], [100.0], [0.001]]), drawn((12,), 5))


@check(2, "eps keeps a row of zeros from being divided by zero", "rms_norm")
def _() -> None:
    try_norm(mx.zeros((1, 4)), mx.ones(4))


@check(2, "the gate opens for what is above zero", "swiglu")
def _() -> None:
    as_ours(ops.swiglu, our_ops.swiglu, drawn((5, 14), 7))


@check(2, "a turn turns number i and number i + Dh/2 as a point in a plane", "rotate")
def _() -> None:
    angles = mx.array([[[0.0, math.pi / 2]], [[math.pi, 0.3]]])  # (2, 1, Dh/2)
    cos, sin = rope.both_of_a_plane(mx.cos(angles), mx.sin(angles))
    as_ours(rope.rotate, our_rope.rotate, drawn((2, 3, 4), 8), cos, sin)


@check(
    2, "position 0 is not turned, and position p by p times each plane's frequency", "rope_angles"
)
def _() -> None:
    given = (demo()[0].kinds[0], mx.array([0, 1, 40]))
    as_ours(rope.rope_angles, our_rope.rope_angles, *given, returns="cos, sin")


@check(2, "an answer comes out, with your norms and your rotation")
def _() -> None:
    said, _ = answer(SUM, keeps=True)
    equal(f"the answer to {SUM!r}", said, ANSWERS[SUM])
    tell(f"{SUM}  ->  {said}")


# --- 3: the slab --------------------------------------------------------------------------------


def picture(seen: mx.array) -> list[str]:  # (B, 1, L, T)
    """A line for each token: x for a row that it sees."""
    if not isinstance(seen, mx.array) or seen.ndim != 4:
        raise Wrong(f"_seen returned {seen!r}, and should return True and False as (B, 1, L, T)")
    B, _, L, _ = seen.shape
    lines = []
    for b in range(B):
        for token in range(L):
            row = seen[b, 0, token].tolist()
            lines.append(f"{b}, token {token}  {''.join('x' if each else '.' for each in row)}")
    return lines


def try_seen(slots: list[int], starts: list[int], L: int, span: int | None, what: str) -> None:
    window = kv.Window(new_slab(3), slots, starts, L)
    wanted = picture(our_kv.Window._seen(window, 6, span))
    beside(picture(window._seen(6, span)), wanted, f"rows that are seen (x), {what}")


@check(3, "a token sees itself and all before it", "_seen")
def _() -> None:
    try_seen([0], [2], 3, None, "3 tokens from row 2 on")
    try_seen([0, 2], [4, 1], 1, None, "two sequences")


@check(3, "with a span, a token sees the last rows only", "_seen")
def _() -> None:
    try_seen([0], [2], 3, 2, "with a span of 2")


def holds(slab: kv.Slab) -> list[str]:
    """A line for each layer, array, head and slot: which token stands in its first rows."""
    lines = []
    for layer, (letter, arrays), head in itertools.product(
        range(2), (("k", slab.k), ("v", slab.v)), range(2)
    ):
        for slot in range(slab.slots):
            rows = arrays[layer][slot, head, :10, 0].tolist()
            cells = " ".join(f"{row:>3.0f}" if row else "  ." for row in rows)
            lines.append(f"layer {layer}, {letter}, head {head}, slot {slot} {cells}")
    return lines


def try_write(slots: list[int], starts: list[int], L: int, what: str) -> None:
    """Token i of a head has the key 10 * i + 1 + head, and a value that is 100 more."""
    N = len(slots) * L
    k = 10 * mx.arange(1, N + 1)[:, None, None] + mx.arange(2)[None, :, None]
    k = mx.broadcast_to(k, (N, 2, 4)).astype(mx.float32)
    slabs = []
    for write in (kv.Window.write, our_kv.Window.write):
        slabs.append(kv.Slab(2, 3, 2, 32, 4, mx.float32))
        write(kv.Window(slabs[-1], slots, starts, L), 1, k, k + 100)
        slabs[-1].check()
    theirs, ours = slabs
    beside(holds(theirs), holds(ours), f"{what}, rows 0 to 9")
    for found, wanted in zip(theirs.arrays, ours.arrays, strict=True):
        compare(f"{what}: the slab, behind row 9, too", found, wanted)


@check(3, "a chunk lands in its slot and its rows, in every head", "write")
def _() -> None:
    try_write([1], [2], 3, "a chunk of 3 tokens from row 2 of slot 1")
    try_write([0], [0], 1, "a token in row 0 of slot 0")


@check(3, "tokens of several sequences land each in its own slot", "write")
def _() -> None:
    try_write([0, 2], [5, 1], 1, "two tokens, slot 0 row 5 and slot 2 row 1")
    try_write([1, 2], [3, 6], 2, "two tokens each, from slot 1 row 3 and slot 2 row 6")


@check(3, "what was written is read", "read")
def _() -> None:
    slab = kv.Slab(2, 4, 2, 32, 4, mx.float32)
    slab.k[1] = drawn(slab.shape, 9)
    slab.v[1] = drawn(slab.shape, 10)
    window = kv.Window(slab, [1, 2], [4, 5], 1)
    given = (window, 1, kv.Look(slice(1, 3), 6, None))
    as_ours(kv.Window.read, our_kv.Window.read, *given, returns="keys, values")


@check(3, "a prompt in two pieces is the prompt as a whole", "attend")
def _() -> None:
    ids = ids_of()
    slab = new_slab()
    first = logits(ids[:6], slab)
    second = logits(ids[6:], slab, start=6)
    wanted = our_logits(ids)
    compare("the first piece's logits", first, wanted[:6], 1e-3)
    compare("the second piece's logits", second, wanted[6:], 1e-3)


@check(3, "rows of an earlier owner do not show")
def _() -> None:
    slab = new_slab()
    for layer in range(len(slab.k)):
        slab.k[layer] = 5 * drawn(slab.shape, 11)
        slab.v[layer] = 5 * drawn(slab.shape, 12)
    ids = ids_of()
    compare("the logits", logits(ids, slab), our_logits(ids), 1e-3)


class Noted(kv.Window):
    """A window that writes down what it does."""

    did: ClassVar[list[str]] = []

    def write(self, *rest) -> None:
        self.did.append("write")
        super().write(*rest)

    def read(self, *rest) -> tuple[mx.array, mx.array]:
        self.did.append("read")
        return super().read(*rest)


@check(3, "several windows share a pass, and all write before the first one reads", "attend")
def _() -> None:
    model, _ = demo()
    prompts = [list(ids_of(prompt)) for prompt in (SUM, "Spell lantern.", "Count from 5 to 9.")]
    Noted.did.clear()
    results = []
    for window_of, forward in ((Noted, llama.forward), (our_kv.Window, our_llama.forward)):
        slab = new_slab(slots=4)
        windows = []
        for slot, ids in zip((2, 0, 1), prompts, strict=True):
            windows.append(window_of(slab, [slot], [0], len(ids)))
        ids = mx.array([*itertools.chain(*prompts)])
        first = forward(model, ids, windows, range(ids.size))
        # Now one token of each decodes; neighbouring slots share a look
        rows = [len(prompts[i]) for i in (1, 2, 0)]
        decoding = window_of(slab, [0, 1, 2], rows, 1)
        results.append((first, forward(model, mx.array([5, 6, 7]), [decoding], range(3))))
    theirs, ours = results
    compare("the states of three prompts", theirs[0], ours[0], 1e-3)
    equal("what the windows did in a layer", Noted.did[:6], ["write"] * 3 + ["read"] * 3)
    compare("the states of three tokens", theirs[1], ours[1], 1e-3)


@check(3, "the same tokens, and each step computes one")
def _() -> None:
    said, few = answer(SUM, keeps=True)
    equal(f"the answer to {SUM!r}", said, ANSWERS[SUM])
    again, many = answer(SUM, keeps=False)
    equal("the answer without the slab", again, said)
    tell(f"{SUM}  ->  {said}")
    tell(f"without the slab {many} tokens are computed, with it {few}")


# --- 4: sampling --------------------------------------------------------------------------------


@check(4, "the best of a row is its largest number, and of equals the first", "argmax")
def _() -> None:
    x = drawn((4, 300), 13)
    x[1, 7] = x[1, 200] = 9.0
    as_ours(sampling.argmax, our_sampling.argmax, x, returns="best, ids")
    x[2, 9] = math.nan
    if mx.isfinite(sampling.argmax(x)[0][2]).item():
        raise Wrong("a NaN is in the row, and the best is a number: nobody would notice")


@check(4, "noise depends on seed and index alone, and is spread evenly", "uniform")
def _() -> None:
    first = [[sampling.uniform(seed, index) for index in range(64)] for seed in range(64)]
    again = [[sampling.uniform(seed, index) for index in range(64)] for seed in range(64)]
    equal("the noise, asked for again", again, first)
    values = [*itertools.chain(*first)]
    if not all(0 < mx.array(value).item() < 1 for value in values):
        raise Wrong(
            f"{min(values)} to {max(values)}: each must lie above 0 and, as a float32, below 1"
        )
    for what, some in (
        ("of 64 seeds, 64 indices of each", values),
        ("of the difference to the next index", [(b - a) % 1 for a, b in itertools.pairwise(values)]),
        ("of the difference to the next seed", [(b[3] - a[3]) % 1 for a, b in itertools.pairwise(first)]),
    ):  # fmt: skip
        bins = [0] * 8
        for value in some:
            bins[int(8 * value)] += 1
        mean = len(some) / 8
        chi = sum((each - mean) ** 2 / mean for each in bins)
        if chi > 35:  # by chance once in 100,000
            raise Wrong(f"{what}, eight equal parts of 0 to 1 have {bins}")
    if sampling.uniform(2**64 - 1, 2**20) == sampling.uniform(2**63 - 1, 2**20):
        raise Wrong("seeds that differ in their highest bit have the same noise")


@check(4, "a mark lands where the running sum passes it, and never on a weight of 0", "land")
def _() -> None:
    weights = mx.array([[0.0, 5.0, 0.0, 3.0, 2.0, *[0.0] * 59]])  # whole blocks, as they always are
    for u in (0.0, 0.0001, 0.3, 0.499, 0.501, 0.6, 0.799, 0.801, 0.9999999, 1.0):
        as_ours(sampling.land, our_sampling.land, weights, mx.array([[u]]))
    many = mx.zeros((2, 5120))
    many[0, 4321] = 1.0
    many[1, 17] = many[1, 4000] = 1.0
    as_ours(sampling.land, our_sampling.land, many, mx.array([[0.5], [0.75]]))


IDS = (42, 7, 250, 3, 199)  # the tokens that are likely
PROBABILITIES = (0.4, 0.3, 0.2, 0.06, 0.04)


def logits_of(rows: int) -> mx.array:
    probabilities = [1e-30] * 300
    for token, probability in zip(IDS, PROBABILITIES, strict=True):
        probabilities[token] = probability
    return mx.broadcast_to(mx.log(mx.array(probabilities)), (rows, 300))


@check(4, "top_k keeps a number of tokens, top_p a part of the probability", "keep_first")
def _() -> None:
    spread = sampling.Spread.of(logits_of(4))
    spread = spread.only(mx.broadcast_to(mx.array(IDS), (4, 5)))
    settings = [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 1, "top_p": 0.99}, {"top_p": 0.01}]
    for some in (settings, [{"top_k": 2}] * 4):
        filters = sampling.Filters.of(spread, [Sampling(**each) for each in some])
        as_ours(sampling.keep_first, our_sampling.keep_first, spread, filters)


DRAWS = 4_000


def drawn_tokens(settings: Sequence[dict], slots: Sequence[int] | None = None) -> list[int]:
    """What comes in each of 4,000 rows, with settings in turn: 0 is the likeliest token. Row i has seed
    and index of its own."""
    slots = slots or range(DRAWS)
    picks = []
    for row, slot in enumerate(slots):
        options = Sampling(**settings[row % len(settings)])
        picks.append(Pick(slot, options, seed=row % 50, index=row // 50))
    state = sampling.SlotState(DRAWS, 300)
    tokens = sampling.choose(logits_of(DRAWS), picks, state)[0].tolist()
    others = {*tokens} - {*IDS}
    if others:
        raise Wrong(f"token {others.pop()} came; only {IDS} are likely")
    return [IDS.index(token) for token in tokens]


def is_likely(what: str, tokens: Sequence[int], probabilities: Sequence[float]) -> None:
    for token, probability in enumerate(probabilities):
        found = tokens.count(token) / len(tokens)
        if abs(found - probability) > 0.001 + 5 * math.sqrt(probability / len(tokens)):
            often = f"in {found:.1%} of the draws, and should in {probability:.1%}"
            raise Wrong(f"{what}: token {IDS[token]} came {often}")


@check(4, "tokens come as often as they are likely, at each temperature", "draw")
def _() -> None:
    both = drawn_tokens([{"temperature": 1.0}, {"temperature": 2.0}])
    roots = [math.sqrt(p) for p in PROBABILITIES]
    is_likely("temperature 1", both[0::2], PROBABILITIES)
    is_likely("temperature 2", both[1::2], [root / sum(roots) for root in roots])


@check(4, "each row has filters of its own, and they look at temperature 1", "draw")
def _() -> None:
    settings = [
        {"temperature": 2.0, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "min_p": 0.45},
    ]
    tokens = drawn_tokens(settings)
    equal("tokens (0: the likeliest) under top_p = 0.6, temperature 2", {*tokens[0::3]}, {0, 1})
    equal("tokens (0: the likeliest) under top_k = 3", {*tokens[1::3]}, {0, 1, 2})
    equal("tokens (0: the likeliest) under min_p = 0.45", {*tokens[2::3]}, {0, 1, 2})
    is_likely("top_k = 3", tokens[1::3], [p / 0.9 for p in (0.4, 0.3, 0.2)])


@check(4, "a draw depends on seed and index, and not on slot or neighbours", "draw")
def _() -> None:
    warm = {"temperature": 1.0}
    alone = drawn_tokens([warm])
    equal("the tokens, asked for again", drawn_tokens([warm]), alone)
    equal("the tokens, in other slots", drawn_tokens([warm], [*reversed(range(DRAWS))]), alone)
    beside_others = drawn_tokens([warm, {"temperature": 1.0, "top_k": 1}, {}, {"min_p": 0.3}])
    equal("the tokens beside others' settings", beside_others[0::4], alone[0::4])
    equal("the tokens under top_k = 1", {*beside_others[1::4]}, {0})


@check(4, "an engine with your sampler says the same for the same seed")
def _() -> None:
    with engine(slots=2) as ours:
        prompt = ours.text.ask("Tell me a story about a fox.")
        warm = Sampling(temperature=0.9, top_p=0.95, seed=7, max_tokens=12)
        asks = [warm, warm, Sampling(temperature=0.9, seed=8, max_tokens=12)]
        handles = [ours.submit(prompt, each) for each in asks]
        run_all(ours)
        one, same, other = [handle.tokens for handle in handles]
    equal("the same seed's tokens", same, one)
    if other == one:
        raise Wrong("seed 8 says the same as seed 7")
    tell(f"seed 7: {demo()[1].tokenizer.decode(one)!r}, twice")


# --- engines ------------------------------------------------------------------------------------


@contextmanager
def engine(slots: int, policy: str = "continuous", **options) -> Iterator[Engine]:
    model, text = demo()
    options = {"max_len": 128, "chunk": 32, "reuse": False, "guesses": 0} | options
    ours = Engine(model, text, slots=slots, policy=policy, **options)
    with ours:
        yield ours


class Faults(logging.Handler):
    """What failed in a step, with the line in which it did. The engine itself goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple] = []

    def emit(self, record: logging.LogRecord) -> None:
        _, error, trace = record.exc_info
        self.found.append((error, trace))  # the engine takes the trace from the error


@contextmanager
def invariants(when: str) -> Iterator[None]:
    """What `check` of the scheduler or the slab asserts, in words."""
    try:
        yield
    except Wrong:
        raise
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        raise Wrong(f"{when}, what `check` asserts does not hold: {line}") from None


def run_all(ours: Engine) -> None:
    """Step until nothing is left. What fails in a step ends the check, too."""
    for _ in range(10 * STEPS):
        faults = Faults()
        LOG.addHandler(faults)
        try:
            worked = ours.step()
        finally:
            LOG.removeHandler(faults)
        if faults.found:
            error, trace = faults.found[0]
            raise error.with_traceback(trace)
        with invariants("after a step"):
            ours.check()
        if not worked:
            return
    raise Wrong(f"after {10 * STEPS} steps, requests still run or wait")


def ask(ours: Engine, prompt: str = SUM, max_tokens: int = 40) -> Handle:
    return ours.submit(ours.text.ask(prompt), Sampling(max_tokens=max_tokens))


def answers(ours: Engine, prompts: Iterable[str]) -> int:
    """All at once. Returns how many steps were run."""
    handles = {prompt: ask(ours, prompt) for prompt in prompts}
    run_all(ours)
    for prompt, handle in handles.items():
        equal(f"the answer to {prompt!r}", handle.result().text, ANSWERS[prompt])
    return ours.steps


# --- a scheduler without a model ----------------------------------------------------------------


LETTERS = "timeline (p: a prompt's last chunk, P: any other, d: decode)"


class Tale(Story):
    """A story whose slab is drawn, and which says in plain words what is wrong with it.

    `slab[slot][row]` is the token whose key stands there: what the device would have written.
    """

    def __init__(self, *rest, **options):
        super().__init__(*rest, **options)
        self.fails: set[int] = set()  # requests whose rows are NaN, and whose tokens are -1

    def submit(self, *rest, **options) -> sched.Request:
        return super().submit(*rest, **({"reuse": False} | options))

    def write(self, plan: sched.Plan) -> None:
        for slot, start, stop in plan.scrubs:
            rows = self.rows[slot]
            rows[start:stop] = [None] * len(rows[start:stop])
        for chunk in plan.chunks:
            request = chunk.request
            who = f"step {plan.step}, prompt {name(request)}"
            rows = self.rows[chunk.slot]
            equal(f"{who}: the chunk's slot", chunk.slot, request.slot)
            if chunk.start == 0 and "NaN" in rows:
                raise Wrong(f"{who} begins in slot {chunk.slot}, in which rows of NaN are left")
            before = rows[: chunk.start]
            fails = request.id in self.fails
            if not fails and before != list(request.prompt[: chunk.start]):
                raise Wrong(
                    f"{who}: the chunk begins at row {chunk.start}, but before it stand {before}"
                )
            piece = list(request.prompt[chunk.start : chunk.stop])
            rows[chunk.start : chunk.stop] = ["NaN"] * len(piece) if fails else piece
        for request, slot, position, _ in plan.decodes:
            who = f"step {plan.step}, {name(request)}"
            rows = self.rows[slot]
            said = position - len(request.prompt)
            right = len(request.prompt) + request.planned - 2  # the plan has counted this token
            equal(f"{who}: the row of its newest token", position, right)
            rows[position] = "NaN" if request.id in self.fails else self.says(request, said)

    def run(self, plan: sched.Plan) -> dict[int, list[int]]:
        most = max(self.sched.budget, self.sched.chunk + len(plan.decodes))
        if plan.cost > most:
            raise Wrong(
                f"step {plan.step} costs {plan.cost}, but no step may cost more than {most}"
            )
        self.write(plan)
        self.plans.append(plan)
        said = {}
        for member in plan.emitters:
            request = member.request
            token = self.says(request, request.planned - 1)
            said[member.slot] = [-1 if request.id in self.fails else token]
        return said

    def finite(self, plan: sched.Plan) -> list[int]:
        return [
            chunk.slot
            for chunk in plan.chunks
            if not chunk.emits and chunk.request.id not in self.fails
        ]

    def accept(self, request: sched.Request, token: int) -> str | None:
        if token < 0:
            equal(
                f"the answer of {name(request)}, whose logits were not finite,", request.answer, []
            )
            return "error"
        said = self.tokens[request.id]
        wanted = self.says(request, len(said))
        if token != wanted:
            place = f"as number {len(said)} of its answer, counted from 0"
            raise Wrong(f"{name(request)} gets token {token}, and should get {wanted} {place}")
        equal(f"the tokens of {name(request)} so far", request.answer, [*said, token])
        said.append(token)
        return "stop" if len(said) == self.eos.get(request.id) else None

    def step(self) -> bool:
        try:
            with invariants(f"after step {self.sched.steps}"):
                return super().step()
        except Stuck as error:
            shown = "\n  ".join(["so far:", *self.lines()[-6:]])
            raise Wrong(f"{error}; {shown}") from None

    def should_be(self, wanted: str, what: str = LETTERS) -> None:
        beside(self.drawn(), timeline(wanted), what)

    def drawn(self) -> list[str]:
        """A line for each step, to the end."""
        while self.step():
            if len(self.plans) > STEPS:
                shown = "\n  ".join(self.lines()[:6])
                raise Wrong(f"after {STEPS} steps it has not ended; it begins\n  {shown}")
        return self.lines()


# --- 5: static batching -------------------------------------------------------------------------


@check(5, "a batch is admitted, and the next one when all of it has ended", "_admit")
def _() -> None:
    tale = Tale(slots=2, policy="static")
    tale.submit_all((3, 2), (3, 5), (3, 2))
    tale.should_be("""
         1 | A:p B:p
         2 | A:d B:d
         3 | B:d
         4 | B:d
         5 | B:d
         6 | C:p
         7 | C:d
    """)


@check(
    5,
    "who is admitted has a slot of its own, a moment and a policy, and is in line no more",
    "_admit",
)
def _() -> None:
    tale = Tale(slots=2, policy="static")
    for _ in range(3):
        tale.submit(3, 2)
    found = [(name(r), r.slot, r.admitted, r.policy) for r in tale.sched._admit(5.0)]
    wanted = [("A", 0, 5.0, "static"), ("B", 1, 5.0, "static")]
    equal("who is admitted, with slot, moment and policy,", found, wanted)
    lines = [*tale.sched.running], [*tale.sched.waiting]
    equal("those who run, and those who wait", lines, ([0, 1], [2]))


@check(5, "the policy says who is next", "_admit")
def _() -> None:
    tale = Tale(slots=1, policy="short")
    tale.submit(9, 2)
    short = tale.submit(2, 2)
    equal("who is admitted first under the policy short", tale.sched._admit(0.0), [short])


def new_runner() -> Runner:
    return Runner(demo()[0], Sizes(slots=3, max_len=128, chunk=32, budget=64))


def try_orders(orders: Sequence[tuple[Order, Picks]], wanted: Sequence[dict[int, str]]) -> None:
    """By step and slot: what is said."""
    _, text = demo()
    runner = new_runner()
    start = runner._start
    starts: list[tuple] = []

    def note(*results) -> None:
        starts.append(results)
        start(*results)

    runner._start = note
    for number, (step, said) in enumerate(zip(orders, wanted, strict=True), 1):
        starts.clear()
        tokens, _ = runner.run(*step).read()
        if not starts:
            raise Wrong(f"order {number}: `self._start` was not called, so nothing may be written")
        sizes = [len(each) for each in tokens]
        equal(f"order {number}: by slot, how many tokens came out", sizes, [1, 1, 1])
        found = {slot: text.tokenizer.decode(t) for slot, t in enumerate(tokens) if t >= [0]}
        equal(f"order {number}: what is said, by slot,", found, said)


def order(
    prefills: Sequence[Prefill] = (),
    decodes: Sequence[tuple[int, int]] = (),
    index: int = 0,
    **settings,
) -> tuple[Order, Picks]:
    """An order, and how its tokens are chosen."""
    slots = [prefill.slot for prefill in prefills if prefill.asked]
    slots += [slot for slot, _ in decodes]
    picks = {slot: [Pick(slot, Sampling(**settings), 0, index)] for slot in slots}
    return Order((), tuple(prefills), [Decoding(*each, ()) for each in decodes]), picks


@check(
    5, "prompts of different lengths go in side by side, then a token of each", "_forward, _choose"
)
def _() -> None:
    one = ids_of()
    two = ids_of("Count from 5 to 9.")
    prompts = [Prefill(2, one, 0, None, True), Prefill(0, two, 0, None, True)]
    rows = [(0, len(two)), (2, len(one))]
    later = [(slot, row + 1) for slot, row in rows]
    orders = [order(prompts), order((), rows, 1), order((), later, 2)]
    try_orders(orders, [{0: "5", 2: "7"}, {0: ",", 2: " +"}, {0: " 6", 2: " 6"}])


@check(5, "who asks for log probabilities gets them", "_choose")
def _() -> None:
    asks = order([Prefill(2, ids_of(), 0, None, True)], logprobs=2)
    tokens, logprobs = new_runner().run(*asks).read()
    equal("whose log probabilities came, by slot and index", [*logprobs], [(2, 0)])
    found = logprobs[2, 0]
    equal("the likeliest token", found.top[0], (tokens[2][0], found.logprob))


@check(
    5,
    "a chunk that does not end its prompt says nothing, and others decode beside it",
    "_forward, _choose",
)
def _() -> None:
    one = ids_of()
    two = ids_of("Count from 5 to 9.")
    orders = [
        order([Prefill(1, one[:4], 0, None, False)]),
        order([Prefill(0, two, 0, None, True), Prefill(1, one[4:7], 4, None, False)]),
        order([Prefill(1, one[7:], 7, None, True)], [(0, len(two))]),
    ]
    try_orders(orders, [{}, {0: "5"}, {0: ",", 1: "7"}])


@check(5, "six prompts, three at a time, have the answers that they have alone")
def _() -> None:
    with engine(slots=3, policy="static", run_ahead=False) as ours:
        steps = answers(ours, ANSWERS)
    with engine(slots=1, policy="serial", run_ahead=False) as ours:
        alone = answers(ours, ANSWERS)
    tell(f"six prompts: {alone} steps one at a time, {steps} in batches of three")


# --- 6: slots, and continuous batching ----------------------------------------------------------


@check(6, "the newest token goes into the row behind all before it", "next_row")
def _() -> None:
    request = sched.Request(1, (5, 6, 7), 10, 0.0)
    for planned, row in ((1, 3), (2, 4), (9, 11)):
        request.planned = planned
        equal(f"next_row, behind a prompt of 3 with {planned} planned,", request.next_row, row)


@check(6, "the timeline at the top of sched.py comes out", "plan, commit, finish")
def _() -> None:
    tale = Tale(slots=2)
    tale.submit_all((3, 3), (3, 5), (3, 2))
    tale.should_be("""
         1 | A:p B:p
         2 | A:d B:d
         3 | A:d B:d
         4 | B:d C:p
         5 | B:d C:d
    """)
    for line in tale.lines():
        tell(line)


@check(6, "answers end by themselves or at max_tokens, and one token may be all", "commit, plan")
def _() -> None:
    tale = Tale(slots=3, budget=20)
    requests = [tale.submit(3, 9, eos=2), tale.submit(2, 1), tale.submit(4, 3), tale.submit(1, 2)]
    tale.should_be("""
         1 | A:p B:p C:p
         2 | A:d C:d D:p
         3 | C:d D:d
    """)
    reasons = [request.finish_reason for request in requests]
    equal("why they ended", reasons, ["stop", "length", "length", "length"])
    if not all(request.ended for request in requests):
        raise Wrong("a request has ended, and `ended` does not say when")


@check(6, "a plan says who is admitted, what is blocked, and how many wait", "plan")
def _() -> None:
    tale = Tale(slots=2, policy="serial")
    for _ in range(3):
        tale.submit(3, 2)
    plan = tale.sched.plan(4.0)
    if plan is None:
        raise Wrong("plan returned None, though three requests wait")
    found = [plan.step, plan.at, plan.blocked, plan.waiting, plan.policy, name(*plan.admitted)]
    what = "step, moment, blocked slots, how many wait, policy, and who is admitted"
    equal(what, found, [1, 4.0, (1,), 2, "serial", "A"])
    tale = Tale(slots=3, chunk=4, budget=4)
    tale.submit_all((6, 2), (3, 2), (3, 2))
    held = [name(request) for request in tale.sched.plan(0.0).held]
    equal("those in prefill without a chunk", held, ["C"])
    equal("what is planned when nobody is there", Tale().sched.plan(0.0), None)


@check(6, "a commit hands out tokens, and says who has ended, now or before", "commit")
def _() -> None:
    tale = Tale(slots=2)
    first = tale.submit(3, 1)
    second = tale.submit(3, 5)
    plan = tale.sched.plan(0.0)
    tokens = tale.run(plan)
    done = tale.sched.commit(plan, tokens, tale.accept, 7.0)
    equal("who has ended", ([name(r) for r in done.ended], [*done.ghosts]), (["A"], []))
    equal("their answers", [len(first.answer), len(second.answer)], [1, 1])
    equal("the moment of the end", first.ended, 7.0)
    plan = tale.sched.plan(8.0)
    tale.sched.finish(second, "cancelled", 9.0)
    done = tale.sched.commit(plan, tale.run(plan), tale.accept, 9.0)
    equal("who has ended, and the slots of ghosts", (done.ended, [*done.ghosts]), ([], [1]))


@check(6, "no token is planned behind the last one, though none has been read", "plan")
def _() -> None:
    tale = Tale(slots=1)
    request = tale.submit(3, 2)
    plans = [tale.sched.plan(0.0) for _ in range(3)]
    equal("steps planned for 2 tokens", sum(plan is not None for plan in plans), 2)
    equal("tokens planned", request.planned, 2)


@check(6, "what is blocked blocks somebody", "plan")
def _() -> None:
    tale = Tale(slots=2, policy="serial")
    tale.submit(3, 2)
    equal("the slots that are blocked, though nobody waits", tale.sched.plan(0.0).blocked, ())


@check(6, "when the last request has left, a change of the policy comes true", "finish")
def _() -> None:
    tale = Tale(slots=2)
    request = tale.submit(3, 5)
    tale.step()
    tale.sched.drain(POLICIES["static"])
    tale.sched.finish(request, "cancelled", 1.0)
    equal("the policy (see `_end_drain`)", tale.sched.policy.name, "static")


@check(6, "a request that is cancelled leaves the line, or its slot", "finish")
def _() -> None:
    tale = Tale(slots=1)
    first, second, third = [tale.submit(3, 5) for _ in range(3)]
    tale.step()
    tale.sched.finish(second, "cancelled", 1.0)
    tale.sched.finish(second, "error", 2.0)  # changes nothing
    tale.sched.finish(first, "cancelled", 2.0)
    equal("reasons", [first.finish_reason, second.finish_reason], ["cancelled"] * 2)
    equal("the moment of the second's end", second.ended, 1.0)
    equal("those who wait", [*tale.sched.waiting], [third.id])
    tale.should_be("""
         1 | A:p
         2 | C:p
         3 | C:d
         4 | C:d
         5 | C:d
         6 | C:d
    """)


@check(
    6, "rows that may hold NaN are scrubbed before the next owner reads them", "_leave_slot, plan"
)
def _() -> None:
    tale = Tale(slots=1, chunk=4)
    failing = tale.submit(6, 4)
    tale.fails.add(failing.id)
    tale.submit(3, 3)
    tale.should_be("""
         1 | A:P
         2 | A:p
         3 | B:p
         4 | B:d
         5 | B:d
    """)
    equal("why A ended", failing.finish_reason, "error")
    # One is cancelled in mid-prompt: no token has shown that its rows are numbers
    tale = Tale(slots=1, chunk=4)
    first = tale.submit(9, 4)
    tale.fails.add(first.id)
    tale.step()
    tale.sched.finish(first, "cancelled", 1.0)
    tale.submit(2, 2)
    beside(tale.drawn()[1:], timeline(" 2 | B:p\n 3 | B:d"), LETTERS)


@check(6, "many requests at random moments: every plan keeps every invariant")
def _() -> None:
    for seed in range(25):
        dice = random.Random(seed)
        tale = Tale(
            slots=dice.randint(1, 4), chunk=dice.choice((2, 4, 8)), budget=dice.randint(1, 20)
        )
        left = 12
        open_ones: list[sched.Request] = []
        while left or tale.sched.running or tale.sched.waiting:
            if left and dice.random() < 0.5:
                left -= 1
                eos = dice.choice((None, dice.randint(1, 9)))
                request = tale.submit(dice.randint(1, 20), dice.randint(1, 9), eos=eos)
                if dice.random() < 0.15:
                    tale.fails.add(request.id)
                open_ones.append(request)
            if open_ones and dice.random() < 0.1:
                tale.sched.finish(
                    open_ones.pop(dice.randrange(len(open_ones))), "cancelled", tale.now
                )
            tale.step()
            if len(tale.plans) > STEPS:
                raise Wrong(f"seed {seed}: after {STEPS} steps requests still run or wait")


@check(6, "six prompts in two slots: the same answers, in fewer steps")
def _() -> None:
    with engine(slots=2, policy="static", run_ahead=False) as ours:
        batches = answers(ours, ANSWERS)
    with engine(slots=2, run_ahead=False) as ours:
        steps = answers(ours, ANSWERS)
    tell(
        f"six prompts in two slots: {batches} steps in batches, {steps} if a free slot is taken at once"
    )


# --- 7: chunks under a budget -------------------------------------------------------------------


def cuts(tale: Tale) -> list[str]:
    lines = []
    for plan in tale.plans:
        cells = [f"{name(c.request)}[{c.start}:{c.stop}]" for c in plan.chunks]
        cells += [f"{name(d.request)}:d" for d in plan.decodes]
        lines.append(f"{plan.step:>2} | {' '.join(cells)}")
    return lines


def try_cuts(asks: Sequence[tuple[int, int]], wanted: str, what: str, **options) -> Tale:
    tale = Tale(**options)
    for prompt, tokens in asks:
        tale.submit(prompt, tokens)
    tale.drawn()
    beside(cuts(tale), timeline(wanted), f"{what} (A[0:4]: rows 0 to 3 of A's prompt)")
    return tale


@check(7, "a prompt is cut into chunks, and the others decode beside it")
def _() -> None:
    wanted = """
         1 | A[0:2] B[0:4]
         2 | B[4:8] A:d
         3 | B[8:11] A:d
         4 | A:d B:d
         5 | A:d
    """
    try_cuts([(2, 5), (11, 2)], wanted, "chunks of 4, a budget of 8", slots=2, chunk=4, budget=8)


@check(7, "the last chunk is cut where the budget ends", "_cut, _chunks")
def _() -> None:
    wanted = """
         1 | A[0:4] B[0:2]
         2 | A[4:6] B[2:6]
         3 | B[6:7] C[0:4] A:d
         4 | C[4:7] A:d B:d
         5 | A:d B:d C:d
         6 | B:d
    """
    asks = [(6, 4), (7, 4), (7, 2)]
    tale = try_cuts(asks, wanted, "chunks of 4, a budget of 6", slots=3, chunk=4, budget=6)
    held = [[name(r) for r in plan.held] for plan in tale.plans]
    equal("who has no chunk in a step", held, [["C"], ["C"], [], [], [], []])


@check(7, "a short prompt does not wait for a long one, and leaves half to the oldest", "_chunks")
def _() -> None:
    wanted = """
         1 | A[0:8]
         2 | B[0:4] A[8:12]
         3 | B[4:6] A[12:18]
         4 | A[18:24] B:d
    """
    tale = Tale(slots=2, chunk=8, budget=8)
    tale.submit(24, 1)
    tale.step()
    tale.submit(6, 2)
    tale.drawn()
    beside(cuts(tale), timeline(wanted), "chunks of 8, a budget of 8; B comes in step 2")


@check(7, "what the oldest cannot use is not kept for it", "_chunks")
def _() -> None:
    wanted = """
         1 | C[0:4] A[0:4]
         2 | C[4:8] A[4:8]
         3 | C[8:9] A[8:10] B[0:5]
         4 | B[5:12]
    """
    asks = [(10, 1), (12, 1), (9, 1)]
    try_cuts(asks, wanted, "chunks of 8, a budget of 8", slots=3, chunk=8, budget=8)


@check(7, "one whole chunk is let in, however many decode")
def _() -> None:
    wanted = """
         1 | A[0:1] B[0:1] C[0:1]
         2 | D[0:3] A:d B:d C:d
         3 | D[3:5] A:d B:d C:d
         4 | A:d B:d C:d D:d
    """
    asks = [(1, 4), (1, 4), (1, 4), (5, 2)]
    options = {"slots": 4, "chunk": 3, "budget": 2}
    tale = Tale(**options)
    for prompt, tokens in asks[:3]:
        tale.submit(prompt, tokens)
    tale.step()
    tale.submit(*asks[3])
    tale.drawn()
    beside(cuts(tale), timeline(wanted), "chunks of 3, a budget of 2")


@check(7, "a token takes its price of the budget")
def _() -> None:
    wanted = """
         1 | A[0:32] B[0:32]
         2 | A[32:53] B[32:53]
         3 | A[53:64] B[53:64]
    """
    options = {"slots": 2, "chunk": 32, "budget": 64, "far": 64}
    tale = try_cuts([(64, 1), (64, 1)], wanted, "at row 64 a token costs 2", **options)
    costs = [[chunk.cost for chunk in plan.chunks] for plan in tale.plans]
    equal("what the chunks cost", costs, [[32, 32], [32, 32], [21, 21]])


@check(7, "a long prompt in chunks says what it says as a whole")
def _() -> None:
    said = []
    for chunk in (32, 128):
        with engine(slots=2, max_len=384, chunk=chunk, budget=chunk + 8, run_ahead=False) as ours:
            story = (
                "Once there was a fox. The fox was kind, and went to the lake with a lantern. " * 8
            )
            long = ask(ours, story + SUM, max_tokens=12)
            short = ask(ours)
            run_all(ours)
            most = 0
            for step in ours.snapshot().steps:
                read = sum(stop - start for _, _, start, stop in step.prefill)
                most = max(most, read + len(step.decode))
            said.append((long.tokens, short.result().text))
            tell(
                f"{len(long.request.prompt)} tokens in chunks of {chunk}: {most} tokens in a step at most"
            )
    equal("the answers", said[0], said[1])
    equal("the short one's", said[0][1], ANSWERS[SUM])


# --- 8: run-ahead -------------------------------------------------------------------------------


def diary(run_ahead: bool, hurries: bool) -> list[str]:
    """When steps are started, and when they are read."""
    lines: list[str] = []

    def note(what: str) -> None:
        lines.append(f"{what} {1 + sum(line.startswith(what) for line in lines)}")

    class Noted(Flight):
        def read(self) -> tuple:
            note("read")
            return super().read()

    with engine(slots=2, run_ahead=run_ahead) as ours:
        finish = ours.runner.finish

        def finished(*rest) -> Noted:
            flight = Noted(*finish(*rest))
            note("start")
            return flight

        ours.runner.finish = finished
        ours.hurries = hurries
        handle = ask(ours, max_tokens=4)
        run_all(ours)
        equal("its tokens", len(handle.tokens), 4)
    return lines


@check(8, "without run-ahead, a step is read before the next one starts", "_may_fly, step")
def _() -> None:
    wanted = [f"{what} {step}" for step in range(1, 5) for what in ("start", "read")]
    beside(diary(run_ahead=False, hurries=False), wanted, "starts and reads of four steps")


@check(
    8, "with run-ahead, the next step starts before the last one is read", "_may_fly, step, finish"
)
def _() -> None:
    wanted = ["start 1", "start 2", "read 1", "start 3", "read 2", "start 4", "read 3", "read 4"]
    beside(diary(run_ahead=True, hurries=False), wanted, "starts and reads of four steps")


@check(8, "a first token is read at once, where the engine hurries", "_may_fly")
def _() -> None:
    wanted = ["start 1", "read 1", "start 2", "start 3", "read 2", "start 4", "read 3", "read 4"]
    beside(diary(run_ahead=True, hurries=True), wanted, "starts and reads of four steps")


@check(8, "a flight holds what was asked of it: tokens, and -1 for the others", "finish")
def _() -> None:
    runner = new_runner()
    ids = ids_of()
    started: list[object] = []
    enqueue = runner._enqueue

    def note(*results) -> None:
        started.extend(results)
        enqueue(*results)

    runner._enqueue = note
    flight = runner.run(*order([Prefill(1, ids, 0, None, True)]))
    if not any(each is flight.tokens for each in started):
        raise Wrong(
            "the tokens were never handed to self._enqueue: the device would start too late"
        )
    tokens, _ = flight.read()
    equal("slots without a token", [tokens[0], tokens[2]], [[-1], [-1]])
    newest = runner._newest.tolist()
    equal("the newest tokens on the device", newest, [0, *tokens[1], 0])
    times = (flight.build_s, flight.device_s, flight.wait_s)
    if not all(isinstance(each, float) and each >= 0 for each in times):
        raise Wrong(f"build_s, device_s and wait_s are {times}; each is a time")


@check(8, "a ghost's token is dropped, and its row harms nobody")
def _() -> None:
    tale = Tale(slots=1, lag=1)
    first = tale.submit(3, 9, eos=2)
    tale.submit(3, 2)
    tale.should_be("""
         1 | A:p
         2 | A:d
         3 | A:d
         4 | B:p
         5 | B:d
    """)  # A ends with its 2nd token, and runs once more as a ghost
    equal("what A said", len(first.answer), 2)
    # A ghost whose numbers are not finite
    tale = Tale(slots=1, lag=1)
    tale.fails.add(tale.submit(3, 9).id)
    tale.submit(2, 2)
    tale.drawn()


@check(8, "a step that fails ends its requests, and the engine goes on", "step")
def _() -> None:
    before = LOG.disabled
    LOG.disabled = True  # else the traceback, which belongs to the check, would be shown
    try:
        with engine(slots=2) as ours:
            run = ours.runner.begin

            def fail(order: Order):
                with ThreadPoolExecutor(1) as other:
                    if other.submit(device_lock.acquire, blocking=False).result():
                        raise Wrong("another thread can take device_lock while a step runs")
                raise ZeroDivisionError("planted by the check")

            ours.runner.begin = fail
            handle = ask(ours)
            try:
                worked = ours.step()
            except ZeroDivisionError:
                raise Wrong(
                    "an exception in a step came out of Engine.step: tell self._fail of it"
                ) from None
            equal("what step returns after a failure", worked, True)
            equal("why the request ended", handle.finish_reason, "error")
            if isinstance(handle.exception, Wrong):
                raise handle.exception
            ours.runner.begin = run
            answers(ours, [SUM])
            ours.runner.begin = partial(leave, run)
            handle = ask(ours)
            try:
                ours.step()
            except SystemExit:
                equal("why its request ended", handle.finish_reason, "error")
                return
            raise Wrong("SystemExit is for the whole program: raise it again, after self._fail")
    finally:
        LOG.disabled = before


def leave(run: Callable, order: Order):
    raise SystemExit(3)


@check(8, "`plan=False` plans nothing, and what is in flight is read", "step")
def _() -> None:
    with engine(slots=1) as ours:
        ours.hurries = False
        news: list[int] = []
        ours.on_commit = lambda: news.append(1)
        handle = ask(ours)
        ours.step()
        equal("what step returns when something was in flight", ours.step(plan=False), True)
        equal("tokens that were read", len(handle.tokens), 1)
        equal("how often on_commit was called (`_changing` sees to that)", len(news), 1)
        equal("what an idle step returns", ours.step(plan=False), False)
        run_all(ours)


@check(8, "in company each answer is the one that it has alone")
def _() -> None:
    dice = random.Random(3)
    asks = []
    for number in range(16):
        warm = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
        ids = [dice.randrange(5, 1500) for _ in range(dice.randint(1, 60))]
        tokens = dice.randint(1, 10)
        asks.append((ids, Sampling(max_tokens=tokens, ignore_eos=True, logprobs=3, **warm)))
    together = replies(asks, at_once=True, slots=5, budget=48)
    alone = replies(asks, at_once=False, slots=1, policy="serial", run_ahead=False)
    for number, (ids, _) in enumerate(asks):
        what = f"request {number}, of {len(ids)} tokens: its answer in company"
        equal(what, together[number][0], alone[number][0])
    same_bits = sum(one == other for one, other in zip(together, alone, strict=True))
    said = f"{len(asks)} answers in company and alone: the same tokens"
    tell(f"{said}, {same_bits} with the same bits")


def replies(asks: Sequence[tuple], at_once: bool, **options) -> list[tuple]:
    """Each answer's tokens, and all of its log probabilities."""
    with engine(**options) as ours:
        handles = []
        for each in asks:
            handles.append(ours.submit(*each))
            if not at_once:
                run_all(ours)
        run_all(ours)
    return [(handle.tokens, handle.logprobs) for handle in handles]


# --- running them -------------------------------------------------------------------------------


def can_try(each: Check, blank: Collection[str]) -> bool:
    """Are the functions written that a check is about? If it is about the whole stage: all of them."""
    return not blank if not each.about else not set(each.about.split(", ")) & set(blank)


def trouble(stage: int, blank: Collection[str] = ()) -> tuple[Check, Exception] | None:
    """The first check of a stage that fails, and why; None if all pass. Ends at the first, since the
    others often fail for the same reason."""
    told.clear()
    for each in CHECKS[stage]:
        if not can_try(each, blank):
            continue
        try:
            each.function()
        except Exception as error:
            return each, error
    return None
