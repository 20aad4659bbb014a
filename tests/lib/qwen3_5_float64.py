"""Qwen 3.5 in float64, as in its paper and in mlx-lm, to find out whose rounding causes a difference."""

from collections.abc import Callable

import numpy as np
from mlx.utils import tree_flatten

from kernels.device import mx

EPS = 1e-6


def parameters(model) -> dict[str, np.ndarray]:
    """Return the weights of mlx-lm's model, dequantized to float64."""
    found = {}
    for name, module in tree_flatten(
        model.leaf_modules(), is_leaf=lambda m: hasattr(m, "parameters")
    ):
        if hasattr(module, "scales"):
            how = {"group_size": module.group_size, "bits": module.bits}
            weight = mx.dequantize(module.weight, module.scales, module.biases, **how)
            found[f"{name}.weight"] = weight
    plain = dict(tree_flatten(model.parameters()))
    found = {name: each for name, each in plain.items() if each.dtype != mx.uint32} | found
    return {
        name.removeprefix("language_model."): np.array(each.astype(mx.float32), np.float64)
        for name, each in found.items()
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def mlp(at: Callable[[str], np.ndarray], place: str, x: np.ndarray) -> np.ndarray:
    gate, up = (x @ at(f"{place}.{part}_proj").T for part in ("gate", "up"))
    return (gate * sigmoid(gate) * up) @ at(f"{place}.down_proj").T


class Float64:
    def __init__(self, model):
        self.args = model.language_model.args
        self.weights = parameters(model)

    def logits(self, tokens: list[int]) -> np.ndarray:  # (T, V)
        c, w = self.args, self.weights
        x = w["model.embed_tokens.weight"][tokens]
        for i in range(c.num_hidden_layers):
            at = self.of(f"model.layers.{i}")
            h = norm(x, at("input_layernorm"), c.rms_norm_eps)
            is_delta = (i + 1) % c.full_attention_interval
            x = x + (self.delta_net if is_delta else self.attention)(at, h)
            h = norm(x, at("post_attention_layernorm"), c.rms_norm_eps)
            x = x + (self.experts(at, h) if c.num_experts else mlp(at, "mlp", h))
        x = norm(x, w["model.norm.weight"], c.rms_norm_eps)
        return x @ w["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"].T

    def with_rounding(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits, (T, V), and how far a different rounding of the weights to float32 moves them, (T,):
        the largest change of eight."""
        rng, weights = np.random.default_rng(0), self.weights
        exact = self.logits(tokens)
        change = np.zeros(len(tokens))
        for _ in range(8):
            self.weights = {
                name: each * (1 + 2**-24 * rng.standard_normal(each.shape))
                for name, each in weights.items()
            }
            change = np.maximum(change, np.abs(self.logits(tokens) - exact).max(axis=1))
        self.weights = weights
        return exact, change

    def of(self, place: str) -> Callable[[str], np.ndarray]:
        def at(name: str) -> np.ndarray:
            for full in (f"{place}.{name}.weight", f"{place}.{name}"):
                if full in self.weights:
                    return self.weights[full]
            raise KeyError(name)

        return at

    def experts(self, at: Callable[[str], np.ndarray], x: np.ndarray) -> np.ndarray:
        c = self.args
        shares = np.exp(x @ at("mlp.gate").T)
        shares = shares / shares.sum(axis=1, keepdims=True)
        chosen = np.argsort(-shares, axis=1)[:, : c.num_experts_per_tok]
        best = np.take_along_axis(shares, chosen, axis=1)
        if c.norm_topk_prob:
            best = best / best.sum(axis=1, keepdims=True)
        y = sigmoid(x @ at("mlp.shared_expert_gate").T) * mlp(at, "mlp.shared_expert", x)
        for i in range(c.num_experts):
            share = np.where(chosen == i, best, 0).sum(axis=1, keepdims=True)
            y = y + share * mlp(lambda name, i=i: at(name)[i], "mlp.switch_mlp", x)
        return y

    def attention(self, at: Callable[[str], np.ndarray], x: np.ndarray) -> np.ndarray:
        c = self.args
        H, Hkv, Dh, T = c.num_attention_heads, c.num_key_value_heads, c.head_dim, len(x)
        q, gate = np.split((x @ at("self_attn.q_proj").T).reshape(T, H, 2 * Dh), 2, axis=-1)
        k, v = ((x @ at(f"self_attn.{p}_proj").T).reshape(T, Hkv, Dh) for p in "kv")
        q = self.turned(norm(q, at("self_attn.q_norm"), c.rms_norm_eps))
        k = self.turned(norm(k, at("self_attn.k_norm"), c.rms_norm_eps))
        k, v = (np.repeat(each, H // Hkv, axis=1) for each in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * Dh**-0.5
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        y = np.einsum("hts,shd->thd", weights, v) * sigmoid(gate)
        return y.reshape(T, -1) @ at("self_attn.o_proj").T

    def turned(self, x: np.ndarray) -> np.ndarray:  # (T, H, Dh)
        c = self.args
        half = int(c.head_dim * c.partial_rotary_factor) // 2
        angles = np.arange(len(x))[:, None] * c.rope_theta ** -(np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b, rest = np.split(x, [half, 2 * half], axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def delta_net(self, at: Callable[[str], np.ndarray], x: np.ndarray) -> np.ndarray:
        c = self.args
        Hk, Hv = c.linear_num_key_heads, c.linear_num_value_heads
        Dk, Dv, T = c.linear_key_head_dim, c.linear_value_head_dim, len(x)
        inputs = x @ at("linear_attn.in_proj_qkv").T
        taps = at("linear_attn.conv1d")[:, :, 0].T  # (4, inputs)
        inputs = np.concatenate([np.zeros((len(taps) - 1, inputs.shape[1])), inputs])
        mixed = sum(inputs[i : i + T] * tap for i, tap in enumerate(taps))
        q, k, v = np.split(mixed * sigmoid(mixed), [Hk * Dk, 2 * Hk * Dk], axis=1)
        q, k = (each.reshape(T, Hk, Dk).repeat(Hv // Hk, axis=1) for each in (q, k))
        q, k = (each / np.sqrt((each**2).sum(axis=-1, keepdims=True) + EPS) for each in (q, k))
        a, beta = (x @ at(f"linear_attn.in_proj_{p}").T for p in "ab")
        g = np.exp(
            -np.exp(at("linear_attn.A_log")) * np.logaddexp(a + at("linear_attn.dt_bias"), 0)
        )
        rate, v, S, rows = sigmoid(beta), v.reshape(T, Hv, Dv), np.zeros((Hv, Dk, Dv)), []
        for t in range(T):
            S = S * g[t, :, None, None]
            d = (v[t] - np.einsum("hkv,hk->hv", S, k[t])) * rate[t, :, None]
            S = S + k[t][:, :, None] * d[:, None]
            rows.append(np.einsum("hkv,hk->hv", S, q[t]) * Dk**-0.5)
        y = norm(np.array(rows), at("linear_attn.norm"), c.rms_norm_eps).reshape(T, -1)
        z = x @ at("linear_attn.in_proj_z").T
        return (y * z * sigmoid(z)) @ at("linear_attn.out_proj").T
