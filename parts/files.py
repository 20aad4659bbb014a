"""Files of unknown origin, and files that are whole.

The problem of reading. A model folder comes from anywhere: a file may be missing, cut off, a pipe,
a web page, or JSON whose fields hold what nobody expects. A KeyError says nothing to the user who
has downloaded it.

The problem of writing. A disk is full, a limit is met, or the program is killed in the middle. Then
a file that was opened to be written is empty or cut, and the good one before it is gone.

What this file keeps. Whatever is wrong with a model's file is a `ModelError`: the file, the field
and its value, and what to do. A file that `write_whole` writes holds all of the new text, or else
all that was in it before. A line that is added to a log is there as a whole or not at all.

Where next: `parts/model/config.py` and `parts/model/weights.py`, which read a config and weights
with it.
"""

import errno
import json
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

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


# --- reading ------------------------------------------------------------------------------------


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


def read_some(path: str, most: int) -> str:
    """The text in a file that a user names. It may be a device without an end."""
    with open(path, encoding="utf-8") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it has more than {most:,} characters")
    return text


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


def read_json_if_any(path: Path) -> dict:
    """The same; an empty object, if there is no such file."""
    return read_json(path) if path.exists() else {}


def what_is(head: bytes) -> str | None:
    """What a file is that often lies where weights should be, by its first bytes."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself (run `git lfs pull`)"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, not the file itself"
    return None


# --- writing ------------------------------------------------------------------------------------

# Nothing can be put beside the file, or in its place: a folder that is closed, another's file in
# /tmp, a file that a container has mounted by itself
NO_ROOM_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def check_writable(file: str) -> None:
    """Better to learn now that a file cannot be written than at the end. Nothing stays behind, and
    a pipe that nobody reads is an error instead of a long wait."""
    if _standard(file):
        return
    if _what(file) is None:
        handle, beside = _open_beside(os.path.realpath(file))
        os.close(handle)
        os.unlink(beside)
        return
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    # subtle: a pipe stays open, since its reader would take this for the end
    if not stat.S_ISFIFO(os.fstat(handle).st_mode):
        os.close(handle)


def write_whole(file: str | Path, text: str) -> None:
    """Make a file hold this text, or leave it as it was. An OSError names the file.

    The text is written beside the file, and takes its place when all of it is on the disk. A link
    stays a link, and permissions stay. What is no plain file is simply written to. A program that
    is killed may leave its half-written text behind, as `.nanobatch-*`.
    """
    path = str(file)
    data = text.encode()
    try:
        if stream := _standard(path):  # what was printed before comes before it
            stream.write(text)
            stream.flush()
        elif (before := _what(path)) and not stat.S_ISREG(before.st_mode):
            _write_to_special(path, data)
        else:
            _write_to_plain(os.path.realpath(path), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _standard(path: str) -> TextIO | None:
    return {"/dev/stdout": sys.stdout, "/dev/stderr": sys.__stderr__}.get(path)


def _what(path: str) -> os.stat_result | None:
    """What there is, if there is anything: other than `os.path.exists`, no other error passes for
    nothing."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _write_to_special(path: str, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # else a pipe without a reader would wait
    with open(handle, "wb") as file:
        os.set_blocking(handle, True)
        file.write(data)


def _write_to_plain(path: str, data: bytes) -> None:
    try:
        replace(path, data)
    except OSError as error:
        if error.errno not in NO_ROOM_BESIDE or _what(path) is None:
            raise
        _overwrite(path, data)


def replace(path: str, data: bytes) -> None:
    """Write beside the file, and put that into its place: nobody sees half of it."""
    before = _what(path)
    if before:
        os.close(os.open(path, os.O_WRONLY))  # a file that is protected stays so
    handle, beside = _open_beside(path)
    try:
        with open(handle, "wb") as file:
            now = os.fstat(handle)
            if before and (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
                os.fchown(handle, before.st_uid, before.st_gid)
            if before:
                os.fchmod(handle, stat.S_IMODE(before.st_mode))
            file.write(data)
            file.flush()
            os.fsync(handle)  # else a power cut may leave a name without its contents
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def _overwrite(path: str, data: bytes) -> None:
    """Write over what is there, and put that back if it fails. Only a kill in the middle harms."""
    before = Path(path).read_bytes()
    try:
        _write_over(path, data)
    except BaseException:
        _write_over(path, before)
        raise


def _write_over(path: str, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def _open_beside(path: str) -> tuple[int, str]:
    """A new file in the same folder: its descriptor, and its name."""
    beside = os.path.join(os.path.dirname(path), f".nanobatch-{secrets.token_hex(8)}")
    return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), beside


def append_line(handle: int, line: str) -> None:
    """Add a line to a file. If the disk has no room for all of it, nothing of it stays."""
    data = f"{line}\n".encode(errors="replace")
    written = 0
    try:
        while written < len(data):
            written += os.write(handle, data[written:])
    except OSError:
        if written and stat.S_ISREG(os.fstat(handle).st_mode):
            os.ftruncate(handle, os.fstat(handle).st_size - written)
        raise


class LineFile:
    """A server's log: lines are added as long as there is room, each as a whole. On a full disk, or
    if the reader of a pipe has gone, serving goes on. That is told once, and the next line that
    finds room says how many are missing."""

    def __init__(self, file: TextIO):
        self._file = file
        self._lost = 0

    def write(self, line: str) -> None:
        try:
            lost = f"lost_lines={self._lost} " if self._lost else ""
            append_line(self._file.fileno(), lost + line)
            self._lost = 0
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._lost += 1
            if self._lost == 1:
                why = getattr(error, "strerror", None) or error
                with suppress(OSError, ValueError):  # the log may be stderr itself
                    words = f"{self._file.name}: {why}; serving goes on without its log"
                    print(f"nanobatch: {one_line(words)}", file=sys.stderr)
