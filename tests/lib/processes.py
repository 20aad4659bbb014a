"""Run programs of ours, and code, in a process of their own until it ends."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(
    *words: object,
    input: str = "",
    cwd: Path | str = ROOT,
    preexec_fn: Callable[[], object] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments: a program and its options, or what follows `-c`."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        input=input,
        cwd=cwd,
        preexec_fn=preexec_fn,
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=500,  # less than pytest's own, which would end all tests
    )


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-c", code, **environment)


def without_backend(folder: Path) -> dict[str, str]:
    """An environment with an mlx package that lacks its library, as `pip install mlx` leaves it on
    Linux."""
    (folder / "mlx").mkdir()
    (folder / "mlx" / "__init__.py").touch()
    raises = "raise ImportError('libmlx.so: cannot open shared object file')"
    (folder / "mlx" / "core.py").write_text(raises)
    return {"PYTHONPATH": str(folder), "NANOBATCH_BLAS": "off"}
