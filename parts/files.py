"""Text files and JSON objects of a model folder, and one line for each way in which they can be
wrong.

The problem. A model folder comes from anywhere: a file may be missing, cut off, a pipe, a web page,
or JSON whose fields hold what nobody expects. A KeyError says nothing to the user who has
downloaded it.

What this file keeps. Whatever is wrong is a `ModelError`: the file, the field and its value, and
what to do.

Where next: `parts/model/config.py` and `parts/model/weights.py`, which read a config and weights
with it.
"""

import json
from pathlib import Path

from parts.checks import one_line

# The most bytes that a file may have, several times as many as the largest that are published have.
# More would take minutes to read, and all for nothing.
LARGEST = {
    "tokenizer.json": 150_000_000,  # published: 35 MB
    "model.safetensors.index.json": 30_000_000,  # some MB
    "chat_template.jinja": 1_000_000,  # some ten KB
}
LARGEST_OTHER = 10_000_000  # configs: about 1 MB
LARGEST_HEADER = 100_000_000  # of a file with weights, as the format has it


class ModelError(ValueError):
    """A checkpoint that cannot be served. The message is one line: the file, what is wrong, what to
    do.

    `short` says why in about five words, for a list of models, where it is more than that a file is
    broken.
    """

    def __init__(self, message: str, short: str = ""):
        super().__init__(one_line(message))
        self.short = short


def check_plain(path: Path) -> None:
    """Refuse what is no plain file. To open a pipe may take for ever, and so may reading
    /dev/zero."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is no plain file; download it again.")


def check_size(path: Path) -> None:
    """Refuse what is too large before it is read."""
    most = LARGEST.get(path.name, LARGEST_OTHER)
    size = path.stat().st_size
    if size > most:
        raise ModelError(
            f"{path} has {size:,} bytes, and such a file may have {most:,}; download it again."
        )


def read_text(path: Path) -> str:
    """The text in a file, or one line that says why there is none."""
    try:
        check_plain(path)
        check_size(path)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; a model folder needs it. Download the model again."
        ) from None
    except (OSError, UnicodeDecodeError, MemoryError) as error:
        raise ModelError(f"{path} cannot be read ({one_line(error)}); download it again.") from None


def read_json(path: Path) -> dict:
    """The JSON object in a file, or one line that says why there is none."""
    text = read_text(path)
    try:
        value = json.loads(text)
    # No JSON, or a number of more than 4,300 digits
    except (ValueError, RecursionError, MemoryError) as error:
        what = what_is(text[:64].encode()) or f"not JSON ({one_line(error)})"
        raise ModelError(f"{path} is {what}; download it again.") from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{path} holds a JSON {type(value).__name__} where an object belongs; download it again."
        )
    return value


def what_is(head: bytes) -> str | None:
    """What a file is that often lies where weights should be, by its first bytes."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself (run `git lfs pull`)"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, not the file itself"
    return None
