"""The device: MLX with a fast matrix product, free memory, one stream, one lock, and the shutdown.

The problem. In MLX a stream belongs to the thread that created it, running out of memory crashes the
process, and a process that exits while the device is busy hangs. This file handles all three.

The invariant: only this file imports MLX, after `library.preload`. Every other file imports `mx` from
here.
"""

import atexit
import ctypes
import gc
import sys
import threading
import time
import weakref
from pathlib import Path

from base import installation, machine
from base.strings import readable  # noqa: F401  re-exported
from kernels import library
from kernels.library import Blas, preload


def _fail(line: str) -> None:
    """Exit with one line if this is one of our programs; otherwise raise an ImportError with that line.

    In a background thread, in which the screen loads, raise a RuntimeError for the screen to show."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(line) from None
    program = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "/")
    checkout = Path(installation.ROOT)
    ours = (checkout, checkout / "course" / "ladder")
    if installation.is_command or program.resolve().parent in ours:
        print(f"nanobatch: {line}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(line) from None


try:
    blas = preload()
except ImportError as error:
    _fail(str(error))

try:
    import mlx.core as mx
    from mlx.utils import tree_flatten  # noqa: F401  re-exported
except ImportError as error:
    if sys.platform == "linux":  # where `pip install mlx` installs no backend and so no libmlx.so
        _fail(
            f"MLX has no backend here: run {installation.install('cpu', 'mlx[cpu]')}. "
            f"With an NVIDIA GPU write cuda instead of cpu. [{error}]"
        )
    raise

if blas.library:
    computed = blas.products
    product = mx.matmul(mx.ones((3, 5)), mx.ones((5, 2)), stream=mx.cpu)
    if product.tolist() != [[5.0, 5.0]] * 3 or blas.products == computed:
        blas = Blas(
            "mlx", why_not="this version of MLX does not call cblas_sgemm; pip install mlx==0.32.4"
        )


# --- memory -------------------------------------------------------------------------------------


is_gpu = mx.default_device().type == mx.DeviceType.gpu  # tests may set this


def has_gpu() -> bool:
    return is_gpu


def is_batch_invariant() -> bool:
    """Return True if a row has the same bits in any batch.

    This holds on a CPU with our own product (`cpu_kernels.c`), for float32 and packed matrices."""
    return blas.name == "rows" and not has_gpu()


def named() -> str:
    """Return the name of the GPU, or on a CPU the name of the BLAS and its kernels."""
    return str(mx.device_info().get("device_name", "GPU")) if has_gpu() else str(blas)


def read_rate(nbytes: int, threads: int = 0, seconds: float = 0.1) -> float:
    """Return the bytes per second that our own library reads from `nbytes` of memory: the best of ten tries.

    The memory has large pages if the system has them. `threads`: 0 means as many as multiply matrices."""
    read = blas.library.rows_read_rate
    read.restype = ctypes.c_double
    tries = 10
    count = threads or library.threads()
    return read(ctypes.c_long(nbytes), count, tries, ctypes.c_double(seconds / tries))


def free_memory() -> int | None:
    """Return the number of free bytes, or None if unknown. MLX crashes when memory runs out."""
    # For a GPU, MLX reports only the total and its own allocations
    if has_gpu():
        info = mx.device_info()
        whole = info.get("max_recommended_working_set_size") or info.get("memory_size")
        return whole and int(whole) - mx.get_active_memory()
    if sys.platform != "linux":
        return None
    return int(machine.free_memory())


def limit_cache() -> None:
    """Limit MLX's cache of freed buffers. On a GPU it keeps buffers of every shape that it has seen,
    up to 1.5 times the recommended memory."""
    if has_gpu():
        info = mx.device_info()
        whole = info.get("max_recommended_working_set_size") or info.get("memory_size") or 0
        mx.set_cache_limit(max(2**28, int(whole) // 16))


# --- one device, one stream, one thread at a time -----------------------------------------------

# MLX binds ordinary streams to the thread that created them. This stream may be used from any thread,
# but only from one at a time, which the lock ensures. So an engine can be loaded in one thread and
# stepped in another.
device_lock = threading.RLock()
exiting = (
    threading.Event()
)  # set when the program exits; loading a model then stops at the next layer
_stream: list[mx.Stream] = []
_open: weakref.WeakSet = weakref.WeakSet()  # engines to close before the program exits


def device_stream() -> mx.StreamContext:
    """Use `with device_lock, device_stream():` around everything that touches an `mx.array`.

    subtle: these are two context managers written in C, not one generator. Ctrl-C may arrive between
    any two lines of Python. In a generator about to release the lock, the lock would then stay held.
    """
    if not _stream:
        _stream.append(mx.new_thread_unsafe_stream(mx.default_device()))
    return mx.stream(_stream[0])


def give_way() -> None:
    """Let another engine run a step. Call this between two parts of long work, holding the lock exactly once."""
    device_lock.release()
    time.sleep(0.0005)  # otherwise the waiting thread would not wake up in time
    device_lock.acquire()


def synchronize() -> None:
    """Wait until the device is idle."""
    for stream in _stream:
        mx.synchronize(stream)


def give_back() -> None:
    """Return all unreferenced memory to the system.

    subtle: after loading, a server freezes its objects (`gc.freeze`), and the collector ignores frozen
    objects. And the C library keeps freed memory for later allocations.
    """
    synchronize()
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # exists in glibc only
    if trim is not None:
        trim(0)


def close_at_exit(engine) -> None:
    """Close this engine before the program exits: a process that exits while the device is busy hangs or
    aborts."""
    _open.add(engine)


@atexit.register
def _leave() -> None:
    exiting.set()
    for engine in list(_open):
        engine.close()
    device_lock.acquire()  # never released, so that no new work starts
    synchronize()
