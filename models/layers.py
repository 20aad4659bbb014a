"""The parts of a model: projections, MLPs, experts, norms, layers.

Each part is a record of arrays, created when the model is loaded. Calling it with an input returns the output,
so `forward` does not depend on how weights are stored. Next: `load.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from distributed.group import ALONE, Ranks
from kernels.device import mx, tree_flatten
from kernels.packed import Matrix
from models.config import AttentionHeads, Config
from models.forward_cost import ModelCost
from models.ops import clamped_swiglu, geglu, rms_norm, siglu, softmax, swiglu
from models.rope import AttentionType

if TYPE_CHECKING:
    from kv import Window
    from models.layer_embeddings import LayerInputs


class Mlp(NamedTuple):
    """down(silu(gate(x)) * up(x)), or with gelu instead of silu in some families"""

    gate_up: Matrix | SideBySide  # D -> 2 * hidden
    down: Matrix  # hidden -> D
    gelu: bool = False

    def __call__(self, x: mx.array) -> mx.array:  # (..., D) -> (..., D)
        gate_up = self.gate_up(x)  # (..., 2 * hidden)
        return self.down(geglu(gate_up) if self.gelu else swiglu(gate_up))


class ExpertChoices:
    """The experts to which the newest pass routes its tokens, layer by layer.

    A pass computes them anyway, so keeping them adds no node to the graph. Only `counts` waits for them.

    subtle: the choices of earlier passes are dropped. While they are not evaluated, they refer to the
    slab, and the next write would copy it.
    """

    def __init__(self, layers: int):
        self._newest: deque[mx.array | None] = deque(maxlen=layers)

    def add(self, chosen: mx.array) -> None:  # (N, k)
        # Without a token to sample, the last layer is not computed and must not be evaluated here
        self._newest.append(chosen if chosen.size else None)

    def counts(self) -> list[Counter[int]]:
        """Return the number of tokens per expert, for each layer. Waits for the device."""
        chosen = list(self._newest)
        return [Counter() if each is None else Counter(each.flatten().tolist()) for each in chosen]


class Experts(NamedTuple):
    """Mixture of experts: the sum of share * down(silu(gate(x)) * up(x)) over a token's k best experts.

    A router chooses the experts. The shares are its softmax over all experts; in some models those of
    the k best are normalized to sum to 1. A token's experts and the bits of its result depend only on
    that token.
    """

    router: Matrix  # D -> experts
    gate_up: Matrix | SideBySide  # a stack of experts: D -> 2 * hidden
    down: Matrix  # a stack of experts: hidden -> D
    k: int
    whole_shares: bool
    choices: ExpertChoices
    limit: float | None = None  # clamp of gate and up in gpt-oss

    def __call__(self, x: mx.array) -> mx.array:  # (N, D) -> (N, D)
        shares = softmax(self.router(x))  # (N, experts)
        chosen = mx.argpartition(shares, -self.k, axis=-1)[..., -self.k :]  # (N, k)
        self.choices.add(chosen)
        shares = mx.take_along_axis(shares, chosen, axis=-1)
        if self.whole_shares:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        gate_up = self.gate_up.of_experts(x[:, None], chosen)  # (N, k, 2 * hidden)
        inner = swiglu(gate_up) if self.limit is None else clamped_swiglu(gate_up, self.limit)
        y = self.down.of_experts(inner, chosen)  # (N, k, D)
        return (y * shares[..., None]).sum(axis=-2)


class SharedExpert(NamedTuple):
    """experts(x) + sigmoid(gate · x) * shared(x)"""

    experts: Experts
    shared: Mlp
    gate: mx.array  # (D,)

    def __call__(self, x: mx.array) -> mx.array:  # (..., D) -> (..., D)
        share = mx.sigmoid((x * self.gate).sum(axis=-1, keepdims=True))
        return self.experts(x) + share * self.shared(x)


class SideBySide(NamedTuple):
    """Projections of the same input that cannot be one matrix, because they are packed differently."""

    parts: tuple[Matrix, ...]

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([part(x) for part in self.parts], axis=-1)

    def of_experts(self, x: mx.array, chosen: mx.array) -> mx.array:
        return mx.concatenate([part.of_experts(x, chosen) for part in self.parts], axis=-1)


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight"""

    weight: mx.array  # (D,)
    of_row: Step

    @staticmethod
    def from_weight(weight: mx.array, eps: float) -> Norm:
        return Norm(weight, rms_norm(weight, eps))

    def __call__(self, x: mx.array) -> mx.array:  # (..., D) -> the same
        return self.of_row(x)


class QKNorm(NamedTuple):
    """Norms of queries and keys in some families: per head, or over all heads of a token."""

    q: Norm
    k: Norm
    H: int  # the first H heads are queries
    over_all: bool

    def __call__(self, qk: mx.array) -> mx.array:  # (N, H + Hkv, Dh) -> the same
        normed = []
        for norm, heads in zip((self.q, self.k), mx.split(qk, [self.H], axis=1), strict=True):
            x = heads.flatten(1) if self.over_all else heads
            normed.append(norm(x).reshape(heads.shape))
        return mx.concatenate(normed, axis=1)


class ValueNorm(NamedTuple):
    """A norm of each value head, without weights. If the input has no values, the keys are used as
    values."""

    norm: Norm
    heads: AttentionHeads

    def __call__(self, qkv: mx.array) -> mx.array:  # (N, width) -> (N, (H + 2 Hkv) * Dh)
        H, Hkv, Dh = self.heads
        heads = qkv.reshape(len(qkv), -1, Dh)
        values = self.norm(heads[:, -Hkv:])
        return mx.concatenate([heads[:, : H + Hkv], values], axis=1).flatten(1)


Step = Callable[[mx.array], mx.array]


class Chain(NamedTuple):
    """Steps applied one after the other."""

    steps: tuple[Step, ...]

    def __call__(self, x: mx.array) -> mx.array:
        for step in self.steps:
            x = step(x)
        return x


def chain(*steps: Step | None) -> Step:
    """Join steps into one, ignoring None. Without steps, the result returns x unchanged."""
    present = tuple(step for step in steps if step is not None)
    return present[0] if len(present) == 1 else Chain(present)


class OutputGate(NamedTuple):
    """sigmoid(gate(x)) h"""

    gate: Matrix  # D -> H * Dh

    def __call__(self, h: mx.array, x: mx.array) -> mx.array:  # (N, H * Dh), (N, D) -> (N, H * Dh)
        return siglu(mx.concatenate([self.gate(x), h], axis=-1))


# Takes the place of attention: mixes the tokens within each sequence.
# (N, D), windows -> (N, input width of `Layer.out`)
Mixer = Callable[[mx.array, "Sequence[Window]"], mx.array]


class Layer(NamedTuple):
    """The steps that `forward` calls. Anything that a family adds is part of a step."""

    kind: int  # attention type: an index into the model's `kinds`
    attn_norm: Step  # (N, D) -> the same
    out: Step  # (N, H * Dh), or a mixer's width -> (N, D)
    mlp_norm: Step  # (N, D) -> the same
    mlp: Step  # (N, D) -> the same
    heads: AttentionHeads | None = None  # None without attention
    slab_index: int = 0  # index of the slab array that it reads (`Config.slab_index`)
    qkv: Step = chain()  # (N, D) -> (N, (H + 2 Hkv) * Dh)
    qk_norm: Step = chain()  # (N, H + Hkv, Dh) -> the same
    gate: OutputGate | None = None  # applied to the output of attention
    mixer: Mixer | None = None  # replaces attention; then there are no queries, keys and values
    # Applied to the residual stream after the MLP: (N, D), per-layer inputs -> (N, D)
    after: Callable[[mx.array, Sequence[mx.array]], mx.array] | None = None


@dataclass(frozen=True)
class Model:
    """A config and its weights, ready for `forward`."""

    config: Config
    layers: list[Layer]
    norm: Norm
    table: Matrix | None  # the embedding, as a projection D -> V
    # The embedding table itself if tied. On ranks other than 0, the head returns its input.
    head: Step  # (n, D) -> (n, V)
    kinds: tuple[AttentionType, ...]  # the attention types of the layers
    ranks: Ranks = ALONE  # the ranks that share the model; config and layers are this rank's shard
    choices: ExpertChoices | None = None  # None without experts
    layer_inputs: LayerInputs | None = None  # per-layer embeddings, in Gemma 4
    cost: ModelCost = field(default_factory=ModelCost)  # cost of a forward pass
    quantization: str = ""  # format of the files: "Q4_K_M", "4-bit" or "bfloat16"
    kv_dtype: mx.Dtype = mx.float32  # dtype of keys and values in the slab
    attention: str = "formula"  # the implementation: a key of `llama.ATTENTION`
    arithmetic: str = "float"  # "int8": products with packed weights round activations to 8 bits

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    @property
    def has_narrow_kv(self) -> bool:
        """True if keys and values are rounded when they are stored."""
        return self.kv_dtype.size < self.dtype.size

    @property
    def is_float32(self) -> bool:
        """True if everything is computed in float32, including packed weights, which our own product
        converts to float32."""
        parts = (self.layers, self.norm, self.table, self.head, self.layer_inputs)
        parts = tree_flatten(parts, is_leaf=_is_claimed)
        return all(part.dtype == mx.float32 for _, part in parts if isinstance(part, mx.array))

    def without_weights(self) -> Model:
        """Return the model without its weights, for use after it has been unloaded. (`dtype` needs the norm.)"""
        gone = {"table": None, "choices": None, "layer_inputs": None}
        return replace(self, layers=[], head=chain(), kinds=(), **gone)

    def for_slots_of(self, length: int) -> Model:
        """Return the same model with RoPE for sequences of up to this length."""
        kinds = [
            AttentionType.for_rope(*kind[:3], kind.Dh, length, *kind[5:]) for kind in self.kinds
        ]
        return replace(self, kinds=tuple(kinds))


def _is_claimed(part: object) -> bool:
    return isinstance(part, Matrix) and part.claim is not None
