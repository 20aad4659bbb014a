"""The peers: GGUF files for llama.cpp, the batches that its library receives, equal tokens, and errors."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, get_tensor_name_map
from gguf_models import make_pair

import bench
from benchmarks import peers
from benchmarks.driver import Sample, drive
from benchmarks.peers import TimedRequest
from benchmarks.plan import Spec, read_rival
from kernels.device import mx
from models.load import read_model
from nanobatch import Engine, SamplingParams, Tokenizer

V = 272


# --- the file -----------------------------------------------------------------------------------


def written(folder, tmp_path) -> tuple[GGUFReader, dict[str, np.ndarray]]:
    file = tmp_path / "model.gguf"
    peers.write_gguf(folder, file)
    reader = GGUFReader(file)
    assert all(tensor.tensor_type == GGMLQuantizationType.F32 for tensor in reader.tensors)
    return reader, {tensor.name: tensor.data for tensor in reader.tensors}


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_says_what_the_config_says(tmp_path, tied):
    folder = make_checkpoint(
        tmp_path / "model", head_dim=24, rms_norm_eps=3e-6, rope_theta=5e5, tie_word_embeddings=tied
    )
    reader, tensors = written(folder, tmp_path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "llama" and values["tokenizer.ggml.model"] == "none"
    expected = {
        "vocab_size": V,
        "context_length": 2048,
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 24,
        "rope.freq_base": 5e5,
        "attention.layer_norm_rms_epsilon": pytest.approx(3e-6),
    }
    assert {name: values[f"llama.{name}"] for name in expected} == expected
    assert ("output.weight" in tensors) != tied and len(tensors) == 2 + 2 * 9 + (not tied)


def test_a_gguf_file_has_every_weight(tmp_path):
    """RoPE rotates pairs. We pair number i of a head's first half with number i of its second half;
    llama.cpp pairs neighbours. A file in the wrong order loads and runs, but gives wrong answers."""
    folder = make_checkpoint(tmp_path / "model", seed=3)
    _, tensors = written(folder, tmp_path)
    ours = peers.ModelReader(folder, "float32")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    for name in ours.config.tensors():
        theirs = names.get_name(name, (".weight",))
        weight = np.array(ours.part(name.removesuffix(".weight")).weight)
        if theirs.endswith(("attn_q.weight", "attn_k.weight")):
            rows = [
                head * 16 + half * 8 + i
                for head in range(len(weight) // 16)
                for i in range(8)
                for half in (0, 1)
            ]
            weight = weight[rows]
        assert np.array_equal(weight, tensors.pop(theirs)), name
    assert not tensors


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2"},
        {"attention_bias": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_what_a_plain_llama_is_not_gets_one_line(tmp_path, changes):
    folder = make_checkpoint(tmp_path / "model", **changes)
    with pytest.raises(ValueError, match="not a plain Llama") as refused:
        peers.write_gguf(folder, tmp_path / "model.gguf")
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


# --- the batches --------------------------------------------------------------------------------


class Library:
    """Stands in for llama-cpp-python. Its model is simple: the next token is the sum of all previous ones
    plus their count.

    A sequence's tokens must arrive in order, and a new request must not find another one's tokens in its
    sequence.
    """

    GGML_TYPE_F32, LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = 0, 0, 1

    def __init__(self):
        self.sequences, self.calls, self.freed = {}, [], []

    def llama_model_default_params(self):
        return SimpleNamespace()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path, options):
        assert GGUFReader(path.decode()).tensors and options.n_gpu_layers == 0
        return "model"

    def llama_init_from_model(self, model, options):
        self.options = options
        return "context"

    def llama_batch_init(self, size, embeddings, sequences):
        lists = {name: [None] * size for name in ("token", "pos", "logits", "n_seq_id")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(size)], **lists)

    def llama_decode(self, context, batch):
        assert batch.n_tokens <= self.options.n_batch
        self.calls.append(batch.n_tokens)
        rows = []
        for i in range(batch.n_tokens):
            tokens = self.sequences.setdefault(batch.seq_id[i][0], [])
            assert (
                batch.n_seq_id[i] == 1
                and batch.pos[i] == len(tokens) < self.options.n_ctx // self.options.n_seq_max
            )
            tokens.append(batch.token[i])
            if batch.logits[i]:
                rows.append(np.eye(V)[(sum(tokens) + len(tokens)) % V])
        assert len(self.sequences) <= self.options.n_seq_max
        self.logits = np.array(rows, np.float32)
        return 0

    def llama_get_logits(self, context):
        return self.logits.ctypes.data_as(np.ctypeslib.ctypes.POINTER(np.ctypeslib.ctypes.c_float))

    def llama_get_memory(self, context):
        return "memory"

    def llama_memory_seq_rm(self, memory, sequence, start, stop):
        assert (memory, start, stop) == ("memory", -1, -1)
        del self.sequences[sequence]

    def llama_batch_free(self, it):
        self.freed.append(it)

    llama_free = llama_model_free = llama_batch_free


def sums(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((sum(tokens) + len(tokens)) % V)
    return tokens[len(prompt) :]


@pytest.fixture
def library(monkeypatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    return library


def test_llama_cpp_batches_rows_and_prompts(library, tmp_path, monkeypatch):
    """Seven requests share three sequences: 10 + 10 tokens fit a call of 24, and a third prompt waits for
    the next call."""
    monkeypatch.setattr(peers.LlamaCpp, "BATCH", 24)
    peer = peers.LlamaCpp(str(make_checkpoint(tmp_path / "model")), rows=3, length=20)
    asks = [TimedRequest([7 * n] * 10, 3 + n) for n in range(7)]
    answers = drive(peer, asks)
    peer.close()
    assert [answer.tokens for answer in answers] == [
        sums(ask.prompt, ask.max_tokens) for ask in asks
    ]
    assert library.calls[:3] == [20, 12, 3] and library.sequences == {} and len(library.freed) == 3
    options = library.options
    assert (options.n_seq_max, options.n_ctx, options.n_batch) == (3, 3 * 256, 24)
    assert (
        options.n_threads == options.n_threads_batch == len(peers.my_cores())
        and options.type_k == options.type_v == 0
    )


@pytest.mark.parametrize(("kv", "is_float32"), [("auto", False), ("float32", True)])
def test_llama_cpp_keeps_keys_in_as_many_bits_as_we_do(library, tmp_path, kv, is_float32):
    """With weights of 16 bits, keys have 16 bits, which is llama.cpp's default, too; `--kv float32` changes both."""
    folder = make_checkpoint(tmp_path / "model", dtype=mx.bfloat16)
    peers.write_gguf(folder, folder / peers.GGUF)
    peers.LlamaCpp(str(folder), rows=1, length=20, kv=kv)
    assert hasattr(library.options, "type_k") == hasattr(library.options, "type_v") == is_float32
    assert library.options.flash_attn_type == (not is_float32)


def test_llama_cpp_takes_a_gguf_file_as_it_is(library, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "make_gguf", lambda *_: pytest.fail("it was made anew"))
    file, _ = make_pair(tmp_path, num_hidden_layers=1)
    taken = []
    monkeypatch.setattr(
        library, "llama_model_load_from_file", lambda path, _: taken.append(path) or "model"
    )
    peer = peers.LlamaCpp(str(file), rows=1, length=20)
    (answer,) = drive(peer, [TimedRequest([5, 6], 4)])
    assert taken == [str(file).encode()] and answer.tokens == sums([5, 6], 4)


# --- the same weights give the same tokens ------------------------------------------------------


@pytest.mark.parametrize("who", peers.PEERS)
def test_a_peer_answers_with_our_tokens(parts, tmp_path, who):
    if why := peers.obstacle(who):
        pytest.skip(why)
    folder = make_checkpoint(tmp_path / "model", seed=1)
    rng = np.random.default_rng(0)
    asks = [TimedRequest(rng.integers(0, V, n).tolist(), 24) for n in (1, 5, 40, 90, 17, 64)]
    with Engine(read_model(folder), Tokenizer(folder, V), slots=4, max_len=128) as engine:
        handles = [
            engine.submit(ask.prompt, SamplingParams(max_tokens=24, ignore_eos=True))
            for ask in asks
        ]
        ours = [handle.result().tokens for handle in handles]
    peer = peers.PEERS[who](str(folder), 4, 128)
    theirs = [answer.tokens for answer in drive(peer, asks)]
    peer.close()
    assert theirs == ours and len({token for tokens in ours for token in tokens}) > 50


def test_same_counts_up_to_the_first_difference(monkeypatch, tmp_path):
    folder = make_checkpoint(tmp_path / "model", seed=1)
    sample = Sample(Spec("same", "mlx-lm", str(folder), V, rows=2, prompt=5, output=8))
    true = drive

    def with_a_slip(contestant, asks):
        answers = true(contestant, asks)
        if contestant is sample.contestant:
            answers[1].tokens[2] += 1
        return answers

    assert sample.same()["equal tokens %"] == 100
    monkeypatch.setattr("benchmarks.driver.drive", with_a_slip)
    figures = sample.same()
    assert (
        figures["equal tokens %"] == 100 * (8 + 2) / 16
        and figures["tokens"] == 16 > figures["distinct tokens"] > 4
    )
    sample.contestant.close()


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, missing, words",
    [
        (
            ["--vs", "llama.cpp"],
            ["llama_cpp"],
            ["llama.cpp is not installed", "pip install llama-cpp-python", "--vs"],
        ),
        (["--vs", "llama.cpp"], ["gguf"], ["gguf missing", "pip install llama-cpp-python gguf"]),
        (
            ["--vs", "mlx-lm"],
            ["mlx_lm"],
            ["mlx-lm is not installed", "pip install mlx-lm", "leave out --vs"],
        ),
    ],
)
def test_missing_peer_is_one_line(arguments, missing, words, monkeypatch, capsys):
    there = {"llama_cpp", "gguf", "mlx_lm"} - set(missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
    with pytest.raises(SystemExit) as exit:
        bench.main(arguments)
    line = capsys.readouterr().err
    assert exit.value.code == 2 and line.count("\n") == 1 and all(word in line for word in words), (
        line
    )


def test_mlx_lm_is_measured_on_openblas(monkeypatch, capsys):
    """mlx-lm is measured with OpenBLAS, which its users can preload, because MLX's own product is slow on a
    CPU."""
    monkeypatch.setattr(peers, "has_gpu", lambda: False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(peers, "find_library", lambda name: f"lib{name}.so.0")
    found = read_rival("mlx-lm", "continuous").environment
    assert found == {"LD_PRELOAD": "libopenblas.so.0", "NANOBATCH_BLAS": "off"}
    assert read_rival("mlx-lm@off", "continuous").environment == {"NANOBATCH_BLAS": "off"}
    monkeypatch.setattr(peers, "find_library", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main(["--vs", "mlx-lm"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "OpenBLAS, which is missing; run apt-get install libopenblas0" in line


def test_llama_cpp_is_not_measured_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(peers, "has_gpu", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert "only on a CPU" in peers.obstacle("llama.cpp") and peers.obstacle("mlx-lm") is None


@pytest.mark.parametrize(("bits", "form"), [(4, "Q4_0"), (8, "Q8_0"), (16, "BF16")])
def test_packed_gguf_has_as_many_bits(tmp_path, bits, form):
    """Only feed-forward weights are checked, because llama.cpp stores an embedding table in a different
    type."""
    pytest.importorskip("llama_cpp")
    how = {"dtype": mx.bfloat16} if bits == 16 else {"quantize": lambda module: (bits, 32)}
    folder = make_checkpoint(tmp_path / "model", **how)
    file = peers.make_gguf(folder, tmp_path)
    forms = [tensor.tensor_type for tensor in GGUFReader(file).tensors if "ffn" in tensor.name]
    assert forms.count(getattr(GGMLQuantizationType, form)) == 6, forms
    assert not (tmp_path / "whole.gguf").exists()
