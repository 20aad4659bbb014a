"""How `setup.py` compiles `cpu_kernels.c`: once for each instruction set.

A wheel is for all processors of an architecture, so it has a library for each instruction set, and
`library.py` loads the best one for the processor. A library contains the hash of what it was compiled
from, so that an edited source is noticed. Where the machine has no C compiler, zig's compiles, a wheel
in the registry (`build_backend/backend.py`).
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
# Not those of Python's own build, which differ between machines and may change bits
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
    """`cpu_kernels.c` for one instruction set."""

    machine: str  # the architecture; empty: any
    features: str  # words of /proc/cpuinfo that the processor must have
    # Of the compiler. Never "native", which means something else on each machine
    options: str


FORMS = {  # the best one comes first
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
    "plain": Form("x86_64", "", ""),  # older than 2013: without fused multiply-adds
}


def forms() -> list[str]:
    """The instruction sets to compile for. On a Mac, MLX has a fast product of its own: a wheel made with
    NANOBATCH_PURE=1 is for that."""
    if sys.platform != "linux" or "NANOBATCH_PURE" in os.environ:
        return []
    return [name for name, form in FORMS.items() if form.machine == platform.machine()]


def library(form: str) -> Path:
    return SOURCE.with_name(f"matmul_{form}.so")


def source_hash(form: str) -> str:
    """The hash of everything that a library is compiled from."""
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, *INCLUDED)]
    made_from = [*sources, *OPTIONS, FORMS[form].options]
    return hashlib.sha256("\n".join(made_from).encode()).hexdigest()


def compiler() -> list[str]:
    """A C compiler, as the beginning of a command: the machine's, or zig's; empty if there is none."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    if importlib.util.find_spec("ziglang"):
        # With a target, since zig would compile for this processor alone; -s: without symbols
        target = f"{platform.machine()}-linux-gnu"
        return [sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"]
    return []


def requirements() -> list[str]:
    """Packages that the build needs."""
    return ["ziglang"] if forms() and not compiler() else []


def command(form: str, output: Path | str) -> list[str]:
    start = compiler()
    if not start:
        sys.exit("nanobatch: there is no C compiler: apt install gcc, or pip install ziglang")
    options = FORMS[form].options
    if "ziglang" in start:
        options = options.replace("armv8.2-a", "generic")  # zig knows processors only
    named = f'-DSOURCE_HASH="{source_hash(form)}"'
    return [*start, *OPTIONS, *options.split(), named, "-o", str(output), str(SOURCE)]
