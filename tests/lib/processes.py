"""Run our programs, or code, in a separate process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(
    *words: object,
    input: str = "",
    cwd: Path | str = ROOT,
    preexec_fn: Callable[[], object] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments: a program and its options, or `-c` and code."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        input=input,
        cwd=cwd,
        preexec_fn=preexec_fn,
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=500,  # for long forms, which pytest does not limit
    )


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-c", code, **environment)


# --- what the system knows about a process --------------------------------------------------------


def ps(what: str, process: int) -> str:
    """Return a field of `ps` on Linux and macOS, or "" if the process is gone. The test is skipped without
    `ps`."""
    try:
        command = ["ps", "-o", f"{what}=", "-p", str(process)]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        pytest.skip("no ps here")


def state_of(process: int) -> str:
    """Return a process's state: "R" running, "S" sleeping, "T" stopped, "Z" not yet reaped, or "" if gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "" if sys.platform == "linux" else ps("state", process)[:1]


def resident(process: int) -> int:
    """Return the resident memory of a process, in bytes."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1024 * int(ps("rss", process))


def without_backend(folder: Path) -> dict[str, str]:
    """Return an environment whose mlx package lacks its library, as after `pip install mlx` on Linux."""
    (folder / "mlx").mkdir()
    (folder / "mlx" / "__init__.py").touch()
    raises = "raise ImportError('libmlx.so: cannot open shared object file')"
    (folder / "mlx" / "core.py").write_text(raises)
    return {"PYTHONPATH": str(folder), "NANOBATCH_BLAS": "off"}
