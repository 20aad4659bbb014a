"""GGUF files give the same bits as weights that the `gguf` package converts to float32."""

import os
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_models import FAMILIES, make_pair
from long_forms import number_of
from parity import same_bits, whole

from base.untrusted_files import ModelError
from kernels import device
from models import model_finder
from models.config import read_config
from models.forward_cost import nbytes_of
from models.gguf_file import TYPES, read_gguf
from models.gguf_weights import FILE_TYPES
from models.load import ModelReader, read_model
from models.rope import rope_frequencies
from nanobatch import Tokenizer
from text.gguf_tokenizer import GgufText

KINDS = [each.name for each in TYPES.values()]
PROMPT = np.random.default_rng(0).integers(0, 250, 45).tolist()


def alike(file, folder, tokens=PROMPT) -> bool:
    return same_bits(read_model(file, activations=32), read_model(folder, "float32"), tokens)


# The largest allowed ratio of the weights' memory to the size of the file's tensors
MOST = {"Q4_0": 1.15, "Q4_1": 1.15, "Q8_0": 1.15, "Q5_0": 1.7, "Q5_1": 1.7}
MOST |= {"Q4_K": 1.05, "Q5_K": 1.6, "Q6_K": 1.42, "MXFP4": 1.35}


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_gives_the_bits_of_the_dequantized_weights(kind, tmp_path):
    """The weights also stay packed."""
    file, wide = make_pair(tmp_path, kind, seed=len(kind))
    assert alike(file, wide)
    stored = sum(tensor.nbytes for tensor in read_gguf(file).tensors.values())
    model = read_model(file)
    assert ModelReader(file).nbytes == nbytes_of(model)
    if device.is_batch_invariant():
        assert nbytes_of(model) < MOST.get(kind, 1.05) * stored


def test_names_of_files_are_those_of_the_gguf_package():
    for number, name in FILE_TYPES.items():
        kind = gguf.LlamaFileType(number).name
        assert name == kind.removeprefix("MOSTLY_").removeprefix("ALL_")


@pytest.mark.parametrize("arch", FAMILIES)
def test_each_family_gives_the_bits_of_the_dequantized_weights(arch, tmp_path):
    """The weights are Q4_K, but F32 for Gemma 3 and Granite: factors are folded into their weights, and
    quantized numbers would round differently."""
    assert alike(*make_pair(tmp_path, "F32" if arch in ("gemma3", "granite") else "Q4_K", arch))


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_value_heads_in_the_order_of_llama_cpp(arch, tmp_path):
    """llama.cpp stores value heads in a different order if there are fewer key heads. The output projection then
    sums in a different order, so bits may differ."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
    fields = {"qwen35moe.feed_forward_length": None}
    file, wide = make_pair(
        tmp_path, "Q4_K" if arch == "qwen35moe" else "Q8_0", arch, fields=fields, **heads
    )
    ours, right = (
        whole(model, PROMPT)
        for model in (read_model(file, activations=32), read_model(wide, "float32"))
    )
    assert np.abs(ours - right).max() < 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_mlxs_own_products_come_near(kind, tmp_path):
    """MLX's products, which GPUs use, give nearly the same numbers. Q6_K becomes float16, because MLX does not
    support its groups of 16."""
    file, wide = make_pair(tmp_path, kind, num_hidden_layers=1)
    reader = ModelReader(file, "checkpoint")
    ours = reader.read_model()
    assert nbytes_of(ours) == reader.nbytes
    right = whole(read_model(wide, "float32"), PROMPT)
    assert np.abs(whole(ours, PROMPT) - right).max() < 0.02 * np.abs(right).max()


def test_frequencies_of_llama_3_come_from_their_tensor(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    how = {"kind": "F32", "num_hidden_layers": 1}
    _, wide = make_pair(tmp_path / "a", **how, rope_scaling=scaling)
    c = read_config(wide, True)
    plain = rope_frequencies(replace(c.rope, type="default"), c.Dh, 0)
    slowed = np.array(plain / rope_frequencies(c.rope, c.Dh, 0))
    assert slowed.max() > 7 and slowed.min() == 1
    file, _ = make_pair(tmp_path / "b", **how, more={"rope_freqs.weight": slowed})
    ours, right = (
        whole(read_model(file, activations=32), PROMPT),
        whole(read_model(wide, "float32"), PROMPT),
    )
    assert np.abs(ours - right).max() < 1e-4 * np.abs(right).max()


# --- untrusted files ------------------------------------------------------------------------------


def load(file: Path) -> None:
    """Load like an engine, but the tokenizer last, because its check is slow."""
    found = model_finder.find(str(file))
    ModelReader(found).read_model()
    Tokenizer(found, 272)


def refused(file: Path, *words: str) -> str:
    """Assert that loading fails with one line that names the file and contains the words. Return the line."""
    with pytest.raises(ModelError) as caught:
        load(file)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 480, line
    for word in (file.name, *words):
        assert word in line, f"{word!r} is not in: {line}"
    return line


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str = "a", shape: tuple = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_bytes(fields=(), tensors=(), data: int = 256, version: int = 3, counts=()) -> bytes:
    """Return the bytes of a file with these fields and tensors, valid or not."""
    count, many = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, count, many) + b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32 + data)


HUGE = 2**63 + 1
BROKEN = {
    "empty": (b"", "not a GGUF file"),
    "something else": (b"PK\3\4" * 99, "not a GGUF file"),
    "a page": (b"<!DOCTYPE html><html>", "HTML page"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(99), "big-endian"),
    "version 99": (gguf_bytes(version=99), "version 99", "2 and 3"),
    "too many tensors": (gguf_bytes(counts=(HUGE, 0)), "broken header"),
    "a long name": (gguf_bytes([struct.pack("<Q", HUGE)]), "broken header"),
    "a long list of texts": (gguf_bytes([field("a", 9, array(8, HUGE))]), "broken header"),
    "a list of lists": (gguf_bytes([field("a", 9, array(9, 1, array(0, 0)))]), "type 9"),
    "a field twice": (gguf_bytes([field("a", 0, b"\1")] * 2), "'a' twice"),
    "a name that is no text": (gguf_bytes([field(b"\xff", 0, b"\1")]), "broken header"),
    "no dimensions": (gguf_bytes(tensors=[tensor(shape=())]), "0 dimensions"),
    "an empty tensor": (gguf_bytes(tensors=[tensor(shape=(32, 0))]), "of the shape (0, 32)"),
    "a tensor of 2^248 numbers": (gguf_bytes(tensors=[tensor(shape=(2**62,) * 4)]), "cut off"),
    "half a block": (gguf_bytes(tensors=[tensor(shape=(48,), kind=8)]), "not a Q8_0", "(48,)"),
    "an unknown type": (gguf_bytes(tensors=[tensor(kind=99)]), "'a' is of type 99", "Q4_K"),
    "a type not read": (gguf_bytes(tensors=[tensor(kind=23)]), "'a' is IQ4_XS", "Q4_K_M or Q8_0"),
    "a tensor twice": (gguf_bytes(tensors=[tensor(), tensor(offset=128)]), "there twice"),
    "overlapping": (gguf_bytes(tensors=[tensor("a"), tensor("b", offset=96)]), "'b' begins"),
    "unaligned": (gguf_bytes(tensors=[tensor(offset=4)]), "'a' begins at"),
    "an odd alignment": (gguf_bytes([field("general.alignment", 4, b"\3\0\0\0")]), "power of two"),
    "no architecture": (gguf_bytes(tensors=[tensor()]), "None", "llama, qwen2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(name, tmp_path):
    data, *words = BROKEN[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    refused(tmp_path / "bad.gguf", *words)


@pytest.mark.parametrize("part", [0.005, 0.3, 1 - 1e-6])
def test_a_file_that_is_cut_off_is_refused(part, tmp_path, whole_file):
    data = whole_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(part * len(data))])
    refused(tmp_path / "cut.gguf", "cut off" if part > 0.01 else "broken header")


def test_a_file_that_is_cut_off_later_is_refused(tmp_path, whole_file):
    """A file that is truncated or removed after its header was read is refused."""
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole_file.read_bytes())
    reader = ModelReader(file)
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(ModelError, match="was truncated"):
        reader.read_model()
    file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        reader.read_model()


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory) -> Path:
    return make_pair(tmp_path_factory.mktemp("whole"), num_hidden_layers=1)[0]


def without(wanted: str):
    return lambda name, data: None if name == wanted else data


def cut(wanted: str):
    return lambda name, data: data[: len(data) // 2] if name == wanted else data


def filled(wanted: str, number: float):
    """Return a change that sets each block's scale to this number."""

    def change(name: str, data: np.ndarray) -> np.ndarray:
        if name == wanted:
            data.reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
        return data

    return change


Q = "blk.0.attn_q.weight"
T = "tokenizer.ggml."
SPOILT = number_of("SPOILT", 100)


def test_a_spoilt_header_is_refused_or_read_and_never_anything_else(tmp_path, whole_file):
    """Replace some bytes of the metadata with random ones."""
    rng = np.random.default_rng(0)
    data = np.frombuffer(whole_file.read_bytes(), np.uint8)
    end = min(tensor.begin for tensor in read_gguf(whole_file).tensors.values())
    file = tmp_path / "spoilt.gguf"
    count = Counter()
    for _ in range(SPOILT):
        spoilt = data.copy()
        places = rng.integers(4, end, rng.integers(1, 4))
        spoilt[places] = rng.integers(0, 256, len(places))
        file.write_bytes(spoilt.tobytes())
        try:
            ModelReader(file)
            text = GgufText(file)
            count["read", bool(text.config), bool(text.end_tokens)] += 1
        except ModelError as error:
            assert "\n" not in str(error)
            count["refused"] += 1
    assert len(count) > 1 and count["refused"] > SPOILT // 10, count


UNFIT = {
    "a tensor is missing": ({}, without(Q), f"lacks the tensor {Q}"),
    "a wrong shape": ({}, cut(Q), Q, "(128, 256)", "(256, 256)"),
    "a norm's wrong shape": ({}, cut("output_norm.weight"), "(128,)", "(256,)"),
    "NaN": ({}, filled(Q, np.nan), "blk.0.attn_q.weight holds NaN"),
    "another architecture": ({"general.architecture": "mamba"}, None, "'mamba'", "llama, qwen2"),
    "one that is near": (
        {"general.architecture": "qwen3next"},
        None,
        "'qwen3next' is not served as GGUF; qwen35 is. Supported: llama, qwen2",
    ),
    "a list of pre-tokenizers": ({f"{T}pre": ["qwen2"]}, None, "qwen2"),
    "parts in words": ({"split.count": "two"}, None, "-00001-of-"),
    "merges that are numbers": ({f"{T}merges": [1, 2]}, None, "not a tokenizer"),
    "no number of layers": ({"llama.block_count": None}, None, "lacks the field llama.block_count"),
    "too many layers": ({"llama.block_count": 10**6}, None, "lacks the tensor blk.999999"),
    "heads that differ": ({"llama.attention.head_count_kv": [1, 2]}, None, "[1, 2]", "one number"),
    "experts": ({"llama.expert_count": 8}, None, "llama.expert_count = 8"),
    "a part of a head turns": ({"llama.rope.dimension_count": 16}, None, "dimension_count = 16"),
    "an unknown rope": ({"llama.rope.scaling.type": "new"}, None, "rope type = 'new'"),
    "a factor in words": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": "two"},
        None,
        "factor",
        "'two'",
    ),
    "another tokenizer": ({f"{T}model": "bert"}, None, "'bert'", "gpt2, llama"),
    "an unknown pre-tokenizer": ({f"{T}pre": "viking"}, None, "'viking'", "qwen2"),
    "no tokens": ({f"{T}tokens": None}, None, f"{T}tokens"),
    "too many tokens": ({f"{T}tokens": list("abcd"), f"{T}token_type": [1]}, None, "token_type"),
    "no scores": ({f"{T}model": "llama"}, None, f"{T}scores"),
    "merges of nothing": ({f"{T}merges": ["xyz qrs"]}, None, "not a tokenizer"),
    "an end beyond the tokens": (
        {f"{T}eos_token_id": 10**6},
        None,
        "eos_token_id = 1000000",
        "272",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_file_that_does_not_fit_together_is_refused_in_one_line(name, tmp_path):
    fields, change, *words = UNFIT[name]
    how = {"change": change} if change else {}
    file, _ = make_pair(tmp_path, fields=fields, num_hidden_layers=1, **how)
    refused(file, *words)


def constant(wanted: str, number: float):
    def change(name: str, data: np.ndarray) -> np.ndarray:
        return np.full_like(data, number) if name == wanted else data

    return change


UNFIT_STATES = {
    "A above 0": ({}, constant("blk.0.ssm_a", 0.5), "blk.0.ssm_a", "not negative"),
    "A of 0": ({}, constant("blk.0.ssm_a", 0), "blk.0.ssm_a", "not negative"),
    "A is NaN": ({}, constant("blk.0.ssm_a", np.nan), "blk.0.ssm_a"),
    "no dt": ({}, without("blk.0.ssm_dt.bias"), "lacks the tensor blk.0.ssm_dt.bias"),
    "no A": ({}, without("blk.0.ssm_a"), "lacks the tensor blk.0.ssm_a"),
    "a short convolution": ({}, cut("blk.0.ssm_conv1d.weight"), "conv1d", "(384, 4)"),
    "a broken width": ({"ssm.inner_size": 257}, None, "inner_size = 257", "multiple of 4"),
    "no heads": ({"ssm.time_step_rank": 0}, None, "time_step_rank", "0"),
    "no states": ({"ssm.state_size": None}, None, "ssm.state_size"),
    "five taps": ({"ssm.conv_kernel": 5}, None, "linear_conv_kernel_dim = 5"),
    "more than a head turns": ({"rope.dimension_count": 66}, None, "partial_rotary_factor"),
    "heads of no size": ({"attention.key_length": 0}, None, "key_length", "0"),
    "drafts alone": ({"nextn_predict_layers": 4}, None, "nextn_predict_layers = 4", "4 layers"),
    "drafts in words": ({"nextn_predict_layers": "one"}, None, "nextn_predict_layers", "'one'"),
    "states last": ({"attention.recurrent_layers": [True] * 4}, None, "last layer"),
    "a dense file's experts": ({"expert_count": 8}, None, "qwen35.expert_count = 8"),
}


@pytest.mark.parametrize("name", UNFIT_STATES)
def test_states_that_do_not_fit_together_are_refused_in_one_line(name, tmp_path):
    fields, change, *words = UNFIT_STATES[name]
    fields = {f"qwen35.{field}": value for field, value in fields.items()}
    how = {"change": change} if change else {}
    refused(make_pair(tmp_path, "F32", "qwen35", fields=fields, **how)[0], *words)


def test_layers_that_draft_tokens_are_not_read(tmp_path):
    """Layers that predict additional tokens (`nextn`) follow the others and are skipped. Here a list of layer
    types includes them."""
    fields = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    fields["qwen35.attention.recurrent_layers"] = [True, True, True, False, False]
    names = ("blk.4.attn_norm.weight", "blk.4.nextn.eh_proj.weight")
    more = {name: np.ones(256, np.float32) for name in names}
    assert alike(*make_pair(tmp_path, "F32", "qwen35", fields=fields, more=more))


@pytest.mark.parametrize("heads", [[1, 2, 0, 0], [0, 0, 0, 0], [0, 2], 2])
def test_heads_that_differ_between_layers_are_refused(heads, tmp_path):
    """The list needs zeros for layers with a convolution, and equal numbers for all others."""
    fields = {"lfm2.attention.head_count_kv": heads}
    refused(make_pair(tmp_path, "F32", "lfm2", fields=fields)[0], "head_count_kv")


G = "gemma4."
WINDOWS = f"{G}attention.sliding_window_pattern"
GEMMA4_UNFIT = {
    "windows in words": ({WINDOWS: "often"}, None, "sliding_window_pattern", "6 layers"),
    "a window in the last layer": ({WINDOWS: [True] * 6}, None, "full attention in the last"),
    "windows of another model": ({WINDOWS: [True, False]}, None, "[True, False]", "6 layers"),
    "heads that differ": (
        {f"{G}attention.head_count_kv": [1, 2, 1, 1, 1, 1]},
        None,
        "head_count_kv",
        "one number for all layers with a window",
    ),
    "widths that differ": ({f"{G}feed_forward_length": [64] * 5 + [100]}, None, "twice that"),
    "too many layers": ({f"{G}block_count": 10**9}, None, "1000000000 layers"),
    "all layers reuse": (
        {f"{G}attention.shared_kv_layers": 6},
        None,
        "shared_kv_layers = 6",
        "0 to 5",
    ),
    "a billion layers reuse": ({f"{G}attention.shared_kv_layers": 10**9}, None, "0 to 5"),
    "values of another size": ({f"{G}attention.value_length_swa": 32}, None, "value_length_swa"),
    "a part of a head turns": ({f"{G}rope.dimension_count_swa": 32}, None, "dimension_count_swa"),
    "experts": ({f"{G}expert_count": 8}, None, "gemma4.expert_count = 8"),
    "no frequencies": ({}, without("rope_freqs.weight"), "rope_freqs.weight must hold ones"),
    "slowed frequencies": (
        {},
        lambda name, data: data * 2 if name == "rope_freqs.weight" else data,
        "rope_freqs.weight must hold ones",
    ),
    "no table for layers": ({}, without("per_layer_token_embd.weight"), "per_layer_token_embd"),
    "no scalar": (
        {},
        without("blk.3.layer_output_scale.weight"),
        "blk.3.layer_output_scale.weight",
    ),
}


@pytest.mark.parametrize("name", GEMMA4_UNFIT)
def test_a_gemma_4_that_does_not_fit_together_is_refused(name, tmp_path):
    fields, change, *words = GEMMA4_UNFIT[name]
    how = {"change": change} if change else {}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "hidden_size_per_layer_input": 32}
    file, _ = make_pair(tmp_path, "F32", "gemma4", fields=fields, **how, **sizes)
    refused(file, *words)


def nan_scale(name: str, data: np.ndarray) -> np.ndarray:
    """Set a block's scale to 255, which means NaN."""
    if name == "blk.1.ffn_up_exps.weight":
        data.reshape(-1, 17)[-1, 0] = 255
    return data


@pytest.mark.parametrize(
    ("fields", "change", "word"),
    [
        ({}, nan_scale, "blk.1.ffn_up_exps.weight holds NaN"),
        ({}, without("blk.1.attn_sinks.weight"), "lacks the tensor blk.1.attn_sinks.weight"),
        ({}, without("blk.1.ffn_down_exps.bias"), "lacks the tensor blk.1.ffn_down_exps.bias"),
        ({"gpt-oss.expert_used_count": 4}, None, "num_experts_per_tok = 4"),
        ({"gpt-oss.expert_feed_forward_length": 128}, None, "(3, 128, 64)"),
    ],
)
def test_a_gpt_oss_that_does_not_fit_together_is_refused(fields, change, word, tmp_path):
    how = {"change": change} if change else {}
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    refused(make_pair(tmp_path, "F32", "gpt-oss", fields=fields, **how, **sizes)[0], word)


def test_values_that_are_keys(tmp_path):
    """Larger Gemma 4 models have no v in layers with full attention, and fewer heads there."""
    heads = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    own = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    own |= {"hidden_size_per_layer_input": 0}
    file, wide = make_pair(tmp_path, "Q4_K", "gemma4", **heads, **own)
    assert "blk.2.attn_v.weight" not in read_gguf(file).tensors
    assert read_model(file).config.heads(2) == (4, 1, 128)
    assert alike(file, wide)


def test_granite_without_positions(tmp_path):
    """Granite 4 stores the lack of positions in a field with an unrelated name."""
    fields = {"granite.rope.scaling.finetuned": False}
    file, _ = make_pair(tmp_path, "F32", "granite", fields=fields)
    assert all(kind.rope is None for kind in read_model(file).kinds)


def test_more_tokens_than_rows_are_refused(tmp_path):
    more = {f"{T}tokens": [f"t{n}" for n in range(300)], f"{T}token_type": [1] * 300}
    file, _ = make_pair(tmp_path, fields=more, num_hidden_layers=1)
    refused(file, "token id 299", "ends at 271")


def test_a_split_model_is_found_by_any_of_its_parts(tmp_path):
    file, wide = make_pair(tmp_path, num_hidden_layers=1)
    parts = split(file)
    for part in parts:
        assert model_finder.find(str(part)) == parts[0]
    assert alike(parts[0], wide)
    middle = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ModelError, match=rf"{parts[1].name} is missing"):
        load(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match="is in two parts; download all parts again"):
        load(parts[0])
    parts[1].write_bytes(middle)
    alone = parts[0].rename(tmp_path / "alone.gguf")
    refused(alone, "is a part of a model")


def split(file: Path) -> list[Path]:
    """Split the file into three parts, as llama.cpp does."""
    stem = file.with_suffix("")
    reader = gguf.GGUFReader(file)
    parts = [Path(f"{stem}-0000{n + 1}-of-00003.gguf") for n in range(3)]
    for n, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        writer.kv_data[0].clear()
        for name, value in reader.fields.items():
            if not name.startswith("GGUF.") and (n == 0 or name == "general.architecture"):
                own = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
                if value.data:
                    writer.add_key_value(name, value.contents(), value.types[0], own)
        writer.add_uint16("split.no", n)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[n::3]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    file.unlink()
    return parts
