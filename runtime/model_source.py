"""Where an engine's model comes from, so that the model can be let go of and read again.

The problem. Weights and slab are nearly all of an engine's memory, and an idle engine needs neither.
But what was let go of has to come back: the same model, although its files may have changed
meanwhile, or another one, although its files may be broken.

What this file keeps. Nothing is read before it has been checked: the names and shapes of all tensors,
the tokenizer, and the memory, with what the engine holds already counted as free. A `Checked` is
read once.

Where next: `Engine.release` and `Engine.reload` in `nanobatch.py`; `models/load.py`, which reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distributed.rendezvous import join
from kernels.mlx import device_lock, device_stream, readable
from models import hub as models
from models.layers import Model
from models.load import ModelReader
from models.memory import Sizes, described
from runtime.files import ModelError
from text.tokenizer import Tokenizer

Report = Callable[[str], None]  # is told what is done


class Source(NamedTuple):
    """A model's files, and the sizes that were asked for."""

    model: str  # a folder, a hub id, or "demo"
    dtype: str
    kv: str
    attention: str
    report: Report
    asked: Mapping[str, Any]  # slots, max_len and so on, as `fit` takes them
    files: Mapping[Path, tuple[int, int]] = {}  # of the model that was read, as `files_of` has them

    def check(self, held: int = 0, text: Tokenizer | None = None) -> Checked:
        """Look at all that can be wrong before a tensor is read.

        `held`: so many bytes will be free by then.
        `text`: that of the model that is to come back, from the same files.
        """
        self.report(f"finding {self.model}")
        ranks = join()
        folder = models.find(self.model)  # it may have to be downloaded
        files = files_of(folder)
        with device_lock, device_stream():
            reader = ModelReader(folder, self.dtype, ranks, held, self.kv, self.attention)
            if text and files != self.files:
                changed = min(path for path, _ in files.items() ^ self.files.items())
                why = "has changed since the model was read"
                raise ModelError(f"{changed} {why}; start anew to serve it.")
            text = text or Tokenizer(folder, reader.config.V)
            sizes = reader.fit(**self.asked)
        return Checked(self._replace(files=files), reader, text, sizes)


def files_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of change of each file in a model folder."""
    states = {path: path.stat() for path in folder.iterdir() if path.is_file()}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}


class Checked(NamedTuple):
    """A model that can be read, and what fits beside it."""

    source: Source
    reader: ModelReader
    text: Tokenizer
    sizes: Sizes

    def read(self) -> Model:
        report = self.source.report
        reader = self.reader
        report(f"reading {readable(reader.nbytes)} of weights from {reader.folder.name}")
        with device_lock, device_stream():
            model = reader.read()
        report(f"allocating the slab: {described(model, self.sizes)}")
        return model
