"""Saved slots as files: safetensors in a folder that is private and has a limited size.

    header      8 bytes: its length; then JSON: dtype, shape and place of each tensor, and metadata
    tokens      (rows,) int32
    layers.N    (2 Hkv, rows, Dh): the keys, then the values, of one layer
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
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

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


class Damaged(ValueError):
    """A file that is cut off, changed, or not a saved slot."""


class Tensor(NamedTuple):
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    data: memoryview


class Saved(NamedTuple):
    """A saved slot, as its file's beginning describes it."""

    name: str
    key: str  # of the model and its arithmetic
    owner: str  # the hash of the client whose prompt it was
    tokens: bytes  # int32

    @property
    def rows(self) -> int:
        return len(self.tokens) // 4


def read_setting(text: str) -> tuple[str, int]:
    """DIR[:SIZE] as a folder and bytes."""
    folder, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        return text, LARGEST_FOLDER
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])(?:i?B)?", size, re.IGNORECASE)
    if not folder or not found:
        raise ValueError(
            f"slot cache: {shown(text)}: give DIR or DIR:SIZE, with a size such as 500M or 20G"
        )
    return folder, int(float(found[1]) * UNITS[found[2].upper()])


class SlotFolder:
    """`setting`: DIR[:SIZE]. A ValueError if others than the user could read the folder."""

    def __init__(self, setting: str):
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
        """The saved slots of a model."""
        start = f"{key[:16]}-"
        try:
            found = os.listdir(self.path)
        except OSError:
            return set()
        return {name for name in found if name.startswith(start) and SAVED.fullmatch(name)}

    def look(self, name: str) -> Saved:
        """The beginning of a file. Only `read` checks the digest."""
        with open(self.path / name, "rb") as file:
            size = header_size(file.read(8))
            metadata, tensors = parsed(file.read(size))
            dtype, shape, start, stop = tensors["tokens"]
            if (dtype, start, stop) != ("I32", 0, 4 * math.prod(shape)):
                raise Damaged("its tokens are in another place")
            if 8 + size + stop > os.fstat(file.fileno()).st_size:
                raise Damaged("it is cut off")
            tokens = file.read(stop)
        return Saved(name, metadata["key"], metadata["owner"], tokens)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def read(self, saved: Saved) -> dict[str, Tensor]:
        """All tensors of a file, once its digest and its tokens have been checked."""
        data = memoryview((self.path / saved.name).read_bytes())
        size = 8 + header_size(data)
        metadata, tensors = parsed(bytes(data[8:size]))
        if blake2b(data[:-DIGEST], digest_size=DIGEST).digest() != data[-DIGEST:]:
            raise Damaged("its digest differs")
        found = {}
        for name, (dtype, shape, start, stop) in tensors.items():
            part = data[size + start : size + stop]
            found[name] = Tensor(dtype, shape, part.cast("B").cast(FORMATS[dtype]))
        is_same = (metadata["key"], metadata["owner"]) == (saved.key, saved.owner)
        if not is_same or found["tokens"].data.tobytes() != saved.tokens:
            raise Damaged("it has changed since it was listed")
        return found

    def write(self, saved: Saved, tensors: Mapping[str, Tensor]) -> None:
        """Make room for a file, and write it atomically."""
        written = {"tokens": Tensor("I32", (saved.rows,), memoryview(saved.tokens)), **tensors}
        digest = Tensor("U8", (DIGEST,), memoryview(bytes(DIGEST)))  # its place
        header = header_of({"key": saved.key, "owner": saved.owner}, {**written, "digest": digest})
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
                file.write(state.digest())
            beside.replace(self.path / saved.name)
        finally:
            beside.unlink(missing_ok=True)

    def make_room(self, nbytes: int) -> None:
        """Delete the least recently used files, of any model, until there is room for this many bytes.
        Temporary files count, and are deleted when they are stale."""
        files = []
        for entry in os.scandir(self.path):
            with suppress(FileNotFoundError):
                state = entry.stat(follow_symlinks=False)
                if SAVED.fullmatch(entry.name):
                    files.append((state.st_mtime, state.st_size, entry.name))
                elif TEMPORARY.fullmatch(entry.name):
                    if time.time() - state.st_mtime > STALE_S:
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


def header_of(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
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
        raise Damaged("it is no safetensors file")
    return size


Place = tuple[
    str, tuple[int, ...], int, int
]  # dtype, shape, first byte, and the one after the last


def parsed(header: bytes) -> tuple[dict[str, str], dict[str, Place]]:
    """The metadata and the place of each tensor."""
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__")
        places = {}
        for name, entry in entries.items():
            places[name] = entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]
        if not {"tokens", "digest"} <= places.keys() or not {"key", "owner"} <= metadata.keys():
            raise KeyError("tokens, digest, key and owner")
        return metadata, places
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header is not ours: {error}") from None


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
