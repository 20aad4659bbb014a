"""Saved slots as files: safetensors in a private folder of limited size.

    header      8 bytes: its length; then JSON: dtype, shape and offsets of each tensor, and metadata
    tokens      (rows,) int32
    layers.N    (2 Hkv, rows, Dh): the keys, then the values, of one layer
    states.N    (numbers,): the state of one layer, for layers with states; `base` is in the metadata
    digest      (32,) uint8: BLAKE2b of all bytes before it

A file is written under a temporary name and then renamed, so it is never incomplete. Its name begins with
the model's key. Several servers may share a folder without locks: equal names mean equal content, and a
file that vanishes is a miss.

`header_of` writes the safetensors header itself. Threads write while the device computes, so they must not
touch MLX arrays, as MLX's `save_safetensors` would. The `safetensors` package would be a dependency for ten
lines of code, and the digest would need a second pass.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from base.validation import shown

DIGEST = 32  # bytes
LARGEST_HEADER = 2**20  # bytes; about 200 are used per layer
LARGEST_FOLDER = 8 * 2**30  # default limit in bytes
STALE_S = 3600  # a temporary file unchanged for this long is treated as abandoned
STEM = r"[0-9a-f]{16}-[0-9a-f]{32}"
SAVED = re.compile(rf"{STEM}\.safetensors")
TEMPORARY = re.compile(rf"{STEM}\.[0-9a-f]{{16}}\.tmp")
UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}
FORMATS = {"F16": "H", "BF16": "H", "F32": "I", "I32": "i", "U8": "B"}  # dtype -> memoryview format
BLOCK = 2**24  # bytes per read


class Damaged(ValueError):
    """Raised for a file that is cut off, changed, or not a saved slot."""


class SavedTensor(NamedTuple):
    dtype: str  # the name in safetensors
    shape: tuple[int, ...]
    data: memoryview


class SavedSlot(NamedTuple):
    """The description of a saved slot, read from the beginning of its file."""

    name: str
    key: str  # hash of the model and its arithmetic
    owner: str  # hash of the client that sent the prompt
    tokens: bytes  # int32
    base: int = 0  # number of tokens that the states include; a prompt must share all of them

    @property
    def rows(self) -> int:
        return len(self.tokens) // 4


def read_setting(text: str) -> tuple[str, int]:
    """Parse DIR[:SIZE] into a folder and a size in bytes."""
    folder, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        return text, LARGEST_FOLDER
    nbytes = read_nbytes(size)
    if not folder or nbytes is None:
        raise ValueError(
            f"slot cache: {shown(text)}: give DIR or DIR:SIZE, with a size such as 500M or 20G"
        )
    return folder, nbytes


def read_nbytes(text: str) -> int | None:
    """Parse a size such as 500M or 20G into bytes. Return None if the text is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])(?:i?B)?", text, re.IGNORECASE)
    return int(float(found[1]) * UNITS[found[2].upper()]) if found else None


class SlotFolder:
    """The folder of saved slots. Raises ValueError if it cannot be created, or if it is not private.

    `setting`: DIR[:SIZE].
    `answered`: the time of the last successful file operation. In a lost network folder, operations hang forever.
    """

    def __init__(self, setting: str):
        self.answered = time.monotonic()
        folder, self.limit = read_setting(setting)
        self.path = Path(folder).expanduser()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self.path.stat()
        except OSError as error:
            raise ValueError(f"slot cache: {self.path}: {error.strerror}") from None
        if state.st_uid != os.geteuid():
            raise ValueError(f"slot cache: {self.path} belongs to another user; choose your own")
        if state.st_mode & 0o077:
            raise ValueError(
                f"slot cache: {self.path} is open to others, and will hold what users say; "
                f"run chmod 700 {self.path}"
            )

    def names(self, key: str) -> set[str]:
        """Return the names of a model's saved slots; empty if the folder cannot be listed. Skip anything but
        regular files, because opening a pipe would block."""
        start = f"{key[:16]}-"
        try:
            found = [each.name for each in os.scandir(self.path) if each.is_file()]
        except OSError:
            return set()
        self.answered = time.monotonic()
        return {name for name in found if name.startswith(start) and SAVED.fullmatch(name)}

    def read_head(self, name: str) -> SavedSlot:
        """Read the beginning of a file, without checking the digest (`read_tensors` does)."""
        with open(self.path / name, "rb") as file:
            size = header_size(file.read(8))
            nbytes = os.fstat(file.fileno()).st_size - 8 - size
            key, owner, base, tensors = parsed(file.read(size), nbytes)
            tokens = file.read(tensors["tokens"].stop)
        self.answered = time.monotonic()
        return SavedSlot(name, key, owner, tokens, base)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def read_tensors(self, saved: SavedSlot) -> dict[str, SavedTensor]:
        """Return all tensors of a file. Raise Damaged if its digest is wrong, or it has changed since `read_head`."""
        data = self._bytes_of(saved.name)
        size = 8 + header_size(data)
        key, owner, base, tensors = parsed(bytes(data[8:size]), len(data) - size)
        if blake2b(data[:-DIGEST], digest_size=DIGEST).digest() != data[-DIGEST:]:
            raise Damaged("its digest differs")
        found = {}
        for name, (dtype, shape, start, stop) in tensors.items():
            part = data[size + start : size + stop]
            found[name] = SavedTensor(dtype, shape, part.cast(FORMATS[dtype]))
        tokens = found["tokens"].data.tobytes()
        if SavedSlot(saved.name, key, owner, tokens, base) != saved:
            raise Damaged("it has changed since it was listed")
        return found

    def _bytes_of(self, name: str) -> memoryview:
        """Return the content of a file, read in blocks so that `answered` shows progress."""
        with open(self.path / name, "rb") as file:
            data = memoryview(bytearray(os.fstat(file.fileno()).st_size))
            start = 0
            while count := file.readinto(data[start : start + BLOCK]):
                self.answered = time.monotonic()
                start += count
        return data[:start]

    def write(self, saved: SavedSlot, tensors: Mapping[str, SavedTensor]) -> None:
        """Make room for a file, and write it atomically."""
        written = {"tokens": SavedTensor("I32", (saved.rows,), memoryview(saved.tokens)), **tensors}
        digest = SavedTensor("U8", (DIGEST,), memoryview(bytes(DIGEST)))  # filled in at the end
        metadata = {"key": saved.key, "owner": saved.owner, "base": str(saved.base)}
        header = header_of(metadata, {**written, "digest": digest})
        nbytes = len(header) + DIGEST + sum(tensor.data.nbytes for tensor in written.values())
        if nbytes > self.limit:
            raise OSError(0, f"{nbytes:,} bytes exceed the limit of {self.limit:,}")
        self.make_room(nbytes)
        stem = saved.name.removesuffix(".safetensors")
        beside = self.path / f"{stem}.{secrets.token_hex(8)}.tmp"
        state = blake2b(digest_size=DIGEST)
        try:
            with open(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                for part in (header, *(tensor.data for tensor in written.values())):
                    state.update(part)
                    file.write(part)
                    self.answered = time.monotonic()
                file.write(state.digest())
            beside.replace(self.path / saved.name)
        finally:
            beside.unlink(missing_ok=True)

    def make_room(self, nbytes: int) -> None:
        """Delete the least recently used files, of any model, until there is room for this many bytes.

        Temporary files count, and stale ones are deleted. `abs`: after the clock was set back, a stale
        file has a time in the future."""
        files = []
        for entry in os.scandir(self.path):
            with suppress(FileNotFoundError):
                state = entry.stat(follow_symlinks=False)
                if SAVED.fullmatch(entry.name):
                    files.append((state.st_mtime, state.st_size, entry.name))
                elif TEMPORARY.fullmatch(entry.name):
                    if abs(time.time() - state.st_mtime) > STALE_S:
                        self.remove(entry.name)
                    else:
                        nbytes += state.st_size
        nbytes += sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if nbytes <= self.limit:
                return
            self.remove(name)
            nbytes -= size

    def use(self, name: str) -> None:
        """Mark a file as the most recently used."""
        with suppress(OSError):
            os.utime(self.path / name)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(self.path / name)


# --- the format ---------------------------------------------------------------------------------


def header_of(metadata: Mapping[str, str], tensors: Mapping[str, SavedTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        stop = start + data.nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_size(head: bytes | memoryview) -> int:
    size = int.from_bytes(head[:8], "little")
    if len(head) < 8 or size > LARGEST_HEADER:
        raise Damaged("it is not a safetensors file")
    return size


class TensorPlace(NamedTuple):
    """The position of a tensor in the data after the header, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int  # exclusive


def parsed(header: bytes, nbytes: int) -> tuple[str, str, int, dict[str, TensorPlace]]:
    """Return the key, the owner, the base, and the place of each tensor in `nbytes` of data.

    Only the digest detects changed numbers. This checks the structure, so that later code can rely on it."""
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__")
        key, owner, base = metadata["key"], metadata["owner"], int(metadata.get("base", 0))
        places = {name: place_of(entry, nbytes) for name, entry in entries.items()}
        rows, digest = places["tokens"].stop // 4, places["digest"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header is not ours: {error}") from None
    if not isinstance(key, str) or not isinstance(owner, str):
        raise Damaged("its key or owner is not a text")
    if places["tokens"] != TensorPlace("I32", (rows,), 0, 4 * rows):
        raise Damaged("its tokens are in another place")
    if digest != TensorPlace("U8", (DIGEST,), nbytes - DIGEST, nbytes):
        raise Damaged("its digest is in another place, or it is cut off")
    return key, owner, base, places


def place_of(entry: Mapping[str, Any], nbytes: int) -> TensorPlace:
    """Check an entry of a header. Raise ValueError, KeyError or TypeError if it is malformed."""
    dtype = entry["dtype"]
    shape = entry["shape"]
    start, stop = entry["data_offsets"]
    numbers = (*shape, start, stop)
    if any(type(number) is not int or not 0 <= number <= nbytes for number in numbers):
        raise ValueError(f"{shown(numbers)} for {nbytes:,} bytes")
    if len(shape) > 3 or stop - start != struct.calcsize(FORMATS[dtype]) * math.prod(shape):
        raise ValueError(f"{dtype} of shape {shown(shape)} in {stop - start:,} bytes")
    return TensorPlace(dtype, tuple(shape), start, stop)


def common_bytes(one: bytes, other: bytes) -> int:
    """Return the length of the longest common prefix. Bisection is fast, because comparing bytes is fast."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def digest_of(*parts: str | bytes) -> str:
    """Return a hash of length-prefixed parts, in hexadecimal."""
    state = blake2b(digest_size=DIGEST)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def name_of(key: str, owner: str, tokens: bytes) -> str:
    return f"{key[:16]}-{digest_of(key, owner, tokens)[:32]}.safetensors"
