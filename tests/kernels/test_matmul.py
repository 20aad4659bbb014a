"""The C library: correct, batch-invariant, equal on all processors, free of races, built at install time, and
checked when it is loaded."""

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from long_forms import IS_LONG, long_form
from processes import python, run
from source import PACKAGES

from base import machine
from benchmarks import answer_hash
from kernels import build, device
from kernels import library as matmul_library

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere MLX brings a fast product"
)

ROOT = Path(__file__).parents[2]
EXAM = Path(__file__).with_name("cpu_kernels_exam.c")
COMPILER = shutil.which("cc")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here")
COMPILED = [form for form in matmul_library.forms_here() if build.library(form).exists()]


# --- cpu_kernels.c itself ----------------------------------------------------------------------------

BEST = build.FORMS[matmul_library.forms_here()[0]].options.split()


def compiled(output: Path, *options: str | Path) -> Path:
    usual = ["-O0", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off"]
    usual += [f"-I{build.SOURCE.parent}"]  # a source with planted bugs includes files from there
    subprocess.run([COMPILER, *usual, "-o", output, *options, "-lm"], check=True)
    return output


def examined(exam: Path, bug: int = 0, rounds: int = 4) -> subprocess.CompletedProcess:
    """Compute products on four threads, and compare them (`cpu_kernels_exam.c`)."""
    command = [exam, "4", str(bug), str(rounds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def exam(tmp_path_factory) -> Path:
    """The exam's object file, compiled once. Tests link it with a library."""
    return compiled(tmp_path_factory.mktemp("exam") / "exam.o", "-c", EXAM)


@NEEDS_COMPILER
@pytest.mark.parametrize("form", COMPILED)
def test_product_is_right_and_row_invariant(tmp_path, exam, form):
    """Test the installed library of each form. In the short form, those that programs do not load here compute
    fewer products."""
    program = compiled(tmp_path / "exam", exam, build.library(form))
    done = examined(program, rounds=60 if form == COMPILED[0] or IS_LONG else 15)
    assert done.returncode == 0 and "0 differ, 0 numbers wrong" in done.stdout, done


@NEEDS_COMPILER
@pytest.mark.skipif(
    "fma" not in matmul_library.processor(), reason="no fused multiply-add on this x86"
)
def test_plain_c_has_the_same_bits(tmp_path):
    """All forms sum in the same order, so that answers can be compared between processors."""
    library = compiled(tmp_path / "plain.so", "-shared", "-mfma", build.SOURCE)
    assert matmul_library.computed(ctypes.CDLL(library)) == matmul_library.BITS


# The long form also looks for undefined behaviour, except for null pointers, which crash anyway. It uses
# traps, which compile in half the time of messages. In the short form, AddressSanitizer checks by calls,
# which compile faster, and races are looked for in plain C only, since they are the same in all forms
IN_SHORT = {
    "address": "-fsanitize=address --param asan-instrumentation-with-call-threshold=0",
    "thread": "-fsanitize=thread",
}
IN_LONG = {
    "address": "-fsanitize=address,undefined -fno-sanitize=null -fsanitize-undefined-trap-on-error",
    "thread": "-fsanitize=thread",
}


@NEEDS_COMPILER
@pytest.mark.parametrize("sanitizer", IN_SHORT)
def test_sanitizers_find_nothing(tmp_path, sanitizer):
    """The sanitizers find no read beyond an array and no data race."""
    options = (IN_LONG if IS_LONG else IN_SHORT)[sanitizer].split()
    options += BEST if IS_LONG or sanitizer == "address" else []
    program = compiled(tmp_path / "exam", *options, EXAM, build.SOURCE)
    done = examined(program, rounds=2 if IS_LONG else 1)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]


BUGS = {  # the correct code and its replacement; PLANTED is 1 while this bug is turned on
    "an unnamed multiply-add in the tiles of one row": (
        "ldw + k);\n#pragma GCC unroll 6\n"
        "        for (int r = 0; r < rows; r++) sum[i][r][c] = fma_(own[r], weights, sum[i][r][c]);",
        "ldw + k);\n        for (int r = 0; r < rows; r++)\n"
        "          if (PLANTED && rows == 1) sum[i][r][c] = own[r] * weights + sum[i][r][c];\n"
        "          else sum[i][r][c] = fma_(own[r], weights, sum[i][r][c]);",
    ),
    "an unnamed multiply-add at the end of a sum": (
        "total[c] = fma_one(x[k], weight, total[c]);",
        "total[c] = PLANTED && p->M == 1 ? total[c] + x[k] * weight : "
        "fma_one(x[k], weight, total[c]);",
    ),
    "a tile of three rows that adds from the end": (
        "for (; k < end; k += ORDER)",
        "const long first = k, step = PLANTED && rows == 3 ? -ORDER : ORDER;\n"
        "  for (k = step < 0 ? end - ORDER : k; first <= k && k < end; k += step)",
    ),
    "a tile of two rows whose first product is a little off": (
        "own[r] = all(x[r * p->ldx + k]);",
        "own[r] = all(x[r * p->ldx + k] * (PLANTED && rows == 2 && k == 0 ? 1.0000002f : 1));",
    ),
    "a turned tile of one row and eight vectors that begins at a small number": (
        "for (int c = 0; c < cols; c++) sum[r][c] = all(0);",
        "for (int c = 0; c < cols; c++) "
        "sum[r][c] = all(PLANTED && rows == 1 && cols == WIDEST ? 1e-6f : 0);",
    ),
    "a helper's share computed twice": (
        "compute_share(&pool.product, pool.shares - left, pool.shares, pool.by_rows);",
        "for (int i = 0; i <= PLANTED; i++) "
        "compute_share(&pool.product, pool.shares - left, pool.shares, pool.by_rows);",
    ),
    "a share that nobody takes": (
        "atomic_store(&pool.untaken, shares);",
        "atomic_store(&pool.untaken, shares - PLANTED);\n"
        "  atomic_store(&pool.unfinished, shares - PLANTED);",
    ),
    "a caller that takes very small numbers for zero": (
        "Setting own = change_setting(USUAL);",
        "Setting own = change_setting(USUAL);\n  if (PLANTED) change_setting(own);",
    ),
    "a caller whose setting is not put back": (
        "  change_setting(own);\n",
        "  if (!PLANTED) change_setting(own);\n",
    ),
    "y is read though beta is 0": ("*y = p->beta ?", "*y = p->beta || PLANTED ?"),
    "an unnamed multiply-add where a weight is unpacked": (
        "return add(times(numbers, group->scale), group->offset);",
        "if (PLANTED) return fma_(numbers, group->scale, group->offset);\n"
        "  return add(times(numbers, group->scale), group->offset);",
    ),
    "a packed weight with the scale of the group before": (
        "Group group = group_of(&factors, (k >> shift) - g, form);",
        "Group group = group_of(&factors, (k >> shift) - g - (PLANTED && (k >> shift) > g), form);",
    ),
    "a long row that has the scales of its beginning all along": (
        "read_factors(a, (j + c) * a->groups + g, at_most",
        "read_factors(a, (j + c) * a->groups + (PLANTED ? 0 : g), at_most",
    ),
    "sums that begin anew with each part of a long row": (
        "copy(is_first ? NULL : &before[i],",
        "copy(PLANTED || is_first ? NULL : &before[i],",
    ),
    "packed numbers at the end of a row without their scale": (
        " * ((const float *)line(a, a->scales))[j];",
        " * (PLANTED ? 1 : ((const float *)line(a, a->scales))[j]);",
    ),
    "a hidden number that weighs 10^-38": (
        "  ints is_zero = x < all(-FAR),",
        "  if (PLANTED) x = where(x < all(-87), all(-87), x);\n  ints is_zero = x < all(-FAR),",
    ),
    "a power of NaN that is 0": (
        "  ints is_zero = x < all(-FAR),",
        "  ints is_zero = PLANTED ? ~(x >= all(-FAR)) : x < all(-FAR),",
    ),
    "a power that is too large": (
        "is_infinite = x > all(FAR);",
        "is_infinite = x > all(PLANTED ? 1e9f : FAR);",
    ),
    "the logarithm of 2 in one part": (
        "rest = fma_(n, all(0x1.bd0106p-13f), rest);",
        "rest = PLANTED ? fma_(n, all(-0x1.62e43p-1f), x) : fma_(n, all(0x1.bd0106p-13f), rest);",
    ),
    "a matrix of one number is never an operation": (
        ".packed = K > 0 ? packed_at(b) : NULL,",
        ".packed = K > 0 && !(PLANTED && turn_b == 111) ? packed_at(b) : NULL,",
    ),
    "a norm without its eps": (
        "sum_of(x, count, 1) / count + eps)",
        "sum_of(x, count, 1) / count + (PLANTED ? 0 : eps))",
    ),
    "a cap without its polynomial": ("size < all(0.625f)", "size < all(PLANTED ? 0 : 0.625f)"),
    "a share of an operation without its last row": (
        "operate(p, m0, m1);",
        "operate(p, m0, m1 - (PLANTED && m1 < p->M));",
    ),
}


def planted(folder: Path) -> Path:
    """Write the source with all bugs in it. The variable `planted` turns one of them on."""
    source = build.SOURCE.read_text()
    for number, (right, wrong) in enumerate(BUGS.values(), 1):
        assert source.count(right) == 1, right
        source = source.replace(right, wrong.replace("PLANTED", f"(planted == {number})"))
    changed = folder / "cpu_kernels.c"
    changed.write_text(f"int planted __attribute__((weak));\n{source}")
    return changed


@NEEDS_COMPILER
@long_form
def test_every_planted_bug_is_caught(tmp_path, exam):
    """The exam catches each bug that shows on this processor. So does the check at load, which rejects the
    output of a broken compiler, if the bug shows in one thread. One library contains all bugs, which are
    turned on one after another.
    They quote lines of C: whoever changes those lines has to plant the bugs again before a release."""
    path = compiled(tmp_path / "planted.so", "-shared", *BEST, planted(tmp_path))
    exam = compiled(tmp_path / "exam", exam, path)
    library = ctypes.CDLL(path)
    switch = ctypes.c_int.in_dll(library, "planted")
    assert (
        examined(exam).returncode == 0 and matmul_library.computed(library) == matmul_library.BITS
    )
    is_fused = matmul_library.forms_here()[0] != "plain"
    for number, bug in enumerate(BUGS, 1):
        switch.value = number
        is_seen_at_load = matmul_library.computed(library) != matmul_library.BITS
        assert is_seen_at_load != ("share" in bug or "caller" in bug), bug
        if is_fused or "unnamed" not in bug:
            assert examined(exam, number).returncode == 1, bug


def test_fork():
    """Both parent and child continue to multiply after a fork."""
    code = (
        "import os, sys; from kernels import library as matmul_library, device\n"
        "from kernels.device import mx\n"
        "a = mx.random.normal((64, 300)); b = mx.random.normal((300, 500)); mx.eval(a, b)\n"
        "library = device.blas.library\n"
        "form = device.blas.kernels.split(',')[0]\n"
        "for _ in range(3):\n"
        "    if not (child := os.fork()):\n"
        "        os._exit(bool(library and matmul_library.why_unfit(library, form)))\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    assert not code and not mx.isnan(mx.sum(a @ b)).item()\n"
    )
    done = python(code)
    assert done.returncode == 0, done


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled here")
def test_mlx_that_does_not_call_our_product():
    done = python(
        "from kernels import library; library.Blas.products = 7\n"
        "from kernels import device; print(device.blas)"
    )
    assert done.stdout.startswith("mlx, so bits may differ with the batch: this version of MLX"), (
        done
    )


# --- threads ------------------------------------------------------------------------------------


def test_threads_default_to_the_cores(monkeypatch):
    monkeypatch.delenv("NANOBATCH_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(5))
    monkeypatch.setattr(machine, "quota", lambda: float("inf"))
    assert matmul_library.threads() == 5
    monkeypatch.setattr(machine, "quota", lambda: 2.5)
    assert matmul_library.threads() == 2
    monkeypatch.setattr(machine, "quota", lambda: 0.3)
    assert matmul_library.threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(500))
    monkeypatch.setattr(machine, "quota", lambda: float("inf"))
    assert matmul_library.threads() == matmul_library.MOST_THREADS
    monkeypatch.setenv("NANOBATCH_THREADS", "3")
    assert matmul_library.threads() == 3


@pytest.mark.parametrize("count", ["0", "two"])
def test_threads_must_be_a_number(count):
    done = run("ask.py", "x", NANOBATCH_THREADS=count)
    lines = done.stderr.splitlines()
    assert (
        done.returncode == 2 and len(lines) == 1 and "a whole number from 1 to 1,024" in lines[0]
    ), done


# --- built at install time, checked at load -----------------------------------------------------


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of everything that `ask.py` needs."""
    for name in (*PACKAGES, "benchmarks", "cli", "course", "demo/model"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    return tmp_path


def blas_of(checkout: Path, choice: str = "") -> str:
    """Return the name of the library that multiplies, or the error."""
    done = run(
        "-c",
        "from kernels import device; print(device.named())",
        cwd=checkout,
        NANOBATCH_BLAS=choice,
    )
    return done.stdout or done.stderr


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled here")
def test_library_is_chosen_and_checked_at_load(checkout):
    """A library that cannot be loaded or has a different source is not used. A missing form is replaced by the next."""
    best = checkout / "kernels" / f"matmul_{COMPILED[0]}.so"
    remedy = f"run pip install -e {checkout}\n"
    assert blas_of(checkout).startswith(f"rows ({COMPILED[0]}, ")
    content = best.read_bytes()
    best.write_bytes(b"no library")
    assert "the matrix product cannot be loaded (" in blas_of(checkout)
    best.unlink()
    assert not COMPILED[1:] or blas_of(checkout).startswith(f"rows ({COMPILED[1]}, ")
    best.write_bytes(content)
    with (checkout / "kernels" / "cpu_kernels.c").open("a") as source:
        source.write("/* edited */\n")
    line = blas_of(checkout)
    assert f"{best.name} was compiled from a different cpu_kernels.c; " in line and line.endswith(
        remedy
    )
    for library in checkout.glob("kernels/*.so"):
        library.unlink()
    words = ("What is 17 + 6?", "--max-tokens", "20")
    done = run("ask.py", *words, cwd=checkout, NANOBATCH_BLAS="")
    assert "23" in done.stdout, "the tokens are right without our product"
    assert (
        "; mlx, so bits may differ with the batch: cpu_kernels.c is not compiled; " in done.stderr
    )
    assert done.stderr.endswith(remedy)
    assert "NANOBATCH_BLAS=rows: cpu_kernels.c is not compiled; " in blas_of(checkout, "rows")


def test_a_form_that_this_processor_lacks():
    done = run("ask.py", "x", NANOBATCH_BLAS="rows:sse")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("nanobatch: NANOBATCH_BLAS=rows:sse: ") and "no form 'sse'" in line


# --- the same bits on every processor -----------------------------------------------------------

FINGERPRINT = """
from nanobatch import Engine
from kernels import device
from benchmarks.answer_hash import compared, fingerprint
with Engine.load("demo", max_len=256) as engine:
    print(compared(fingerprint(engine), device.mx.__version__))
"""
EXPECTED = f"{answer_hash.EXPECTED.get(device.mx.__version__)}, as on every x86-64 and ARM CPU"
RECORDED = pytest.mark.skipif(
    device.mx.__version__ not in answer_hash.EXPECTED, reason="nothing is known of this MLX"
)


@RECORDED
@pytest.mark.parametrize("form", [form for form in COMPILED if form != "plain"])
def test_fingerprint_of_the_demo(form):
    done = python(FINGERPRINT, NANOBATCH_BLAS=f"rows:{form}")
    assert done.stdout.startswith(EXPECTED), done
    assert EXPECTED.partition(",")[0] in (ROOT / "README.md").read_text()


@RECORDED
@pytest.mark.skipif("NANOBATCH_ARM" not in os.environ, reason="NANOBATCH_ARM names no Python")
def test_fingerprint_on_an_emulated_arm(checkout):
    """NANOBATCH_ARM is the command of an aarch64 Python that has everything that `ask.py` needs."""
    library = checkout / "kernels" / "matmul_neon.so"
    command = build.command("neon", library)[len(build.compiler()) :]
    subprocess.run(["aarch64-linux-gnu-gcc", *command], check=True)
    done = subprocess.run(
        [*shlex.split(os.environ["NANOBATCH_ARM"]), "-c", FINGERPRINT],
        cwd=checkout,
        env=os.environ | {"NANOBATCH_BLAS": "rows:neon", "NANOBATCH_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(EXPECTED), done


def test_a_hash_that_should_be_another_is_said():
    assert answer_hash.compared("12", "0.32.4").startswith("12, expected ")
    assert "none is recorded" in answer_hash.compared("12", "9.9")


# --- messages -----------------------------------------------------------------------------------


def test_on_a_mac_or_a_gpu_no_library_is_loaded(monkeypatch):
    monkeypatch.setattr(matmul_library, "load", lambda *_: pytest.fail("it was loaded"))
    monkeypatch.delenv("NANOBATCH_BLAS", raising=False)
    monkeypatch.setattr("sys.platform", "darwin")
    assert str(matmul_library.preload()) == "mlx"
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(
        "importlib.metadata.distributions", lambda name: [name] * (name == "mlx-cuda-13")
    )
    assert str(matmul_library.preload()) == "mlx"
