"""The tensors of a model folder: all that can be wrong with them is found before it can do harm.

The problem. MLX loads lazily and checks little. A truncated download, a matrix of zeros or a NaN
goes through in silence and comes out as nonsense, many tokens later. A serving engine must notice
it while it loads.

What this file keeps. A tensor leaves `Weights.take` only if the config implies it, its file has it
in the shape that the config implies, and its numbers are finite and not all zero. Everything else
raises `ModelError`, one line with the file, what is wrong with it, and what to do.

Where next: `load.py` turns `Config` and `Weights` into a `Model`, layer by layer, so that a
checkpoint and its converted copy are never in memory together.
"""

import json
import math
import re
import struct
from pathlib import Path

from parts.checks import one_line, shown
from parts.device import mlx as device
from parts.device.mlx import mx
from parts.device.packed import LEAST, WIDER, row_nbytes
from parts.files import LARGEST_HEADER, ModelError, check_plain, read_json, what_is
from parts.model.config import Config

# As phi3 stores them
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "U32": mx.uint32}


def usual_form() -> str:
    """What becomes of weights unless another form is asked for.

    "checkpoint": they stay as the files have them, and MLX multiplies. "float32": they are widened.
    "packed": matrices stay as they are, and our own product makes float32 numbers of them as it
    goes. On a CPU, MLX itself is fast with float32 alone.
    """
    if device.has_gpu():
        return "checkpoint"
    return "packed" if device.is_exact() else "float32"


def read_header(path: Path) -> dict[str, dict]:
    """The table of contents of a safetensors file, checked against the size of the file.

    A safetensors file begins with the length N of a JSON text, in 8 bytes. After the JSON comes the
    data it points to:

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
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for name, entry in entries.items():
                begin, stop = entry["data_offsets"]
                if (kind := DTYPES.get(entry["dtype"])) and stop - begin != math.prod(
                    entry["shape"]
                ) * kind.size:
                    raise ValueError(f"{name}: {stop - begin} bytes for the shape {entry['shape']}")
            end = 0
            for begin, stop in sorted(entry["data_offsets"] for entry in entries.values()):
                if begin != end or stop < begin:
                    raise ValueError(f"data at {begin}, where {end} is next")
                end = stop
            end += 8 + length
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download the model again.") from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{path} has a broken header ({one_line(error)}); download it again."
        ) from None
    if size != end:
        what = "cut off" if size < end else "longer than its header says"
        raise ModelError(f"{path} is {what}: {size:,} bytes, expected {end:,}; download it again.")
    return entries


def _misplaced(index: Path, tensor: str, file: object) -> ModelError:
    return ModelError(f"{index}: {tensor} is said to be in {shown(file)}; download it again.")


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read. Each comes with the tensors that the index promises in it, None if there
    is no index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelError(f"{index} has no weight_map; download it again.")
        # Grouped first, since there may be a million tensors, and a path costs more than a text
        named: dict[str, set[str]] = {}
        for tensor, file in places.items():
            if not isinstance(file, str):
                raise _misplaced(index, tensor, file)
            named.setdefault(file, set()).add(tensor)
        files: dict[Path, set[str] | None] = {}
        for file, tensors in named.items():
            if Path(file).name != file or len(file) > 200:
                raise _misplaced(index, min(tensors), file)
            path = folder / file
            if not path.exists():
                raise ModelError(
                    f"{path} is missing, but {index.name} names it; download the model again."
                )
            files[path] = tensors
        return files
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise ModelError(
            f"{folder} holds no model*.safetensors; only safetensors weights are supported."
        )
    return dict.fromkeys(found)


class Weights:
    """The tensors of a checkpoint. All names and shapes are checked together, the numbers of each
    when it is taken."""

    def __init__(self, folder: Path):
        self.entries: dict[str, dict] = {}
        self.files: dict[str, Path] = {}
        for path, promised in _weight_files(folder).items():
            entries = read_header(path)
            if promised is not None and (gone := promised - entries.keys()):
                raise ModelError(
                    f"{path} lacks {min(gone)}, which the index names: one is stale; download both again."
                )
            for name, entry in entries.items():
                if entry.get("dtype") not in DTYPES:
                    raise ModelError(
                        f"{path}: {name} is {shown(entry.get('dtype'))}. Supported: {', '.join(DTYPES)}."
                    )
                self.entries[name] = entry
                self.files[name] = path
        # As models without a head are saved
        self._before = "model." if "embed_tokens.weight" in self.entries else ""
        self.entries = {self._before + name: entry for name, entry in self.entries.items()}
        self.files = {self._before + name: path for name, path in self.files.items()}
        if not self.entries:
            raise ModelError(
                f"{folder}: its weight files hold no tensors; download the model again."
            )
        self._lazy: dict[Path, dict[str, mx.array]] = {}
        self._joined: dict[str, list[str]] = {}  # of a stack: the tensors that it is made of
        self._may_be_zero = (".bias", ".biases")
        # Of a part: the tensor that holds it, and its rows there
        self._cuts: dict[str, tuple[str, range]] = {}

    @property
    def has_head(self) -> bool:
        return "lm_head.weight" in self.entries

    @property
    def are_narrow(self) -> bool:
        """Has any matrix fewer than 32 bits a number?"""
        matrices = [entry for entry in self.entries.values() if len(entry["shape"]) > 1]
        return any(entry["dtype"] != "F32" for entry in matrices)

    def nbytes(self, config: Config, own: Config, form: str, has_head: bool) -> int:
        """The memory that the model will take in this form (`usual_form`). `own` is a rank's share
        of it."""
        shapes = own.tensors()
        if not has_head:
            shapes.pop("lm_head.weight", None)
        whole = config.tensors()
        total = 0
        for name, shape in shapes.items():
            is_multiplied = config.factor(name) != 1
            total += self._nbytes(name, shape, whole[name][-1], form, is_multiplied)
        return total

    def _nbytes(
        self, name: str, shape: tuple[int, ...], width: int, form: str, is_multiplied: bool
    ) -> int:
        """Of one tensor, with its scales and offsets. `width`: of its rows, before they are shared
        among ranks. What cuts a group of numbers is unpacked."""
        count = math.prod(shape)
        size = DTYPES[self.entries[name]["dtype"]].size
        scales = self.entries.get(f"{name.removesuffix('.weight')}.scales")
        if form == "float32" or (form == "packed" and len(shape) == 1):
            return 4 * count
        if scales is None and form == "packed":
            has_room = shape[-1] >= LEAST
            return 2 * count + 4 * count // shape[-1] if size == 2 and has_room else 4 * count
        if scales is None:
            return size * count
        bits, group = quantization(self.shape(name), tuple(scales["shape"]), width)
        size = 4 if form == "packed" and is_multiplied else DTYPES[scales["dtype"]].size
        if shape[-1] % group:
            return (4 if form == "packed" else size) * count
        factors = 2 * size * (count // group)
        if form != "packed":
            return bits * count // 8 + factors
        return row_nbytes(shape[-1], WIDER.get(bits, bits)) * (count // shape[-1]) + factors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def split(self, config: Config) -> None:
        """Let what is stored as one tensor appear as its parts, under the names that other families
        give them."""
        shapes = config.tensors()
        for name in list(self.entries):
            module, _, kind = name.rpartition(".")
            place, _, fused = module.rpartition(".")
            heights = {
                part: shapes.get(f"{place}.{part}.weight", (0,))[0] for part in FUSED.get(fused, ())
            }
            entry = self.entries[name]
            path = self.files[name]
            start = 0
            if not heights or not all(heights.values()):
                continue  # whole as it is, or `check_against` finds no place for it
            if entry["shape"][:1] != [sum(heights.values())]:
                raise ModelError(
                    f"{path}: {name} has the shape {self.shape(name)}, but config.json implies "
                    f"{sum(heights.values())} rows; the two do not belong together; download both again."
                )
            for part, height in heights.items():
                own = f"{place}.{part}.{kind}"
                self.entries[own] = entry | {"shape": [height, *entry["shape"][1:]]}
                self.files[own] = path
                self._cuts[own] = name, range(start, start := start + height)
            del self.entries[name]

    def join(self, config: Config) -> None:
        """Let experts' matrices appear as stacks, whether the files hold mlx-lm's stacks or each by
        itself."""
        apart: dict[str, dict[int, str]] = {}
        for name in list(self.entries):
            if "switch_mlp" in name:
                own = name.replace("switch_mlp", "experts")
                self.entries[own] = self.entries.pop(name)
                self.files[own] = self.files[name]
                self._joined[own] = [name]
            elif match := re.fullmatch(r"(.+\.mlp\.experts\.)(\d{1,9})\.(\w+\.\w+)", name):
                apart.setdefault(match[1] + match[3], {})[int(match[2])] = name
        for own, parts in apart.items():
            names = list(parts.values())
            shapes = {self.shape(name) for name in parts.values()}
            if sorted(parts) != list(range(config.experts)) or len(shapes) > 1:
                has = f"{len(parts)} experts of {len(shapes)} shapes"
                raise ModelError(
                    f"{self.files[names[0]]}: {own} has {has}, but config.json implies {config.experts}."
                )
            self.entries[own] = self.entries[names[0]] | {"shape": [len(parts), *shapes.pop()]}
            self.files[own] = self.files[names[0]]
            self._joined[own] = [parts[n] for n in range(len(parts))]
            for name in names:
                del self.entries[name]

    def check_against(self, config: Config) -> None:
        """Refuse weights unless they hold every tensor that the config implies, in its shape, and
        no other."""
        folder = next(iter(self.files.values())).parent
        self._may_be_zero += ("norm.weight",) * config.norms_add
        if config.fused:
            self.split(config)
        if config.experts:
            self.join(config)
        last = f"model.layers.{config.layers - 1}.post_attention_layernorm.weight"
        # Asked first, so that refusing a config with a million layers is quick
        if last not in self.entries:
            raise ModelError(f"{folder} lacks the tensor {last}; download it again.")
        expected = config.tensors()
        for name, shape in expected.items():
            if name not in self.entries:
                raise ModelError(
                    f"{folder} lacks the tensor {self._stored(name, config)}; download it again."
                )
            module = name.removesuffix(".weight")
            if f"{module}.scales" in self.entries:
                self._check_quantized(module, shape)
            elif self.shape(name) != shape:
                raise ModelError(
                    f"{self.files[name]}: {name} has the shape {self.shape(name)}, but config.json implies {shape}; "
                    "the two do not belong together; download both again."
                )
            elif self.entries[name]["dtype"] == "U32":
                raise ModelError(
                    f"{self.files[name]}: {name} is packed, but lacks {module}.scales; download it again."
                )
        for name in self.entries.keys() - expected.keys():
            module, _, part = name.rpartition(".")
            if part in ("scales", "biases") and f"{module}.weight" in expected:
                continue
            if part == "inv_freq" or (config.tied and module == "lm_head"):
                continue  # old checkpoints have rope tables, and tied ones may hold the head twice
            raise ModelError(
                f"{self.files[name]}: {name} has no place in a {config.model_type} model of this config.json; "
                "use the one that came with it."
            )

    def _stored(self, name: str, config: Config) -> str:
        """What a family's files call the tensor that holds this one."""
        whole = (
            {part: fused for fused, parts in FUSED.items() for part in parts}
            if config.fused
            else {}
        )
        *place, module, kind = name.split(".")
        return ".".join([*place, whole.get(module, module), kind])

    def _check_quantized(self, module: str, shape: tuple[int, ...]) -> None:
        names = [f"{module}.{part}" for part in ("weight", "scales", "biases")]
        for name in names:
            if name not in self.entries:
                raise ModelError(
                    f"{self.files[f'{module}.scales']}: {module} is quantized, but {name} is missing."
                )
        packed, scales, biases = (self.shape(name) for name in names)
        *out, width = shape
        if len(shape) == len(packed) == len(scales) > 1 and scales[-1] and width % scales[-1] == 0:
            bits, group = quantization(packed, scales, width)
            fits = packed == (*out, width * bits // 32) and scales == biases == (
                *out,
                width // group,
            )
            if fits and bits in QUANTIZED_BITS:
                return
        raise ModelError(
            f"{self.files[names[0]]}: {module} has shapes {packed}, {scales}, {biases}, which no MLX quantization of "
            f"{shape} has. Supported bits: {', '.join(map(str, QUANTIZED_BITS))}."
        )

    def take(self, name: str) -> mx.array:
        """One tensor, read and checked now. It can be taken once: from here on the caller owns its
        memory."""
        if parts := self._joined.get(name):
            return (
                self.take(parts[0])
                if len(parts) == 1 and "switch_mlp" in parts[0]
                else mx.stack([*map(self.take, parts)])
            )
        path = self.files[name]
        if path not in self._lazy:
            try:
                arrays = mx.load(str(path))
                self._lazy[path] = {self._before + name: array for name, array in arrays.items()}
            except (RuntimeError, MemoryError) as error:
                raise ModelError(
                    f"{path} cannot be read ({one_line(error)}); download it again."
                ) from None
        name, rows = self._cuts.get(name, (name, None))
        array = self._lazy[path][name] if rows else self._lazy[path].pop(name)
        if rows:
            if rows.stop == len(array):  # its parts are taken in order, and this is the last
                del self._lazy[path][name]
            array = array[rows.start : rows.stop]
        # Without their signs the bits of numbers are ordered as the numbers are, with infinity and NaN
        # above all others. (As integers, since MLX takes 40 times as long to compare float16 numbers.)
        # Packed integers, biases and quantization offsets may well be all zero.
        if array.dtype != mx.uint32:
            kind = mx.uint16 if array.dtype.size == 2 else mx.uint32
            infinite = (mx.array(math.inf, array.dtype).view(kind) << 1).item()
            peak = (array.view(kind) << 1).max().item()
            if peak >= infinite:
                raise ModelError(f"{path}: {name} holds NaN or infinity; download it again.")
            if peak == 0 and not name.endswith(self._may_be_zero):
                raise ModelError(f"{path}: {name} is all zeros; download it again.")
        return array


def quantization(packed: tuple[int, ...], scales: tuple[int, ...], width: int) -> tuple[int, int]:
    """(bits, group size) of a quantized matrix `width` numbers wide, from its shapes, whatever a
    config claims.

    `width` numbers of `bits` bits are packed into 32-bit words, and every `group` of them shares
    one scale. So a width of 128 in 16 words with 2 scales means 4 bits in groups of 64. Layers may
    differ, without further care.
    """
    return packed[-1] * 32 // width, width // scales[-1]
