"""The peers of `bench.py`: other engines behind a common interface.

A benchmark is fair if the other engine does the same work with the settings that its own developers
would choose. Each peer is a class whose docstring explains its settings. A peer uses our weights, samples
greedily, never stops early, and computes in float32 on a CPU. Only packed weights are converted, to
llama.cpp's format with the same number of bits (`GGUF_FORMS`). `python bench.py --vs llama.cpp --parts
same` counts how many of llama.cpp's tokens equal ours.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from base.machine import my_cores
from kernels.device import has_gpu, mx
from models.config import read_config
from models.gguf_file import is_gguf
from models.load import ModelReader

# The result of a step for one request: its key, its new tokens, and whether it has finished
News = tuple[int, list[int], bool]


@dataclass(frozen=True)
class TimedRequest:
    prompt: list[int]
    max_tokens: int
    at: float = 0.0  # seconds after the start at which an open loop sends it
    after: int = 0  # an open loop sends it only when all running answers have this many tokens


class MlxLm:
    """mlx-lm's BatchGenerator.

    The batch size is our number of slots. As many prompts as fit are prefilled together, each in one piece;
    smaller groups or chunks gave fewer tokens per second. On a CPU the model computes in float32, because
    other types are slow there.

    mlx-lm uses MLX's BLAS. On Linux it gets the system's OpenBLAS, the fastest one that its users can
    install. Keys and values are stored in the type of the computation; `kv` is ignored.
    """

    PACKAGES = ("mlx_lm",)
    REMEDY = "pip install mlx-lm"

    def __init__(self, folder: str, rows: int, length: int, kv: str = "auto"):
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.utils import load_model

        model, _ = load_model(Path(folder))
        if not has_gpu():
            model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        self.generator = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=rows)

    def submit(self, request: TimedRequest) -> int:
        return self.generator.insert([request.prompt], max_tokens=[request.max_tokens])[0]

    def step(self) -> list[News]:
        _, responses = self.generator.next()
        return [(r.uid, [r.token], r.finish_reason is not None) for r in responses]

    def close(self) -> None:
        self.generator.close()
        mx.synchronize()  # mlx-lm runs ahead, and a process that exits during a pass may hang


@dataclass
class Row:
    """A waiting or running request of llama.cpp."""

    key: int
    ids: list[int]  # the next input: first the prompt, then the newest token
    left: int  # number of tokens left to generate
    sequence: int = 0  # sequence id in the KV cache
    length: int = 0  # number of tokens in the KV cache


class LlamaCpp:
    """llama.cpp on the CPU with one thread per core, through the C functions that llama-cpp-python binds.

    A step is one `llama_decode`, as in llama.cpp's own server. It contains the newest token of each row and
    as many prompts as fit in the batch, each in one piece. numpy finds the likeliest token, because it is
    faster than llama.cpp's samplers.

    Keys and values have as many bits as ours. With 16 bits, which is llama.cpp's default, flash attention is
    used. With float32, plain attention is used: flash attention rounds more than float32 does, and some
    answers would differ.
    """

    PACKAGES = ("llama_cpp", "gguf")
    REMEDY = "pip install llama-cpp-python gguf (compiling takes minutes)"
    BATCH = 2048  # maximum number of tokens per call, as in llama.cpp's server, unless a prompt is longer

    def __init__(self, folder: str, rows: int, length: int, kv: str = "auto"):
        import llama_cpp
        import numpy

        self.c = llama_cpp
        self.numpy = numpy
        with tempfile.TemporaryDirectory(prefix="nanobatch-") as place:
            file = Path(folder) if is_gguf(Path(folder)) else Path(folder, GGUF)
            if not file.exists():
                file = make_gguf(Path(folder), Path(place))
            options = self.c.llama_model_default_params()
            options.n_gpu_layers = 0
            self.model = self.c.llama_model_load_from_file(str(file).encode(), options)
        self.V = read_config(Path(folder), has_head=False).V
        self.size = max(self.BATCH, rows + length)
        options = self.c.llama_context_default_params()
        options.n_seq_max = rows
        options.n_ctx = rows * -(-length // 256) * 256
        options.n_batch = self.size
        if ModelReader(Path(folder), kv=kv).kv_dtype == mx.float16:
            options.flash_attn_type = self.c.LLAMA_FLASH_ATTN_TYPE_ENABLED
        else:
            options.type_k = options.type_v = self.c.GGML_TYPE_F32
            options.flash_attn_type = self.c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.n_threads = options.n_threads_batch = len(my_cores())
        self.context = self.model and self.c.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot load {folder}; see its own messages above")
        self.batch = self.c.llama_batch_init(self.size, 0, 1)
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.free = list(range(rows))
        self.count = 0

    def submit(self, request: TimedRequest) -> int:
        self.count += 1
        self.waiting.append(Row(self.count, request.prompt, request.max_tokens))
        return self.count

    def step(self) -> list[News]:
        self.batch.n_tokens = 0
        for row in self.running:
            self.put(row)
        while self.waiting and self.free:
            if self.batch.n_tokens + len(self.waiting[0].ids) > self.size:
                break
            row = self.waiting.popleft()
            row.sequence = self.free.pop()
            self.running.append(row)
            self.put(row)
        if code := self.c.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = self.c.llama_get_logits(self.context)  # (rows, V): each row's last token
        best = self.numpy.ctypeslib.as_array(logits, (len(self.running), self.V)).argmax(axis=1)
        for row, token in zip(self.running, best.tolist(), strict=True):
            row.ids = [token]
            row.left -= 1
            if not row.left:
                memory = self.c.llama_get_memory(self.context)
                self.c.llama_memory_seq_rm(memory, row.sequence, -1, -1)
                self.free.append(row.sequence)
        came = [(row.key, row.ids, not row.left) for row in self.running]
        self.running = [row for row in self.running if row.left]
        return came

    def put(self, row: Row) -> None:
        """Add a row's tokens to the next call. Request the logits of the last one."""
        batch = self.batch
        for at, id in enumerate(row.ids, batch.n_tokens):
            batch.token[at] = id
            batch.pos[at] = row.length
            batch.logits[at] = False
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = row.sequence
            row.length += 1
        batch.n_tokens += len(row.ids)
        batch.logits[batch.n_tokens - 1] = True

    def logits(self, ids: list[int], at: int):
        """Return the logits of all of these tokens, which continue a sequence at position `at`. Position 0
        starts a new sequence."""
        if at == 0:
            self.c.llama_memory_seq_rm(self.c.llama_get_memory(self.context), 0, -1, -1)
        self.batch.n_tokens = 0
        self.put(Row(0, ids, 1, length=at))
        for place in range(len(ids)):
            self.batch.logits[place] = True
        if code := self.c.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = self.c.llama_get_logits(self.context)
        return self.numpy.ctypeslib.as_array(logits, (len(ids), self.V))

    def close(self) -> None:
        self.c.llama_batch_free(self.batch)
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)


PEERS = {"mlx-lm": MlxLm, "llama.cpp": LlamaCpp}


def environment_of(peer: str) -> dict[str, str]:
    """Return a peer's environment variables. On Linux without a GPU, mlx-lm gets the system's OpenBLAS;
    LD_PRELOAD is empty if OpenBLAS is missing."""
    if peer != "mlx-lm" or sys.platform != "linux" or has_gpu():
        return {}
    return {"LD_PRELOAD": find_library("openblas") or "", "NANOBATCH_BLAS": "off"}


def obstacle(peer: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return why a peer cannot be measured here, with a remedy; None if it can be measured."""
    packages = PEERS[peer].PACKAGES
    if missing := [name for name in packages if not importlib.util.find_spec(name)]:
        words = f"{peer} is not installed ({' and '.join(missing)} missing)"
        return f"{words}; run {PEERS[peer].REMEDY}"
    if peer == "llama.cpp" and has_gpu():
        return "llama.cpp is measured only on a CPU, where both compute in float32"
    if environment and environment.get("LD_PRELOAD") == "":
        words = "mlx-lm is measured on OpenBLAS, which is missing; run apt-get install libopenblas0"
        return f"{words}, take --vs mlx-lm@off (MLX's own product, which is slow)"
    return None


# --- conversion to GGUF, llama.cpp's file format ------------------------------------------------

GGUF = "model.gguf"
# Bits per weight -> llama.cpp's file type with about as many bits. (Q4_0 and Q8_0 have a scale for each
# 32 weights, and llama.cpp rounds activations to 8 bits with them.)
GGUF_FORMS = {
    4: "LLAMA_FTYPE_MOSTLY_Q4_0",
    8: "LLAMA_FTYPE_MOSTLY_Q8_0",
    16: "LLAMA_FTYPE_MOSTLY_BF16",
}


def make_gguf(folder: Path, place: Path) -> Path:
    """Convert a model to a GGUF file in the folder `place` and return the file. Unless our weights are
    float32, llama.cpp converts the file's weights to one of `GGUF_FORMS`."""
    import llama_cpp

    file = place / GGUF
    whole = place / "whole.gguf"
    write_gguf(folder, whole)
    table = ModelReader(folder, "checkpoint").part("model.embed_tokens")
    bits = table.bits or 8 * table.weight.dtype.size
    if bits == 32:
        return whole.rename(file)
    llama_cpp.llama_log_set(errors_alone(), None)  # otherwise it prints a line for each tensor
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread = len(my_cores())
    options.ftype = getattr(llama_cpp, GGUF_FORMS[bits])
    if llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), options):
        raise RuntimeError(f"llama.cpp cannot quantize {folder}; see its own messages above")
    whole.unlink()
    return file


@functools.cache
def errors_alone():
    """Return a log callback for llama.cpp that prints only errors."""
    import llama_cpp

    def say(level: int, text: bytes, _: object) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            print(text.decode(errors="replace"), end="", file=sys.stderr)

    return llama_cpp.llama_log_callback(say)


def write_gguf(folder: Path, file: Path) -> None:
    """Write a plain Llama model to a GGUF file in float32, without a tokenizer."""
    import gguf
    import numpy

    reader = ModelReader(folder, "float32")
    c = reader.config
    has_biases = c.qkv_bias or c.o_bias or c.mlp_bias
    if c.model_type not in ("llama", "mistral") or c.rope.type != "default" or has_biases:
        raise ValueError(
            f"{folder} is not a plain Llama; --vs llama.cpp takes no model with biases or scaled positions"
        )
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("none")
    fields = {
        "vocab_size": c.V,
        "context_length": c.max_positions,
        "block_count": c.layers,
        "embedding_length": c.D,
        "feed_forward_length": c.hidden,
        "attention.head_count": c.H,
        "attention.head_count_kv": c.Hkv,
        "attention.key_length": c.Dh,
        "attention.value_length": c.Dh,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "rope.dimension_count": c.Dh,
        "rope.freq_base": c.rope.theta,
    }
    for name, value in fields.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"llama.{name}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.layers)
    for name in c.tensors():
        weight = numpy.array(reader.part(name.removesuffix(".weight")).weight)
        # RoPE rotates pairs of elements. We pair an element of a head's first half with one of its
        # second half; llama.cpp pairs adjacent elements.
        if heads := {"q_proj": c.H, "k_proj": c.Hkv}.get(name.split(".")[-2]):
            weight = weight.reshape(heads, 2, c.Dh // 2, c.D).swapaxes(1, 2).reshape(-1, c.D)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
