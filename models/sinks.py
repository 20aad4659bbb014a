"""The attention sinks of gpt-oss: the softmax of each query head has one more logit, without a value."""

from __future__ import annotations

from kernels.device import mx
from kernels.library import ORDER


def with_sinks(
    sinks: mx.array,  # (H,)
    mask: mx.array,  # (B, 1, L, T)
    k: mx.array,  # (B, Hkv, T, Dh)
    v: mx.array,  # (B, Hkv, T, Dh)
) -> tuple[mx.array, mx.array, mx.array]:  # (B, H, L, ORDER + T), (B, Hkv, ORDER + T, Dh) twice
    """Add attention sinks to the arguments of `llama.attention`: prepend keys and values of zeros, and
    use the mask to add the sink to the score of the first one.

    subtle: `ORDER` zeros are prepended, one per partial sum of the softmax, so that each row stays in
    the same partial sum.
    """
    B, _, L, T = mask.shape
    Dh = k.shape[-1]
    first = mx.full((len(sinks), 1, ORDER), -mx.inf)
    first[:, 0, 0] = sinks / Dh**-0.5  # attention scales the sum of score and mask
    first = mx.broadcast_to(first, (B, len(sinks), L, ORDER))
    mask = mx.concatenate([first, mx.broadcast_to(mask, (B, len(sinks), L, T))], axis=-1)
    k, v = (mx.pad(each, [(0, 0), (0, 0), (ORDER, 0), (0, 0)]) for each in (k, v))
    return mask, k, v
