"""Facts about a model before it is loaded: the headers of its files tell how much memory it will need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kernels.device import device_lock, device_stream
from models import memory, model_finder
from models.embedding_support import why_not
from models.gguf_file import is_gguf, parts_of
from models.load import ModelReader

READER = ("dtype", "kv", "attention", "activations")  # options of `ModelReader`


class ModelFacts(NamedTuple):
    """A model's files, the memory that it needs, and the slots that it would get."""

    place: Path
    size: int  # bytes of its files
    nbytes: int  # bytes of weights, slab and states in memory
    slots: int
    max_len: int
    quantization: str
    is_embedding: bool

    @classmethod
    def from_files(cls, model: str, options: Mapping[str, Any], free: float | None) -> ModelFacts:
        """Read the headers of a model's files. Raise ValueError if the model does not fit.

        `options`: the options of `Engine.load`. `free`: bytes available for the model; None if unknown."""
        place = model_finder.find(model)  # may download it
        how = {name: options[name] for name in READER if name in options}
        with device_lock, device_stream():
            reader = ModelReader(place, **how)
            reader.free = free
            sizes = reader.fit(**options)
            slab = memory.nbytes_with(reader.config, reader.kv_dtype.size, sizes)
        files = parts_of(place) if is_gguf(place) else place.iterdir()
        return cls(
            place=place,
            size=sum(path.stat().st_size for path in files if path.is_file()),
            nbytes=reader.nbytes + slab,
            slots=sizes.slots,
            max_len=sizes.max_len,
            quantization=reader.weights.quantization(reader.config),
            is_embedding=not is_gguf(place) and not why_not(place),
        )
