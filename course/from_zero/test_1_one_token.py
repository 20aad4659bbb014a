"""Stage 1: one token says something. You write `attention`, `heads` and `forward` in llama.py.

B sequences of L new tokens each look back on T rows; there are H query heads and Hkv key heads of
Dh numbers each.
"""

import math
from types import SimpleNamespace

import pytest

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
    our_logits,
    text_of,
    varied,
)
from kernels.device import mx


def attention_by_hand(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
    """Compute attention token by token and head by head."""
    count, H, Dh = q.shape
    L = count // len(k)
    G = H // k.shape[1]
    sums = []
    for token in range(count):
        b, at = divmod(token, L)
        for head in range(H):
            keys, values = k[b, head // G], v[b, head // G]  # (T, Dh)
            scores = keys @ q[token, head] / math.sqrt(Dh)  # (T,)
            sums.append(mx.softmax(scores + mask[b, 0, at]) @ values)
    return mx.stack(sums).reshape(count, H * Dh)


def check_attention(H: int, Hkv: int, B: int, L: int, T: int) -> None:
    """Check attention for new tokens at the end of each sequence.

    If the result is wrong, compare it with those of common mistakes.
    """
    Dh = varied(8, 4, 12)
    q = drawn((B * L, H, Dh), 1)
    k = drawn((B, Hkv, T, Dh), 2)
    v = drawn((B, Hkv, T, Dh), 3)
    seen = mx.arange(T) <= mx.arange(T - L, T)[:, None]
    # 100 changes no weight, but e^100 is infinite if softmax does not subtract the largest score
    mask = mx.broadcast_to(mx.where(seen, 100.0, -mx.inf), (B, 1, L, T))
    heads = mx.arange(H) % Hkv
    found = llama.attention(q, k, v, mask, demo()[0].kinds[0])
    right = attention_by_hand(q, k, v, mask)
    what = f"attention (H={H}, Hkv={Hkv}, B={B}, L={L}, T={T})"
    try:
        assert_close(found, right, what)
    except AssertionError as error:
        mistakes = {
            "the scores are not divided by sqrt(Dh)": attention_by_hand(
                q * math.sqrt(Dh), k, v, mask
            ),
            "the mask is not added": attention_by_hand(q, k, v, mx.zeros_like(mask)),
            "query head h takes key head h % Hkv instead of h // G": attention_by_hand(
                q, k[:, heads], v[:, heads], mask
            ),
            "the sums, (B, H, L, Dh), are not brought back to (B, L, H, Dh)": (
                right.reshape(B, L, H, Dh).swapaxes(1, 2).reshape(right.shape)
            ),
        }
        lines = [str(error)]
        for mistake, wrong in mistakes.items():
            if getattr(found, "shape", None) == wrong.shape and mx.allclose(found, wrong, 1e-3):
                lines.append(f"this is the result if {mistake}")
        pytest.fail("\n".join(lines), pytrace=False)


GROUPED = varied((6, 2), (6, 3), (8, 2), (12, 4))  # H, Hkv


@pytest.mark.about("attention")
def test_values_are_weighed():
    """A query weights the values by their keys."""
    check_attention(H=1, Hkv=1, B=1, L=1, T=4)


@pytest.mark.about("attention")
def test_mask():
    """No query sees what the mask hides."""
    check_attention(H=1, Hkv=1, B=1, L=3, T=5)


@pytest.mark.about("attention")
def test_grouped_query_attention():
    """Neighbouring query heads share a key head."""
    check_attention(*GROUPED, B=1, L=1, T=5)
    check_attention(*GROUPED, B=1, L=3, T=5)


@pytest.mark.about("attention")
def test_batch():
    """Sequences of a batch do not see each other."""
    check_attention(*GROUPED, B=3, L=1, T=7)
    check_attention(*GROUPED, B=2, L=3, T=7)


@pytest.mark.about("heads")
def test_heads():
    """Queries and keys are normalized and rotated, values are not."""
    model, _ = demo()
    H, Hkv, Dh = model.config.H, model.config.Hkv, model.config.Dh
    qkv = drawn((5, (H + 2 * Hkv) * Dh), 4)  # for 5 tokens
    layer = SimpleNamespace(qkv=lambda x: qkv, qk_norm=lambda x: x + 1, heads=model.layers[0].heads)
    q, k, v = llama.heads(layer, drawn((5, model.config.D), 5), rope=lambda x: 3 * x)
    each = qkv.reshape(5, H + 2 * Hkv, Dh)
    assert_close(q, 3 * (each[:, :H] + 1), "the queries")
    assert_close(k, 3 * (each[:, H : H + Hkv] + 1), "the keys")
    assert_close(v, each[:, H + Hkv :], "the values")


@pytest.mark.about("forward")
def test_logits():
    """The logits of a prompt are right."""
    suspects = "two norms in each layer, two additions, a norm at the end, `layer.kind`'s RoPE"
    assert_close(logits(ids_of()), our_logits(ids_of()), f"the logits (check {suspects})", 1e-3)


@pytest.mark.about("forward")
def test_asked():
    """Only the states at `logits_at` come out."""
    few = logits(ids_of(), logits_at=[3, 7])
    assert_close(few, our_logits(ids_of())[mx.array([3, 7])], "the logits of tokens 3 and 7", 1e-3)


@pytest.mark.about("forward")
def test_positions():
    """Positions come from the windows, wherever these begin."""
    ids = ids_of()
    slab = new_slab()
    logits(ids[:5], slab)
    rest = logits(ids[5:], slab, start=5)
    assert_close(
        rest, our_logits(ids)[5:], "the logits from token 5 on, in a pass of their own", 1e-3
    )


def test_one_token():
    """The most likely token begins the answer."""
    found = logits(ids_of(), logits_at=[len(ids_of()) - 1])
    token = mx.argmax(found).item()
    assert ANSWERS[SUM].startswith(text_of([token]))
    print(f"{SUM}  ->  {text_of([token])}")
