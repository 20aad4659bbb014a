"""Configurations of each family, and the comparison of an engine's answers with mlx-lm's, token by token."""

import zlib
from dataclasses import replace

import numpy as np
from checkpoints import Reference
from harness import Tap, random_asks, run_schedule
from long_forms import number_of
from qwen3_5_float64 import Float64

from kernels import device
from kernels.delta_net import Places
from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.delta_net import states_of
from models.memory import rows_of_layers
from nanobatch import Engine, Model

TOKENS = 20  # per answer
PROMPTS = number_of("PARITY_PROMPTS", 11)  # for a family that differs much from a Llama
FEWER = number_of("PARITY_PROMPTS", 6)  # for all other families
# Logits may differ by this much. Where the best two are closer than this, either may win.
# The GPU of a virtual Mac, such as a CI runner's, deviates more; the exact amount was not measured.
IS_VIRTUAL = "Paravirtual" in device.named()
CLOSE = 1e-2 if IS_VIRTUAL else 1e-4
CLOSE_KV = 5e-2  # with keys and values in float16
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {  # half of a head of 16 makes four planes
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 60,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.5, 2.0],
        "long_factor": [1.2, 3.0, 9.0, 20.0],
    },
}
GRANITE = {
    "embedding_multiplier": 0.6,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.8,
    "logits_scaling": 2.5,
    "attention_bias": False,
    "mlp_bias": False,
}
MINISTRAL = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
LFM2 = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
QWEN3_5_MOE = {
    **QWEN3_5,
    "model_type": "qwen3_5_moe_text",
    "reference": {"model_type": "qwen3_5_moe"},
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "norm_topk_prob": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 10,
    "num_hidden_layers": 3,
    "sliding_window_pattern": 3,
    "sliding_window": 30,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 30,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
    },
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "num_key_value_heads": 1,
    "sliding_window": 30,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 272,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "rope_theta": None,
}
CONFIGS = {
    "multi-head attention": {"num_key_value_heads": 4},
    "grouped queries": {"num_key_value_heads": 2},
    "multi-query attention": {"num_key_value_heads": 1},
    "kv heads not named": {"num_key_value_heads": None},
    "head_dim larger than hidden / heads": {"head_dim": 32},
    "head_dim smaller than hidden / heads": {
        "head_dim": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "tied head": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "all biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "another rope theta": {"rope_theta": 500000.0},
    "rope default, named": {"rope_scaling": {"rope_type": "default"}},
    "rope linear, old spelling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope linear, new spelling": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "rope llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "rope llama3 in rope_parameters": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        "reference": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    },
    "rope dynamic, within the trained length": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "rope yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    },
    "qwen3, yarn, its gain a quotient": {
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 48,
            "beta_fast": 8,
            "beta_slow": 2,
            "mscale": 1.5,
            "mscale_all_dim": 0.7,
        },
    },
    "rope interleaved": {"rope_traditional": True, "head_dim": 24},
    "qwen2, interleaved, 4 bits": {
        "model_type": "qwen2",
        "rope_traditional": True,
        "quantize": lambda module: (4, 32),
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "mistral, window longer than the slot": {"model_type": "mistral", "sliding_window": 512},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 64},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "qwen3, rope_parameters": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "float16": {"dtype": mx.float16},
    "bfloat16 in three shards": {"dtype": mx.bfloat16, "shards": 3},
    "2 bits": {"quantize": lambda module: (2, 32)},
    "3 bits": {"quantize": lambda module: (3, 32)},
    "4 bits": {"quantize": lambda module: (4, 64), "hidden_size": 128, "intermediate_size": 192},
    "5 bits": {"quantize": lambda module: (5, 32)},
    "6 bits, tied": {"quantize": lambda module: (6, 32), "tie_word_embeddings": True},
    "8 bits, sharded": {"quantize": lambda module: (8, 32), "shards": 2},
    "some layers quantized, each in its way": {
        "num_hidden_layers": 3,
        "quantize": lambda module: {"q_proj": (4, 32), "v_proj": (6, 32), "down_proj": (8, 32)}.get(
            module.split(".")[-1],
            (4, 64) if "embed" in module or "layers.1.mlp" in module else None,
        ),
        "hidden_size": 64,
        "intermediate_size": 128,
    },
    "deep and narrow": {
        "num_hidden_layers": 6,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "intermediate_size": 64,
    },
    "qwen3_moe, experts apart": {
        **EXPERTS,
        "experts_apart": True,
        "norm_topk_prob": False,
        "shards": 2,
    },
    "qwen3_moe, 4 bits": {
        **EXPERTS,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "quantize": lambda module: (8, 64) if module.endswith("mlp.gate") else (4, 32),
    },
    "granite, tied": {"model_type": "granite", "tie_word_embeddings": True, **GRANITE},
    "granite, biases, as published": {
        "model_type": "granite",
        **GRANITE,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "num_hidden_layers": 6,
    },
    "granite, 4 bits, tied": {
        "model_type": "granite",
        "tie_word_embeddings": True,
        "quantize": lambda module: (4, 32),
        **GRANITE,
    },
    "phi3": {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 512},
    "phi3, tied, 4 bits": {
        "model_type": "phi3",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "quantize": lambda module: (4, 32),
        "shards": 2,
    },
    "phi3, a part of each head turns": {"model_type": "phi3", "partial_rotary_factor": 0.75},
    "phi3, longrope, a part of each head turns, 8 bits": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "quantize": lambda module: (8, 32),
        **LONGROPE,
    },
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2, "rope_theta": 500000.0},
    "olmo2, 8 bits": {
        "model_type": "olmo2",
        "num_hidden_layers": 4,
        "quantize": lambda module: (8, 32),
    },
    "llama, layers with a window": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 40,
    },
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, **GEMMA, "sliding_window": 512},
    "gemma2, scores near the cap, 4 bits": {
        "model_type": "gemma2",
        "tie_word_embeddings": True,
        **GEMMA,
        "num_hidden_layers": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 512,
        "quantize": lambda module: (4, 32),
    },
    "gemma3_text": {"model_type": "gemma3_text", "tie_word_embeddings": True, **GEMMA},
    "gemma3_text, as published": {
        "model_type": "gemma3_text",
        **GEMMA,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 5000.0,
        "sliding_window_pattern": 2,
        "sliding_window": 16,
        "num_hidden_layers": 4,
    },
    "gpt_oss": GPT_OSS,
    "gpt_oss, experts in MXFP4, 8 bits": {
        **GPT_OSS,
        "num_experts_per_tok": 3,
        "quantize": lambda module: ("mxfp4", 32) if ".experts." in module else (8, 32),
    },
    "gpt_oss, as published": {
        **GPT_OSS,
        "blocks": True,
        "intermediate_size": 64,
        "sliding_window": 12,
        "quantize": lambda module: ("mxfp4", 32) if ".experts." in module else None,
    },
    "gemma4_text": {"model_type": "gemma4_text", "tie_word_embeddings": True, **GEMMA4},
    "gemma4_text, keys are values, 4 bits": {
        "model_type": "gemma4_unified_text",
        "reference": {"model_type": "gemma4_text"},
        **GEMMA4,
        "tie_word_embeddings": True,
        "global_head_dim": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "quantize": lambda module: None if module.endswith("layer_scalar") else (4, 32),
    },
    "gemma4_text, as published, 8 bits": {
        "model_type": "gemma4_text",
        **GEMMA4,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 32,
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2
        + ["full_attention"],
        "use_double_wide_mlp": False,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 500000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 20000.0, "rope_type": "default"},
        },
        "quantize": lambda module: (8, 32) if "input_gate" not in module else (8, 64),
    },
    "olmo3": {
        "model_type": "olmo3",
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "sliding_window": 30,
    },
    "olmo3, yarn in full layers, 4 bits": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 20,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "quantize": lambda module: (4, 32),
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "tie_word_embeddings": True,
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        **GRANITE,
    },
    "granitemoehybrid, without positions, 8 bits": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["attention"] * 3,
        "shared_intermediate_size": 96,
        "position_embedding_type": "nope",
        "quantize": lambda module: (8, 32),
        **GRANITE,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 24,
        "rope_theta": None,
        "rope_parameters": MINISTRAL,
    },
    "ministral3, tied, 4 bits": {
        "model_type": "ministral3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "rope_theta": None,
        "rope_parameters": {**MINISTRAL, "llama_4_scaling_beta": 0.7},
        "quantize": lambda module: (4, 32),
    },
    "lfm2": {"model_type": "lfm2", **LFM2},
    "qwen3_5, tied": {
        **QWEN3_5,
        "tie_word_embeddings": True,
        "reference": {"model_type": "qwen3_5"},
    },
    "qwen3_5, experts": {**QWEN3_5_MOE, "num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3_5, experts, as converted, 8 bits": {
        **QWEN3_5_MOE,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "quantize": lambda module: None if "conv1d" in module else (8, 32),
    },
    "qwen3_5, as converted, 4 bits": {
        **QWEN3_5,
        "reference": {"model_type": "qwen3_5"},
        "num_hidden_layers": 3,
        "full_attention_interval": 3,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_value_head_dim": 64,
        "quantize": lambda module: None if "conv1d" in module else (4, 32),
    },
    "lfm2, four taps, as published, 4 bits": {
        "model_type": "lfm2",
        **LFM2,
        "conv_L_cache": 4,
        "num_hidden_layers": 5,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv"],
        "block_auto_adjust_ff_dim": True,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "quantize": lambda module: None if module.endswith("conv.conv") else (4, 32),
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layer_interval": 2},
    "smollm3, layers named": {
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 0],
        "head_dim": 24,
        "rope_theta": 5000000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "seed_oss": {
        "model_type": "seed_oss",
        "head_dim": 16,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    "seed_oss, bias of the output": {
        "model_type": "seed_oss",
        "head_dim": 24,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
}


def is_of_its_own(name: str) -> bool:
    """True if the family differs from a Llama by more than biases or a norm of heads."""
    return CONFIGS[name].get("model_type", "llama") not in ("llama", "mistral", "qwen2", "qwen3")


def seed_of(name: str) -> int:
    """Derive a seed from the name only, so that a new configuration does not change the others."""
    return zlib.crc32(name.encode())


def prompts_of(name: str) -> int:
    return PROMPTS if is_of_its_own(name) else FEWER


def compare(
    engine: Engine,
    reference: Reference,
    seed: int,
    prompts: int,
    close: float = CLOSE,
    float64: Float64 | None = None,
) -> dict:
    """Run a random schedule, and compare every token and every logit with the reference. Where logits differ
    by more than `close`, and there is `float64`, ours must be as near to it as the token's rounding allows."""
    rng = np.random.default_rng(seed)
    tap = Tap(engine)
    asks = [
        replace(ask, max_tokens=TOKENS) for ask in random_asks(rng, prompts, longest=140, tokens=1)
    ]
    handles = run_schedule(engine, asks, rng)
    assert len(handles) == prompts
    tokens, ties, amplified, furthest, distinct = 0, 0, 0, 0.0, []
    for handle in handles:
        assert handle.finish_reason == "length" and len(handle.tokens) == handle.sampling.max_tokens
        prompt = list(handle.request.prompt)
        right = reference.of(engine.sched.max_len)
        text = prompt + handle.tokens[:-1]
        expected = right.logits(text)[len(prompt) - 1 :]  # (tokens, V)
        ours = tap.of(handle)
        for index, token in enumerate(handle.tokens):
            behind = expected[index].max() - expected[index][token]
            assert behind < close, (
                f"request {handle.id}, token {index}: {token} is {behind:.2g} behind mlx-lm's choice"
            )
            ties += behind > 0
        difference = float(np.abs(ours - expected).max())
        if difference >= close and float64:
            exact, change = (each[len(prompt) - 1 :] for each in float64.with_rounding(text))
            error = np.abs(ours - exact).max(axis=1)
            assert (error < np.maximum(close, 2 * change)).all(), (
                f"request {handle.id}: {error.max():.2g} from float64, rounding {change.max():.2g}"
            )
            amplified += 1
        else:
            furthest = max(furthest, difference)
        tokens += len(handle.tokens)
        distinct.append(len(set(handle.tokens)) / len(handle.tokens))
    assert furthest < close, f"logits differ by {furthest:.2g}"
    assert amplified <= prompts / 50, f"{amplified} requests differ by more than {close}"
    assert np.mean(distinct) > 0.3, "the answers are stuck, and prove nothing"
    found = {"tokens": tokens, "ties": int(ties), "largest difference": furthest}
    return found | ({"decided by float64": amplified} if amplified else {})


def count() -> tuple[int, int]:
    """Return the number of prompts, and how many of them belong to families that differ substantially from Llama."""
    each = [prompts_of(name) for name in CONFIGS]
    return sum(each), sum(
        many for name, many in zip(CONFIGS, each, strict=True) if is_of_its_own(name)
    )


def same_bits(ours: Model, wide: Model, tokens: list[int]) -> bool:
    """True if both models give the same logits, bit by bit, for a prompt in one pass and for its first token."""
    parts = (tokens, tokens[:1])
    return all(np.array_equal(whole(ours, part), whole(wide, part)) for part in parts)


def whole(
    model: Model, tokens: list[int], dtype: mx.Dtype = mx.float32, kv: mx.Dtype | None = None
) -> np.ndarray:
    """Return the logits of one pass over all tokens in a new slab, (len(tokens), V). `kv` is the slab's
    dtype, by default the model's."""
    c = model.config
    assert model.dtype == dtype
    slab = Slab(c.layers, 1, c.Hkv, 256, c.Dh, kv or dtype, rows_of_layers(c))
    slab.states = states_of(model, Places(slots=1, checkpoints=0, log=1))
    window = Window(slab, [0], [0], len(tokens), [(-1, 0, 0, len(tokens) - 1)])
    logits = model.head(forward(model, mx.array(tokens), [window], range(len(tokens))))
    assert logits.shape == (len(tokens), c.V)
    return np.array(logits.astype(mx.float32))
