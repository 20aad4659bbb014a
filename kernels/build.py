"""Compile `cpu_kernels.c` once for each instruction set. Used by `setup.py`.

A wheel supports all processors of an architecture, so it contains a library for each instruction set, and
`library.py` loads the best one for the processor. A library contains the hash of its sources, so that
an outdated build is detected. On a machine without a C compiler, zig's compiler is used, which pip
can install (`build_backend/backend.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("cpu_kernels.c")
INCLUDED = tuple(map(SOURCE.with_name, ("delta_net.c", "experts.c")))
# Not the flags of Python's own build: they differ between machines and may change bits
OPTIONS = [
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
]


class Form(NamedTuple):
    """An instruction set that `cpu_kernels.c` is compiled for."""

    machine: str  # the architecture, as `platform.machine()` names it
    features: str  # required processor flags, as in /proc/cpuinfo
    # Compiler options. Never "native", which means something else on each machine
    options: str


FORMS = {  # best first
    "avx512vnni": Form(
        "x86_64",
        "avx512f avx512bw avx512dq avx512vl avx512cd avx512_vnni avx2 fma f16c",
        "-mavx512f -mavx512bw -mavx512vnni -mavx2 -mfma -mf16c",
    ),
    "avx512": Form(
        "x86_64",
        "avx512f avx512bw avx512dq avx512vl avx512cd avx2 fma f16c",
        "-mavx512f -mavx512bw -mavx2 -mfma -mf16c",
    ),
    "avxvnni": Form("x86_64", "avx2 fma f16c avx_vnni", "-mavxvnni -mavx2 -mfma -mf16c"),
    "avx2": Form("x86_64", "avx2 fma f16c", "-mavx2 -mfma -mf16c"),
    "neondot": Form("aarch64", "asimddp", "-march=armv8.2-a+dotprod"),
    "neon": Form("aarch64", "", ""),
    "plain": Form("x86_64", "", ""),  # processors from before 2013, without fused multiply-adds
}


def forms() -> list[str]:
    """Return the instruction sets to compile for.

    The list is empty on a Mac, where MLX's own product is fast, and with NANOBATCH_PURE=1, which builds
    a wheel for Macs."""
    if sys.platform != "linux" or "NANOBATCH_PURE" in os.environ:
        return []
    return [name for name, form in FORMS.items() if form.machine == platform.machine()]


def library(form: str) -> Path:
    return SOURCE.with_name(f"matmul_{form}.so")


def source_hash(form: str) -> str:
    """Return the hash of the sources and options that a library is compiled from."""
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, *INCLUDED)]
    made_from = [*sources, *OPTIONS, FORMS[form].options]
    return hashlib.sha256("\n".join(made_from).encode()).hexdigest()


def compiler() -> list[str]:
    """Return the command of the machine's C compiler, or else zig's; empty if there is neither."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    if importlib.util.find_spec("ziglang"):
        # Without a target, zig would compile for this processor only. -s strips symbols
        target = f"{platform.machine()}-linux-gnu"
        return [sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"]
    return []


def requirements() -> list[str]:
    """Return the packages that the build needs."""
    return ["ziglang"] if forms() and not compiler() else []


def command(form: str, output: Path | str) -> list[str]:
    start = compiler()
    if not start:
        sys.exit("nanobatch: no C compiler was found: apt install gcc, or pip install ziglang")
    options = FORMS[form].options
    if "ziglang" in start:
        options = options.replace("armv8.2-a", "generic")  # zig expects a processor's name
    named = f'-DSOURCE_HASH="{source_hash(form)}"'
    return [*start, *OPTIONS, *options.split(), named, "-o", str(output), str(SOURCE)]
