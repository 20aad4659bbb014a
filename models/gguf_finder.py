"""Find GGUF files that other programs downloaded: Ollama, LM Studio, and the hub's own client."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from base.untrusted_files import ModelError, read_json
from base.validation import shown
from models.gguf_file import SPLIT

OLLAMA = "ollama:"
REGISTRY = "registry.ollama.ai"
SERVICE = Path(
    "/usr/share/ollama/.ollama/models"
)  # Ollama's folder when it runs as a system service
WEIGHTS = "application/vnd.ollama.image.model"
TYPE = re.compile(
    r"(?:UD-)?(?:I?Q\d\w*|B?F16|F32)(?=[.-])", re.IGNORECASE
)  # the quantization in a file's name


def files_in(folder: Path) -> list[Path]:
    """Return the GGUF models in a folder and its subfolders."""
    return models_among(sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]))


def models_among(found: Iterable[Path]) -> list[Path]:
    """Keep one GGUF file for each model: the first part of a split model, and no image projectors."""
    parts = {path: SPLIT.search(path.name) for path in found if not path.name.startswith("mmproj")}
    return [path for path, part in parts.items() if part is None or int(part[1]) == 1]


def type_of(path: Path) -> str:
    """Return the quantization in a file's name, such as Q4_K_M. If it has none, return the name."""
    found = TYPE.findall(path.name)
    return found[-1] if found else path.name


def chosen(folder: Path, wanted: str = "") -> Path | None:
    """Return the only GGUF model in a folder, or the only one with the type or file name `wanted`. None if the
    folder has none. Raise ModelError if there are several, or none that is wanted."""
    files = files_in(folder)
    if wanted:
        files = [
            path for path in files if wanted.lower() in (type_of(path).lower(), path.name.lower())
        ]
    if len(files) > 1:
        named = ", ".join(path.name for path in files[:8])
        raise ModelError(f"{folder} holds {len(files)} GGUF models ({named}); name the file.")
    if wanted and not files:
        raise ModelError(
            f"{folder} holds no GGUF model of the type {shown(wanted)}; --list shows what is here."
        )
    return files[0] if files else None


def ollama_roots() -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    return [Path(own)] if own else [Path("~/.ollama/models").expanduser(), SERVICE]


def ollama_models() -> Iterator[tuple[str, Path]]:
    """Yield each of Ollama's models: its name for `--model`, and its manifest."""
    for root in ollama_roots():
        for path in sorted((root / "manifests").glob("*/*/*/*")):
            if path.is_file():
                host, owner, name, tag = path.parts[-4:]
                place = [] if host == REGISTRY else [host]
                place += [] if owner == "library" and not place else [owner]
                yield f"{OLLAMA}{'/'.join([*place, name])}:{tag}", path


def ollama_file(model: str) -> Path:
    """Return the GGUF file of one of Ollama's models."""
    name = model if ":" in model.removeprefix(OLLAMA) else f"{model}:latest"
    manifest = dict(ollama_models()).get(name)
    if manifest is None:
        where = " and ".join(map(str, ollama_roots()))
        raise ModelError(
            f"{shown(model)} is not among Ollama's models in {where}; --list shows them."
        )
    return blob_of(manifest)


def blob_of(manifest: Path) -> Path:
    layers = read_json(manifest).get("layers")
    for layer in layers if isinstance(layers, list) else ():
        digest = layer.get("digest") if isinstance(layer, dict) else None
        if isinstance(digest, str) and layer.get("mediaType") == WEIGHTS:
            found = re.fullmatch(r"sha256:([0-9a-f]{64})", digest)
            if found:
                return manifest.parents[4] / "blobs" / f"sha256-{found[1]}"
    raise ModelError(f"{manifest} names no weights; run `ollama pull` again.")
