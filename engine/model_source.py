"""The source of an engine's model, so that it can be unloaded and loaded again. Names and
shapes, the tokenizer, and the memory are checked before any tensor is loaded.

`model_lifecycle.py` unloads the model and loads it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from base.untrusted_files import ModelError
from distributed.rendezvous import join
from kernels.device import device_lock, device_stream, give_way, readable
from models import model_finder as models
from models.gguf_file import is_gguf, parts_of
from models.layers import Model
from models.load import ModelReader
from models.memory import Sizes, described
from text.tokenizer import Tokenizer

Report = Callable[[str], None]  # called with one line for each stage
SILENT_S = 2.0  # minimum time between two progress lines while weights are loaded


class ModelSource(NamedTuple):
    """A model's files, and the requested sizes."""

    model: str  # a folder, a GGUF file, a hub id, or "demo"
    dtype: str
    kv: str
    attention: str
    activations: str | int
    report: Report
    asked: Mapping[str, Any]  # slots, max_len, ...: the arguments of `ModelReader.fit`
    files: Mapping[Path, tuple[int, int]] = {}  # the result of `files_of` when the model was loaded

    def with_changes(
        self, model: str | Path | None, sizes: Mapping[str, int | None]
    ) -> ModelSource:
        """Return the source of another model, or of the same model with other sizes (`Engine.reload`)."""
        if unknown := sizes.keys() - {*Sizes._fields, "usual_len"}:
            raise ValueError(f"reload has no size {min(unknown)!r}; see Engine")
        return self._replace(model=str(model or self.model), asked={**self.asked, **sizes})

    def check(self, held: int = 0, text: Tokenizer | None = None) -> Checked:
        """Check everything before any tensor is loaded. Needs no lock, because it touches no array.

        `held`: bytes that will be freed before the model is loaded.
        `text`: the tokenizer, if the model is loaded again from the same files.
        """
        self.report(f"finding {self.model}")
        ranks = join()
        folder = models.find(self.model)  # may download it
        files = files_of(folder)
        how = {"kv": self.kv, "attention": self.attention, "activations": self.activations}
        reader = ModelReader(folder, self.dtype, ranks, held, **how)
        if text and files != self.files:
            changed = min(path for path, _ in files.items() ^ self.files.items())
            why = "has changed since the model was loaded"
            raise ModelError(f"{changed} {why}; restart to serve it.")
        text = text or Tokenizer(folder, reader.config.V)
        sizes = reader.fit(**self.asked)
        return Checked(self._replace(files=files), reader, text, sizes)


def files_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size and modification time of each file in a model folder, or of each part of a GGUF file."""
    files = parts_of(folder) if is_gguf(folder) else folder.iterdir()
    states = {path: path.stat() for path in files if path.is_file()}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}


class Checked(NamedTuple):
    """A checked model, ready to be loaded, and the sizes that fit into memory with it."""

    source: ModelSource
    reader: ModelReader
    text: Tokenizer
    sizes: Sizes

    def read_model(self) -> Model:
        report = self.source.report
        reader = self.reader
        nbytes = reader.nbytes
        report(f"reading {readable(nbytes)} of weights from {reader.folder.name}")
        began = said = time.perf_counter()

        def between(share: float) -> None:
            nonlocal said
            give_way()
            now = time.perf_counter()
            if share and now - said > SILENT_S:
                said = now
                rate = share * nbytes / (now - began) / 1e9
                report(f"read {readable(share * nbytes)} of {readable(nbytes)}, {rate:.2g} GB/s")

        with device_lock, device_stream():
            model = reader.read_model(between)
        report(f"allocating the slab: {described(model, self.sizes)}")
        return model
