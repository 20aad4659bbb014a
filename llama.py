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
    kind     an attention type: RoPE and sliding window (most models have one; `layer.kind` is its index)

The invariant: a token's logits depend on the model and on its own sequence up to this token, and on
nothing else: not on the neighbours, not on the slot, and not on the timing. Where
`Engine.is_batch_invariant` is True (on a CPU, with our own matrix product), that holds for every bit.
The proof is one sentence, in `kernels/cpu_kernels.c`: every number of a matrix product is one sum,
computed in one order.

`attention` below is the reference. On a CPU with our own matrix product, one C operation with the same
bits runs instead (`kernels/c_attention.py`); on a GPU it is MLX's kernel, for models that it supports.
The choice is made when a model is loaded (`ATTENTION`); `--attention plain` chooses the formula.

Where next: `kv.py`, which holds the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from kernels.c_attention import COperation
from kernels.device import mx
from kv import AttentionGroup, Window
from models.layers import Layer, Model
from models.ops import capped, softmax
from models.rope import AttentionType, rope_at
from models.sinks import with_sinks


def forward(
    model: Model,
    ids: mx.array,  # (N,)
    windows: Sequence[Window],
    logits_at: Sequence[int],
) -> mx.array:  # (n, D)
    """Run the tokens of all windows, one after the other, through the model. Return the final
    hidden states at `logits_at`; `model.head(hidden)` turns them into logits, (n, V).

    `windows`: each chunk of a prompt has its own window; decoding sequences with the same number of
    new tokens share one.
    `logits_at`: the indices, among the N tokens, of those whose next token is to be sampled. Ascending,
    without duplicates.

    Norms, projections and the MLP treat each token by itself. So each weight is read once for all N
    tokens. Only attention needs to know which sequence a token belongs to. What a layer calls
    (`models/layers.py`; `mixer`, `gate`, `after` and `layer_inputs` are None in a Llama):

        attn_norm, mlp_norm   x / sqrt(mean(x^2) + eps) * weight           RMSNorm
        qkv, out, head        x W^T
        rope                  (a, b) -> (a cos - b sin, b cos + a sin)     RoPE, in each plane
        mlp                   down(silu(gate(x)) * up(x))                  SwiGLU

    Nothing is computed here. MLX is lazy: each line adds nodes to a graph, and `Runner` starts it.
    """
    positions = mx.concatenate([window.positions for window in windows])  # (N,)
    ropes = [rope_at(kind, positions) for kind in model.kinds]
    prepare = ATTENTION[model.attention]
    operations = [prepare(kind, model.config.H, windows) for kind in model.kinds]
    x = model.table.embed(ids)  # (N, D)
    inputs = model.layer_inputs(ids, x, logits_at) if model.layer_inputs else []
    for layer in model.layers:
        normed = layer.attn_norm(x)
        if layer.mixer:
            h = layer.mixer(normed, windows)
        else:
            q, k, v = heads(layer, normed, ropes[layer.kind])
            h = attend(layer, q, k, v, windows, operations[layer.kind])  # (N, H * Dh)
        if layer.gate:
            h = layer.gate(h, normed)
        if layer is model.layers[-1]:
            # All keys and values are written. Only tokens whose next one is sampled continue.
            x = only(x, logits_at)  # (n, D)
            h = only(h, logits_at)  # (n, H * Dh)
        x = x + layer.out(h)
        h = layer.mlp_norm(x)
        x = x + layer.mlp(h)
        if layer.after:
            x = layer.after(x, inputs)
    return model.norm(x)


def heads(
    layer: Layer,
    x: mx.array,  # (N, D)
    rope: Callable[[mx.array], mx.array],
) -> tuple[mx.array, mx.array, mx.array]:  # (N, H, Dh), twice (N, Hkv, Dh)
    """Return each token's queries, keys and values, split into heads.

    `rope`: rotates queries and keys by position, so that scores depend on distances.
    """
    c = layer.heads
    qkv = layer.qkv(x).reshape(-1, c.H + 2 * c.Hkv, c.Dh)
    qk, v = mx.split(qkv, [c.H + c.Hkv], axis=1)
    qk = rope(layer.qk_norm(qk))  # queries and keys in one operation
    q, k = mx.split(qk, [c.H], axis=1)
    return q, k, v


def attend(
    layer: Layer,
    q: mx.array,  # (N, H, Dh)
    k: mx.array,  # (N, Hkv, Dh)
    v: mx.array,  # (N, Hkv, Dh)
    windows: Sequence[Window],
    operation: COperation | Formula,
) -> mx.array:  # (N, H * Dh)
    """Write the new keys and values into the slab, and let each token attend to the rows of its slot.
    All windows write before the first one reads (`Window.put` says why)."""
    sizes = [window.B * window.L for window in windows]
    if k.size:  # k is empty in a layer that reads an earlier layer's rows, at `layer.slab_index`
        for window, new_k, new_v in zip(windows, cut(k, sizes), cut(v, sizes), strict=True):
            window.write(layer.slab_index, new_k, new_v)
    return operation.run(layer.slab_index, q)


class Formula:
    """Attention by the formula, group by group."""

    def __init__(self, kind: AttentionType, H: int, windows: Sequence[Window]):
        self.kind = kind
        self.windows = windows
        self.masks = [[self.mask(group, H) for group in window.groups] for window in windows]

    def mask(self, group: AttentionGroup, H: int) -> mx.array:  # (B, 1, L, T)
        """The mask that is added to the scores of each token in all heads: 0 for a row that the token
        sees, and minus infinity for any other."""
        return mx.where(seen(group.positions, group.T, self.kind.span), 0.0, -mx.inf)

    def run(self, layer: int, q: mx.array) -> mx.array:
        sums = []
        parts = cut(q, [window.B * window.L for window in self.windows])
        for window, window_q, masks in zip(self.windows, parts, self.masks, strict=True):
            groups = cut(window_q, [group.B * window.L for group in window.groups])
            for group, group_q, mask in zip(window.groups, groups, masks, strict=True):
                keys, values = window.read(layer, group)  # (B, Hkv, T, Dh) each
                if layer in self.kind.sinks:
                    mask, keys, values = with_sinks(self.kind.sinks[layer], mask, keys, values)
                sums.append(self.of_group(group_q, keys, values, mask))
        return mx.concatenate(sums)

    def of_group(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        return attention(q, k, v, mask, self.kind)


def attention(
    q: mx.array,  # (B * L, H, Dh)
    k: mx.array,  # (B, Hkv, T, Dh)
    v: mx.array,  # (B, Hkv, T, Dh)
    mask: mx.array,  # (B, 1, L, T)
    kind: AttentionType,
) -> mx.array:  # (B * L, H * Dh)
    """softmax(q k^T / sqrt(Dh) + mask) v

    Each token's query is compared with the keys of the tokens that it sees: all tokens up to itself,
    or only the last `span` with a sliding window. The softmax of these scores weights the values.
    The mask is 0 for keys that are seen, and minus infinity for the rest, whose weights become 0.

    G = H / Hkv query heads share a key head. They are adjacent, so they become rows of one matrix
    product, and each key is read once for all of them.
    """
    count, H, Dh = q.shape
    B, Hkv, T, _ = k.shape
    L = count // B
    scale = Dh**-0.5
    # subtle: cast before transposing k. A cast of the transposed array would be laid out differently,
    # and the product would add in a different order.
    k = k.astype(q.dtype)
    v = v.astype(q.dtype)
    if L > 1:  # with one token per sequence, the numbers are in this order already
        q = q.reshape(B, L, H, Dh).swapaxes(1, 2)  # (B, H, L, Dh)
    q = q.reshape(B, Hkv, -1, Dh)  # (B, Hkv, G * L, Dh)
    scores = q @ k.swapaxes(-1, -2)  # (B, Hkv, G * L, T)
    if kind.cap:
        scores = capped(scores * scale, kind.cap)
        scale = 1.0
    scores = scores.reshape(B, H, L, T) + mask  # in float32, like the mask
    weights = softmax(scores, scale).astype(q.dtype)
    sums = weights.reshape(B, Hkv, -1, T) @ v  # (B, Hkv, G * L, Dh)
    if L > 1:
        sums = sums.reshape(B, H, L, Dh).swapaxes(1, 2)  # (B, L, H, Dh)
    return sums.reshape(count, H * Dh)


class MlxKernel(Formula):
    """MLX's fused kernel on a GPU, which does not store the scores."""

    def mask(self, group: AttentionGroup, H: int) -> mx.array | str:
        """True where a token sees a row. A single sequence without a span needs only "causal"."""
        if group.B == 1 and self.kind.span is None:
            return "causal"
        visible = seen(group.positions, group.T, self.kind.span)  # (B, 1, L, T)
        B, _, L, T = visible.shape
        # subtle: the kernel would copy a view for each head in each layer; this copies it once
        return mx.contiguous(mx.broadcast_to(visible, (B, H, L, T)))

    def of_group(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str) -> mx.array:
        count, H, Dh = q.shape
        B = len(k)
        q = q.reshape(B, -1, H, Dh).swapaxes(1, 2)  # (B, H, L, Dh)
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        sums = mx.fast.scaled_dot_product_attention(q, k, v, scale=Dh**-0.5, mask=mask)
        return sums.swapaxes(1, 2).reshape(count, H * Dh)


ATTENTION = {"c": COperation, "formula": Formula, "kernel": MlxKernel}


def seen(positions: mx.array, T: int, span: int | None) -> mx.array:  # (B, 1, L, 1) -> (B, 1, L, T)
    """True where a token at position p sees row j, which is where j <= p. So it sees no later token,
    and no row of the slot's previous owner.

    `span`: the number of rows it sees, including its own. None: all rows of its sequence.
    """
    rows = mx.arange(T)
    visible = rows <= positions
    return visible if span is None else visible & (rows > positions - span)


def only(x: mx.array, places: Sequence[int]) -> mx.array:  # (N, ...) -> (n, ...)
    if len(places) == len(x):
        return x
    return mx.take(x, mx.array(list(places), mx.int32), axis=0)


def cut(x: mx.array, sizes: Sequence[int]) -> list[mx.array]:  # (N, ...) -> (size, ...) each
    if len(sizes) == 1:
        return [x]  # adds no node to the graph
    ends = list(accumulate(sizes))
    return mx.split(x, ends[:-1])
