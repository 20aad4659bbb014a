"""Read a model's config.json, or the metadata of a GGUF file, into a `Config`.

A `Config` holds the differences between families as plain data, so the forward pass never checks a
family's name. Unsupported settings are refused with an error that names the field and the supported values. Next:
`weights.py` checks the tensors against the config; `load.py` builds a model from both.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from base.untrusted_files import ModelError, read_json
from base.validation import shown
from kernels.delta_net import TAPS, Heads
from models.families import FAMILIES, NORMS, Family
from models.fields import Fields, nearest
from models.gguf_config import described
from models.gguf_file import is_gguf, read_gguf
from models.rope import Rope

# A layer's matrices: (output size, input size). `Config.tensors` defines the named sizes
ATTENTION = {
    "self_attn.q_proj": ("queries", "width"),
    "self_attn.k_proj": ("keys", "width"),
    "self_attn.v_proj": ("keys", "width"),
    "self_attn.o_proj": ("width", "queries"),
}
MLP = {
    "mlp.gate_proj": ("hidden", "width"),
    "mlp.up_proj": ("hidden", "width"),
    "mlp.down_proj": ("width", "hidden"),
}
DELTA_NET = {
    "linear_attn.in_proj_qkv": ("delta inputs", "width"),
    "linear_attn.in_proj_z": ("delta values", "width"),
    "linear_attn.in_proj_a": ("value heads", "width"),
    "linear_attn.in_proj_b": ("value heads", "width"),
    "linear_attn.out_proj": ("width", "delta values"),
}
CONVOLUTION = {"conv.in_proj": ("three widths", "width"), "conv.out_proj": ("width", "width")}
EXPERTS = {  # these replace the MLP: a router, and three matrices per expert
    "mlp.gate": ("experts", "width"),
    "mlp.experts.gate_proj": ("experts", "hidden", "width"),
    "mlp.experts.up_proj": ("experts", "hidden", "width"),
    "mlp.experts.down_proj": ("experts", "width", "hidden"),
}
SHARED_EXPERT = {  # every token goes through it
    "mlp.shared_expert.gate_proj": ("shared", "width"),
    "mlp.shared_expert.up_proj": ("shared", "width"),
    "mlp.shared_expert.down_proj": ("width", "shared"),
    "mlp.shared_expert_gate": ("one", "width"),
}
# Per-layer embeddings, from a second table; "embeddings" is their size per layer
LAYER_INPUT = {
    "per_layer_input_gate": ("embeddings", "width"),
    "per_layer_projection": ("width", "embeddings"),
}
# These configs have the language model in `text_config`; images are not supported
WITH_TEXT_PART = ("mistral3", "gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


class AttentionHeads(NamedTuple):
    """The number and size of a layer's attention heads."""

    H: int  # query heads
    Hkv: int  # key heads and value heads; 0 if the layer reuses those of an earlier layer
    Dh: int  # head size


@dataclass(frozen=True)
class Config:
    """The shape of a model, in the notation of `llama.py`."""

    model_type: str
    layers: int
    D: int  # model width
    H: int  # query heads
    Hkv: int  # key and value heads; H / Hkv query heads share each
    Dh: int  # head size
    hidden: int  # hidden width of the MLP, or of each expert
    V: int  # vocabulary size
    norm_eps: float
    max_positions: int  # the longest sequence the model was trained for
    tied: bool  # the output head is the embedding table, transposed
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: str  # norm of queries and keys: per "head", over the full "width", or "" for none
    # Length of the sliding window, including the token's own row; None means full attention
    window: int | None
    rope: Rope
    whole: Collection[int] = ()  # layers with full attention in a model with a sliding window
    near: Rope | None = None  # RoPE of the layers with the window, if it differs
    # (beta, L): queries at position p are multiplied by 1 + beta ln(1 + floor(p / L))
    growth: tuple[float, int] | None = None
    norms_at: str = "before"  # or "after" or "around" a layer's two branches
    norms_add: bool = False  # the files store norm weights minus 1
    unturned: Collection[int] = ()  # layers without RoPE (NoPE)
    gelu: bool = False  # the MLP uses GELU instead of SiLU
    cap: float | None = None  # soft cap of attention scores
    head_cap: float | None = None  # soft cap of the logits
    has_head: bool = True  # an embedding model may have no output head
    convolved: Collection[int] = ()  # layers with a short convolution instead of attention
    taps: int = 0  # kernel size of that convolution
    delta: Heads | None = None  # heads of the gated delta nets
    deltas: Collection[int] = ()  # layers with a gated delta net instead of attention
    # GGUF's order: the first value head of each key head, then the second of each
    values_tiled: bool = False
    shared_expert: int = 0  # hidden width of the expert that every token goes through; 0: none
    gated: bool = False  # attention has an output gate, whose rows are in q_proj
    # (Hkv, Dh) of the layers with full attention, if they differ from those of the layers with a window
    far: tuple[int, int] | None = None
    # Scale of q k^T, if not 1 / sqrt(Dh); it is folded into the norm of q
    scale: float | None = None
    v_norm: bool = False  # each value head is normalized, without weights
    v_is_k: bool = False  # in layers with full attention, values are the keys before their norm
    reusing: int = 0  # number of final layers that read the rows of an earlier layer of their type
    reusing_hidden: int = 0  # hidden width of the MLP in those layers
    embeddings: int = 0  # size of a token's embedding per layer, from a second table
    embeddings_V: int = 0  # vocabulary size of that table
    scalars: bool = False  # each layer's output is multiplied by a learned scalar
    # The files may store q, k and v as one matrix, and gate and up as another (`Weights.split`)
    fused: bool = False
    experts: int = 0  # experts per layer; 0 means one MLP for all tokens
    taken: int = 1  # experts per token
    whole_shares: bool = False  # the shares of a token's experts are normalized to sum to 1
    limit: float | None = None  # clamp of gate and up in the SwiGLU of experts
    sinks: bool = False  # each query head has an extra logit in its softmax
    # Module -> factor of its output, folded into its weights
    multipliers: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors that the checkpoint must contain, with their shapes before quantization."""
        D = self.D
        sizes = {
            "width": D,
            "three widths": 3 * D,
            "experts": self.experts,
            "shared": self.shared_expert,
            "one": 1,
            "embeddings": self.embeddings,
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.V, D),
            "model.norm.weight": (D,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.V, D)
        if self.delta:
            values = self.delta.Hv * self.delta.Dv
            sizes |= {"delta inputs": self.delta.inputs, "delta values": values}
            sizes |= {"value heads": self.delta.Hv}
        if self.embeddings:
            count = self.layers * self.embeddings
            shapes["model.embed_tokens_per_layer.weight"] = (self.embeddings_V, count)
            shapes["model.per_layer_model_projection.weight"] = (count, D)
            shapes["model.per_layer_projection_norm.weight"] = (self.embeddings,)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            H, Hkv, Dh = self.heads(i)
            sizes |= {"queries": H * Dh, "keys": Hkv * Dh, "hidden": self.hidden_of(i)}
            mixer = CONVOLUTION if i in self.convolved else ATTENTION
            mixer = DELTA_NET if i in self.deltas else mixer
            modules = mixer | (EXPERTS if self.experts else MLP)
            modules |= LAYER_INPUT if self.embeddings else {}
            modules |= SHARED_EXPERT if self.shared_expert else {}
            for module, sides in modules.items():
                if self.is_unused(f"{layer}{module}"):
                    continue
                shape = tuple(sizes[side] for side in sides)
                if self.gated and module.endswith("q_proj"):
                    shape = (2 * shape[0], shape[1])
                shapes[f"{layer}{module}.weight"] = shape
                if self.has_bias(module):
                    shapes[f"{layer}{module}.bias"] = shape[:-1]
            for name in self.norms.values():
                shapes[f"{layer}{name}.weight"] = (D,)
            if self.embeddings:
                shapes[f"{layer}post_per_layer_input_norm.weight"] = (D,)
            if self.scalars:
                shapes[f"{layer}layer_scalar"] = (1,)
            if self.sinks:
                shapes[f"{layer}self_attn.sinks"] = (H,)
            if i in self.convolved:
                shapes[f"{layer}conv.conv.weight"] = (D, self.taps, 1)
            elif i in self.deltas:
                shapes[f"{layer}linear_attn.conv1d.weight"] = (self.delta.inputs, TAPS, 1)
                shapes[f"{layer}linear_attn.A_log"] = (self.delta.Hv,)
                shapes[f"{layer}linear_attn.dt_bias"] = (self.delta.Hv,)
                shapes[f"{layer}linear_attn.norm.weight"] = (self.delta.Dv,)
            elif self.qk_norm:
                over_all = self.qk_norm == "width"
                shapes[f"{layer}self_attn.q_norm.weight"] = (sizes["queries"] if over_all else Dh,)
                if Hkv:
                    shapes[f"{layer}self_attn.k_norm.weight"] = (sizes["keys"] if over_all else Dh,)
        return shapes

    def has_bias(self, module: str) -> bool:
        """True if this matrix has a bias."""
        if "linear_attn" in module:
            return False
        if "mlp" in module:
            return self.mlp_bias
        return self.o_bias if "o_proj" in module else self.qkv_bias

    def factor(self, name: str) -> float:
        """Return the factor of the module's output that is folded into this tensor."""
        module = name.split(".")[-2]
        if module == "q_norm" and self.scale:
            return self.scale * self.heads(int(name.split(".")[2])).Dh ** 0.5
        return self.multipliers.get(module, 1)

    @property
    def norms(self) -> dict[str, str]:
        """The norms of a layer: field of `Layer` -> name in the checkpoint."""
        return NORMS[self.norms_at]

    def heads(self, layer: int) -> AttentionHeads:
        """Return the heads of a layer with attention."""
        is_far = self.far and (self.window is None or layer in self.whole)
        Hkv, Dh = self.far if is_far else (self.Hkv, self.Dh)
        return AttentionHeads(self.H, Hkv if layer < self.writing else 0, Dh)

    @property
    def writing(self) -> int:
        """The number of layers that write their own rows. All layers after them reuse earlier rows."""
        return self.layers - self.reusing

    def slab_index(self, layer: int) -> int:
        """Return the index of the slab array that a layer reads: its own, or that of the last layer of
        its type that writes rows."""
        if layer >= self.writing:
            kind = self.positions(layer)
            layer = max(i for i in range(self.writing) if self.positions(i) == kind)
        return sum(self.row(i)[0] > 0 for i in range(layer))

    def hidden_of(self, layer: int) -> int:
        """Return the hidden width of a layer's MLP."""
        return self.hidden if layer < self.writing else self.reusing_hidden or self.hidden

    def is_unused(self, name: str) -> bool:
        """True for a matrix or norm that a checkpoint may contain although its layer does not use it."""
        place, _, module = name.removesuffix(".weight").rpartition(".")
        if module not in ("k_proj", "v_proj", "k_norm") or not (self.reusing or self.v_is_k):
            return False
        layer = int(place.split(".")[2])
        is_far = self.window is None or layer in self.whole
        return layer >= self.writing or (self.v_is_k and module == "v_proj" and is_far)

    def row(self, layer: int) -> tuple[int, int]:
        """Return the shape of a token's row in a layer: (heads, head size).

        A row holds keys and values, or the input of a convolution. A delta net has states instead of
        rows, and a layer that reuses another's rows has none of its own: both have 0 heads.
        """
        if layer in self.deltas:
            return 0, self.Dh
        if layer in self.convolved:
            return self.D // self.Dh, self.Dh
        _, Hkv, Dh = self.heads(layer)
        return 2 * Hkv, Dh

    def positions(self, layer: int) -> tuple[Rope | None, int | None]:
        """Return a layer's rope (None for NoPE) and its sliding window (None for full
        attention). A convolution has no rope, and its window is its taps."""
        if layer in self.convolved:
            return None, self.taps
        slides = self.window is not None and layer not in self.whole
        rope = (self.near if slides else None) or self.rope
        return None if layer in self.unturned else rope, self.window if slides else None


def read_config(folder: Path, has_head: bool) -> Config:
    """Read the config of a folder or GGUF file.

    `has_head`: the weights contain an `lm_head`. This decides whether the head is tied if the config
    does not.
    """
    path = folder if is_gguf(folder) else folder / "config.json"
    raw = raw_config(folder)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near = f"; {near_family(name)}" if near_family(name) else ""
        said = f"{path}: model_type {shown(name)} is not served{near}. "
        raise ModelError(f"{said}Supported: {', '.join(FAMILIES)}.", near.removeprefix("; "))
    family = FAMILIES[name]
    raw |= {key: usual for key, usual in family.unsaid.items() if raw.get(key) is None}
    fields = Fields(path, raw)
    get = raw.get
    _refuse(fields, family)
    D = fields.number("hidden_size")
    H = fields.number("num_attention_heads")
    Hkv = fields.number("num_key_value_heads", H)
    if H % Hkv:
        raise ModelError(f"{path}: {H} attention heads cannot share {Hkv} key-value heads evenly.")
    if get("head_dim") is None and D % H:
        raise ModelError(
            f"{path}: hidden_size {D} is not a multiple of {H} heads, and head_dim is not given."
        )
    Dh = fields.number("head_dim", D // H)
    if Dh % 2 or Dh < 4:
        raise ModelError(
            f"{path}: head_dim = {Dh}, but rotary positions rotate pairs of numbers: it must be even, and at least 4."
        )
    attention_bias = bool(get("attention_bias", False))
    max_positions = fields.number("max_position_embeddings", 2048)
    tied = bool(get("tie_word_embeddings", not has_head))
    window, whole = _window(fields, family)
    shared = {
        "model_type": name,
        "layers": fields.number("num_hidden_layers"),
        "D": D,
        "H": H,
        "Hkv": Hkv,
        "Dh": Dh,
        "hidden": fields.number(family.width),
        "V": fields.number("vocab_size"),
        "norm_eps": fields.real("rms_norm_eps", 1e-6, 0),
        "max_positions": max_positions,
        "tied": tied,
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": bool(get("mlp_bias", False)),
        "qk_norm": "",
        "window": window,
        "whole": whole,
        "rope": _rope(fields, family, Dh, max_positions),
    }
    config = Config(**shared | family.own(fields, D, Dh, tied))
    return replace(config, norms_add=False) if get("norms_hold_one") else config


def raw_config(place: Path) -> dict[str, Any]:
    """Return the fields of config.json, or the equivalent fields of a GGUF file. For a multimodal
    model, return those of its language model."""
    if is_gguf(place):
        return described(read_gguf(place))
    raw = read_json(place / "config.json")
    text = raw.get("text_config")
    if raw.get("model_type") not in WITH_TEXT_PART or not isinstance(text, dict):
        return raw
    kept = ("quantization", "quantization_config", "eos_token_id", "tie_word_embeddings")
    return {key: raw[key] for key in kept if key in raw} | text


def near_family(name: object) -> str:
    """Return the most similar supported family, followed by "is"; empty if there is none."""
    return nearest(name, [family.removesuffix("_text") for family in FAMILIES])


def _refuse(fields: Fields, family: Family) -> None:
    """Refuse settings that a `Config` cannot hold."""
    get = fields.get
    act, *known = family.activation
    if (get(act) or known[0]) not in known:
        raise fields.refuse(act, get(act), known[:1])
    for flag in ("use_bidirectional_attention", *family.refused):
        if get(flag) and get(flag) != "vision":  # "vision": only images are bidirectional
            raise fields.refuse(flag, get(flag), ("false, or absent",))
    for key in ("quantization", "quantization_config"):
        if not isinstance(get(key) or {}, dict):
            raise fields.refuse(key, get(key), ("an object, as MLX writes it",))
    method = (get("quantization_config") or {}).get("quant_method")
    if method not in (None, "mxfp4") and not get("quantization"):
        known = ("MLX affine quantization", "mxfp4", "float16", "bfloat16", "float32")
        raise fields.refuse("quant_method", method, known)
    mode = (get("quantization") or {}).get("mode", "affine")
    if mode not in ("affine", "mxfp4"):
        raise fields.refuse("quantization mode", mode, ("affine", "mxfp4"))


def _window(fields: Fields, family: Family) -> tuple[int | None, Collection[int]]:
    """Return the length of the sliding window (None if no layer has one), and the layers without it."""
    layers = fields.number("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = family.layer_types or {
            "full_attention": "full_attention",
            "sliding_attention": "sliding_attention",
        }
        if not isinstance(kinds, list) or len(kinds) < layers or not {*map(str, kinds)} <= {*known}:
            choice = f"for each of {layers} layers {' or '.join(sorted(known))}"
            raise fields.refuse("layer_types", kinds, (choice,))
        whole = frozenset(i for i in range(layers) if known[kinds[i]] == "full_attention")
    elif family.whole is not None:
        whole = family.whole(fields, layers)
    else:
        return None, ()
    if len(whole) == layers or fields.get("sliding_window", 4096) is None:
        return None, ()
    return fields.number("sliding_window", 4096), whole


def _rope(fields: Fields, family: Family, Dh: int, max_positions: int) -> Rope:
    """Read the RoPE settings from `rope_scaling`, with `type` or `rope_type`, or from `rope_parameters`."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if family.two_ropes and isinstance(scaling, dict):
        full = scaling.get("full_attention")
        scaling = full if isinstance(full, dict) else scaling
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ModelError(
            f"{fields.path}: rope scaling is {shown(scaling)} instead of one flat object."
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if isinstance(kind, str):
        kind = family.rope_types.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise fields.refuse("rope type", kind, ROPE_TYPES)
    inner = Fields(fields.path, scaling)
    theta = inner.real("rope_theta", fields.real("rope_theta", 10000.0, 1), 1)
    name = "partial_rotary_factor"
    part = inner.real(name, fields.real(name, 1.0, 0), 0)
    if kind == "proportional":
        if part > 1:
            raise fields.refuse(name, part, ("up to 1",))
        return Rope(kind, theta, factor=inner.real("factor", 1.0), part=part)
    turned = int(Dh * part)
    if part != 1 and not family.turns_a_part:
        raise fields.refuse(name, part, ("1",))
    if turned % 2 or not 4 <= turned <= Dh:
        choice = f"1, or a share that rotates an even number, at least 4, of {Dh}"
        raise fields.refuse(name, part, (choice,))
    rope = Rope(
        kind,
        theta,
        turned=turned if turned < Dh else None,
        interleaved=bool(fields.get("rope_traditional")),
    )
    if kind == "default":
        return rope
    name = "original_max_position_embeddings"
    usual = 8192 if kind == "llama3" else max_positions
    original = fields.number(name, inner.number(name, usual))
    if kind in ("linear", "dynamic"):
        return replace(rope, factor=inner.real("factor"), original_length=max_positions)
    rope = replace(rope, original_length=original)
    if kind == "llama3":
        return replace(
            rope,
            factor=inner.real("factor"),
            low_freq_factor=inner.real("low_freq_factor", 1),
            high_freq_factor=inner.real("high_freq_factor", 4),
        )
    stretch = max_positions / original
    rope = replace(rope, factor=inner.real("factor", stretch))
    return _yarn(inner, rope) if kind == "yarn" else _longrope(inner, rope, turned // 2)


def _yarn(inner: Fields, rope: Rope) -> Rope:
    """Add YaRN's parameters to a rope. The default gain grows with the logarithm of the factor; with
    mscale and mscale_all_dim it is the ratio of two such terms."""
    if rope.theta == 1:
        raise inner.refuse("rope_theta", rope.theta, ("with yarn, more than 1",))
    growth = math.log(max(rope.factor, 1))
    over = inner.real("mscale", 0.0, 0)
    under = inner.real("mscale_all_dim", 0.0, 0)
    usual = 1 + 0.1 * growth
    if over and under:
        usual = (1 + 0.1 * over * growth) / (1 + 0.1 * under * growth)
    return replace(
        rope,
        rounds=bool(inner.get("truncate", True)),
        low_freq_factor=inner.real("beta_slow", 1),
        high_freq_factor=inner.real("beta_fast", 32),
        gain=inner.real("attention_factor", usual),
    )


def _longrope(inner: Fields, rope: Rope, planes: int) -> Rope:
    found = []
    for name in ("short_factor", "long_factor"):
        factors = inner.get(name)
        if not isinstance(factors, list) or len(factors) != planes:
            raise inner.refuse(name, factors, (f"a number for each of {planes} planes",))
        found.append(tuple(Fields(inner.path, {name: factor}).real(name) for factor in factors))
    short, long = found
    usual = 1.0
    if rope.factor > 1 and rope.original_length > 1:
        usual = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    gain = inner.real("attention_factor", usual)
    return replace(rope, short=short, long=long, gain=gain)
