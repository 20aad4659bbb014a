"""Chapter 1: everything a Llama does, from token ids to logits.

The problem. A language model answers one token at a time, and for each token the machine reads
every weight. That reading takes most of the time, and it costs almost the same for eight sequences
as for one. So an engine that serves many users wants many sequences in every forward pass. Their
lengths differ: one is at its third token, another at its thousandth, and a third brings in a whole
prompt. This file is the forward pass that runs them all.

The notation, used everywhere in this project (all terms: GLOSSARY.md):

    N    tokens in one forward pass            D    model width
    n    tokens whose next one is sampled      V    vocabulary
    B    sequences in one window or group      H    query heads
    L    new tokens of each sequence           Hkv  key and value heads; G = H / Hkv share one
    T    rows that attention reads             Dh   size of one head

    slot     a sequence's place in the slab
    row      a place in a slot, for one token's key and value
    chunk    a part of a prompt: prefill brings a prompt into its slot chunk by chunk
    decode   one new token for a sequence, or more with draft tokens
    window   the rows that a chunk, or decoding sequences together, write in a forward pass
    group    neighbouring sequences of a window whose attention is one product, over T rows of each
    kind     an attention type: RoPE and sliding window of some layers (most models have one)

The invariant: a token's logits depend on the model and on the tokens before it in its own sequence,
and on nothing else: not on the neighbours, not on the slot, and not on the timing. Where
`Engine.is_batch_invariant` is True (on a CPU, with our own matrix product), that holds for every bit.
The proof is one sentence, in `kernels/cpu_kernels.c`: every number of a matrix product is one sum,
computed in one order.

Where next: `kv.py`, which holds the keys and values.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from kernels import c_attention as fused
from kernels.device import mx
from kv import AttentionGroup, Window
from models.layers import Layer, Model
from models.ops import capped, softmax
from models.rope import AttentionType, turning


def forward(
    model: Model,
    ids: mx.array,  # (N,)
    windows: Sequence[Window],
    asked: Sequence[int],
) -> mx.array:  # (n, D)
    """Run the tokens of all windows, one after the other, through the model. Return the final
    hidden states at `asked`; `model.head(states)` turns them into logits, (n, V).

    `windows`: each chunk of a prompt has one of its own; decoding sequences with the same number of
    new tokens share one.
    `asked`: indices into the N tokens: those whose next token is to be sampled. Ascending, without
    duplicates.

    Norms, projections and the MLP treat each token by itself. So each weight is read once for all N
    tokens. Only attention needs to know which sequence a token belongs to. What a layer calls
    (`models/layers.py`; a family may add to it when the model is loaded):

        attn_norm, mlp_norm   x / sqrt(mean(x^2) + eps) * weight           RMSNorm
        qkv, out, head        x W^T
        turn                  (a, b) -> (a cos - b sin, b cos + a sin)     RoPE, in each plane
        mlp                   down(silu(gate(x)) * up(x))                  SwiGLU

    Nothing is computed here. MLX is lazy: each line adds nodes to a graph, and `Runner` starts it.
    """
    positions = mx.concatenate([window.positions for window in windows])  # (N,)
    turns = [turning(kind, positions) for kind in model.kinds]
    visible = [visible_to(kind, model.config.H, windows) for kind in model.kinds]
    x = model.table.embed(ids)  # (N, D)
    for layer in model.layers:
        h = layer.attn_norm(x)
        q, k, v = heads(model, layer, h, turns[layer.kind])
        h = attend(model, layer, q, k, v, windows, visible[layer.kind])  # (N, H * Dh)
        if layer is model.layers[-1]:
            # All keys and values are stored. Only tokens whose next one is sampled go on.
            x = only(x, asked)  # (n, D)
            h = only(h, asked)  # (n, H * Dh)
        x = x + layer.out(h)
        h = layer.mlp_norm(x)
        x = x + layer.mlp(h)
    return model.norm(x)


def heads(
    model: Model,
    layer: Layer,
    x: mx.array,  # (N, D)
    turn: Callable[[mx.array], mx.array],
) -> tuple[mx.array, mx.array, mx.array]:  # (N, H, Dh), twice (N, Hkv, Dh)
    """Each token's queries, keys and values, head by head.

    `turn`: RoPE. It rotates queries and keys by position, so that scores depend on distances.
    """
    c = model.config
    qkv = layer.qkv(x).reshape(-1, c.H + 2 * c.Hkv, c.Dh)
    qk, v = mx.split(qkv, [c.H + c.Hkv], axis=1)
    qk = turn(layer.qk_norm(qk))  # queries and keys together: one operation instead of two
    q, k = mx.split(qk, [c.H], axis=1)
    return q, k, v


def attend(
    model: Model,
    layer: Layer,
    q: mx.array,  # (N, H, Dh)
    k: mx.array,  # (N, Hkv, Dh)
    v: mx.array,  # (N, Hkv, Dh)
    windows: Sequence[Window],
    visible: mx.array | list,  # as `visible_to` makes it
) -> mx.array:  # (N, H * Dh)
    """Write the new keys and values into the slab, and let each token attend to the rows of its slot.

    All windows write before the first one reads (`Window.write` says why).
    """
    sizes = [window.B * window.L for window in windows]
    for window, new_k, new_v in zip(windows, cut(k, sizes), cut(v, sizes), strict=True):
        window.write(layer.index, new_k, new_v)

    slab = windows[0].slab
    if slab.is_fused:
        return fused.attend(q, visible, slab.arrays[layer.index])
    sums = []
    for window, window_q, masks in zip(windows, cut(q, sizes), visible, strict=True):
        parts = cut(window_q, [group.B * window.L for group in window.groups])
        for group, group_q, mask in zip(window.groups, parts, masks, strict=True):
            keys, values = window.read(layer.index, group)  # (B, Hkv, T, Dh) each
            sums.append(attention(group_q, keys, values, mask, model.kinds[layer.kind]))
    return mx.concatenate(sums)


def attention(
    q: mx.array,  # (B * L, H, Dh)
    k: mx.array,  # (B, Hkv, T, Dh)
    v: mx.array,  # (B, Hkv, T, Dh)
    mask: mx.array | str,  # as `mask_of` makes it
    kind: AttentionType,
) -> mx.array:  # (B * L, H * Dh)
    """softmax(q k^T / sqrt(Dh) + mask) v

    This formula runs on a GPU, without our matrix product (`cpu_kernels.c`), with `--attention plain`
    and with `--book` (a student's core). Otherwise a CPU runs `fused.attend`, one operation of
    `cpu_kernels.c`, with the same bits; a test compares them. If you change the formula, run with
    `--attention plain` to see the effect.

    Each token's query is compared with the keys of the tokens that it sees: all up to itself, or,
    with a span (sliding window), the last of them. The result weights the values. The mask is 0 for
    these keys, and minus infinity for all others, so that their weight is 0.

    G = H / Hkv query heads share a key head. They are adjacent, so they fold into the
    rows of one matrix product, and each key is read once for all of them.
    """
    count, H, Dh = q.shape
    B, Hkv, T, _ = k.shape
    L = count // B
    scale = Dh**-0.5
    # subtle: cast before k is transposed. Afterwards the copy would be made in the other layout,
    # which has another order of sums.
    k = k.astype(q.dtype)
    v = v.astype(q.dtype)
    if L > 1:  # a chunk; with one token a sequence, the numbers are in order
        q = q.reshape(B, L, H, Dh).swapaxes(1, 2)  # (B, H, L, Dh)
    if kind.has_kernel:  # on a GPU, one kernel does all of this and keeps no scores
        q = q.reshape(B, H, L, Dh)
        sums = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    else:
        q = q.reshape(B, Hkv, -1, Dh)  # (B, Hkv, G * L, Dh)
        scores = q @ k.swapaxes(-1, -2)  # (B, Hkv, G * L, T)
        if kind.cap:
            scores = capped(scores * scale, kind.cap)
            scale = 1.0
        scores = scores.reshape(B, H, L, T) + mask  # in float32, as the mask is
        weights = softmax(scores, scale).astype(q.dtype)
        sums = weights.reshape(B, Hkv, -1, T) @ v  # (B, Hkv, G * L, Dh)
    if L > 1:
        sums = sums.reshape(B, H, L, Dh).swapaxes(1, 2)  # (B, L, H, Dh)
    return sums.reshape(count, H * Dh)


def visible_to(kind: AttentionType, H: int, windows: Sequence[Window]) -> mx.array | list:
    """Which rows each token sees, alike in all layers of a kind: for `fused.attend`, or as a mask
    for each group of each window."""
    if windows[0].slab.is_fused:
        return fused.visible_rows(windows, kind.span, kind.cap)
    return [[mask_of(group, kind, H) for group in window.groups] for window in windows]


def mask_of(group: AttentionGroup, kind: AttentionType, H: int) -> mx.array | str:
    """What is added to the scores of each token, (B, 1, L, T), the same for all heads: 0 for a row
    that is seen, and minus infinity for any other.

    A GPU's kernel wants True and False, for each head. subtle: a view would be copied for each head
    in each layer; this is one copy for all. Where one sequence sees all its rows, the string
    "causal" is enough.
    """
    if kind.has_kernel and group.B == 1 and kind.span is None:
        return "causal"
    visible = seen(group.positions, group.T, kind.span)  # (B, 1, L, T)
    if not kind.has_kernel:
        return mx.where(visible, 0.0, -mx.inf)
    B, _, L, T = visible.shape
    return mx.contiguous(mx.broadcast_to(visible, (B, H, L, T)))


def seen(positions: mx.array, T: int, span: int | None) -> mx.array:  # (B, 1, L, 1) -> (B, 1, L, T)
    """A token at position p sees row j if j <= p. So it sees no later token, and no row of a
    previous owner.

    `span`: how many rows it sees, its own included; None means all rows of its sequence.
    """
    rows = mx.arange(T)
    seen = rows <= positions
    return seen if span is None else seen & (rows > positions - span)


def only(x: mx.array, places: Sequence[int]) -> mx.array:  # (N, ...) -> (n, ...)
    if len(places) == len(x):
        return x
    return mx.take(x, mx.array(list(places), mx.int32), axis=0)


def cut(x: mx.array, sizes: Sequence[int]) -> list[mx.array]:  # (N, ...) -> (size, ...) each
    if len(sizes) == 1:
        return [x]  # no node of the graph
    ends = list(accumulate(sizes))
    return mx.split(x, ends[:-1])
