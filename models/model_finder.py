"""Find local models: folders, GGUF files, the hub's cache, LM Studio, Ollama.

A complete local model is used without network access.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from base.untrusted_files import ModelError
from base.validation import one_line, shown
from models.download import download
from models.gguf_file import is_gguf, parts_of
from models.gguf_finder import OLLAMA, chosen, models_among, ollama_file
from models.weights import MissingError, weight_files

DEMO = Path(__file__).resolve().parents[1] / "demo" / "model"
# The files that a download fetches in addition to the weights; no other files are read
FILES = ("*.json", "*.jinja")
WEIGHTS = "model*.safetensors"
GGUF_NAME = re.compile(r"[-._]gguf\b.*$", re.IGNORECASE)  # a suffix after the model's own name
LEVELS = 6  # levels of folders to search; a model in the hub's cache is four levels down
LM_STUDIO = (Path("~/.lmstudio/models"), Path("~/.cache/lm-studio/models"))


def find(model: str) -> Path:
    """Find the folder or GGUF file of a model, and download it if necessary.

    `model`: "demo", a path, a hub id such as `mlx-community/Llama-3.2-1B-Instruct-4bit`, or the name
    of a model in Ollama's store, such as `ollama:llama3.2`.
    """
    if model.startswith(OLLAMA):
        return ollama_file(model)
    try:
        path = DEMO if model == "demo" else Path(model).expanduser()
        exists = path.exists()
    # An invalid file name, or the home of an unknown user
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"{shown(model)} is not a folder ({error.args[-1]}); name one, or a hub id."
        ) from None
    if exists:
        if path.is_dir():
            return whole_or_gguf(path)
        if is_gguf(path):
            return parts_of(path)[0]
        raise ModelError(
            f"{path} is not a GGUF file; name one, or the folder that holds config.json."
        )
    if model == "demo":
        raise ModelError(
            f"{path} is missing; the demo model comes with the checkout. Name a model of your own."
        )
    if model.lower().endswith(".gguf"):
        raise ModelError(f"{path} is missing; --list shows the models that are here.")
    if model.count("/") != 1 or model[0] in "./~":
        raise ModelError(
            f"{shown(model)} is not a folder, a GGUF file, or a hub id of the form owner/name."
        )
    name, _, wanted = model.partition(":")
    here = [folder for each, folder in found() if each == name]
    if whole := next(filter(is_whole, here), None):
        return whole
    for folder in here:
        if file := chosen(folder, wanted):
            return file
    if wanted or "gguf" in name.lower():
        raise ModelError(
            f"{shown(model)} is not in the cache, and GGUF is not downloaded here: "
            f"run `hf download {name} FILE.gguf`, then name it, or take a model such as "
            f"mlx-community/{GGUF_NAME.sub('', name.split('/')[1])}-4bit."
        )
    return _download(model)


def whole_or_gguf(folder: Path) -> Path:
    """Return the folder if it holds a config, else the GGUF file in it, or the folder if there is none."""
    return folder if (folder / "config.json").exists() else chosen(folder) or folder


def is_whole(folder: Path) -> bool:
    """True if no file of a model is missing. An interrupted download leaves only some of them."""
    if not all((folder / name).exists() for name in ("config.json", "tokenizer.json")):
        return False
    try:
        files = weight_files(folder)
    except MissingError:
        return False
    except ModelError:
        return True  # loading the model will report the error
    has_index = any(files.values())
    return has_index or not any("-of-" in path.name for path in files)


def _download(repo: str) -> Path:
    """Download a repository from the hub, or use its cached files if there is no network."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return download(repo, FILES, WEIGHTS)
    except errors.GatedRepoError:
        why = "is gated: ask for access on its page, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "is neither a folder here nor on the hub: check the spelling, or `hf auth login` if it is private"
    except errors.HFValidationError:
        why = "is neither a folder here nor a valid hub id (owner/name)"
    # No network, a proxy, a full disk. Not every error of the hub's HTTP library is an OSError
    except (OSError, errors.HTTPError, errors.XetDownloadError) as error:
        patterns = [*FILES, WEIGHTS]
        try:  # without a network, a partial older download may be enough
            return Path(
                huggingface_hub.snapshot_download(
                    repo, allow_patterns=patterns, local_files_only=True
                )
            )
        except OSError:
            why = f"is not a folder here, not in the cache, and could not be downloaded ({one_line(error, 200)}): "
            why += "check the network, or name a folder or a GGUF file (`ask.py --list` shows those here)"
    raise ModelError(f"{shown(repo, 100)} {why}.")


# --- local models -------------------------------------------------------------------------------


def found() -> Iterator[tuple[str, Path]]:
    """Yield name and folder of every model in the hub's cache and LM Studio's folders, supported or
    not."""
    from huggingface_hub import constants

    for repo in below(Path(constants.HF_HUB_CACHE), "models--*"):
        snapshots = below(repo / "snapshots", "*")
        try:
            newest = (repo / "refs" / "main").read_text().strip()
        except (OSError, ValueError):
            newest = ""
        if snapshots:
            by_name = {path.name: path for path in snapshots}
            yield (
                repo.name.removeprefix("models--").replace("--", "/", 1),
                by_name.get(newest, snapshots[-1]),
            )
    for root in LM_STUDIO:
        for folder in below(root.expanduser(), "*/*"):
            yield f"{folder.parent.name}/{folder.name}", folder


def below(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(pattern) if path.is_dir())
    except OSError:  # no permission
        return []


def models_in(root: Path) -> Iterator[Path]:
    """Yield the GGUF files and model folders in a folder and its subfolders, breadth first.

    Symlinks are followed, but each folder is visited once. Hidden files and folders are skipped.
    """
    known = set()
    level = [root]
    for _ in range(LEVELS):
        below = []
        for folder in level:
            try:
                status = folder.stat()
                if (status.st_dev, status.st_ino) in known:
                    continue
                known.add((status.st_dev, status.st_ino))
                folders, files = _entries(folder)
            except OSError:  # no permission, or the folder was just deleted
                if folder is root:
                    raise
                continue
            below += folders
            names = {path.name for path in files}
            if "config.json" in names and any(name.endswith(".safetensors") for name in names):
                yield folder
            yield from models_among(path for path in files if path.suffix == ".gguf")
        level = below


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return a folder's subfolders, and its files that may belong to a model. Other files get no
    `Path`, because there may be a million."""
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(folder / entry.name)
            elif entry.name == "config.json" or entry.name.endswith((".gguf", ".safetensors")):
                files.append(folder / entry.name)
    return sorted(folders), sorted(files)
