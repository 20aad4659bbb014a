"""Read files of unknown origin.

A file in a model folder may be missing, cut off, a pipe, a web page, or JSON with unexpected fields.
Each case raises a `ModelError` with the file, the problem and the remedy.
"""

import json
from pathlib import Path

from base.validation import one_line

# Size limits in bytes: several times the largest published files
LARGEST = {
    "tokenizer.json": 150_000_000,  # published: 35 MB
    "model.safetensors.index.json": 30_000_000,  # published: a few MB
    "chat_template.jinja": 1_000_000,  # published: tens of KB
}
LARGEST_OTHER = 10_000_000  # configs: about 1 MB
LARGEST_HEADER = 100_000_000  # header of a safetensors file; the format's own limit


class ModelError(ValueError):
    """A checkpoint cannot be served. The message is one line: the file, the problem, the remedy.

    `short`: the reason in about five words, for a list of models.
    """

    def __init__(self, message: str, short: str = ""):
        super().__init__(one_line(message, 480))  # a message may list all families
        self.short = short


def check_plain(path: Path) -> None:
    """Refuse anything but a regular file: opening a pipe or reading /dev/zero may never finish."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a regular file; download it again.")


def check_size(path: Path) -> None:
    """Raise ModelError if a file is too large. Call it before reading the file."""
    most = LARGEST.get(path.name, LARGEST_OTHER)
    size = path.stat().st_size
    if size > most:
        raise ModelError(
            f"{path} has {size:,} bytes, but such a file may have at most {most:,}; download it again."
        )


def read_text(path: Path) -> str:
    """Return the text of a file. Raise ModelError if it cannot be read."""
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


def read_some(path: str, most: int) -> str:
    """Return the text of a file named by the user. Raise ValueError if it has more than `most` characters,
    because it may be endless, such as /dev/zero."""
    with open(path, encoding="utf-8") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it has more than {most:,} characters")
    return text


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raise ModelError if the file contains anything else."""
    text = read_text(path)
    try:
        value = json.loads(text)
    # ValueError: invalid JSON, or a number of more than 4,300 digits
    except (ValueError, RecursionError, MemoryError) as error:
        what = what_is(text[:64].encode()) or f"not JSON ({one_line(error)})"
        raise ModelError(f"{path} is {what}; download it again.") from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{path} holds a JSON {type(value).__name__} instead of an object; download it again."
        )
    return value


def read_json_if_any(path: Path) -> dict:
    """Return the JSON object in a file, or an empty object if the file does not exist."""
    return read_json(path) if path.exists() else {}


def what_is(head: bytes) -> str | None:
    """Describe a file that is often found in place of weights, such as a web page, by its first bytes.

    Return None for other files."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself (run `git lfs pull`)"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, not the file itself"
    return None
