"""SavedSlot slots as files: safetensors in a folder that is private and has a limited size.

    header      8 bytes: its length; then JSON: dtype, shape and place of each tensor, and metadata
    tokens      (rows,) int32
    layers.N    (2 Hkv, rows, Dh): the keys, then the values, of one layer
    states.N    (numbers,): the place of a state, of one layer that has one; `base` in the metadata
    digest      (32,) uint8: BLAKE2b of all bytes before it

A file is written under another name and then renamed, so it is whole or not there. Its name begins with
the model's key, and several servers may share a folder without locks: the same name is the same content,
and a file that vanishes is a miss.

`header_of` writes safetensors' header by hand. Threads write while the device computes, so they may touch
no array of MLX, as its `save_safetensors` would. The `safetensors` package would be a dependency for these
ten lines, and the digest would need a second pass.
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
LARGEST_HEADER = 2**20  # bytes: some 200 for each layer
LARGEST_FOLDER = 8 * 2**30  # bytes, by default
STALE_S = 3600  # a temporary file that has not grown for this long has no writer any more
STEM = r"[0-9a-f]{16}-[0-9a-f]{32}"
SAVED = re.compile(rf"{STEM}\.safetensors")
TEMPORARY = re.compile(rf"{STEM}\.[0-9a-f]{{16}}\.tmp")
UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}
FORMATS = {"F16": "H", "BF16": "H", "F32": "I", "I32": "i", "U8": "B"}  # how memory is cast
BLOCK = 2**24  # bytes that are read at once


class Damaged(ValueError):
    """A file that is cut off, changed, or not a saved slot."""


class SavedTensor(NamedTuple):
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    data: memoryview


class SavedSlot(NamedTuple):
    """A saved slot, as its file's beginning describes it."""

    name: str
    key: str  # of the model and its arithmetic
    owner: str  # the hash of the client whose prompt it was
    tokens: bytes  # int32
    base: int = 0  # the fewest of these that a prompt must have in common: the base of the states

    @property
    def rows(self) -> int:
        return len(self.tokens) // 4


def read_setting(text: str) -> tuple[str, int]:
    """DIR[:SIZE] as a folder and bytes."""
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
    """A size such as 500M or 20G. None if it is not one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])(?:i?B)?", text, re.IGNORECASE)
    return int(float(found[1]) * UNITS[found[2].upper()]) if found else None


class SlotFolder:
    """`setting`: DIR[:SIZE]. A ValueError if others than the user could read the folder.

    `answered`: when the folder last did what it was asked. A folder of a network that is gone never does.
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
        """The saved slots of a model. (To open a named pipe would block.)"""
        start = f"{key[:16]}-"
        try:
            found = [each.name for each in os.scandir(self.path) if each.is_file()]
        except OSError:
            return set()
        self.answered = time.monotonic()
        return {name for name in found if name.startswith(start) and SAVED.fullmatch(name)}

    def read_head(self, name: str) -> SavedSlot:
        """What the beginning of a file says. Only `read_tensors` checks the digest."""
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
        """All tensors of a file, once its digest and its tokens have been checked."""
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
        """The content of a file, read block by block."""
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
        digest = SavedTensor("U8", (DIGEST,), memoryview(bytes(DIGEST)))  # its place
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
        Temporary files count, and are deleted when they are stale: also after the clock was set back,
        which makes them files of the future."""
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
    """Where a tensor is in the data after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int  # the byte after the last one


def parsed(header: bytes, nbytes: int) -> tuple[str, str, int, dict[str, TensorPlace]]:
    """The key, the owner, the base, and the place of each tensor among `nbytes` of data. Only the digest tells
    whether a number has changed, but all that is computed with them afterwards must be possible."""
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
    """Check an entry of a header. Raise ValueError, or what Python raises for another structure."""
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
    """The length of the longest common prefix, found by bisection: bytes are compared quickly."""
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
    """A hash of length-prefixed parts, in hexadecimal."""
    state = blake2b(digest_size=DIGEST)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def name_of(key: str, owner: str, tokens: bytes) -> str:
    return f"{key[:16]}-{digest_of(key, owner, tokens)[:32]}.safetensors"
