"""The one device: MLX with a fast product under it, the memory that is free, its stream and its
lock, and how to leave.

The problem. MLX computes for one process on one device, and has its own ideas of threads, of
memory, and of the end of a program: a stream belongs to the thread that made it, memory that runs
out is a crash, and a process that leaves while the device works hangs. All of that is settled here,
once.

What this file keeps: it is the only one that imports MLX, and `blas_preload.py` comes before that. Every
other file takes its `mx` from here.
"""

import atexit
import ctypes
import gc
import sys
import threading
import weakref
from pathlib import Path

from kernels.blas_preload import Blas, preload
from runtime import cgroup
from runtime.cli import install


def _fail(line: str) -> None:
    """One line if a program of ours was run; an exception with the same line if we were imported by
    another. The thread in which a screen loads cannot end the program, so the screen shows it."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    checkout = Path(__file__).resolve().parents[1]
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(line) from None
    if program and Path(program).resolve().parent in (checkout, checkout / "course" / "ladder"):
        print(f"nanobatch: {line}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(line) from None


try:
    blas = preload()
except ImportError as error:
    _fail(str(error))

try:
    import mlx.core as mx
    from mlx.utils import tree_flatten  # noqa: F401  others take it from here
except ImportError as error:
    if sys.platform == "linux":  # `pip install mlx` alone brings no backend there: no libmlx.so
        _fail(
            f"MLX has no backend here: run {install('cpu', 'mlx[cpu]')}. "
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


is_gpu = mx.default_device().type == mx.DeviceType.gpu  # a test may set it


def has_gpu() -> bool:
    return is_gpu


def is_batch_invariant() -> bool:
    """Are a row's bits the same in any company? On a CPU our own product sees to that (`matmul.c`). It
    takes float32 matrices, and packed ones."""
    return blas.name == "rows" and not has_gpu()


def named() -> str:
    """What multiplies matrices here, on a CPU with which kernels."""
    return str(mx.device_info().get("device_name", "GPU")) if has_gpu() else str(blas)


def free_memory() -> int | None:
    """Bytes that can still be taken, or None if that is not known. Where memory runs out, MLX
    crashes."""
    # Of an Apple GPU or a CUDA card, MLX knows the whole and what it has taken itself
    if has_gpu():
        info = mx.device_info()
        whole = info.get("max_recommended_working_set_size") or info.get("memory_size")
        return whole and int(whole) - mx.get_active_memory()
    if sys.platform != "linux":
        return None
    return int(cgroup.memory())


def limit_cache() -> None:
    """Bound the buffers that MLX keeps for later. On a GPU it keeps those of every shape that it has
    seen, up to 1.5 times the recommended memory."""
    if has_gpu():
        info = mx.device_info()
        whole = info.get("max_recommended_working_set_size") or info.get("memory_size") or 0
        mx.set_cache_limit(max(2**28, int(whole) // 16))


def readable(nbytes: float) -> str:
    """12345678 -> '11.8 MiB'"""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


# --- one device, one stream, one thread at a time -----------------------------------------------

# MLX binds ordinary streams to the thread that made them. This one may be used from any thread, as
# long as a lock keeps it to one at a time. So an engine can be loaded in one thread and stepped in
# another, and no thread is left behind.
device_lock = threading.RLock()
exiting = threading.Event()  # set when the program ends: loading a model stops at the next layer
_stream: list[mx.Stream] = []
_open: weakref.WeakSet = weakref.WeakSet()  # what must be closed before the program ends


def device_stream() -> mx.StreamContext:
    """`with device_lock, device_stream():` stands around everything that touches an `mx.array`.

    subtle: two context managers written in C, not one made of a generator. Ctrl-C comes between two
    lines of Python, so also in a generator that is about to release the lock, and the lock would
    stay held for good.
    """
    if not _stream:
        _stream.append(mx.new_thread_unsafe_stream(mx.default_device()))
    return mx.stream(_stream[0])


def synchronize() -> None:
    """Wait until the device has nothing left to do."""
    for stream in _stream:
        mx.synchronize(stream)


def give_back() -> None:
    """Give the system all memory that nothing refers to any more.

    subtle: a server has frozen what loading left (`gc.freeze`), and the collector looks at none of
    that. And the C library keeps what is free, in case that it will be wanted again.
    """
    synchronize()
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def close_at_exit(engine) -> None:
    """Call its `close` before the program ends: a process that exits while the device works hangs
    or aborts."""
    _open.add(engine)


@atexit.register
def _leave() -> None:
    exiting.set()
    for engine in list(_open):
        engine.close()
    device_lock.acquire()  # and never released: from here on nothing is started
    synchronize()
