"""Write files whole: a file has all of the new text or, as on a full disk, all of the old one."""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path


def check_writable(file: str) -> None:
    """Raise OSError now if `write_whole` could not write this file at the end."""
    with suppress(FileNotFoundError):
        os.stat(file)  # its name may be too long
    if os.path.isdir(file):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
    if not _is_special(file):
        beside = _beside(file)
        beside.touch()
        beside.unlink()


def write_whole(file: str | Path, text: str) -> None:
    """Make a file hold this text, or leave it as it was. An OSError names the file.

    The text is written next to the file, and then takes its place.
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
    """A device or a pipe, such as /dev/stdout, cannot be replaced."""
    return os.path.exists(file) and not os.path.isfile(file)


def _beside(file: str | Path) -> Path:
    """An unused name in the same folder. A link stays a link."""
    return Path(os.path.realpath(file)).with_name(f".nanobatch-{secrets.token_hex(8)}")
