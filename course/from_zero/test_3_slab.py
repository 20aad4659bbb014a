"""Stage 3: the slab. You write `write` and `read` in kv.py, and `seen`, `attend` and
`Formula.run` in llama.py."""

from itertools import chain

import pytest

import kv
import llama
from course.from_zero.shared_by_tests import (
    ANSWERS,
    SUM,
    assert_close,
    demo,
    drawn,
    ids_of,
    logits,
    new_slab,
    numbered,
    our_logits,
    row_pictures,
    text_of,
)
from course.from_zero.small_llama import answer
from kernels.device import mx


def rows_seen(slots: list[int], starts: list[int], L: int, span: int | None = None) -> list[str]:
    """Draw a line for each token, with an x for each row that it sees."""
    positions = kv.Window(new_slab(3), slots, starts, L).positions.reshape(-1, 1, L, 1)
    seen = llama.seen(positions, 6, span)
    assert isinstance(seen, mx.array) and seen.shape == (len(slots), 1, L, 6), (
        f"seen returned {seen!r}, expected True and False as (B, 1, L, T)"
    )
    return ["".join("x" if each else "." for each in row) for row in seen.reshape(-1, 6).tolist()]


@pytest.mark.about("seen")
def test_causal_mask():
    """A token sees itself and all tokens before it."""
    three_tokens_from_row_2 = [
        "xxx...",
        "xxxx..",
        "xxxxx.",
    ]
    assert rows_seen([0], [2], 3) == three_tokens_from_row_2
    two_sequences_at_rows_4_and_1 = [
        "xxxxx.",
        "xx....",
    ]
    assert rows_seen([0, 2], [4, 1], 1) == two_sequences_at_rows_4_and_1


@pytest.mark.about("seen")
def test_sliding_window():
    """With a span, a token sees only the last `span` rows, its own included."""
    a_span_of_2 = [
        ".xx...",
        "..xx..",
        "...xx.",
    ]
    assert rows_seen([0], [2], 3, span=2) == a_span_of_2


def rows_after(slots: list[int], starts: list[int], L: int) -> list[str]:
    """Write new tokens into layer 1 of an empty slab, and draw its rows.

    Token i's key is i in head 0 and i + 10 in head 1; its value is the key plus 20.
    """
    slab = kv.Slab(2, 3, 2, 1024, 4, mx.float32)  # layers, slots, Hkv, rows, Dh
    k = numbered(len(slots) * L)
    mx.eval(slab.arrays, k)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    kv.Window(slab, slots, starts, L).write(1, k, k + 20)
    mx.eval(slab.arrays)
    most = mx.get_peak_memory() - before
    assert most < slab.arrays[1].nbytes, "the slab was copied: `array[...] = new` writes in place"
    slab.check()
    return row_pictures([array[:, :, :32] for array in slab.arrays], "slot", 10)


@pytest.mark.about("write")
def test_write_a_chunk():
    """A chunk is written to its slot and its rows, in every head."""
    three_tokens_from_row_2_of_slot_1 = [
        "layer 1, k, slot 1, head 0  .  .  1  2  3  .  .  .  .  .",
        "layer 1, k, slot 1, head 1  .  . 11 12 13  .  .  .  .  .",
        "layer 1, v, slot 1, head 0  .  . 21 22 23  .  .  .  .  .",
        "layer 1, v, slot 1, head 1  .  . 31 32 33  .  .  .  .  .",
    ]
    assert rows_after([1], [2], 3) == three_tokens_from_row_2_of_slot_1
    slab = kv.Slab(1, 1, 1, 32, 4, mx.float16)
    kv.Window(slab, [0], [0], 1).write(0, mx.full((1, 1, 4), 1e5), mx.zeros((1, 1, 4)))
    slab.check()
    assert mx.isnan(slab.arrays[0][0, 0, 0]).all(), "1e5 is not a float16: see self.slab.narrowed"


@pytest.mark.about("write")
def test_write_several_sequences():
    """Tokens of several sequences are each written to their own slot."""
    two_tokens_each = [
        "layer 1, k, slot 1, head 0  .  .  .  1  2  .  .  .  .  .",
        "layer 1, k, slot 1, head 1  .  .  . 11 12  .  .  .  .  .",
        "layer 1, k, slot 2, head 0  .  .  .  .  .  .  3  4  .  .",
        "layer 1, k, slot 2, head 1  .  .  .  .  .  . 13 14  .  .",
        "layer 1, v, slot 1, head 0  .  .  . 21 22  .  .  .  .  .",
        "layer 1, v, slot 1, head 1  .  .  . 31 32  .  .  .  .  .",
        "layer 1, v, slot 2, head 0  .  .  .  .  .  . 23 24  .  .",
        "layer 1, v, slot 2, head 1  .  .  .  .  .  . 33 34  .  .",
    ]
    assert rows_after([1, 2], [3, 6], 2) == two_tokens_each
    assert rows_after([0, 2], [5, 1], 1) == [
        "layer 1, k, slot 0, head 0  .  .  .  .  .  1  .  .  .  .",
        "layer 1, k, slot 0, head 1  .  .  .  .  . 11  .  .  .  .",
        "layer 1, k, slot 2, head 0  .  2  .  .  .  .  .  .  .  .",
        "layer 1, k, slot 2, head 1  . 12  .  .  .  .  .  .  .  .",
        "layer 1, v, slot 0, head 0  .  .  .  .  . 21  .  .  .  .",
        "layer 1, v, slot 0, head 1  .  .  .  .  . 31  .  .  .  .",
        "layer 1, v, slot 2, head 0  . 22  .  .  .  .  .  .  .  .",
        "layer 1, v, slot 2, head 1  . 32  .  .  .  .  .  .  .  .",
    ]


@pytest.mark.about("read")
def test_read():
    """What was written is read back: the first T rows of a group's slots, in every head."""
    slab = kv.Slab(2, 4, 2, 32, 4, mx.float32)
    slab.arrays[1] = drawn(slab.shape, 9)
    window = kv.Window(slab, [1, 2], [4, 5], 1)
    group = kv.AttentionGroup(slots=slice(1, 3), T=6, positions=window.positions)
    keys, values = window.read(1, group)
    assert_close(keys, slab.arrays[1][1:3, :2, :6], "the keys")
    assert_close(values, slab.arrays[1][1:3, 2:, :6], "the values")


class Noted(kv.Window):
    """A window that records its reads and writes."""

    def __init__(self, did: list[str], *rest):
        super().__init__(*rest)
        self.did = did

    def write(self, *rest) -> None:
        self.did.append("write")
        super().write(*rest)

    def read(self, *rest) -> tuple[mx.array, mx.array]:
        self.did.append("read")
        return super().read(*rest)


@pytest.mark.about("attend", "run")
def test_several_windows():
    """Several windows share a pass, and in each layer all write before the first one reads."""
    model, _ = demo()
    prompts = [ids_of(prompt) for prompt in (SUM, "Spell lantern.", "Count from 5 to 9.")]
    ids = mx.array([*chain(*prompts)])
    did: list[str] = []
    slab = new_slab(slots=4)
    windows = [
        Noted(did, slab, [slot], [0], len(ids))
        for slot, ids in zip((3, 0, 1), prompts, strict=True)
    ]
    states = llama.forward(model, ids, windows, range(ids.size))
    alone = mx.concatenate([our_logits(prompt) for prompt in prompts])
    assert_close(model.head(states), alone, "the logits of three prompts", 1e-3)
    assert did == (["write"] * 3 + ["read"] * 3) * len(model.layers)

    # Now each sequence decodes one token. Slots 0, 1 and 3 hold prompts 1, 2 and 0. The first two are
    # neighbours, so they are one group
    decoding = kv.Window(slab, [0, 1, 3], [len(prompts[i]) for i in (1, 2, 0)], 1)
    states = llama.forward(model, mx.array([5, 6, 7]), [decoding], range(3))
    for i, (slot, prompt, token) in enumerate(((0, 1, 5), (1, 2, 6), (3, 0, 7))):
        wanted = our_logits((*prompts[prompt], token))[-1:]
        assert_close(model.head(states[i : i + 1]), wanted, f"the logits of slot {slot}", 1e-3)


def test_earlier_owner():
    """Rows of an earlier owner have no effect."""
    slab = new_slab()
    for layer in range(len(slab.arrays)):
        slab.arrays[layer] = 5 * drawn(slab.shape, 11)
    assert_close(logits(ids_of(), slab), our_logits(ids_of()), "the logits", 1e-3)


def test_kv_cache():
    """With the cache the answer is the same, and each step computes only one token."""
    slab = new_slab()
    said = answer(ids_of(), lambda ids, windows: logits(ids, slab, windows[0].starts[0]))
    assert text_of(said) == ANSWERS[SUM]
    tokens = len(ids_of()) + len(said) - 1
    print(f"{SUM}  ->  {text_of(said)}")
    without = sum(range(len(ids_of()), tokens + 1))
    print(f"without the slab {without} tokens are computed, with it {tokens}")
