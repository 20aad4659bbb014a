"""Write files atomically: after an error, such as a full disk, a file still has its old content."""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path


def check_writable(file: str) -> None:
    """Raise OSError if `write_whole` cannot write this file. Call it before work whose result would be lost."""
    with suppress(FileNotFoundError):
        os.stat(file)  # raises if the name is too long
    if os.path.isdir(file):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
    if not _is_special(file):
        beside = _beside(file)
        beside.touch()
        beside.unlink()


def write_whole(file: str | Path, text: str) -> None:
    """Replace the content of a file with this text, or leave the file unchanged and raise OSError.

    The text is written to a temporary file in the same folder, which then replaces the file.
    """
    try:
        if _is_special(file):
            Path(file).write_text(text, encoding="utf-8")
        else:
            replace(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def replace(file: str | Path, data: bytes) -> None:
    beside = _beside(file)
    try:
        beside.write_bytes(data)
        beside.replace(os.path.realpath(file))
    finally:
        beside.unlink(missing_ok=True)


def _is_special(file: str | Path) -> bool:
    """Return True for a device or a pipe, such as /dev/stdout, which cannot be replaced."""
    return os.path.exists(file) and not os.path.isfile(file)


def _beside(file: str | Path) -> Path:
    """Return an unused path in the folder of the file, or of the link's target, so that a link stays a link."""
    return Path(os.path.realpath(file)).with_name(f".nanobatch-{secrets.token_hex(8)}")
