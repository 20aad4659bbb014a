"""The demo model without an engine, for the checks of stages 9 to 12.

Norm, rotation and attention are MLX's own functions, and any window that can `write` and `read` may
hold the keys and values. So these stages depend on none of the others.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from kernels.device import mx
from kv import AttentionGroup
from models.model_finder import DEMO
from text.tokenizer import Tokenizer

LAYERS, H, HKV, DH, V = 6, 6, 2, 32, 1536


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO, V)


@cache
def weights() -> dict[str, mx.array]:
    found = mx.load(str(DEMO / "model.safetensors"))
    return {name.removeprefix("model."): each.astype(mx.float32) for name, each in found.items()}


def weights_of(layer: int) -> dict[str, mx.array]:
    """Return a layer's weights by short name.

    They are "q_proj" (H * Dh, D), "down_proj" (D, hidden), "input_layernorm" (D,) and so on.
    """
    prefix = f"layers.{layer}."
    found = weights().items()
    return {name.split(".")[-2]: each for name, each in found if name.startswith(prefix)}


def norm(x: mx.array, weight: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, weight, 1e-5)


def block(x: mx.array, w: dict[str, mx.array], attend: Callable) -> mx.array:  # (N, D)
    """Run one layer. `attend` turns queries, keys and values into (N, H * Dh)."""
    h = norm(x, w["input_layernorm"])
    h = attend(h @ w["q_proj"].T, h @ w["k_proj"].T, h @ w["v_proj"].T)
    x = x + h @ w["o_proj"].T
    h = norm(x, w["post_attention_layernorm"])
    gate = h @ w["gate_proj"].T
    return x + (gate * mx.sigmoid(gate) * (h @ w["up_proj"].T)) @ w["down_proj"].T


def forward(
    ids: Sequence[int],
    windows: Sequence[Any],
    block: Callable = block,
    weights_of: Callable = weights_of,
) -> mx.array:  # (N, V): the logits
    """Run the tokens of all windows, one window after the other."""
    x = weights()["embed_tokens.weight"][mx.array(list(ids))]
    for layer in range(LAYERS):
        x = block(x, weights_of(layer), partial(attention, layer, windows))
    return norm(x, weights()["norm.weight"]) @ weights()["embed_tokens.weight"].T


def attention(
    layer: int, windows: Sequence[Any], q: mx.array, k: mx.array, v: mx.array
) -> mx.array:  # (N, heads * Dh) each
    sums = []
    at = 0
    for window in windows:
        tokens = slice(at, at + window.B * window.L)
        at = tokens.stop
        new_q, new_k, new_v = (by_head(x[tokens], window.B) for x in (q, k, v))
        new_q = rope(new_q, window)
        window.write(layer, by_token(rope(new_k, window)), by_token(new_v))
        for i, group in enumerate(window.groups):
            keys, values = window.read(layer, group)  # (1, Hkv, T, Dh) each
            mask = mx.arange(group.T) <= group.positions  # (1, 1, L, T)
            found = mx.fast.scaled_dot_product_attention(
                new_q[i : i + 1], keys, values, scale=DH**-0.5, mask=mask
            )
            sums.append(by_token(found).flatten(1))
    return mx.concatenate(sums)


def by_head(x: mx.array, B: int) -> mx.array:  # (B * L, heads * Dh) -> (B, heads, L, Dh)
    return x.reshape(B, -1, x.shape[-1] // DH, DH).swapaxes(1, 2)


def by_token(x: mx.array) -> mx.array:  # (B, heads, L, Dh) -> (B * L, heads, Dh)
    return x.swapaxes(1, 2).flatten(0, 1)


def rope(x: mx.array, window: "Window") -> mx.array:
    starts = mx.array(window.starts)
    return mx.fast.rope(x, DH, traditional=False, base=10000.0, scale=1.0, offset=starts)


class Window:
    """The base of windows.

    Each of B sequences has L new tokens, whose rows begin at its entry in `starts`. The groups are
    like those of `kv.Window`, but each sequence has a group of its own.
    """

    def __init__(self, starts: Sequence[int], L: int):
        self.starts = starts
        self.B = len(starts)
        self.L = L
        self.positions = mx.array([start + i for start in starts for i in range(L)])  # (B * L,)
        self.groups = []
        for i, shown in enumerate(mx.split(self.positions, self.B)):
            group = AttentionGroup(slice(i, i + 1), starts[i] + L, shown.reshape(1, 1, L, 1))
            self.groups.append(group)


class Rows(Window):
    """The rows of one sequence: a growing array for each layer."""

    def __init__(self) -> None:
        self.kept = [mx.zeros((1, 0, 0, DH))] * LAYERS  # (1, heads of keys and values, rows, Dh)

    def at(self, start: int, L: int) -> "Rows":
        """Let the next tokens go into rows from `start` on. Later rows are dropped."""
        super().__init__([start], L)
        return self

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        new = mx.concatenate([k, v], axis=1).swapaxes(0, 1)[None]
        (start,) = self.starts
        old = self.kept[layer][:, :, :start]
        self.kept[layer] = mx.concatenate([old, new], axis=2) if start else new

    def read(self, layer: int, group: AttentionGroup) -> list[mx.array]:
        return mx.split(self.kept[layer], 2, axis=1)


def answer(prompt: Sequence[int], step: Callable = forward, most: int = 40) -> list[int]:
    """Return the greedy answer, one token per step. `step` computes logits from ids and windows."""
    rows = Rows()
    said: list[int] = []
    new = list(prompt)
    start = 0
    while len(said) < most and (not said or said[-1] not in tokenizer().end_tokens):
        logits = step(new, [rows.at(start, len(new))])
        start += len(new)
        new = [mx.argmax(logits[-1]).item()]
        said += new
    return said
