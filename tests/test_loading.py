"""Every way a checkpoint may be written is read, and every way it may be broken is said in one line."""

import json
import shutil
import struct

import numpy as np
import pytest
from checkpoints import V, make_checkpoint, make_tokenizer

from nanobatch import Engine, Model, Sampling, Text
from parts import device
from parts.checkpoint import ModelError
from parts.device import mx


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("sharded"), shards=3)


@pytest.fixture
def folder(whole, tmp_path):
    """A whole checkpoint of one's own, to break."""
    return shutil.copytree(whole, tmp_path / "model")


def refused(folder, *words: str, **options) -> str:
    """Loading fails with one line that holds the words."""
    with pytest.raises(ModelError) as caught:
        Engine.load(folder, slots=1, max_len=64, **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500, line
    for word in words:
        assert word in line, f"{word!r} is not in: {line}"
    return line


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_weights(folder, change) -> None:
    """Rewrite model.safetensors with what `change(weights)` makes of it."""
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    change(weights)
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


# --- what is read ------------------------------------------------------------------------------------------------


def test_one_file_and_many_with_an_index_are_the_same_model(whole, sharded):
    one, many = Model.load(whole), Model.load(sharded)
    assert np.array_equal(np.array(one.layers[1].qkv.weight), np.array(many.layers[1].qkv.weight))
    assert np.array_equal(np.array(one.head.weight), np.array(many.head.weight))


def test_on_a_cpu_weights_become_float32_unless_told_otherwise(tmp_path):
    folder = make_checkpoint(tmp_path, dtype=mx.float16)
    assert Model.load(folder).dtype == mx.float32
    assert Model.load(folder, "checkpoint").dtype == mx.float16


def test_a_tied_model_keeps_one_table_and_ignores_a_head_that_is_stored_twice(folder):
    change_config(folder, tie_word_embeddings=True)
    model = Model.load(folder)
    assert model.head is model.table


def test_where_the_config_leaves_tying_open_the_weights_decide(folder):
    change_config(folder, tie_word_embeddings=...)
    model = Model.load(folder)
    assert model.head is not model.table
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    model = Model.load(folder)
    assert model.head is model.table


def test_rope_tables_that_old_checkpoints_carry_are_ignored(folder):
    change_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(8)}))
    Model.load(folder)


def test_end_tokens_are_the_union_of_config_generation_config_and_tokenizer(folder):
    assert Text(folder, V).end_tokens == {257}
    (folder / "generation_config.json").write_text('{"eos_token_id": [259, 257]}')
    assert Text(folder, V).end_tokens == {257, 259}
    change_config(folder, eos_token_id=[5])
    assert Text(folder, V).end_tokens == {5, 257, 259}
    change_config(folder, eos_token_id=...)
    (folder / "generation_config.json").unlink()
    assert Text(folder, V).end_tokens == frozenset()
    for spelling in ("</s>", {"content": "</s>", "special": True}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": spelling}))
        assert Text(folder, V).end_tokens == {257}


@pytest.mark.parametrize("value", ["</s>", [[1]], 1.5])
def test_an_end_token_that_is_no_id(folder, value):
    change_config(folder, eos_token_id=value)
    refused(folder, "config.json", "eos_token_id")


def test_a_hub_id_loads_from_the_cache_with_the_network_down(whole, tmp_path, monkeypatch):
    """A snapshot folder, laid out as huggingface_hub lays it out, is all that a cached model is."""
    from huggingface_hub import constants

    repo = tmp_path / "models--someone--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(whole, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with Engine.load("someone/tiny", slots=1, max_len=64) as engine:
        assert len(engine.submit([1, 2], Sampling(max_tokens=3)).result().tokens) == 3


# --- what is refused ---------------------------------------------------------------------------------------------


def test_a_name_that_is_neither_a_folder_nor_a_hub_id(tmp_path):
    refused("no-such-model", "no-such-model", "owner/name")
    refused("./not/there", "./not/there", "folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file")


def test_a_hub_id_that_is_not_cached_while_the_network_is_down(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("someone/absent", "someone/absent", "cache", "network")


def test_a_config_for_more_or_fewer_layers_than_there_are(folder):
    change_config(folder, num_hidden_layers=3)
    refused(folder, "lacks", "model.layers.2")
    change_config(folder, num_hidden_layers=3_000_000)
    refused(folder, "lacks", "model.layers.2999999")
    change_config(folder, num_hidden_layers=1)
    refused(folder, "model.layers.1", "no place")


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
    for place in ("../elsewhere.safetensors", "x" * 300, 7):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
        refused(folder, "model.norm.weight", str(place)[:20])


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


@pytest.mark.parametrize("content", ["<html>", "version https://git-lfs.github.com/spec/v1", "{", "[]", "\xff"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_what_lies_where_a_json_file_should_be(folder, file, content):
    (folder / file).write_bytes(content.encode("latin-1"))
    refused(folder, file)


def test_a_file_that_is_cut_off_or_has_bytes_to_spare(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    refused(folder, "cut off", f"{len(data):,}")
    path.write_bytes(data + b"x")
    refused(folder, "longer")


def test_a_tail_of_zeros_where_a_download_stopped(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    refused(folder, "model.safetensors", "zeros")


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_is_not_finite(folder, number):
    def spoil(weights):
        values = np.array(weights["model.layers.1.mlp.up_proj.weight"])
        values[3, 4] = number
        weights["model.layers.1.mlp.up_proj.weight"] = mx.array(values)

    change_weights(folder, spoil)
    refused(folder, "model.layers.1.mlp.up_proj.weight", "NaN or infinity")


def test_a_matrix_of_zeros_and_a_missing_and_a_foreign_and_a_misshapen_tensor(whole, tmp_path):
    def broken(name, change):
        folder = shutil.copytree(whole, tmp_path / name)
        change_weights(folder, change)
        return folder

    name = "model.layers.0.self_attn.q_proj.weight"
    refused(broken("zeros", lambda w: w.update({name: mx.zeros_like(w[name])})), name, "zeros")
    refused(broken("missing", lambda w: w.pop(name)), name, "lacks")
    refused(
        broken("foreign", lambda w: w.update({"model.layers.9.x.weight": mx.ones(3)})), "model.layers.9", "no place"
    )
    refused(broken("transposed", lambda w: w.update({name: w[name][:10]})), name, "(10, 64)", "(64, 64)")
    refused(broken("integers", lambda w: w.update({name: mx.ones((64, 64), mx.int32)})), name, "I32", "BF16")
    refused(broken("packed", lambda w: w.update({name: mx.ones((64, 64), mx.uint32)})), name, "scales")
    scales = name.replace("weight", "scales")
    refused(broken("half", lambda w: w.update({scales: mx.ones((64, 2))})), "biases", "missing")


def test_quantized_shapes_that_no_quantization_has(tmp_path):
    folder = make_checkpoint(tmp_path, quantize=lambda module: (4, 32) if "down" in module else None)
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(folder, lambda w: w.update({name: mx.ones((64, 7), mx.uint32)}))
    refused(folder, name.removesuffix(".weight"), "Supported bits: 2, 3, 4, 5, 6, 8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["gpt2", "llama, mistral, qwen2, qwen3"]),
        ({"model_type": ...}, ["model_type", "llama"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ["yarn", "default, linear, dynamic, llama3"]),
        ({"rope_scaling": {"type": "longrope"}}, ["longrope"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": "linear"}, ["rope scaling", "linear"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["rope scaling", "flat"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"quantization": [4]}, ["quantization", "object"]),
        ({"quantization_config": "x"}, ["quantization_config", "object"]),
        ({"layer_types": 5}, ["layer_types", "full_attention"]),
        ({"layer_types": ["linear_attention"] * 2}, ["layer_types", "linear_attention"]),
        ({"head_dim": 2}, ["head_dim", "2"]),
        ({"partial_rotary_factor": 0.5}, ["partial"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "affine"]),
        ({"quantization": {"mode": "mxfp4", "bits": 4, "group_size": 32}}, ["mxfp4", "affine"]),
        ({"hidden_size": ...}, ["hidden_size"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers", "two"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["64", "5"]),
        ({"head_dim": 15}, ["15", "even"]),
        ({"vocab_size": 100}, ["embed_tokens", "(272, 64)", "(100, 64)"]),
    ],
)
def test_a_config_that_is_not_supported_or_does_not_fit(folder, changes, words):
    change_config(folder, **changes)
    refused(folder, "config.json", *words)


def test_a_tokenizer_larger_than_the_embedding(folder):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"extra{n}" for n in range(50)])
    tokenizer.save(str(folder / "tokenizer.json"))
    refused(folder, "tokenizer.json", "309", str(V - 1))


def test_a_sliding_window_shorter_than_the_slot(tmp_path):
    folder = make_checkpoint(tmp_path, model_type="mistral", sliding_window=100)
    with pytest.raises(ValueError, match=r"128.*100"):
        Engine.load(folder, max_len=128)
    with Engine.load(folder, slots=1) as engine:  # not asked for a length, it takes one that fits
        assert engine.sched.max_len == 100


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"model_type": "llama", "sliding_window": 64}, None),
        ({"model_type": "llama", "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, 4096),  # None leaves the field out
        ({"model_type": "qwen2", "sliding_window": 64}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, None),  # from layer 28 on
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ({"model_type": "qwen3", "head_dim": 16, "sliding_window": 64}, None),
    ],
)
def test_each_familys_way_to_say_whether_attention_slides(tmp_path, settings, window):
    assert Model.load(make_checkpoint(tmp_path, **settings)).config.window == window


def test_rope_scaling_goes_before_rope_parameters_as_in_transformers(folder):
    change_config(
        folder,
        rope_scaling={"type": "linear", "factor": 3.0},
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    assert Model.load(folder).config.rope.type == "linear"


def test_a_header_whose_bytes_do_not_fit_its_shapes(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"shape":[64]', b'"shape":[63]', 1))
    assert path.read_bytes() != data
    refused(folder, "model.safetensors", "header", "63")


def test_weights_or_a_slab_that_do_not_fit_the_free_memory(whole, monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda: 100_000)
    refused(whole, "weights", "KiB")
    model = None
    monkeypatch.setattr(device, "free_memory", lambda: 10_000_000)
    model, text = Model.load(whole), Text(whole, V)
    with pytest.raises(ValueError, match=r"64 slots of 2,048.*--slots \d+ or --max-len \d+"):
        Engine(model, text, slots=64, max_len=2048)
    with Engine(model, text) as engine:  # not asked for a size, it takes one that fits
        assert engine.sched.slots >= 1 and "10" not in engine.summary.split(";")[0]
        assert "slots of 1,024 tokens" in engine.summary and "9.54 MiB" in engine.summary
    monkeypatch.setattr(device, "free_memory", lambda: 1_000_000)
    with Engine(model, text) as engine:
        assert engine.runner.slab.k[0].nbytes * 4 <= 900_000


def test_an_unknown_dtype_is_refused(whole):
    with pytest.raises(ValueError, match="float8"):
        Engine.load(whole, dtype="float8")
