"""Choose the library that multiplies matrices for MLX, and load it before MLX: our own, or OpenBLAS.

The problem. A BLAS is the library that multiplies matrices. MLX's CPU wheel for Linux brings the
*reference* BLAS. It is correct, portable, and 10 to 50 times slower than it could be. A tuned BLAS
is fast, but its order of summation depends on the number of rows, so a request's last bits would
depend on the other requests in its batch. On a Mac (Accelerate, Metal) and on CUDA none of this
applies.

The solution. A dynamic linker binds a name such as `cblas_sgemm` to the first library that defines
it. So a library that is loaded *before* `mlx.core`, with its names made global, replaces the slow
one. Ours is `cpu_kernels.c`, which is compiled at install. Without a compiler, OpenBLAS takes its place:
the tokens are still right, but their last bits may depend on the batch. This module must run first:
every file of ours imports `mx` from `mlx.py`, which calls it.

    NANOBATCH_BLAS=rows               our own product, or an error that says why it cannot be loaded
    NANOBATCH_BLAS=rows:avx2          the same for this instruction set (avx512, avx2, neon, plain)
    NANOBATCH_BLAS=openblas           OpenBLAS, from the wheel in the extra `cpu`, or else the system's
    NANOBATCH_BLAS=openblas:Haswell   the same, with its kernels for another processor than this one
    NANOBATCH_BLAS=off                leave MLX as it is, and say nothing
    NANOBATCH_BLAS=/path/lib.so       load this library
    NANOBATCH_THREADS=1               the number of threads that multiply
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from base.installation import install
from kernels import library as matmul_library

PRODUCTS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # what MLX calls in a BLAS


def say(line: str) -> None:
    """Print a line for the user. The screen replaces this function."""
    print(f"nanobatch: {line}", file=sys.stderr, flush=True)


class Blas(NamedTuple):
    """The library that multiplies under MLX."""

    name: str  # "rows" is our own; else "openblas", a path, or "mlx" for MLX's own
    kernels: str = ""  # the processor that its code is for, as the library names it
    why_not: str = (
        ""  # why it is not our own product, and the remedy; empty where ours is not needed
    )
    library: ctypes.CDLL | None = None  # our own product, loaded

    def __str__(self) -> str:
        named = f"{self.name} ({self.kernels})" if self.kernels else self.name
        return (
            f"{named}, so bits may differ with the company: {self.why_not}"
            if self.why_not
            else named
        )

    @property
    def products(self) -> int:
        """The number of products that our own library has computed."""
        return ctypes.c_long.in_dll(self.library, "rows_products").value


def preload() -> Blas:
    """Load the best library available. Must run before `mlx.core` is imported."""
    choice = os.environ.get("NANOBATCH_BLAS", "")
    name, _, kernels = choice.partition(":")
    if choice == "off" or not _needs_blas():
        return Blas("mlx")
    if "mlx.core" in sys.modules:
        return Blas("mlx", why_not="MLX was imported first; import nanobatch before mlx")
    if name == "rows" or not choice:
        try:
            return _load_rows(kernels)
        except matmul_library.Unbuilt as reason:
            if choice:
                raise ImportError(f"NANOBATCH_BLAS={choice}: {reason}.") from None
            why_not = str(reason)
    else:
        why_not = f"NANOBATCH_BLAS={choice}"
    found = choice if choice and name != "openblas" else "openblas"
    with _environment(
        OPENBLAS_CORETYPE=kernels,
        OPENBLAS_THREAD_TIMEOUT="4",
        OPENBLAS_NUM_THREADS=str(matmul_library.threads(most=1024)),
    ):
        library = _load_openblas() if found == "openblas" else _global(found)
        if library and _offers(library):
            return Blas(found, _kernels(library), why_not)
    if choice:
        raise ImportError(
            f"NANOBATCH_BLAS={choice} is no BLAS that can be loaded; name a shared library, rows, openblas, or 'off'."
        )
    return Blas(
        "mlx",
        why_not=f"{why_not}, or for another fast BLAS, {install('cpu', 'scipy-openblas32')}",
    )


def _needs_blas() -> bool:
    """Only MLX's CPU wheel for Linux is slow; a CUDA wheel computes elsewhere."""
    found = backends()
    if len(found) > 1:
        both = " and ".join(found)
        remedy = f"pip uninstall {' '.join(found)}, then {install('cpu', 'mlx[cpu]')}"
        say(f"{both} own the same file, and the newest computes; to have one: {remedy}")
    return sys.platform == "linux" and not any("cuda" in name for name in found)


def backends() -> list[str]:
    """MLX's backends that are installed. Each has a file `mlx/lib/libmlx.so`."""
    names = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
    return [name for name in names if [*importlib.metadata.distributions(name=name)]]


@contextmanager
def _environment(**settings: str) -> Iterator[None]:
    """Set these variables while a library is loaded, and restore the environment afterwards.

    OpenBLAS's threads spin while they wait for work. With the shortest timeout, 2^4 ticks, they
    sleep at once and leave the processor to others.
    """
    before = {name: os.environ.pop(name) for name in settings if name in os.environ}
    os.environ |= {name: value for name, value in settings.items() if value}
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ |= before


# --- the libraries ------------------------------------------------------------------------------


def _load_rows(form: str) -> Blas:
    """Load and check our own product, then make its names global."""
    library, said = matmul_library.load(form)
    ctypes.CDLL(library._name, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    return Blas("rows", said, library=library)


def _global(library: str | Path) -> ctypes.CDLL | None:
    """Load a library with its names made global; None if it cannot be loaded. (ValueError: neither
    its path nor the reason can be decoded.)"""
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (OSError, ValueError):
        return None


def _load_openblas() -> ctypes.CDLL | None:
    """OpenBLAS from the wheel that NumPy and SciPy are built with, which has kernels for all
    processors; or else the system's."""
    wheel = importlib.util.find_spec("scipy_openblas32")
    inside = (
        Path(wheel.origin).with_name("lib") / "libscipy_openblas.so"
        if wheel and wheel.origin
        else ""
    )
    return (inside and _global(inside)) or _global("libopenblas.so.0")


def _offers(library: ctypes.CDLL) -> bool:
    """Does the library define the names that MLX calls? Those of the wheel begin with `scipy_`, to
    avoid conflicts with other libraries, so they are made known under the usual names, too."""
    try:
        if not hasattr(library, PRODUCTS[0]):
            offer({name: library[f"scipy_{name}"] for name in PRODUCTS})
    except (AttributeError, OSError, ValueError):
        return False
    return True


def offer(functions: Mapping[str, ctypes._CFuncPtr]) -> None:
    """Make functions of this process known to the linker under these names, for libraries that are
    loaded later.

    The linker searches the symbol tables of the libraries that it has loaded. So write a minimal
    ELF library into memory and load it. It has no code, only symbols with absolute addresses:

        file header | load all of it | where the dynamic section is | symbols | their names |
        hash table | dynamic section
    """
    # The first symbol and the first name are empty
    names = b"\0"
    symbols = bytes(24)
    for name, function in functions.items():
        address = ctypes.cast(function, ctypes.c_void_p).value
        # The offset of its name; a function (2) that is global (1 << 4); absolute (0xFFF1), so it is
        # not relocated.
        symbols += struct.pack("=IBBHQQ", len(names), 0x12, 0, 0xFFF1, address, 0)
        names += name.encode() + b"\0"
    count = len(functions) + 1
    # The hash table: one bucket for all names, a chain from symbol 1 to the last one
    chain = [0, *range(2, count), 0]
    hashes = struct.pack(f"={3 + count}I", 1, count, 1, *chain)
    place = 64 + 2 * 56
    body = b""
    tables = b""
    for tag, table in ((6, symbols), (5, names), (4, hashes)):
        tables += struct.pack("=QQ", tag, place + len(body))
        body += table + bytes(-len(table) % 8)
    # The length of the names and of a symbol; the end
    tables += struct.pack("=6Q", 10, len(names), 11, 24, 0, 0)
    start = place + len(body)
    size = place + len(body) + len(tables)
    # The first bytes depend on the machine: take them from Python's own file
    with open("/proc/self/exe", "rb") as python:
        kind = python.read(16) + struct.pack("=H", 3) + python.read(4)[2:]
    header = kind + struct.pack("=IQQQIHHHHHH", 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    load = struct.pack("=IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)  # read and write
    where = struct.pack("=IIQQQQQQ", 2, 6, start, start, start, len(tables), len(tables), 8)
    file = os.memfd_create("names")
    try:
        os.write(file, header + load + where + body + tables)
        ctypes.CDLL(f"/proc/self/fd/{file}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(file)


def _kernels(library: ctypes.CDLL) -> str:
    """The kernels that the library runs, if it can tell."""
    for name in ("scipy_openblas_get_corename", "openblas_get_corename"):
        if core := getattr(library, name, None):
            core.restype = ctypes.c_char_p
            return core().decode()
    return ""
