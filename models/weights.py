"""The tensors of a model folder, checked before they are used.

MLX loads lazily and checks little, so a truncated download or a NaN would make the model answer nonsense.
`Weights` refuses tensors whose shapes differ from those that the config implies or whose numbers are not
finite, with a one-line `ModelError`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from base.untrusted_files import LARGEST_HEADER, ModelError, check_plain, read_json, what_is
from base.validation import one_line, shown
from kernels import device
from kernels.device import mx
from kernels.packed import LEAST, MLX_GROUPS, Blocks, factors_nbytes, form_of, row_nbytes, rows_of
from models import mxfp4
from models.config import Config
from models.mxfp4 import Mxfp4

# Fused matrices of Phi-3, and of Granite 4's MLP
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
LFM2_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "embedding_norm": "norm",
}
GRANITE_NAMES = {
    "shared_mlp.input_linear": "mlp.gate_up_proj",
    "shared_mlp.output_linear": "mlp.down_proj",
}
GPT_OSS_NAMES = {"mlp.router": "mlp.gate"}
# Gate and up of gpt-oss's experts are alternating rows of one tensor
ALTERNATE = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}
# Prefixes of tensors that are not used: vision, audio, and multi-token prediction
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "audio_tower.")
OTHER_PARTS += ("embed_vision.", "embed_audio.", "vision_embedder.", "visual.")
OTHER_PARTS += tuple(f"model.{part}" for part in OTHER_PARTS)
OTHER_PARTS += ("mtp.", "language_model.mtp.")  # multi-token prediction of Qwen 3.5
CONVOLUTIONS = ("conv.conv.weight", "conv1d.weight")
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "U32": mx.uint32}
DTYPES["U8"] = mx.uint8  # MXFP4


def usual_form() -> str:
    """Return the default form of weights in memory.

    "checkpoint": as stored in the files, multiplied by MLX.
    "packed": as stored in the files; our own product converts them to float32 in registers.
    "float32": widened at load, because on a CPU MLX is fast only with float32.
    """
    if device.has_gpu():
        return "checkpoint"
    return "packed" if device.is_batch_invariant() else "float32"


# --- headers ------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor of the model: its file, and its entry in the file's header."""

    path: Path
    name: str  # in the file
    dtype: mx.Dtype
    shape: tuple[int, ...]
    rows: slice = slice(None)  # rows of the tensor in the file
    parts: tuple[Tensor, ...] = ()  # the matrices of a stack, if they are stored separately
    # Set for packed matrices by `check_against`
    bits: int = 0
    group: int = 0
    center: float = 0.0  # if not 0, each offset is its scale times this and is not stored
    mxfp4: Mxfp4 | None = None  # conversion from MXFP4; dtype and shape are those of the result
    every: slice = slice(None)  # rows of each expert
    is_last: bool = True  # no later tensor reads the same entry of the file


class MissingError(ModelError):
    """Some files of a model are missing."""


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the header of a safetensors file, and check it against the size of the file.

    A safetensors file begins with the length N of a JSON text, in 8 bytes. The JSON is followed by the
    data that it points to:

        | N (u64) | {"model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}} | 32 bytes |
    """
    try:
        check_plain(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            if what := what_is(start):
                raise ModelError(f"{path} is {what}; download it again.")
            if not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise ModelError(
                    f"{path} is not a safetensors file, or it is cut off; download it again."
                )
            file.seek(8)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: read_entry(path, name, entry) for name, entry in header.items()}
        end = 0
        for begin, stop in sorted(entry["data_offsets"] for entry in header.values()):
            if begin != end or stop < begin:
                raise ValueError(f"data at {begin}, expected {end}")
            end = stop
        end += 8 + length
    except ModelError:
        raise
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download the model again.") from None
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ModelError(
            f"{path} has a broken header ({one_line(error)}); download it again."
        ) from None
    if size != end:
        what = "cut off" if size < end else "longer than its header says"
        raise ModelError(f"{path} is {what}: {size:,} bytes, expected {end:,}; download it again.")
    return tensors


def read_entry(path: Path, name: str, entry: dict) -> Tensor:
    """Read a tensor's entry in a header."""
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        kind = shown(entry["dtype"])
        raise ModelError(f"{path}: {name} is {kind}. Supported: {', '.join(DTYPES)}.")
    shape = tuple(entry["shape"])
    begin, stop = entry["data_offsets"]
    if stop - begin != math.prod(shape) * dtype.size:
        raise ValueError(f"{name}: {stop - begin} bytes for the shape {entry['shape']}")
    return Tensor(path, name, dtype, shape)


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """Return a model's weight files. If there is an index, each comes with the tensors that it lists."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("model*.safetensors"))
        if not found:
            raise MissingError(
                f"{folder} holds no weights: neither model*.safetensors nor a GGUF file; "
                "download the model again, or name another folder."
            )
        return {path: set() for path in found}
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index} has no weight_map; download it again.")
    # Group by name first: there may be a million tensors, and a Path costs more than a str
    files: dict[str, set[str]] = {}
    for tensor, file in places.items():
        if not isinstance(file, str) or "/" in file or len(file) > 200:
            said = f"{tensor} is said to be in {shown(file)}"
            raise ModelError(f"{index}: {said}; download it again.")
        files.setdefault(file, set()).add(tensor)
    for file in files:
        if not (folder / file).exists():
            raise MissingError(
                f"{folder / file} is missing, but {index.name} names it; download the model again."
            )
    return {folder / file: tensors for file, tensors in files.items()}


# --- the tensors of a model ---------------------------------------------------------------------


class Weights:
    """The tensors of a checkpoint. Headers are checked immediately, and a tensor's numbers when it
    is read."""

    described_by = "config.json"

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        for path, promised in weight_files(folder).items():
            found = read_header(path)
            if gone := promised - found.keys():
                raise ModelError(
                    f"{path} lacks {min(gone)}, which the index names: one is stale; download both again."
                )
            self.tensors |= found
        if not self.tensors:
            raise ModelError(
                f"{folder}: its weight files hold no tensors; download the model again."
            )
        self.tensors = {
            text_name(name): tensor
            for name, tensor in self.tensors.items()
            if not name.startswith(OTHER_PARTS)
        }
        # Models without a head are saved without the prefix "model."
        if "embed_tokens.weight" in self.tensors:
            self.tensors = {f"model.{name}": tensor for name, tensor in self.tensors.items()}
        self._name_mxfp4()
        self._arrays: dict[Path, dict[str, mx.array]] = {}  # lazily loaded arrays, by file

    def _name_mxfp4(self) -> None:
        """Give MXFP4 tensors the names and shapes of a 5-bit quantization.

        mlx-lm stores a matrix, and scales as bytes. gpt-oss's own files name experts differently.
        """
        for name, tensor in list(self.tensors.items()):
            match = re.fullmatch(
                r"(.+\.experts\.)(gate_up_proj|down_proj)_(blocks|scales|bias)", name
            )
            if match and len(tensor.shape) > 1:
                place, fused, kind = match.groups()
                for part, every in ALTERNATE[fused]:
                    count = len(range(tensor.shape[1])[every])
                    shape = (tensor.shape[0], count, *tensor.shape[2:])
                    own = tensor._replace(shape=shape, every=every, is_last=part != "gate_proj")
                    kinds = {"blocks": "weight", "scales": "scales", "bias": "bias"}
                    self.tensors[f"{place}{part}.{kinds[kind]}"] = own
                del self.tensors[name]
        for name, scales in list(self.tensors.items()):
            module = name.removesuffix(".scales")
            weight = self.tensors.get(f"{module}.weight")
            if module == name or scales.dtype != mx.uint8 or weight is None:
                continue
            if f"{module}.biases" in self.tensors or len(scales.shape) < 2:
                continue  # `check_against` refuses it
            *rows, groups = scales.shape
            nbytes = math.prod(weight.shape[len(rows) :]) * weight.dtype.size
            if weight.shape[: len(rows)] != (*rows,) or nbytes != groups * mxfp4.GROUP // 2:
                raise ModelError(
                    f"{scales.path}: {module} has shapes {weight.shape} and {scales.shape}, which MXFP4 "
                    "does not have; download it again."
                )
            shapes = mxfp4.shapes((*rows,), groups * mxfp4.GROUP)
            for part, dtype, shape in zip(
                ("weight", "scales"), (mx.uint32, mx.bfloat16), shapes, strict=True
            ):
                self.tensors[f"{module}.{part}"] = self.tensors[f"{module}.{part}"]._replace(
                    dtype=dtype, shape=shape, mxfp4=Mxfp4(part == "scales")
                )

    def quantization(self, config: Config) -> str:
        """Return the format of most of the weights in the files."""
        sizes: Counter[str] = Counter()
        for name, shape in config.tensors().items():
            sizes[self._stored_as(name)] += math.prod(shape)
        return max(sizes, key=sizes.get)

    def _stored_as(self, name: str) -> str:
        tensor = self.tensors[name]
        if tensor.mxfp4:
            return "MXFP4"
        return f"{tensor.bits}-bit" if tensor.bits else str(tensor.dtype).removeprefix("mlx.core.")

    @property
    def has_head(self) -> bool:
        return "lm_head.weight" in self.tensors

    def is_converted(self, config: Config) -> bool:
        """True if this Qwen 3.5 was converted by mlx-lm, judged by the shape of a convolution.

        Then the files store the weights of norms. Hugging Face's files store weights minus 1.
        """
        convolution = f"model.layers.{min(config.deltas)}.linear_attn.conv1d.weight"
        return convolution in self.tensors and self.tensors[convolution].shape[-1] == 1

    @property
    def are_narrow(self) -> bool:
        """True if any matrix has fewer than 32 bits per weight."""
        matrices = [tensor for tensor in self.tensors.values() if len(tensor.shape) > 1]
        return any(tensor.dtype != mx.float32 for tensor in matrices)

    def nbytes(self, own: Config, form: str, has_head: bool, rounds: bool = False) -> int:
        """Return the memory of a rank's shard of the model in this form (`usual_form`).

        `rounds`: activations are rounded to 8 bits.
        """
        return sum(
            self._nbytes(name, shape, form, own.factor(name) != 1, rounds)
            for name, shape in own.tensors().items()
            if has_head or name != "lm_head.weight"
        )

    def _nbytes(
        self, name: str, shape: tuple[int, ...], form: str, is_multiplied: bool, rounds: bool
    ) -> int:
        """Return the memory of one tensor with its scales and offsets. If a group is split, it is unpacked."""
        count = math.prod(shape)
        width = shape[-1]
        tensor = self.tensors[name]
        size = tensor.dtype.size
        if form == "float32":
            return 4 * count
        if not tensor.bits and form == "checkpoint":
            return size * count
        if not tensor.bits:
            if len(shape) == 1 or size == 4 or width < LEAST:
                return 4 * count
            return 2 * count + 4 * count // width
        scales = self.tensors[f"{name.removesuffix('.weight')}.scales"]
        size = scales.dtype.size
        # Scales in bytes are widened if rows are cut or if MLX computes the products
        is_cut = width * tensor.bits < 32 * tensor.shape[-1]
        if (form == "packed" and is_multiplied) or (size == 1 and (form != "packed" or is_cut)):
            size = 4
        if form == "checkpoint" and tensor.group not in MLX_GROUPS:
            return 2 * count
        if width % tensor.group:
            return (4 if form == "packed" else size) * count
        factors = factors_nbytes(
            width, tensor.group, {1: mx.uint8, 2: mx.float16, 4: mx.float32}[size]
        )
        if form != "packed":
            return tensor.bits * count // 8 + 2 * factors * (count // width)
        *many, N, _ = shape
        row = row_nbytes(width, form_of(tensor.bits, rounds, tensor.center)) + factors * (
            1 if tensor.center else 2
        )
        return math.prod(many) * rows_of(N, rounds) * row

    def split(self, config: Config) -> None:
        """Replace fused tensors by their parts, with the names that other families use."""
        shapes = config.tensors()
        for name, tensor in list(self.tensors.items()):
            module, _, kind = name.rpartition(".")
            place, _, fused = module.rpartition(".")
            modules = [f"{place}.{part}" for part in FUSED.get(fused, ())]
            heights = {part: shapes.get(f"{part}.weight", (0,))[0] for part in modules}
            if not heights or not all(heights.values()):
                continue  # not fused, or `check_against` refuses it
            if tensor.shape[:1] != (sum(heights.values()),):
                raise ModelError(
                    f"{tensor.path}: {name} has the shape {tensor.shape}, but config.json implies "
                    f"{sum(heights.values())} rows; the two do not belong together; download both again."
                )
            start = 0
            for part, height in heights.items():
                rows = slice(start, start + height)
                shape = (height, *tensor.shape[1:])
                self.tensors[f"{part}.{kind}"] = tensor._replace(shape=shape, rows=rows)
                start = rows.stop
            del self.tensors[name]

    def join(self, config: Config) -> None:
        """Rename experts' matrices to stacks, whether the files store stacks or single matrices."""
        apart: dict[str, dict[int, Tensor]] = {}
        for name in list(self.tensors):
            match = re.fullmatch(r"(.+\.mlp\.experts\.)(\d{1,9})\.(\w+\.\w+)", name)
            if match:
                own = apart.setdefault(match[1] + match[3], {})
                own[int(match[2])] = self.tensors.pop(name)
            elif name.endswith("mlp.experts.gate_up_proj"):  # Qwen 3.5
                tensor = self.tensors.pop(name)
                count, height, width = (*tensor.shape, 0, 0, 0)[:3]
                for part, every in (
                    ("gate", slice(height // 2)),
                    ("up", slice(height // 2, height)),
                ):
                    self.tensors[name.replace("gate_up", part) + ".weight"] = tensor._replace(
                        shape=(count, height // 2, width), every=every, is_last=part == "up"
                    )
            elif name.endswith("mlp.experts.down_proj"):
                self.tensors[f"{name}.weight"] = self.tensors.pop(name)
            elif "switch_mlp" in name:
                self.tensors[name.replace("switch_mlp", "experts")] = self.tensors.pop(name)
        for name, found in apart.items():
            numbers = sorted(found)
            parts = tuple(found[number] for number in numbers)
            kinds = {(part.shape, part.dtype) for part in parts}
            if numbers != list(range(config.experts)) or len(kinds) > 1:
                has = f"{len(parts)} experts of {len(kinds)} shapes or types"
                raise ModelError(
                    f"{parts[0].path}: {name} has {has}, but config.json implies {config.experts}."
                )
            shape = (len(parts), *parts[0].shape)
            self.tensors[name] = parts[0]._replace(shape=shape, parts=parts)

    def check_against(self, config: Config) -> None:
        """Refuse weights unless they have exactly the tensors and shapes that the config implies. Record how
        quantized matrices are packed."""
        last = f"model.layers.{config.layers - 1}.post_attention_layernorm.weight"
        # Checked first, so that a config with a million layers is refused quickly
        if last not in self.tensors:
            raise self._lacks(last)
        if config.fused:
            self.split(config)
        if config.experts:
            self.join(config)
        expected = config.tensors()
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                raise self._lacks(stored_in(name) if config.fused else name)
            module = name.removesuffix(".weight")
            if f"{module}.scales" in self.tensors:
                bits, group, center = self._packing(module, shape)
                self.tensors[name] = tensor._replace(bits=bits, group=group, center=center)
            elif name.endswith(CONVOLUTIONS) and tensor.shape in (
                (shape[0], 1, shape[1]),
                shape[:2],
            ):
                pass  # the layout of torch or GGUF, with the same numbers
            elif tensor.shape != shape:
                raise ModelError(
                    f"{tensor.path}: {name} has the shape {tensor.shape}, but {self.described_by} implies {shape}; "
                    "the two do not belong together; download both again."
                )
            elif tensor.dtype in (mx.uint32, mx.uint8):
                raise ModelError(
                    f"{tensor.path}: {name} is packed, but lacks {module}.scales; download it again."
                )
        for name in self.tensors.keys() - expected.keys():
            module, _, part = name.rpartition(".")
            if part in ("scales", "biases") and f"{module}.weight" in expected:
                continue
            if part == "inv_freq" or (config.tied and module == "lm_head"):
                continue  # old checkpoints store rope tables, and tied ones may store the head as well
            if re.match(r"model\.layers\.\d{1,9}\.", name) and config.is_unused(module):
                continue
            raise ModelError(
                f"{self.tensors[name].path}: {name} has no place in a {config.model_type} model by "
                f"{self.described_by}; download both again."
            )

    def _lacks(self, name: str) -> ModelError:
        return ModelError(f"{self.folder} lacks the tensor {name}; download it again.")

    def _packing(self, module: str, shape: tuple[int, ...]) -> tuple[int, int, float]:
        """Return (bits, group size, center) of a quantized matrix. They follow from its shapes, so layers may differ.

        `width` numbers of `bits` bits are packed into 32-bit words, and every `group` of them shares
        one scale. So a width of 128 in 16 words with 2 scales means 4 bits in groups of 64.
        """
        # The caller has checked that weight and scales exist
        path = self.tensors[f"{module}.scales"].path
        if self.tensors[f"{module}.scales"].mxfp4:
            found = [self.tensors[f"{module}.{part}"].shape for part in ("weight", "scales")]
            if found == [*mxfp4.shapes(shape[:-1], shape[-1])]:
                return mxfp4.BITS, mxfp4.GROUP, mxfp4.CENTER
            raise ModelError(
                f"{path}: {module} has other shapes in MXFP4 than {self.described_by} implies, {shape}; "
                "the two do not belong together; download both again."
            )
        if f"{module}.biases" not in self.tensors:
            raise ModelError(f"{path}: {module} is quantized, but {module}.biases is missing.")
        parts = [self.tensors[f"{module}.{part}"] for part in ("weight", "scales", "biases")]
        packed, scales, biases = (part.dtype for part in parts)
        if packed != mx.uint32 or scales != biases or scales == mx.uint32:
            said = ", ".join(str(part.dtype).split(".")[-1] for part in parts)
            raise ModelError(
                f"{path}: weight, scales and biases of {module} are {said}, which fit no MLX "
                "quantization; download it again."
            )
        packed, scales, biases = (part.shape for part in parts)
        *out, width = shape
        if len(shape) == len(packed) == len(scales) > 1 and scales[-1] and width % scales[-1] == 0:
            bits = packed[-1] * 32 // width
            group = width // scales[-1]
            factors = (*out, width // group)
            fits = packed == (*out, width * bits // 32) and scales == biases == factors
            if fits and bits in QUANTIZED_BITS and group in MLX_GROUPS:
                return bits, group, 0.0  # offsets are stored
        raise ModelError(
            f"{path}: {module} has shapes {packed}, {scales}, {biases}, which fit no MLX quantization of "
            f"{shape}. Supported bits: {', '.join(map(str, QUANTIZED_BITS))}, in groups of "
            f"{', '.join(map(str, MLX_GROUPS))}."
        )

    def read_tensor(self, name: str, as_codes: bool = False) -> mx.array:
        """Read and check one tensor. It can be read only once, because the caller then owns its memory.

        `as_codes`: leave weights in MXFP4 as bytes, two weights each.
        """
        return self._read(self.tensors[name], as_codes)

    def _read(self, tensor: Tensor, as_codes: bool = False) -> mx.array:
        if tensor.parts:
            return mx.stack([self._read(part, as_codes) for part in tensor.parts])
        path = tensor.path
        if path not in self._arrays:
            try:
                self._arrays[path] = mx.load(str(path))
            except (RuntimeError, MemoryError) as error:
                raise ModelError(
                    f"{path} cannot be read ({one_line(error)}); download it again."
                ) from None
        arrays = self._arrays[path]
        array = arrays[tensor.name]
        rows = tensor.rows
        # Parts are read in order, so the last one frees the tensor
        if rows.stop in (None, len(array)) and tensor.is_last:
            del arrays[tensor.name]
        array = array[rows]
        if tensor.every != slice(None):
            array = mx.contiguous(array[:, tensor.every])
        if tensor.mxfp4 and as_codes and not tensor.mxfp4.is_scales:
            array = mx.contiguous(array).view(mx.uint8).reshape(*tensor.shape[:-1], -1)
        elif tensor.mxfp4:
            array = tensor.mxfp4(array)
        self._check_numbers(tensor, array)
        return array

    def blocks_of(self, name: str) -> Blocks | None:
        """Return where a GGUF tensor is if `packed` can read its blocks as stored, else None."""
        return None

    def _check_numbers(self, tensor: Tensor, array: mx.array) -> None:
        """Refuse NaN and infinity.

        Without the sign, the bits of floats are ordered like the numbers, with infinity and NaN above
        all others. They are compared as integers, because MLX is 40 times slower with float16.
        """
        if array.dtype in (mx.uint32, mx.uint8):
            return
        kind = mx.uint16 if array.dtype.size == 2 else mx.uint32
        infinite = (mx.array(math.inf, array.dtype).view(kind) << 1).item()
        peak = (array.view(kind) << 1).max().item()
        if peak >= infinite:
            raise ModelError(
                f"{tensor.path}: {tensor.name} holds NaN or infinity; download it again."
            )


def text_name(name: str) -> str:
    """Return a tensor's name without a language model's prefix, and with Llama's name for the module."""
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    for theirs, ours in (LFM2_NAMES | GRANITE_NAMES | GPT_OSS_NAMES).items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def stored_in(name: str) -> str:
    """Return the name of the fused matrix that holds this tensor."""
    for fused, parts in FUSED.items():
        name = re.sub(rf"\.({'|'.join(parts)})\.", f".{fused}.", name)
    return name
