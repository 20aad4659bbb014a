"""The table of local models: `python ask.py --list [DIR]`.

Only names, configs and headers are read, not weights. Broken models are listed, too.
"""

import math
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from base.untrusted_files import ModelError
from base.validation import one_line, printable, shown
from kernels.device import readable
from models.config import near_family, raw_config
from models.families import FAMILIES
from models.gguf_file import is_gguf, parts_of
from models.gguf_finder import blob_of, files_in, ollama_models, type_of
from models.load import ModelReader
from models.model_finder import DEMO, found, is_whole, models_in
from text.gguf_tokenizer import GgufText

PATIENCE_S = 20.0  # seconds without a new model after which the search stops
MOST = 1_000  # maximum number of lines
NAME = 200  # maximum length of a path in characters


class Listed(NamedTuple):
    """A row of the table."""

    name: str
    family: str
    parameters: str
    quantization: str
    size: str  # on disk
    memory: str  # size of the weights in memory
    served: str  # "yes", or why the model cannot be served


def listed() -> list[Listed]:
    """Return all local models, the demo first."""
    lines = [_listed("demo", DEMO)]
    for name, folder in found():
        files = [] if (folder / "config.json").exists() else files_in(folder)
        lines += [_listed(f"{name}:{type_of(file)}", file) for file in files]
        if not files:
            lines.append(_listed(name, folder))
    for name, manifest in ollama_models():
        with suppress(ModelError):
            lines.append(_listed(name, blob_of(manifest)))
    return lines


def listed_in(folder: Path) -> tuple[list[Listed], str]:
    """Return the models in a folder and its subfolders, and why the list is incomplete ("" if complete).

    A network folder may be huge or may not respond at all. So a daemon thread searches it, and is
    abandoned if it finds no further model within `PATIENCE_S`.
    """
    lines: list[Listed] = []
    failed: list[Exception] = []

    def search() -> None:
        try:
            for place in islice(models_in(folder), MOST):
                lines.append(_listed(str(place), place))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=search, name="list", daemon=True)
    thread.start()
    known = -1
    while thread.is_alive() and len(lines) > known:
        known = len(lines)
        thread.join(PATIENCE_S)
    if failed and isinstance(failed[0], OSError):
        why = failed[0].strerror or one_line(failed[0])
        raise ModelError(f"--list {folder}: {why}; name a folder that holds models")
    if failed:
        raise failed[0]
    if thread.is_alive():
        return lines, f"{PATIENCE_S:.0f} s were not enough; name a folder further down"
    return lines, f"these are the first {MOST:,}" if len(lines) == MOST else ""


def _listed(name: str, place: Path) -> Listed:
    """Return a model's row, with the reason if the model cannot be loaded."""
    family = parameters = quantization = memory = "-"
    served = "yes"
    size = 0
    try:
        size = sum(path.stat().st_size for path in files_of(place))
        family = str(raw_config(place).get("model_type", "-"))
        reader = ModelReader(place)
        count = sum(map(math.prod, reader.config.tensors().values()))
        parameters = f"{count / 1e6:,.0f}M"
        quantization = reader.weights.quantization(reader.config)
        memory = readable(reader.nbytes)
        reader.check_room()
        if is_gguf(place):
            GgufText(place)
        elif not (place / "tokenizer.json").exists():
            served = "tokenizer.json is missing"
    except (ModelError, OSError) as error:
        served = _in_five_words(place, family, getattr(error, "short", ""))
    line = (family, parameters, quantization, readable(size), memory, served)
    texts = [shown(name, NAME), *(shown(text, 60) for text in line)]
    return Listed(*(printable(text[1:-1]) for text in texts))


def files_of(place: Path) -> list[Path]:
    """Return all files of a model."""
    if is_gguf(place):
        return parts_of(place)
    return [path for path in place.rglob("*") if path.is_file()]


def _in_five_words(place: Path, family: str, short: str) -> str:
    if is_gguf(place):
        return short or "broken: load it to see why"
    if family not in ("-", *FAMILIES):
        near = near_family(family)
        return f"{shown(family, 24)[1:-1]} is not served" + (f"; {near}" if near else "")
    return short or ("broken: load it to see why" if is_whole(place) else "not fully downloaded")
