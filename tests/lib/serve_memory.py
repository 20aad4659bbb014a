"""`serve.py`, which prints its memory use on SIGUSR1.

    python tests/lib/serve_memory.py --model demo
    kill -USR1 PROCESS

The resident size of a process says little about what it uses: free memory stays on the heap, MLX
keeps buffers for the next step, and garbage is collected at any time. This hides leaks, and looks like
a leak where there is none. So this collects garbage and counts bytes in use, on the C heap and in
Python's own allocator, without MLX's cache. Then it returns free memory to the system and prints the
resident size. Both are measured without requests.

It needs glibc 2.33 or newer; elsewhere it prints nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import NamedTuple

LIBC = ctypes.CDLL(None)
MIB = 2**20
NUMBERS = count(1)


class Heap(ctypes.Structure):
    """The result of glibc's `mallinfo2`, which describes the C heap."""

    _fields_ = [
        ("of_blocks", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),  # bytes of large blocks
        ("of_freed", ctypes.c_size_t * 2),
        ("used", ctypes.c_size_t),  # bytes of all other blocks
        ("of_free", ctypes.c_size_t * 2),
    ]


class Weight(NamedTuple):
    """The memory of an idle process, in MiB."""

    in_use: float
    resident: float


def can_weigh() -> bool:
    return hasattr(LIBC, "mallinfo2")


def in_use() -> float:
    """Return the memory in use after a garbage collection, in MiB."""
    from kernels.device import mx

    gc.collect()
    LIBC.mallinfo2.restype = Heap
    heap = LIBC.mallinfo2()
    return (heap.used + heap.mapped + python_bytes() - mx.get_cache_memory()) / MIB


def python_bytes() -> int:
    """Return the bytes that Python's own allocator has handed out. It reports them only on C's standard
    error."""
    with tempfile.TemporaryFile() as file:
        usual = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(usual, 2)
            os.close(usual)
        file.seek(0)
        said = file.read().decode()
    found = re.search(r"bytes in allocated blocks\s*=\s*([\d,]+)", said)
    return int(found[1].replace(",", "")) if found else 0


def resident() -> float:
    """Return the resident memory after `malloc_trim`, in MiB."""
    LIBC.malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / MIB


def weigh() -> Weight:
    return Weight(in_use(), resident())


def say(*signal_and_frame) -> None:
    held = weigh()
    said = f"weighing {next(NUMBERS)}: {held.in_use:.2f} MiB in use, {held.resident:.2f} resident"
    print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import serve
    from cli import options

    if can_weigh():
        signal.signal(signal.SIGUSR1, say)
    options.run(serve.main)
