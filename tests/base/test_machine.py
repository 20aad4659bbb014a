"""The resources that cgroups leave to a container, in versions 1 and 2: the tightest group around this
process decides."""

from pathlib import Path

import pytest

from base import machine


def laid_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, float("inf")),
        # The parent group is tighter
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            3,
        ),
        # Version 1, next to groups that limit other resources
        (
            {
                "proc/self/cgroup": "7:memory:/x\n4:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            float("inf"),
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_a_control_groups_quota_is_found(tmp_path, files, cores):
    laid_out(tmp_path, files)
    assert machine.quota(tmp_path) == cores


MACHINE = {"proc/meminfo": "MemTotal:       99 kB\nMemAvailable:       8 kB\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8192),
        # The kernel can reclaim a group's page cache at any time
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "5000\n",
                "sys/fs/cgroup/memory.current": "4000\n",
                "sys/fs/cgroup/memory.stat": "anon 900\nactive_file 1000\ninactive_file 2000\n",
            },
            4000,
        ),
        # A service's limit is not at the root
        (
            {
                "proc/self/cgroup": "0::/system.slice/server\n",
                "sys/fs/cgroup/system.slice/server/memory.max": "max\n",
                "sys/fs/cgroup/system.slice/server/memory.current": "100\n",
                "sys/fs/cgroup/system.slice/memory.max": "3000\n",
                "sys/fs/cgroup/system.slice/memory.current": "1000\n",
            },
            2000,
        ),
        # Version 1 in a container: the group's path differs from the one outside
        (
            {
                "proc/self/cgroup": "4:memory:/docker/x\n1:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/memory.stat": "active_file 1\ntotal_active_file 500\n",
            },
            3500,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5000\n"}, 8192),
    ],
)
def test_the_memory_that_groups_leave_is_found(tmp_path, files, free):
    """Regression: the page cache counted as used, so a second start in a container was refused. The limits of
    services and of cgroups version 1 were not found, so the process was killed."""
    laid_out(tmp_path, MACHINE | files)
    assert machine.free_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("line", "has"),
    [("always [madvise] never", True), ("always madvise [never]", False), ("", False)],
)
def test_large_pages_are_known_from_the_kernels_setting(line, has, tmp_path):
    laid_out(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": line})
    assert machine.has_large_pages(tmp_path) == has
