"""What a model folder's config.json says, in our own words, and what of it cannot be served.

The problem. Each family of models writes its config in its own way, leaves other things unsaid, and
changes with each release of transformers. A field that is read wrongly comes out as nonsense, many
tokens later.

What this file keeps. A `Config` holds all that a family changes, as plain data: the forward pass
knows no family's name. What it has no place for is refused by the field's name, with what is
supported.

Where next: `weights.py`, which holds the tensors against the config; `load.py`, which makes a model
of both.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from parts.checks import real, shown
from parts.files import ModelError, read_json
from parts.model.families import FAMILIES, NORMS, Family
from parts.model.fields import Fields
from parts.model.rope import Rope

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Config:
    """What `config.json` says about the shape of the model, in the names of the glossary in
    `llama.py`."""

    model_type: str
    layers: int
    D: int  # model width
    H: int  # query heads
    Hkv: int  # key and value heads; H / Hkv query heads share one
    Dh: int  # head size
    hidden: int  # width inside the MLP, or inside of each expert
    V: int  # vocabulary
    norm_eps: float
    max_positions: int  # the longest sequence the model was trained for
    tied: bool  # the output head is the embedding table, transposed
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: str  # of queries and keys: over each "head", over their whole "width", or "" for none
    # How many rows attention looks back on, the token's own included; None means all
    window: int | None
    rope: Rope
    whole: Collection[int] = ()  # the layers that look back on all rows although there is a window
    # Of the layers that have the window, where their positions turn in a way of their own
    near: Rope | None = None
    norms_at: str = "before"  # the branches, or "after" them, or "around"
    norms_add: bool = False  # the files hold what is added to 1
    unturned: Collection[int] = ()  # the layers in which attention knows no positions
    gelu: bool = False  # in the MLP, instead of SiLU
    cap: float | None = None  # what attention's scores come near to, and never exceed
    head_cap: float | None = None  # and the logits
    has_head: bool = True  # a model that was made for embeddings may have none
    # The files hold q, k and v as one matrix, and gate and up (`Weights.split`)
    fused: bool = False
    # MLPs of a layer, of which each token takes some; 0 means one MLP for all tokens
    experts: int = 0
    taken: int = 1  # how many a token takes
    whole_shares: bool = False  # the shares of those that it takes add up to 1
    # Of modules' outputs: folded into their weights
    multipliers: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold, with its shape before any quantization."""
        D = self.D
        q = self.H * self.Dh
        kv = self.Hkv * self.Dh
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.V, D),
            "model.norm.weight": (D,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.V, D)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            for name, out, width, bias in (
                ("self_attn.q_proj", q, D, self.qkv_bias),
                ("self_attn.k_proj", kv, D, self.qkv_bias),
                ("self_attn.v_proj", kv, D, self.qkv_bias),
                ("self_attn.o_proj", D, q, self.o_bias),
                *self._mlp(),
            ):
                each = (self.experts,) if "experts" in name else ()
                shapes[f"{layer}{name}.weight"] = (*each, out, width)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (out,)
            for name in self.norms.values():
                shapes[f"{layer}{name}.weight"] = (D,)
            if self.qk_norm:
                shapes[f"{layer}self_attn.q_norm.weight"] = (
                    q if self.qk_norm == "width" else self.Dh,
                )
                shapes[f"{layer}self_attn.k_norm.weight"] = (
                    kv if self.qk_norm == "width" else self.Dh,
                )
        return shapes

    def factor(self, name: str) -> float:
        """What the output of a tensor's module is multiplied by."""
        return self.multipliers.get(name.split(".")[-2], 1)

    def _mlp(self) -> list[tuple[str, int, int, bool]]:
        """The matrices of a layer's MLP, or of all its experts: (name, out, in, has a bias)."""
        place, bias = ("mlp.experts", False) if self.experts else ("mlp", self.mlp_bias)
        sizes = {
            "gate_proj": (self.hidden, self.D),
            "up_proj": (self.hidden, self.D),
            "down_proj": (self.D, self.hidden),
        }
        router = [("mlp.gate", self.experts, self.D, False)] if self.experts else []
        return router + [(f"{place}.{name}", *size, bias) for name, size in sizes.items()]

    @property
    def norms(self) -> dict[str, str]:
        """What a layer's norms are to `forward`, and what the checkpoint calls them."""
        return NORMS[self.norms_at]

    def positions(self, layer: int) -> tuple[Rope | None, int | None]:
        """How attention treats positions in a layer: how they turn, if it knows them, and how far
        it looks back."""
        slides = self.window is not None and layer not in self.whole
        rope = (self.near if slides else None) or self.rope
        return None if layer in self.unturned else rope, self.window if slides else None


def read_config(folder: Path, has_head: bool) -> Config:
    """The config of a folder. `has_head` (the weights hold an `lm_head`) decides about tying if the
    config does not."""
    path = folder / "config.json"
    raw = read_json(path)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise Fields(path, raw).refuse("model_type", name, FAMILIES)
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
            f"{path}: hidden_size {D} is no multiple of {H} heads, and head_dim is not given."
        )
    Dh = fields.number("head_dim", D // H)
    if Dh % 2 or Dh < 4:
        raise ModelError(
            f"{path}: head_dim = {Dh}, but rotary positions turn pairs of numbers: even, and at least 4."
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
        "norm_eps": fields.number("rms_norm_eps", 1e-6, real, 0),
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
    return Config(**shared | family.own(fields, D, Dh, tied))


def _refuse(fields: Fields, family: Family) -> None:
    """Refuse what a field says if there is no place for it in a `Config`."""
    get = fields.values.get
    act, *known = family.activation
    if (get(act) or known[0]) not in known:
        raise fields.refuse(act, get(act), known[:1])
    for flag in ("use_bidirectional_attention", *family.refused):
        if get(flag):
            raise fields.refuse(flag, get(flag), ("false, or nothing",))
    for key in ("quantization", "quantization_config"):
        if not isinstance(get(key) or {}, dict):
            raise fields.refuse(key, get(key), ("an object, as MLX writes it",))
    method = (get("quantization_config") or {}).get("quant_method")
    if method is not None and not get("quantization"):
        raise fields.refuse(
            "quant_method", method, ("MLX affine quantization", "float16", "bfloat16", "float32")
        )
    mode = (get("quantization") or {}).get("mode", "affine")
    if mode != "affine":
        raise fields.refuse("quantization mode", mode, ("affine",))


def _window(fields: Fields, family: Family) -> tuple[int | None, Collection[int]]:
    """The length of the sliding window, if any layer has one, and the layers that have none."""
    layers = fields.number("num_hidden_layers")
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        known = {"full_attention", "sliding_attention"}
        if not isinstance(kinds, list) or len(kinds) < layers or not set(map(str, kinds)) <= known:
            choice = f"for each of {layers} layers {' or '.join(sorted(known))}"
            raise fields.refuse("layer_types", kinds, (choice,))
        whole = frozenset(i for i in range(layers) if kinds[i] == "full_attention")
    elif family.whole is not None:
        whole = family.whole(fields, layers)
    else:
        return None, ()
    if len(whole) == layers or fields.values.get("sliding_window", 4096) is None:
        return None, ()
    return fields.number("sliding_window", 4096), whole


def _rope(fields: Fields, family: Family, Dh: int, max_positions: int) -> Rope:
    """There are three spellings: `rope_scaling` with `type` or with `rope_type`, and
    `rope_parameters` with all."""
    raw = fields.values
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if family.two_ropes and isinstance(scaling, dict):
        full = scaling.get("full_attention")
        scaling = full if isinstance(full, dict) else scaling
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ModelError(
            f"{fields.path}: rope scaling is {shown(scaling)} where one flat object belongs."
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if isinstance(kind, str):
        kind = family.rope_types.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise fields.refuse("rope type", kind, ROPE_TYPES)
    inner = Fields(fields.path, scaling)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0, real, 1), real, 1)
    part = inner.number(
        "partial_rotary_factor", fields.number("partial_rotary_factor", 1.0, real, 0), real, 0
    )
    turned = int(Dh * part)
    if part != 1 and not family.turns_a_part:
        raise fields.refuse("partial_rotary_factor", part, ("1",))
    if turned % 2 or not 4 <= turned <= Dh:
        choice = f"1, or what turns an even number, at least 4, of {Dh}"
        raise fields.refuse("partial_rotary_factor", part, (choice,))
    common = {
        "turned": turned if turned < Dh else None,
        "interleaved": bool(raw.get("rope_traditional")),
    }
    if kind == "default":
        return Rope(kind, theta, **common)
    name = "original_max_position_embeddings"
    usual = 8192 if kind == "llama3" else max_positions
    common["original_length"] = (fields if raw.get(name) is not None else inner).number(name, usual)
    if kind == "longrope":
        return _longrope(inner, theta, turned // 2, max_positions, common)
    if kind == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = max_positions / common["original_length"]
    factor = inner.number("factor", check=real, least=1e-6)
    if kind == "llama3":
        low, high = (
            inner.number(f"{end}_freq_factor", usual, real, 1e-6)
            for end, usual in (("low", 1), ("high", 4))
        )
        return Rope(kind, theta, factor, low, high, **common)
    if kind == "yarn":
        return _yarn(inner, theta, factor, common)
    return Rope(kind, theta, factor, **common | {"original_length": max_positions})


def _yarn(inner: Fields, theta: float, factor: float, common: dict) -> Rope:
    """Where its gain is not given, it grows with the logarithm of the factor, or is the quotient of
    two such."""
    if not inner.values.get("truncate", True):
        raise inner.refuse("truncate", False, ("true",))
    if theta == 1:
        raise inner.refuse("rope_theta", theta, ("with yarn, more than 1",))
    slow, fast = (
        inner.number(f"beta_{end}", usual, real, 1e-6) for end, usual in (("slow", 1), ("fast", 32))
    )
    scales = [inner.number(name, 0.0, real, 0) for name in ("mscale", "mscale_all_dim")]
    over, under = (
        1 + 0.1 * scale * math.log(max(factor, 1)) for scale in (scales if all(scales) else (1, 0))
    )
    return Rope("yarn", theta, factor, slow, fast, gain=_gain(inner, over / under), **common)


def _longrope(inner: Fields, theta: float, planes: int, max_positions: int, common: dict) -> Rope:
    short, long = (inner.values.get(f"{name}_factor") for name in ("short", "long"))
    for name, factors in (("short", short), ("long", long)):
        if not isinstance(factors, list) or len(factors) != planes:
            raise inner.refuse(
                f"{name}_factor", factors, (f"a number for each of {planes} planes",)
            )
        for factor in factors:
            Fields(inner.path, {f"{name}_factor": factor}).number(
                f"{name}_factor", check=real, least=1e-6
            )
    original = common["original_length"]
    factor = inner.number("factor", max_positions / original, real, 1e-6)
    usual = (
        math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    )
    return Rope(
        "longrope",
        theta,
        factor,
        short=(*short,),
        long=(*long,),
        gain=_gain(inner, usual),
        **common,
    )


def _gain(inner: Fields, usual: float) -> float:
    return inner.number("attention_factor", usual, real, 1e-6)
