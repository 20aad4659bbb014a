"""Every form of a checkpoint can be loaded, and every fault is reported in one line."""

import json
import math
import os
import random
import re
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from checkpoints import V, make_checkpoint, make_config, make_tokenizer
from long_forms import number_of
from parity import GPT_OSS, MINISTRAL
from transformers import CONFIG_MAPPING, AutoConfig

from base.untrusted_files import LARGEST, LARGEST_OTHER, ModelError
from engine import model_source
from kernels import device
from kernels.device import mx
from models import config as configs
from models import families
from models.families import FAMILIES
from models.load import ModelReader, read_model
from models.memory import Sizes, slab_of
from nanobatch import Engine, Tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("sharded"), shards=3)


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the checkpoint that a test may break."""
    return shutil.copytree(whole, tmp_path / "model")


def refused(folder, *words: str, **options) -> str:
    """Assert that loading fails with one line that contains the words. Return the line."""
    with pytest.raises(ModelError) as caught:
        Engine.load(folder, slots=1, max_len=64, **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 480, line
    for word in words:
        assert word in line, f"{word!r} is not in: {line}"
    return line


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_weights(folder, change) -> None:
    """Apply `change` to the weights in model.safetensors."""
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    change(weights)
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


# --- what is loaded -----------------------------------------------------------------------------


def test_sharded_and_single_file(whole, sharded):
    """Many files with an index are the same model as one file."""
    one, many = read_model(whole), read_model(sharded)
    assert np.array_equal(np.array(one.layers[1].qkv.weight), np.array(many.layers[1].qkv.weight))
    assert np.array_equal(np.array(one.head.weight), np.array(many.head.weight))


def test_cpu_weights_become_float32(tmp_path):
    folder = make_checkpoint(tmp_path, dtype=mx.float16)
    assert read_model(folder).dtype == mx.float32
    assert read_model(folder, "checkpoint").dtype == mx.float16


@pytest.mark.skipif(device.has_gpu(), reason="a GPU multiplies them")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_experts_as_in_the_checkpoint_are_refused_on_a_cpu(dtype, tmp_path):
    """Regression: each request failed with MLX's "[GatherMM::eval] Currently only supports float32"."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder = make_checkpoint(tmp_path, dtype=dtype, model_type="qwen3_moe", **sizes)
    with pytest.raises(ValueError, match=r"'checkpoint'.* float32 .*choose auto or float32"):
        Engine.load(folder, dtype="checkpoint", slots=1, max_len=16)


def test_a_long_load_says_how_far_it_is(folder, monkeypatch):
    monkeypatch.setattr(model_source, "SILENT_S", 0)
    said = []
    Engine.load(folder, slots=1, max_len=16, report=said.append).close()
    progress = r"read [\d.]+ \w+ of [\d.]+ \w+, [\d.e-]+ GB/s"
    assert any(re.fullmatch(progress, line) for line in said), said


def test_tied_head_is_stored_once(folder):
    """A second copy of the head is ignored."""
    change_config(folder, tie_word_embeddings=True)
    model = read_model(folder)
    assert model.head is model.table


def test_weights_decide_about_tying(folder):
    change_config(folder, tie_word_embeddings=...)
    model = read_model(folder)
    assert model.head is not model.table
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    model = read_model(folder)
    assert model.head is model.table


def test_stored_rope_tables_are_ignored(folder):
    """Old checkpoints contain RoPE tables."""
    change_weights(
        folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(8)})
    )
    read_model(folder)


def test_eos_tokens_are_the_union(folder):
    """EOS tokens come from config, generation_config and tokenizer."""
    assert Tokenizer(folder, V).end_tokens == {257}
    (folder / "generation_config.json").write_text('{"eos_token_id": [259, 257]}')
    assert Tokenizer(folder, V).end_tokens == {257, 259}
    change_config(folder, eos_token_id=[5])
    assert Tokenizer(folder, V).end_tokens == {5, 257, 259}
    change_config(folder, eos_token_id=...)
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder, V).end_tokens == frozenset()
    change_config(folder, text_config={"eos_token_id": 6}, eos_token_id=5)
    assert Tokenizer(folder, V).end_tokens == {5, 6}
    change_config(folder, text_config=..., eos_token_id=...)
    for spelling in ("</s>", {"content": "</s>", "special": True}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": spelling}))
        assert Tokenizer(folder, V).end_tokens == {257}


@pytest.mark.parametrize("value", ["</s>", [[1]], 1.5])
def test_an_end_token_that_is_no_id(folder, value):
    change_config(folder, eos_token_id=value)
    refused(folder, "config.json", "eos_token_id")


# --- what is refused ----------------------------------------------------------------------------


def test_bad_model_name(tmp_path):
    refused("no-such-model", "no-such-model", "owner/name")
    refused("./not/there", "./not/there", "folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a GGUF file")


def test_uncached_hub_id_offline(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("someone/absent", "someone/absent", "cache", "network")


def test_wrong_number_of_layers(folder):
    change_config(folder, num_hidden_layers=3)
    refused(folder, "lacks", "model.layers.2")
    change_config(folder, num_hidden_layers=3_000_000)
    refused(folder, "lacks", "model.layers.2999999")
    change_config(folder, num_hidden_layers=1)
    refused(folder, "model.layers.1", "no place")


def test_a_billion_layers_of_fused_tensors_are_refused(tmp_path):
    """Regression: the shapes of all layers were computed first, to split fused tensors, until memory was
    full."""
    folder = make_checkpoint(tmp_path, model_type="phi3")
    change_config(folder, num_hidden_layers=10**9)
    refused(folder, "lacks", "model.layers.999999999")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file(folder, file):
    (folder / file).unlink()
    refused(folder, file.replace("model.", "model*."))


def test_a_missing_shard_and_an_index_that_lies(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "a")
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors", "missing", "index")
    folder = shutil.copytree(sharded, tmp_path / "b")
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    table["weight_map"]["model.embed_tokens.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(table))
    refused(folder, "stale")
    index.write_text("{}")
    refused(folder, "weight_map")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "HTML"),
        (b"", "cut off"),
        (b"\x10", "cut off"),
        (struct.pack("<Q", 10**15) + b"{}", "cut off"),
        (struct.pack("<Q", 4) + b"[1]]", "header"),
        (struct.pack("<Q", 2) + b"{}" + b"tail", "longer"),
    ],
)
def test_what_lies_where_weights_should_be(folder, content, word):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors", word)


def ends_in(number: float):
    return lambda w: mx.concatenate([w[:-1], mx.full((1, w.shape[1]), number)])


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (f"{Q}.weight", ends_in(math.nan), ["NaN or infinity"]),
        (f"{Q}.weight", ends_in(-math.inf), ["NaN or infinity"]),
        (f"{Q}.weight", lambda w: None, ["lacks"]),
        (f"{Q}.weight", lambda w: w[:10], ["(10, 64)", "(64, 64)"]),
        (f"{Q}.weight", lambda w: w.astype(mx.int32), ["I32", "BF16"]),
        (f"{Q}.weight", lambda w: w.view(mx.uint32), ["scales"]),
        (f"{Q}.scales", lambda w: mx.ones((64, 2)), ["biases", "missing"]),
        ("model.layers.9.x.weight", lambda w: mx.ones(3), ["no place"]),
    ],
)
def test_bad_tensors(folder, name, change, words):
    """A tensor with NaN or infinity, or with a wrong shape or type, and a missing or an extra one are refused."""

    def replace(weights) -> None:
        new = change(weights.pop(name, None))
        if new is not None:
            weights[name] = new

    change_weights(folder, replace)
    refused(folder, name.removesuffix(".scales"), *words)


def test_bad_fused_matrix(tmp_path):
    """Phi-3's q, k and v are slices of one matrix, whose number of rows must match the config."""
    folder, name = (
        make_checkpoint(tmp_path, model_type="phi3"),
        "model.layers.1.self_attn.qkv_proj.weight",
    )
    change_weights(folder, lambda w: w.update({name: w[name][:100]}))
    refused(folder, name, "(100, 64)", "128 rows")
    change_config(folder, num_hidden_layers=1)
    refused(folder, "model.layers.1", "no place")
    change_config(folder, num_hidden_layers=2, model_type="llama")
    refused(folder, "lacks", "q_proj")


def test_bad_experts(tmp_path):
    """Each expert may be a separate tensor. A missing one is refused, because it would shift all later ones."""
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = make_checkpoint(tmp_path, model_type="qwen3_moe", experts_apart=True, **settings)
    read_model(folder)
    change_config(folder, num_experts=5)
    refused(folder, "4 experts", "implies 5")
    change_config(folder, num_experts=4, num_experts_per_tok=5)
    refused(folder, "num_experts_per_tok = 5", "1 to 4")
    change_config(folder, num_experts_per_tok=2, decoder_sparse_step=2)
    refused(folder, "decoder_sparse_step = 2")
    change_config(folder, decoder_sparse_step=1, mlp_only_layers=[0])
    refused(folder, "mlp_only_layers = [0]")
    change_config(folder, mlp_only_layers=[])
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    change_weights(folder, lambda w: w.update({name: w[name].astype(mx.float16)}))
    refused(folder, "experts.up_proj.weight", "2 shapes or types")
    change_weights(folder, lambda w: w.update({name: w[name][:7].astype(mx.float32)}))
    refused(folder, "experts.up_proj.weight", "2 shapes or types")
    change_weights(folder, lambda w: w.pop(name))
    refused(folder, "experts.up_proj.weight", "3 experts")


@pytest.mark.parametrize(
    ("parts", "change", "word"),
    [
        ("weight", lambda w: w[:, :7], "Supported bits: 2, 3, 4, 5, 6, 8"),
        ("scales biases", lambda w: mx.repeat(w, 4, axis=-1), "in groups of 32, 64, 128"),
        ("weight", lambda w: w.astype(mx.float16), "float16"),
        ("scales", lambda w: w.astype(mx.uint32), "uint32"),
        ("biases", lambda w: w.astype(mx.bfloat16), "bfloat16"),
    ],
)
def test_bad_quantized_tensors(tmp_path, parts, change, word):
    """Regression: some tensors were read beyond their end, or scales of one kind were taken for another."""
    folder = make_checkpoint(
        tmp_path, quantize=lambda module: (4, 32) if "down" in module else None
    )
    names = [f"model.layers.0.mlp.down_proj.{part}" for part in parts.split()]
    change_weights(folder, lambda w: w.update({name: change(w[name]) for name in names}))
    refused(folder, "model.layers.0.mlp.down_proj", word)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "gpt2"},
            [
                "gpt2",
                "llama, mistral, qwen2, qwen3, granite, granitemoehybrid, ministral3, phi3, olmo2, olmo3",
            ],
        ),
        (
            {"rope_scaling": {"rope_type": "mrope"}},
            ["mrope", "default, linear, dynamic, llama3, yarn, longrope"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2]}},
            ["long_factor", "8"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [0] * 8, "long_factor": [2] * 8}},
            ["short_factor"],
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, ["rope_theta", "yarn"]),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.2},
            ["partial_rotary_factor", "0.2", "even"],
        ),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["rope scaling", "flat"]),
        ({"quantization": [4]}, ["quantization", "object"]),
        ({"layer_types": ["linear_attention"] * 2}, ["layer_types", "linear_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        (
            {"model_type": "gemma2", "hidden_activation": "gelu"},
            ["hidden_activation", "gelu_pytorch_tanh"],
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            ["use_bidirectional_attention"],
        ),
        ({"model_type": "smollm3", "use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "affine"]),
        ({"quantization": {"mode": "nvfp4", "bits": 4, "group_size": 16}}, ["nvfp4", "affine"]),
        ({"hidden_size": ...}, ["hidden_size"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers", "two"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["64", "5"]),
        ({"head_dim": 15}, ["15", "even"]),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, ["no_rope_layers", "[1]", "2 layers"]),
        ({"model_type": "granite", "logits_scaling": 0}, ["logits_scaling", "0"]),
        ({"model_type": "gpt_oss", "swiglu_alpha": 2.0}, ["swiglu_alpha", "2.0", "1.702"]),
        ({"vocab_size": 100}, ["embed_tokens", "(272, 64)", "(100, 64)"]),
    ],
)
def test_unsupported_configs(folder, changes, words):
    change_config(folder, **changes)
    refused(folder, "config.json", *words)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("scales", lambda array: mx.full(array.shape, 255, mx.uint8), "NaN or infinity"),
        ("scales", lambda array: array[..., :-1], "MXFP4 does not have; download"),
        ("weight", lambda array: array[:, :-1], "MXFP4 does not have; download"),
        (
            "weight",
            lambda array: mx.concatenate([array, array], axis=1),
            "MXFP4 does not have; download",
        ),
        ("both", lambda array: array[:-1], "other shapes in MXFP4"),
        ("weight", None, "lacks the tensor"),
        ("scales", None, "has the shape"),
    ],
)
def test_bad_mxfp4(tmp_path, name, change, word):
    folder = make_checkpoint(
        tmp_path,
        **{**GPT_OSS, "num_hidden_layers": 1},
        quantize=lambda module: ("mxfp4", 32) if ".experts." in module else None,
    )

    def spoil(weights):
        for part in ("weight", "scales") if name == "both" else (name,):
            whole = f"model.layers.0.mlp.experts.up_proj.{part}"
            array = weights.pop(whole)
            if change:
                weights[whole] = change(array)

    change_weights(folder, spoil)
    refused(folder, word)


def test_a_tokenizer_larger_than_the_embedding(folder):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"extra{n}" for n in range(50)])
    tokenizer.save(str(folder / "tokenizer.json"))
    refused(folder, "tokenizer.json", "309", str(V - 1))


@pytest.mark.parametrize(
    ("settings", "window", "whole"),
    [
        (
            {
                "model_type": "llama",
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            64,
            [0],
        ),
        ({"model_type": "mistral", "sliding_window": None}, 4096, []),  # None removes the field
        # By default, windows start at layer 28, which this model does not have
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, None, []),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            64,
            [0],
        ),
        ({"model_type": "qwen3", "head_dim": 16, "sliding_window": 64}, None, []),
        ({"model_type": "phi3"}, None, []),
        ({"model_type": "phi3", "sliding_window": 64}, 64, []),
        ({"model_type": "gemma2", "sliding_window": 64, "num_hidden_layers": 4}, 64, [1, 3]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 7}, 64, [5]),
        (
            {"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 1},
            None,
            [],
        ),
    ],
)
def test_sliding_layers_of_each_family(tmp_path, settings, window, whole):
    config = configs.read_config(make_checkpoint(tmp_path, **settings), True)
    assert config.window == window and [*config.whole] == whole


# The other families are implemented by code on the hub instead of in transformers
KNOWN_TO_TRANSFORMERS = [family for family in FAMILIES if family in CONFIG_MAPPING]


def test_config_defaults_equal_transformers(tmp_path):
    """Our defaults are those of transformers. mlx-lm has different ones for the biases of SeedOss and the theta
    of SmolLM3."""
    assert len(KNOWN_TO_TRANSFORMERS) >= 12
    for family in KNOWN_TO_TRANSFORMERS:
        unsaid = {"head_dim": None, "rope_theta": None, "rms_norm_eps": None}
        if family.startswith("qwen3_5"):
            unsaid["num_hidden_layers"] = 4  # one of them has attention
        given = make_config(model_type=family, **unsaid)
        (tmp_path / "config.json").write_text(json.dumps(given))
        ours = configs.read_config(tmp_path, True)
        theirs = AutoConfig.for_model(**given)
        theirs_eps = theirs.norm_eps if family == "lfm2" else theirs.rms_norm_eps
        assert ours.norm_eps == theirs_eps, family
        positions = theirs.rope_parameters
        if "full_attention" in positions:
            assert ours.near.theta == positions["sliding_attention"]["rope_theta"]
            assert ours.rope.type == positions["full_attention"]["rope_type"]
            positions = positions["full_attention"]
        assert ours.rope.theta == positions["rope_theta"], family
        assert ours.cap == getattr(theirs, "attn_logit_softcapping", None), family
        assert ours.head_cap == getattr(theirs, "final_logit_softcapping", None), family
        sizes = getattr(theirs, "per_layer_config", None) or [theirs] * ours.layers
        for layer in range(ours.layers):
            size = getattr(sizes[layer], "head_dim", None) or ours.D // ours.H
            assert ours.heads(layer).Dh == size, family
        if family != "qwen2":  # its biases are fixed in the code
            assert ours.qkv_bias == getattr(theirs, "attention_bias", False), family
            assert ours.o_bias == getattr(theirs, "attention_out_bias", ours.qkv_bias)
        turned = getattr(theirs, "no_rope_layers", [1, 1])
        assert set(ours.unturned) == {i for i, value in enumerate(turned) if not value}


@pytest.mark.parametrize(
    "sizes",
    [  # 4B and 12B
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ],
)
def test_gemma_3_as_published(tmp_path, sizes):
    """Regression: the configs of all models that see leave out what is transformers' default, and were refused."""
    text = sizes | {"model_type": "gemma3_text", "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    given = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    ours = configs.read_config(tmp_path, has_head=False)
    theirs = AutoConfig.for_model(**given).get_text_config()
    assert (ours.V, ours.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    heads = (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    assert ours.heads(0) == heads and ours.tied == theirs.tie_word_embeddings
    for layer, kind in enumerate(theirs.layer_types):
        rope, window = ours.positions(layer)
        positions = theirs.rope_parameters[kind]
        assert (rope.type, rope.theta) == (positions["rope_type"], positions["rope_theta"])
        assert rope.factor == positions.get("factor", 1)
        assert window == (theirs.sliding_window if kind == "sliding_attention" else None)


OTHERS = """
    gemma gemma3n_text qwen2_moe mixtral gpt2 phi cohere2 starcoder2 olmo glm4 exaone4 granitemoe
    deepseek_v3 mamba2 falcon_h1 bitnet ernie4_5 apertus qwen2_5_vl llama4_text
"""


@pytest.mark.parametrize("family", [*KNOWN_TO_TRANSFORMERS, *OTHERS.split()])
def test_transformers_configs(tmp_path, family):
    """The default config of each family in transformers is read or refused. Field names change with releases:
    since transformers 5, theta is in `rope_parameters`."""
    config = AutoConfig.for_model(family).to_dict()
    if family == "granitemoehybrid":  # the default config has Mamba layers and experts
        config |= {"layer_types": ["attention"] * config["num_hidden_layers"]}
        config["num_local_experts"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    if family in FAMILIES:
        ours = configs.read_config(tmp_path, True)
        assert (ours.D, ours.layers) == (config["hidden_size"], config["num_hidden_layers"])
        return
    with pytest.raises(ModelError, match=rf"{family}.*Supported: {', '.join(FAMILIES)}"):
        configs.read_config(tmp_path, True)


def test_text_part_of_a_model_that_sees(tmp_path):
    """Ministral 3 is published as the text part of a model for images."""
    text = {"model_type": "ministral3", "num_hidden_layers": 1, "rope_theta": None, "head_dim": 16}
    folder = make_checkpoint(tmp_path, **text, rope_parameters=MINISTRAL)
    alone = read_model(folder)
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "mistral3", "text_config": config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    for prefix in ("language_model.", "model.language_model."):
        path = folder / "model.safetensors"
        weights = {
            name.replace("language_model.", ""): array for name, array in mx.load(str(path)).items()
        }
        weights = {
            f"{prefix if name.startswith('model.') else ''}{name}".replace(
                "language_model.model.",
                "language_model." if prefix.startswith("model") else "language_model.model.",
            ): array
            for name, array in weights.items()
            if not name.startswith("vision")
        }
        weights["vision_tower.patch.weight"] = mx.ones((2, 2))
        mx.eval(weights)
        mx.save_safetensors(str(path), weights)
        model = read_model(folder)
        assert model.config == alone.config
        assert mx.array_equal(model.table.weight, alone.table.weight)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("qwen3_next", "qwen3_5"),
        ("qwen2_5_vl", "qwen2"),
        ("gemma3n_text", "gemma3"),
        ("gemma", "gemma4"),
        ("granitemoe", "granitemoehybrid"),
        ("lfm2_moe", "lfm2"),
        ("olmo", "olmo3"),
        ("llama4_text", "llama"),
        ("mixtral", ""),
        ("qwen3_" + "x" * 5000, "qwen3_5"),
    ],
)
def test_a_refused_family_names_the_one_that_is_near(tmp_path, name, near):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ModelError) as caught:
        configs.read_config(tmp_path, True)
    line = str(caught.value)
    assert f"is not served; {near} is. Supp" in line if near else "is not served. Supp" in line
    assert len(line) < 480 and line.endswith("gemma3_text.")


def test_zero_initialized_block(folder):
    """Regression: LLaMA Pro adds blocks whose last matrices are initialized to zero; they were reported as
    a broken download."""
    names = [f"model.layers.1.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj")]
    change_weights(folder, lambda w: w.update({name: mx.zeros_like(w[name]) for name in names}))
    layer = read_model(folder).layers[1]
    assert not layer.out.weight.any() and not layer.mlp.down.weight.any()


def test_rope_scaling_precedes_rope_parameters(folder):
    change_config(
        folder,
        rope_scaling={"type": "linear", "factor": 3.0},
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    assert read_model(folder).config.rope.type == "linear"


def test_model_larger_than_memory(whole, monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda: 100_000)
    refused(whole, "weights", "KiB")
    model = None
    monkeypatch.setattr(device, "free_memory", lambda: 10_000_000)
    model, text = read_model(whole), Tokenizer(whole, V)
    with pytest.raises(ValueError, match=r"64 slots of 2,048.*--slots \d+ or --max-len \d+"):
        Engine(model, text, slots=64, max_len=2048)
    with Engine(model, text) as engine:  # the default sizes are chosen to fit
        assert engine.sched.slots >= 1 and "10" not in engine.summary.split(";")[0]
        assert "slots of 1,024 tokens" in engine.summary and "9.54 MiB" in engine.summary
    monkeypatch.setattr(device, "free_memory", lambda: 1_000_000)
    with Engine(model, text) as engine:
        assert sum(array.nbytes for array in engine.runner.slab.arrays) <= 900_000


def test_sizes_are_fixed_before_loading(whole, monkeypatch):
    """Regression: the sizes were computed twice. If another program allocated memory before the second time,
    a model was refused after its weights had been loaded."""
    read = ModelReader.read_model

    def read_beside_a_neighbour(reader: ModelReader, between: Callable):
        monkeypatch.setattr(device, "free_memory", lambda: 0)
        return read(reader, between)

    monkeypatch.setattr(ModelReader, "read_model", read_beside_a_neighbour)
    monkeypatch.setattr(device, "free_memory", lambda: 10_000_000)
    with Engine.load(whole) as engine:
        assert device.free_memory() == 0
        slab = engine.runner.slab
        assert slab.slots > 1 and sum(array.nbytes for array in slab.arrays) <= 9_000_000


# --- attacks: special files, and invalid numbers ------------------------------------------------

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
FILES += ("model.safetensors", "model.safetensors.index.json", "chat_template.jinja")


def tried(folder) -> str:
    """Load everything in a folder. Return "loaded", or the one line of a ModelError; any other error
    propagates."""
    try:
        with Engine.load(folder, slots=1, max_len=64) as engine:
            engine.text.ask("a question")
        return "loaded"
    except ModelError as error:
        line = str(error)
        assert "\n" not in line and len(line) < 500, line
        return line


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero"])
@pytest.mark.parametrize("file", FILES)
def test_special_files_are_refused(folder, file, kind):
    """A pipe, a folder or a device in place of a file is refused. Opening a pipe without a writer would block
    forever, and /dev/zero has no end."""
    path, said = folder / file, []
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)
    thread = threading.Thread(target=lambda: said.append(tried(folder)), daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive() and kind == "pipe":
        # Otherwise the thread would hold the device's lock forever
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    assert said and str(path) in said[0], said


@pytest.mark.parametrize("file", [file for file in FILES if file != "model.safetensors"])
def test_oversized_file_is_refused(folder, file):
    """Regression: an index of two million entries was refused after 34 s. The test file is sparse."""
    path, most = folder / file, LARGEST.get(file, LARGEST_OTHER)
    with path.open("wb") as large:
        large.truncate(most + 1)
    assert f"{path} has {most + 1:,} bytes, but such a file may have at most {most:,}" in tried(
        folder
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_file_that_must_not_be_read_is_refused(folder, file):
    (folder / file).touch()
    (folder / file).chmod(0)
    assert str(folder / file) in tried(folder)


STRANGE = [
    10**400,
    10**30,
    2**63,
    2**62,
    2**31,
    10**9,
    0,
    -1,
    -(2**62),
    1e308,
    -1e308,
    5e-324,
    1.5,
    True,
    None,
]
STRANGE += [
    math.nan,
    math.inf,
    -math.inf,
    "x" * 5000,
    "NaN",
    "\ud800",
    "",
    [],
    {},
    [1] * 5000,
    {"a": {"b": 1}},
]
FIELDS = """
    head_dim rope_scaling rope_parameters sliding_window layer_types attention_bias mlp_bias quantization hidden_act
    quantization_config max_window_layers partial_rotary_factor rope_traditional use_sliding_window hidden_activation
    query_pre_attn_scalar attn_logit_softcapping sliding_window_pattern rope_local_base_freq no_rope_layer_interval
"""
SCALING = """
    rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings rope_type type short_factor
    long_factor beta_fast beta_slow mscale mscale_all_dim attention_factor
"""


def strange(rng: random.Random, config: dict) -> dict:
    """Return a good config with one to three values replaced, in it or in its rope scaling."""
    config = config | {"model_type": rng.choice([*families.FAMILIES])}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = rng.choice(STRANGE)
        if rng.random() < 0.3:
            usual = {"rope_type": rng.choice(configs.ROPE_TYPES), "factor": 2.0}
            usual |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
            config["rope_scaling"] = usual | {rng.choice(SCALING.split()): value}
        else:
            config[rng.choice([*config, *FIELDS.split()])] = value
    return config


def test_random_configs(folder):
    """Random configs are loaded, or refused in one short line. Regression: a value of 5,000 characters was
    repeated in full."""
    rng, config, count = (
        random.Random(11),
        json.loads((folder / "config.json").read_text()),
        Counter(),
    )
    for _ in range(number_of("DAMAGE", 150)):
        (folder / "config.json").write_text(json.dumps(strange(rng, config)))
        count[tried(folder) == "loaded"] += 1
    assert count[True] > 12 and count[False] > 75, count


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        "{",
        "[]",
        "\xff",
        '{"a": ' * 10**5,
        "[" * 10**5,
        '{"vocab_size": 1' + "0" * 5000 + "}",
    ],
    ids=lambda text: text[:8],
)
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
)
def test_what_is_no_json_file(folder, file, text):
    """The line names the file, although Python's parser raises different errors for deep nesting and too many
    digits."""
    (folder / file).write_bytes(text.encode("latin-1"))
    assert file in tried(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", {"eos_token_id": "x" * 5000}),
        ("tokenizer_config.json", {"eos_token": "\ud800"}),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": [], "template": "x"}, {"name": {}}, 5]},
        ),
        ("tokenizer_config.json", {"chat_template": "{{ 1"}),
        ("model.safetensors.index.json", {"weight_map": {"x" * 5000: "model.safetensors"}}),
        ("model.safetensors.index.json", {"weight_map": {"x": "x" * 5000}}),
        ("model.safetensors.index.json", {"weight_map": {"x": "a\0b"}}),
        ("model.safetensors.index.json", {"weight_map": {"x": ".."}}),
        ("model.safetensors.index.json", {"weight_map": {"x": "config.json"}}),
    ],
    ids=lambda value: str(value)[:60].encode("ascii", "backslashreplace").decode(),
)
def test_bad_values_in_other_files(folder, file, content):
    (folder / file).write_text(json.dumps(content))
    line = tried(folder)
    assert (
        line == "loaded"
        if file == "tokenizer_config.json" and "{{ 1" not in str(content)
        else str(folder) in line
    )


def spoilt(rng: random.Random, data: bytes) -> bytes:
    """Return a weights file that is truncated, or has random bytes or strange values, in its header or
    data."""
    data, end = bytearray(data), 8 + struct.unpack("<Q", data[:8])[0]
    how = rng.choice(("cut", "length", "header", "header", "values", "values", "numbers"))
    if how == "cut":
        return data[: rng.randrange(len(data))]
    if how == "values":
        header = json.loads(data[8:end])
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        others = [
            ["F64"],
            ["a", "b"],
            [0, 2**62],
            [-5, 0],
            [True, 4],
            [[0], [1]],
            [math.nan, 0],
            "BF16",
            "U32",
        ]
        entry[rng.choice([*entry])] = rng.choice(STRANGE + others)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[end:]
    first, last = {"length": (0, 8), "header": (8, end), "numbers": (end, len(data))}[how]
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(first, last)] = rng.randrange(256)
    return bytes(data)


def test_random_damage_to_weights(folder):
    """Damaged weights are loaded or refused in one line. MLX itself checks little: it reads beyond the end of
    a tensor, or aborts."""
    rng, path, count = random.Random(12), folder / "model.safetensors", Counter()
    data = path.read_bytes()
    for _ in range(number_of("DAMAGE", 150)):
        path.write_bytes(spoilt(rng, data))
        count[tried(folder) == "loaded"] += 1
    assert count[True] > 10 and count[False] > 75, count


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_keys_and_values_have_16_bits_where_the_weights_have(tmp_path, dtype):
    folder = make_checkpoint(tmp_path, seed=3, dtype=dtype)
    sizes = {}
    for kv in ("auto", "float32"):
        with Engine.load(folder, slots=2, max_len=64, chunk=32, kv=kv) as engine:
            slab = engine.runner.slab
            sizes[kv] = sum(array.nbytes for array in slab.arrays)
            assert slab.dtype == (mx.float16 if kv == "auto" and dtype.size == 2 else mx.float32)
            assert sizes[kv] == slab_of(engine.model, Sizes(2, 64, 32, budget=32))
    # An additional row per head contains the label that the attention operation reads
    assert sizes["float32"] == pytest.approx(sizes["auto"] * 4 / dtype.size, rel=0.02)
