"""The demo model without an engine: what the checks of stages 9 to 12 run.

MLX's own functions stand for norm, rotation and attention, and any window that can `write` and `read`
holds the keys and values. So these stages need none of the others.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace

from kernels.mlx import mx
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
    """By short name: "q_proj" (H * Dh, D), "down_proj" (D, hidden), "input_layernorm" (D,)."""
    prefix = f"layers.{layer}."
    found = weights().items()
    return {name.split(".")[-2]: each for name, each in found if name.startswith(prefix)}


def norm(x: mx.array, weight: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, weight, 1e-5)


def block(x: mx.array, w: dict[str, mx.array], attend: Callable) -> mx.array:  # (N, D)
    """One layer. `attend` makes (N, H * Dh) of queries, keys and values."""
    h = norm(x, w["input_layernorm"])
    h = attend(h @ w["q_proj"].T, h @ w["k_proj"].T, h @ w["v_proj"].T)
    x = x + h @ w["o_proj"].T
    h = norm(x, w["post_attention_layernorm"])
    gate = h @ w["gate_proj"].T
    return x + (gate * mx.sigmoid(gate) * (h @ w["up_proj"].T)) @ w["down_proj"].T


def forward(
    ids: Sequence[int],
    windows: Sequence,
    block: Callable = block,
    weights_of: Callable = weights_of,
) -> mx.array:  # (N, V): the logits
    """Run the tokens of all windows, one window after the other."""
    x = weights()["embed_tokens.weight"][mx.array(list(ids))]
    for layer in range(LAYERS):

        def attend(q: mx.array, k: mx.array, v: mx.array, layer: int = layer) -> mx.array:
            return attention(q, k, v, layer, windows)

        x = block(x, weights_of(layer), attend)
    return norm(x, weights()["norm.weight"]) @ weights()["embed_tokens.weight"].T


def attention(
    q: mx.array, k: mx.array, v: mx.array, layer: int, windows: Sequence
) -> mx.array:  # (N, H * Dh)
    """All windows write their rows, and then each group of each window reads."""
    at = 0
    queries = []
    for window in windows:
        tokens = slice(at, at + window.B * window.L)
        at = tokens.stop
        starts = window.positions.tolist()[:: window.L]
        turned = turn(q[tokens], starts), turn(k[tokens], starts)
        queries.append(turned[0])
        window.write(layer, turned[1], v[tokens].reshape(-1, v.shape[-1] // DH, DH))
    sums = []
    for window, mine in zip(windows, queries, strict=True):
        at = 0
        for group in window.groups:
            keys, values = window.read(layer, group)  # (B, Hkv, T, Dh) each
            part = mine[at * window.L : (at + group.B) * window.L]
            part = part.reshape(group.B, window.L, -1, DH).swapaxes(1, 2)
            mask = mx.arange(group.T) <= group.positions  # (B, 1, L, T)
            found = mx.fast.scaled_dot_product_attention(
                part, keys, values, scale=DH**-0.5, mask=mask
            )
            sums.append(found.swapaxes(1, 2).reshape(group.B * window.L, -1))
            at += group.B
    return mx.concatenate(sums)


def turn(x: mx.array, starts: Sequence[int]) -> mx.array:  # (N, heads * Dh) -> (N, heads, Dh)
    """RoPE for sequences of the same number of tokens, which begin at these rows."""
    x = x.reshape(len(starts), -1, x.shape[-1] // DH, DH).swapaxes(1, 2)  # (B, heads, L, Dh)
    turned = [
        mx.fast.rope(each[None], DH, traditional=False, base=10000.0, scale=1.0, offset=start)
        for each, start in zip(x, starts, strict=True)
    ]
    return mx.concatenate(turned).swapaxes(1, 2).reshape(-1, x.shape[1], DH)


class Rows:
    """A window over one sequence by itself: its keys and values are two growing arrays a layer."""

    B = 1

    def __init__(self) -> None:
        self.k = [mx.zeros((1, 0, 0, DH))] * LAYERS
        self.v = [mx.zeros((1, 0, 0, DH))] * LAYERS

    def at(self, start: int, L: int) -> "Rows":
        """The next tokens go into rows from `start` on. What was behind them is dropped."""
        self.L = L
        self.start = start
        self.positions = mx.arange(start, start + L)
        shown = self.positions.reshape(1, 1, L, 1)
        self.groups = [SimpleNamespace(B=1, T=start + L, positions=shown)]
        return self

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        for kept, new in ((self.k, k), (self.v, v)):
            new = new.swapaxes(0, 1)[None]
            old = kept[layer][:, :, : self.start]
            kept[layer] = mx.concatenate([old, new], axis=2) if self.start else new

    def read(self, layer: int, group: SimpleNamespace) -> tuple[mx.array, mx.array]:
        return self.k[layer], self.v[layer]


def answer(prompt: Sequence[int], step: Callable = forward, most: int = 40) -> list[int]:
    """Greedy, one token a step. `step` makes logits of ids and windows."""
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
