"""A fast BLAS under MLX: which one there is, how it gets there, and which kernels it runs.

The problem. A BLAS is the library that multiplies matrices. MLX's CPU wheel for Linux brings the *reference* BLAS. It
is correct, portable, and 10 to 50 times slower than the machine can go. Worse for a batching engine, it gains nothing
from a batch: sixteen rows cost sixteen times one row, while a tuned BLAS reads each weight once for all of them. On a
Mac (Accelerate, Metal) and on CUDA none of this applies.

The way out. A dynamic linker binds a name such as `cblas_sgemm` to the first library that offers it. A BLAS that is
loaded *before* `mlx.core`, with its names made global, therefore takes the place of the slow one. So this module must
come first: every file of ours takes its `mx` from `device.py`, which asks here, and no other file has to think of it.

    NANOBATCH_BLAS=off                leave MLX as it is, and say nothing
    NANOBATCH_BLAS=openblas           OpenBLAS, from the wheel that the extra `cpu` brings, or else the system's
    NANOBATCH_BLAS=openblas:Haswell   the same, with the kernels for another processor than this one
    NANOBATCH_BLAS=mkl                Intel's MKL, from the extra `mkl`
    NANOBATCH_BLAS=/path/lib.so       take this library

What this file keeps: an environment that was made for another library changes nothing here, neither the kernels nor
how threads wait. What runs is asked of the library, and never guessed from the processor.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

CORES = {  # of OpenBLAS's kernels for x86-64, the newest first: what a processor must be able to do to run them
    "avx512f avx512bw avx512dq avx512vl avx512cd": "SkylakeX",
    "avx2 fma": "Haswell",
    "avx": "Sandybridge",
}
PRODUCTS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # what MLX asks of a BLAS by itself


class Blas(NamedTuple):
    name: str  # "openblas", "mkl", a path, or "mlx" for what MLX brings
    kernels: str = ""  # the processor that they are made for, in the library's own words

    def __str__(self) -> str:
        return f"{self.name} ({self.kernels})" if self.kernels else self.name

    def takes_rows(self, outputs: int, inputs: int) -> bool:
        """Is x @ W.T, with W (out, in) as a checkpoint has it, faster than x @ W, with W turned to (in, out)?

        A BLAS copies a matrix into another order before it multiplies several rows. MKL copies long rows quicker than
        long columns (8 rows, 576 x 3,072: 0.93 ms turned, 0.71 as it is), short rows not. For the vocabulary, steps of
        few rows decide, since they spend most of their time there. OpenBLAS's AVX-512 kernels copy columns slowly (8
        rows, 288 x 32,000: 17 ms turned, 11 as it is; one row 16 and 10); its AVX2 kernels do not (8.5 and 12).
        """
        return self.kernels == "SkylakeX" or (self.name == "mkl" and inputs >= 512 and outputs <= 16_000)

    def strip(self, rows: int, outputs: int, inputs: int) -> int:
        """How many outputs of x @ W.T to compute in a product of their own, if that is quicker; 0: all in one.

        To copy a matrix into another order takes longer than to multiply a few rows with it. OpenBLAS's AVX-512 kernels
        spare the copy in small products, of 1,200 results and 1,000,000 multiplications at most. So a few rows take a
        wide matrix strip by strip, and each core its share of the strips (1 row, 576 x 49,152 and two cores: 8 ms
        instead of 21; 8 rows: 13 instead of 22).
        """
        if self.kernels != "SkylakeX" or rows > 16 or outputs < 1_500 or outputs * inputs < 200_000 * rows:
            return 0
        most = min(1_200 // rows, 1_000_000 // (rows * inputs))
        return next((width for width in (128, 96, 64, 48, 32) if width <= most and outputs % width == 0), 0)


def preload() -> Blas:
    """Load the best BLAS there is. Must run before `mlx.core` is imported."""
    choice = os.environ.get("NANOBATCH_BLAS", "")
    name, _, kernels = choice.partition(":")
    if choice == "off" or not _needs_blas():
        return Blas("mlx")
    if "mlx.core" in sys.modules:
        _advise("import nanobatch before mlx, so that it can put a fast BLAS under it")
        return Blas("mlx")
    loaders = {"mkl": _load_mkl, "openblas": _load_openblas}
    if name in loaders:
        loaders = {name: loaders[name]}
    elif choice:
        loaders = {choice: lambda: _global(choice)}
    elif not _is_intel():  # elsewhere MKL runs kernels for any processor, and OpenBLAS is ahead from four rows on
        loaders = dict(reversed(loaders.items()))
    with _environment(OPENBLAS_CORETYPE=kernels or core(), OPENBLAS_THREAD_TIMEOUT="4", MKL_THREADING_LAYER="TBB"):
        for found, load in loaders.items():
            library = load()
            if library and _offers(library):
                return Blas(found, _kernels(library))
    if choice:
        raise ImportError(
            f"NANOBATCH_BLAS={choice} is no BLAS that can be loaded; name a shared library, openblas, mkl, or 'off'."
        )
    _advise("pip install -e '.[cpu]' in the checkout brings a fast one")
    return Blas("mlx")


def _needs_blas() -> bool:
    """Only MLX's CPU wheel for Linux is slow; a CUDA wheel computes elsewhere."""
    if sys.platform != "linux":
        return False
    return not [d for version in (12, 13) for d in importlib.metadata.distributions(name=f"mlx-cuda-{version}")]


def _advise(remedy: str) -> None:
    print(
        f"nanobatch: MLX runs on its slow reference BLAS; {remedy}: 8 to 10 times as fast (NANOBATCH_BLAS=off "
        "silences this).",
        file=sys.stderr,
    )


@contextmanager
def _environment(**settings: str | None) -> Iterator[None]:
    """While a library is loaded, it reads these, and afterwards everybody else finds what was there before.

    OpenBLAS picks its kernels by the processor's name, and an older one takes a younger processor for an old one; so
    they are named (`core`). Its threads spin while they wait for work: beside one busy process on each core, a step
    of 8 rows took 73 to 99 ms instead of 5. With the least timeout, 2^4 ticks, they sleep at once, and it takes 12 to
    14 (6 on a quiet machine). MKL's default threads are OpenMP's, which spin, too; TBB's sleep.
    """
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- the libraries -------------------------------------------------------------------------------------------------


def _global(library: str | Path) -> ctypes.CDLL | None:
    """The library, with its names made global; None if it cannot be loaded."""
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def _load_mkl() -> ctypes.CDLL | None:
    """Intel's BLAS, from the `mkl` wheel, which puts its libraries in the environment's lib/.

    MKL aborts the process if it cannot find TBB, which gives it its threads. So TBB goes first.
    """
    lib = Path(sys.prefix, "lib")
    mkl = sorted(lib.glob("libmkl_rt.so.*"))
    return _global(mkl[-1]) if mkl and _global(lib / "libtbb.so.12") else None


def _load_openblas() -> ctypes.CDLL | None:
    """OpenBLAS from the wheel that NumPy and SciPy are built with, which has kernels for every processor; or else the
    system's."""
    wheel = importlib.util.find_spec("scipy_openblas32")
    inside = Path(wheel.origin).with_name("lib") / "libscipy_openblas.so" if wheel and wheel.origin else ""
    return (inside and _global(inside)) or _global("libopenblas.so.0")


def _offers(library: ctypes.CDLL) -> bool:
    """Does the library offer its products to MLX? The wheel's names begin with `scipy_`, so that it gets in no other
    library's way. Ours is to get in the way: what it has is offered under the usual names, too."""
    try:
        if not hasattr(library, PRODUCTS[0]):
            offer({name: library[f"scipy_{name}"] for name in PRODUCTS})
    except (AttributeError, OSError):
        return False
    return True


def offer(functions: Mapping[str, ctypes._CFuncPtr]) -> None:
    """Make functions that are in this process known to the linker by these names, for libraries that come later.

    What a linker knows is what stands in the tables of the libraries that it has loaded. So this writes the smallest
    library there can be, into memory, and loads it. It has no code: only a table of symbols, each an absolute address.

        file header | what to load: all of it | where its tables are | symbols | their names | hash table | the tables
    """
    names, symbols = b"\0", bytes(24)  # of both, the first entry is empty
    for name, function in functions.items():
        address = ctypes.cast(function, ctypes.c_void_p).value
        # Its name's place; a function (2) that all may use (1 << 4); absolute (0xFFF1), so it is moved nowhere.
        symbols += struct.pack("=IBBHQQ", len(names), 0x12, 0, 0xFFF1, address, 0)
        names += name.encode() + b"\0"
    count = len(functions) + 1
    # The hash table: one bucket for all names, which begins with symbol 1, and after each symbol comes the next.
    chain = [0, *range(2, count), 0]
    hashes = struct.pack(f"={3 + count}I", 1, count, 1, *chain)
    place, body, tables = 64 + 2 * 56, b"", b""
    for tag, table in ((6, symbols), (5, names), (4, hashes)):
        tables += struct.pack("=QQ", tag, place + len(body))
        body += table + bytes(-len(table) % 8)
    tables += struct.pack("=6Q", 10, len(names), 11, 24, 0, 0)  # how long the names are, and each symbol; the end
    start, size = place + len(body), place + len(body) + len(tables)
    with open("/proc/self/exe", "rb") as python:  # this machine's kind of file begins as Python's own does
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


# --- the processor, and what runs on it ----------------------------------------------------------------------------


def _kernels(library: ctypes.CDLL) -> str:
    """Which kernels the library runs, if it can say. MKL has a file for each kind, and loads one when it has to."""
    for name in ("scipy_openblas_get_corename", "openblas_get_corename"):
        if core := getattr(library, name, None):
            core.restype = ctypes.c_char_p
            return core().decode()
    if not hasattr(library, "mkl_get_version"):
        return ""
    library.cblas_sasum(1, ctypes.byref(ctypes.c_float(1)), 1)
    loaded = re.findall(r"/libmkl_(def|mc3|avx\w*)\.so", Path("/proc/self/maps").read_text())
    return "generic" if "def" in loaded else next(iter(loaded), "")


def core() -> str | None:
    """The newest kernels of OpenBLAS that this processor can run, by what it can do. None: let OpenBLAS choose."""
    if platform.machine() != "x86_64":
        return None
    return next((core for needs, core in CORES.items() if set(needs.split()) <= _processor()["flags"]), None)


def _is_intel() -> bool:
    return "GenuineIntel" in _processor()["vendor_id"]


@cache
def _processor() -> dict[str, set[str]]:
    """What /proc/cpuinfo says of the first processor, word by word."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {name.strip(): set(words.split()) for name, _, words in (line.partition(":") for line in lines)}
    return {"flags": set(), "vendor_id": set()} | said
