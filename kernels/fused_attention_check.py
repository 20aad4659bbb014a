"""Check MLX's fused attention on this device.

On some chips and for some lengths it returned garbage without an error, for example for grouped heads
in the two-pass kernel from 1,024 rows on. So it is checked with a model's heads when the model is
loaded. If its result differs from the formula, `llama.Formula` is used instead.
"""

from functools import cache

from kernels.device import mx

LENGTHS = (64, 1024, 4096)  # rows; each length uses a different kernel or path
CHUNK = 16
MOST_OFF = 0.05  # the error of half precision is 0.01, that of a wrong row about 1


@cache
def is_right(H: int, Hkv: int, Dh: int, dtype: mx.Dtype) -> bool:
    """Return True if fused attention agrees with the formula for these heads.

    Checks decode steps and chunks, with a mask array and with the causal mask, on views of a slab."""
    heads = min(Hkv, 2)
    shape = (3, heads, LENGTHS[-1], Dh)
    slab = [mx.random.normal(shape, dtype, key=mx.random.key(seed)) for seed in (0, 1)]
    off = []
    for T in LENGTHS:
        for B, L in ((2, 1), (1, 1), (1, CHUNK)):
            k, v = (x[1 : 1 + B, :, :T] for x in slab)
            # Scaled so that the softmax is peaked and the result is not a mean near 0
            q = 3 * mx.random.normal((B, heads * H // Hkv, L, Dh), dtype, key=mx.random.key(2))
            behind = 5 * mx.arange(B)[:, None, None, None]  # the second sequence is shorter
            seen = mx.arange(T) <= mx.arange(T - L, T)[:, None] - behind  # (B, 1, L, T)
            mask = mx.contiguous(mx.broadcast_to(seen, (*q.shape[:3], T)))
            wanted = formula(q, k, v, seen)
            for form in (mask, "causal")[: 3 - B]:
                found = mx.fast.scaled_dot_product_attention(q, k, v, scale=Dh**-0.5, mask=form)
                off.append(mx.max(mx.abs(found - wanted)))
    return all(each <= MOST_OFF for each in mx.stack(off).tolist())  # False for NaN


def formula(
    q: mx.array,  # (B, H, L, Dh)
    k: mx.array,  # (B, Hkv, T, Dh)
    v: mx.array,  # (B, Hkv, T, Dh)
    seen: mx.array,  # (B, 1, L, T)
) -> mx.array:  # (B, H, L, Dh), in float32
    B, H, L, Dh = q.shape
    Hkv, T = k.shape[1:3]
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    scores = q.reshape(B, Hkv, -1, Dh) @ k.swapaxes(-1, -2) * Dh**-0.5  # (B, Hkv, G * L, T)
    scores = mx.where(seen, scores.reshape(B, H, L, T), -mx.inf)
    weights = mx.softmax(scores, axis=-1).reshape(B, Hkv, -1, T)
    return (weights @ v).reshape(B, H, L, Dh)
