"""The one device: a fast BLAS under it, the memory that is free, its stream and its lock, and how to leave it.

The problem. A BLAS is the library that multiplies matrices. MLX's CPU wheel for Linux brings the *reference* BLAS. It
is correct, portable, and 10 to 50 times slower than the machine can go. Worse for a batching engine, it gains nothing
from a batch: sixteen rows cost sixteen times one row, while a tuned BLAS reads each weight once for all of them. On a
Mac (Accelerate, Metal) and on CUDA none of this applies.

The way out. A dynamic linker binds a symbol such as `cblas_sgemm` to the first library that offers it. A BLAS that is
loaded *before* `mlx.core`, with its symbols made global, therefore takes the place of the slow one. So this module
must come first: every file of ours takes its `mx` from here, and no other file has to think of it.

    NANOBATCH_BLAS=off          leave MLX as it is, and say nothing
    NANOBATCH_BLAS=/path/lib.so take this library
"""

import atexit
import ctypes
import importlib.metadata
import os
import platform
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path


def _fail(line: str) -> None:
    """One line if a program of ours was run; an exception with the same line if we were imported by another."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if program and Path(program).resolve().parent == Path(__file__).resolve().parent.parent:
        print(f"nanobatch: {line}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(line)


def _load(*libraries: str | Path) -> bool:
    """Load the libraries, the last of which is the BLAS, with global symbols; False if one is not there."""
    try:
        for library in libraries:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _load_mkl() -> bool:
    """Intel's BLAS, from the `mkl` wheel, which puts its libraries in the environment's lib/.

    MKL's default threads are OpenMP's, which spin while they wait: with one other busy process on two cores a step
    took five times as long. TBB's threads sleep. MKL aborts the process if it cannot find TBB, so TBB goes first.
    """
    lib = Path(sys.prefix, "lib")
    tbb, mkl = lib / "libtbb.so.12", sorted(lib.glob("libmkl_rt.so.*"))
    if not mkl or not tbb.exists():
        return False
    os.environ.setdefault("MKL_THREADING_LAYER", "TBB")
    return _load(tbb, mkl[-1])


def _load_openblas() -> bool:
    """The system's OpenBLAS. It picks its kernels by the processor's name, and takes a processor that is younger than
    itself for an old one. So we name the kernels that use AVX-512, where there is AVX-512."""
    if _has_avx512():
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"
    return _load("libopenblas.so.0")


def _has_avx512() -> bool:
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().partition("flags")[2].partition("\n")[0].split()) if cpu.exists() else set()
    return {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"} <= flags


def _needs_blas() -> bool:
    """Only MLX's CPU wheel for Linux is slow; a CUDA wheel computes elsewhere."""
    if sys.platform != "linux":
        return False
    return not [d for version in (12, 13) for d in importlib.metadata.distributions(name=f"mlx-cuda-{version}")]


def preload() -> str:
    """Load the best BLAS there is and answer with its name. Must run before `mlx.core` is imported."""
    choice = os.environ.get("NANOBATCH_BLAS", "")
    if choice == "off" or not _needs_blas():
        return "mlx"
    if "mlx.core" in sys.modules:
        _advise("import nanobatch before mlx, so that it can put a fast BLAS under it")
        return "mlx"
    if choice:
        if not _load(choice):
            _fail(f"NANOBATCH_BLAS={choice} cannot be loaded; name a shared library, or 'off'.")
        return choice
    if _load_mkl():
        return "mkl"
    if _load_openblas():
        return "openblas"
    mkl = "pip install mkl, or " if platform.machine() == "x86_64" else ""
    _advise(f"{mkl}apt install libopenblas0-pthread")
    return "mlx"


def _advise(remedy: str) -> None:
    print(
        f"nanobatch: MLX runs on its slow reference BLAS; {remedy}: 8 to 10 times as fast (NANOBATCH_BLAS=off "
        "silences this).",
        file=sys.stderr,
    )


blas = preload()  # its name

_old_openblas = "openblas" in blas and not _has_avx512()


def rows_at_once(rows: int, columns: int) -> int:
    """How many rows of a product of this size to compute at once: all of them, with two exceptions.

    OpenBLAS's older kernels add a row's numbers up in an order that depends on the row's place, and the bits show it.
    Within eight rows they do not. MKL copies a matrix into another order if there are four rows or more. For few rows
    and the many columns of a vocabulary, it is quicker to go through the matrix in pairs of rows (4 rows, 288 x 32,000:
    2.4 ms, not 4.2). From seven rows on, copying pays.
    """
    if _old_openblas and rows > 4:
        return 8
    if "mkl" in blas and 4 <= rows <= 6 and columns > 16_000:
        return 2
    return rows


def takes_rows(outputs: int, inputs: int) -> bool:
    """Is x @ W.T, with W (out, in) as a checkpoint has it, faster here than x @ W, with W turned to (in, out)?

    MKL copies a matrix into another order first. Long rows are quicker to copy than long columns (8 rows, 576 x 3,072:
    0.93 ms turned, 0.71 as it is), short rows are not. A step of three rows or fewer needs no copy, and spends most of
    its time on the vocabulary: so for that matrix such steps decide.
    """
    return "mkl" in blas and inputs >= 512 and outputs <= 16_000


try:
    import mlx.core as mx
except ImportError as error:
    if sys.platform == "linux":  # `pip install mlx` alone brings no backend there: no libmlx.so
        _fail(
            "MLX has no backend here: run pip install -e '.[cpu]' (any Linux), or pip install -e '.[cuda]' "
            f"(NVIDIA GPU), in the checkout. [{error}]"
        )
    raise


# --- memory --------------------------------------------------------------------------------------------------------


def has_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def free_memory() -> int | None:
    """Bytes that can still be taken, or None if that is not known. Where memory runs out, MLX crashes."""
    if has_gpu():  # of an Apple GPU or a CUDA card, MLX knows the whole and what it has taken itself
        info = mx.device_info()
        whole = info.get("max_recommended_working_set_size") or info.get("memory_size")
        return whole and int(whole) - mx.get_active_memory()
    if sys.platform != "linux":
        return None
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # a container's own limit, where there is one
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def readable(nbytes: float) -> str:
    """12345678 -> '11.8 MiB'"""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


# --- one device, one stream, one thread at a time --------------------------------------------------------------------

# MLX binds ordinary streams to the thread that made them. This one may be used from any thread, as long as a lock keeps
# it to one at a time. So an engine can be loaded in one thread and stepped in another, and no thread is left behind.
device_lock = threading.RLock()
exiting = threading.Event()  # set when the program ends: loading a model stops at the next layer
_stream: list[mx.Stream] = []
_open: weakref.WeakSet = weakref.WeakSet()  # what must be closed before the program ends


def device_stream() -> mx.StreamContext:
    """`with device_lock, device_stream():` stands around everything that touches an `mx.array`.

    subtle: two context managers written in C, not one made of a generator. Ctrl-C comes between two lines of Python,
    so also in a generator that is about to release the lock, and the lock would stay held for good.
    """
    if not _stream:
        _stream.append(mx.new_thread_unsafe_stream(mx.default_device()))
    return mx.stream(_stream[0])


def synchronize() -> None:
    """Wait until the device has nothing left to do."""
    if _stream:
        mx.synchronize(_stream[0])


def close_at_exit(engine) -> None:
    """Call its `close` before the program ends: a process that exits while the device works hangs or aborts."""
    _open.add(engine)


@atexit.register
def _leave() -> None:
    exiting.set()
    for engine in list(_open):
        engine.close()
    device_lock.acquire()  # and never released: from here on nothing is started
    synchronize()
