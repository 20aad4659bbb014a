"""The cores and the memory that containers and services leave to this process (Linux control groups).

A group's limit holds for all groups in it, so each folder from the process's own group up to the root
is read, in version 1 and version 2 of these files, and the lowest limit counts. Unreadable means
unlimited. Page cache counts as free, as in the system's own figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cli.options import my_cores

ROOT = Path("/")  # where the files of the system are


def cores() -> int:
    """The cores that this process may use."""
    return max(1, int(min(len(my_cores()), quota())))


def quota(root: Path = ROOT) -> float:
    """How many cores' worth of time the control groups allow."""
    return min(map(_quota, groups("cpu", root)), default=math.inf)


def memory(root: Path = ROOT) -> float:
    """Bytes that this process may still allocate, on Linux."""
    free = int(_named(root / "proc/meminfo")["MemAvailable"]) * 1024
    return min([free, *map(_memory, groups("memory", root))])


def groups(kind: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, for "cpu" or "memory"."""
    for line in _lines(root / "proc/self/cgroup"):
        kinds, _, path = line.partition(":")[2].partition(":")
        if kinds == "":  # version 2: one tree for everything
            place = root / "sys/fs/cgroup"
        elif kind in kinds.split(","):
            place = root / "sys/fs/cgroup" / kind
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            yield place.joinpath(*parts[:depth])


def _quota(group: Path) -> float:
    """A group's quota in cores: microseconds of work per microseconds of its period."""
    older = _lines(group / "cpu.cfs_quota_us") + _lines(group / "cpu.cfs_period_us")
    with suppress(ValueError, ZeroDivisionError):  # "max", or no such files
        allowed, period = " ".join(_lines(group / "cpu.max") or older).split()
        if int(allowed) > 0:
            return int(allowed) / int(period)
    return math.inf


def _memory(group: Path) -> float:
    """Bytes that a group may still take."""
    limit = _lines(group / "memory.max") or _lines(group / "memory.limit_in_bytes")
    used = _lines(group / "memory.current") or _lines(group / "memory.usage_in_bytes")
    holds = _named(group / "memory.stat")
    with suppress(ValueError):  # "max", or no such files
        free = int("".join(limit)) - int("".join(used))
        for name in ("active_file", "inactive_file"):  # version 1 has sums of the groups within
            free += int(holds.get(f"total_{name}", holds.get(name, 0)))
        return free
    return math.inf


def _named(file: Path) -> dict[str, str]:
    """Lines such as "name: 3 kB", or "name 3"."""
    return {name.rstrip(":"): value for name, value, *_ in map(str.split, _lines(file))}


def _lines(file: Path) -> list[str]:
    """A small file's lines; no line if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except (OSError, ValueError):
        return []
