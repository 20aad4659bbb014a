"""Chapter 1: everything a Llama does, from token ids to logits.

The problem. A language model answers one token at a time, and for each token the machine reads every weight it has.
That reading takes most of the time, and it costs almost the same for eight sequences as for one. So an engine that
serves many people wants many sequences in every forward pass. Their lengths differ: one may be at its third token,
another at its thousandth, and a third brings in a whole prompt. This file is the forward pass that takes them all.

The glossary, used everywhere in this project:

    N    tokens in one forward pass                   D    model width
    B    sequences in one window of it                H    query heads
    L    new tokens of each sequence                  Hkv  key and value heads; G = H / Hkv queries share one
    S    length of a slot of the slab                 Dh   size of one head
    T    how many rows attention reads                C    width of a prefill chunk
    V    vocabulary

    slot     a sequence's place in the slab: S rows
    row      a place in a slot, for one token's key and value
    window   the rows of the slab that a chunk, or all decoding sequences, write and read in a forward pass
    prefill  the prompt goes into the slot, in chunks
    decode   one new token for a sequence

The invariant: a token's logits depend on the tokens before it in its own sequence and on the model, and on nothing
else: not on the neighbours, not on the slot, and not on the moment. Where `engine.exact` is True, that holds for every
bit. The proof is one sentence, in `parts/device/rows.c`: every number of a matrix product is one sum, taken in one
order.

Where next: `kv.py`, which holds the keys and values.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from kv import Window
from parts.device.mlx import mx
from parts.model.layers import Layer, Model
from parts.model.ops import capped, softmax
from parts.model.rope import Kind, turning


def forward(model: Model, ids: mx.array, windows: Sequence[Window], asked: Sequence[int]) -> mx.array:
    """The token ids (N,) of all windows, side by side -> the logits (n, V) of the n tokens that are asked for.

    Each chunk of a prompt has a window of its own, and all decoding sequences share one. Norms, projections and the MLP
    treat each token by itself, so each weight is read once for all N tokens. Only attention needs to know which
    sequence a token belongs to.

    `asked` holds the places of tokens, among all N, from which a next token is to be sampled. Of a prompt that is its
    last one. The last layer computes keys and values of all tokens, and the rest for those that are asked for.

    Nothing is computed here. MLX is lazy: each line adds nodes to a graph, and `Runner.run` starts the whole of it.
    """
    positions = mx.concatenate([window.positions for window in windows])  # (N,)
    turns = [turning(kind, positions) for kind in model.kinds]
    x = model.table.rows(ids)  # (N, D)
    for layer in model.layers:
        h = layer.attn_norm(x)
        q, k, v = heads(model, layer, h, turns[layer.kind])  # (N, H, Dh), twice (N, Hkv, Dh)
        h = attend(model, layer, q, k, v, windows)  # (N, H * Dh)
        if layer is model.layers[-1]:
            x = only(x, asked)  # (n, D)
            h = only(h, asked)  # (n, H * Dh)
        x = x + layer.out(h)  # (N, D)
        h = layer.mlp_norm(x)
        x = x + layer.mlp(h)
    return model.head(model.norm(x))  # (n, V)


def heads(
    model: Model, layer: Layer, x: mx.array, turn: Callable[[mx.array], mx.array]
) -> tuple[mx.array, mx.array, mx.array]:  # (N, D) -> (N, H, Dh), twice (N, Hkv, Dh)
    """Each token's queries, keys and values, head by head, queries and keys turned by their positions."""
    c = model.config
    qkv = layer.qkv(x).reshape(-1, c.H + 2 * c.Hkv, c.Dh)
    qk, v = mx.split(qkv, [c.H + c.Hkv], axis=1)
    qk = turn(layer.qk_norm(qk))  # q and k turn alike: one operation for both
    q, k = mx.split(qk, [c.H], axis=1)
    return q, k, v


def attend(
    model: Model, layer: Layer, q: mx.array, k: mx.array, v: mx.array, windows: Sequence[Window]
) -> mx.array:  # (N, H, Dh), twice (N, Hkv, Dh) -> (N, H * Dh)
    """Write the new keys and values into the slab, and let each sequence look back on its own slot.

    All windows write before the first one reads: see `Window.write`.
    """
    kind = model.kinds[layer.kind]
    sizes = [window.B * window.L for window in windows]
    for window, own_k, own_v in zip(windows, cut(k, sizes), cut(v, sizes), strict=True):
        window.write(layer.index, own_k, own_v)

    kernel_heads = model.config.H if kind.has_kernel else 0
    looks = [(window, look) for window in windows for look in window.looks(kind.span, kernel_heads)]
    sizes = [look.B * window.L for window, look in looks]
    sums = []
    for own_q, (window, look) in zip(cut(q, sizes), looks, strict=True):
        k, v = window.read(layer.index, look)
        sums.append(attention(own_q, k, v, look.mask, kind))
    return mx.concatenate(sums)


def attention(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str, kind: Kind
) -> mx.array:  # (B * L, H, Dh), twice (B, Hkv, T, Dh) -> (B * L, H * Dh)
    """softmax(q k^T / sqrt(Dh) + mask) v

    Each token's query is compared with the keys of all tokens up to itself; the result weights their values. The mask
    is 0 for these keys and minus infinity for all others, whose weight becomes 0.

    G = H / Hkv query heads share a key head. They stand next to each other, so they fold into the rows of one matrix
    product, and each key is read once for all of them.

    On a GPU, one kernel does all of this and keeps no scores. It knows no cap of the scores, which Gemma 2 has.
    """
    n, H, Dh = q.shape
    B, Hkv, T, _ = k.shape
    scale = Dh**-0.5
    if kind.has_kernel:
        q = q.reshape(B, -1, H, Dh).swapaxes(1, 2)  # (B, H, L, Dh)
        sums = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    else:
        q = (q * scale).reshape(B, -1, H, Dh).swapaxes(1, 2).reshape(B, Hkv, -1, Dh)  # (B, Hkv, G * L, Dh)
        scores = q @ k.swapaxes(-1, -2)  # (B, Hkv, G * L, T)
        if kind.cap:
            scores = capped(scores, kind.cap)
        scores = scores.reshape(B, Hkv, H // Hkv, -1, T) + mask  # (B, Hkv, G, L, T)
        weights = softmax(scores).astype(v.dtype).reshape(B, Hkv, -1, T)
        sums = (weights @ v).reshape(B, H, -1, Dh)  # (B, Hkv, G * L, Dh) -> (B, H, L, Dh)
    return sums.swapaxes(1, 2).reshape(n, H * Dh)


def only(x: mx.array, places: Sequence[int]) -> mx.array:  # (N, ...) -> (n, ...)
    return x if len(places) == len(x) else mx.take(x, mx.array(list(places), mx.int32), axis=0)


def cut(x: mx.array, sizes: Sequence[int]) -> list[mx.array]:  # (N, ...) -> (size, ...) each
    return mx.split(x, list(accumulate(sizes))[:-1]) if len(sizes) > 1 else [x]
