"""The processor of this machine, and the cores and memory that this process may use.

Containers and services get less than the whole machine (Linux control groups). A group's limit applies
to all groups in it, so every folder from the process's own group up to the root is read, for version 1
or 2 of control groups, and the lowest limit counts. Unreadable means unlimited. Page cache counts as
free, as in MemAvailable.

See `kernels/device.py` for the free memory of a GPU, `kernels/library.py` for the number of threads.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # the root of /proc and /sys


def cores() -> int:
    """Return the number of cores that this process may use at a time."""
    return max(1, int(min(len(my_cores()), quota())))


def my_cores() -> set[int]:
    """Return the ids of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota(root: Path = ROOT) -> float:
    """Return the processor time that the control groups allow, in cores; infinity without a limit."""
    return min(map(_quota, groups("cpu", root)), default=math.inf)


def free_memory(root: Path = ROOT) -> float:
    """Return the number of bytes that this process may still allocate. Linux only."""
    free = int(_named(root / "proc/meminfo")["MemAvailable"]) * 1024
    return min([free, *map(_memory, groups("memory", root))])


def has_large_pages(root: Path = ROOT) -> bool:
    """Return True if a program can request pages of 2 MiB. False outside Linux."""
    lines = _lines(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return bool(lines) and "[never]" not in lines[0]


def cpuinfo() -> dict[str, str]:
    """Return the first processor's entry in /proc/cpuinfo. Empty if there is no such file."""
    entry = "\n".join(_lines(ROOT / "proc/cpuinfo")).partition("\n\n")[0]
    pairs = (line.partition(":") for line in entry.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor() -> str:
    """Return the processor's name and the number of cores that this process may run on."""
    name = cpuinfo().get("model name") or platform.processor() or platform.machine()
    many = len(my_cores())
    return f"{name}, {many} core{'s' if many != 1 else ''}"


def groups(kind: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, for "cpu" or "memory"."""
    for line in _lines(root / "proc/self/cgroup"):
        kinds, _, path = line.partition(":")[2].partition(":")
        if kinds == "":  # version 2: a single tree for all controllers
            place = root / "sys/fs/cgroup"
        elif kind in kinds.split(","):
            place = root / "sys/fs/cgroup" / kind
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            yield place.joinpath(*parts[:depth])


def _quota(group: Path) -> float:
    """Return a group's quota in cores: microseconds of processor time divided by the period."""
    older = _lines(group / "cpu.cfs_quota_us") + _lines(group / "cpu.cfs_period_us")
    with suppress(ValueError, ZeroDivisionError):  # "max", or missing files
        allowed, period = " ".join(_lines(group / "cpu.max") or older).split()
        if int(allowed) > 0:
            return int(allowed) / int(period)
    return math.inf


def _memory(group: Path) -> float:
    """Return the number of bytes that a group may still allocate."""
    limit = _lines(group / "memory.max") or _lines(group / "memory.limit_in_bytes")
    used = _lines(group / "memory.current") or _lines(group / "memory.usage_in_bytes")
    holds = _named(group / "memory.stat")
    with suppress(ValueError):  # "max", or missing files
        free = int("".join(limit)) - int("".join(used))
        for name in ("active_file", "inactive_file"):  # in version 1, total_* includes subgroups
            free += int(holds.get(f"total_{name}", holds.get(name, 0)))
        return free
    return math.inf


def _named(file: Path) -> dict[str, str]:
    """Parse lines such as "name: 3 kB" or "name 3"."""
    return {name.rstrip(":"): value for name, value, *_ in map(str.split, _lines(file))}


def _lines(file: Path) -> list[str]:
    """Return the lines of a small file; empty if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except (OSError, ValueError):
        return []
