"""Our own product: right, the same in any company, free of races, and built and kept without a way
in for others."""

import ctypes
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import python, run
from waiting import wait_for

from kernels import matmul
from parts.device import blas, limits

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere MLX brings a fast product"
)

ROOT = Path(__file__).parents[2]
EXAM = Path(__file__).with_name("matmul_exam.c")
COMPILER = shutil.which("cc")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here")


# --- matmul.c itself ------------------------------------------------------------------------------

BEST = matmul.FORMS[matmul.forms_here()[0]].options.split()


def examined(
    tmp_path: Path, product: Path, *options: str, how: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    """Link the exam with matmul.c, or with a library made of it, and take it."""
    exam = tmp_path / "exam"
    usual = ["-std=gnu11", "-ffp-contract=off", "-pthread"]
    command = [COMPILER, *usual, *options, str(EXAM), str(product), "-o", str(exam), "-lm"]
    subprocess.run(command, check=True)
    return taken(exam, *how)


def taken(exam: Path, *how: str) -> subprocess.CompletedProcess:
    return subprocess.run([exam, "4", *how], capture_output=True, text=True, timeout=300)


@NEEDS_COMPILER
@pytest.mark.parametrize("form", matmul.forms_here())
def test_every_row_has_the_same_bits_in_any_company_and_every_number_is_right(
    tmp_path, monkeypatch, form
):
    """In the very library that programs load."""
    if matmul.cache_folder()[0] is None:  # where libraries are kept
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = examined(tmp_path, Path(matmul.load(form)[0]._name))
    assert done.returncode == 0 and "0 differ, 0 numbers wrong" in done.stdout, done


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("sanitizer", "rounds"),  # a race does not depend on sizes, as an array's end does
    [("address,undefined", "40"), ("thread", "15")],
)
def test_no_read_goes_beyond_an_array_and_no_two_threads_race(tmp_path, sanitizer, rounds):
    options = ["-O0", f"-fsanitize={sanitizer}", *BEST]
    done = examined(tmp_path, matmul.SOURCE, *options, how=["0", rounds])
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]


BUGS = {  # what is right, and what stands in its place; PLANTED is 1 in the process with this bug
    "an unnamed multiply-add in the tiles of one row": (
        "ldw + k);\n        for (int r = 0; r < rows; r++) sum[r][c] = fma_(own[r], weights, sum[r][c]);",
        "ldw + k);\n        for (int r = 0; r < rows; r++)\n"
        "          if (PLANTED && rows == 1) sum[r][c] = own[r] * weights + sum[r][c];\n"
        "          else sum[r][c] = fma_(own[r], weights, sum[r][c]);",
    ),
    "an unnamed multiply-add at the end of a sum": (
        "total[c] = fma_one(x[r * p->ldx + i], weight, total[c]);",
        "total[c] = PLANTED && rows == 1 ? total[c] + x[r * p->ldx + i] * weight : "
        "fma_one(x[r * p->ldx + i], weight, total[c]);",
    ),
    "a tile of three rows that adds from the end": (
        "for (long k = 0; k < whole; k += LANES) {",
        "for (long n = 0, blocks = whole / LANES; n < blocks; n++) {\n"
        "      long k = (PLANTED && rows == 3 ? blocks - 1 - n : n) * LANES;",
    ),
    "a tile of two rows whose first product is a little off": (
        "own[r] = all(x[r * p->ldx + k]);",
        "own[r] = all(x[r * p->ldx + k] * (PLANTED && rows == 2 && k == 0 ? 1.0000002f : 1));",
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
        "part.is_first = k == 0;",
        "part.is_first = PLANTED || k == 0;",
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
    "a share of an operation without its last row": (
        "operate(p, m0, m1);",
        "operate(p, m0, m1 - (PLANTED && m1 < p->M));",
    ),
}


@NEEDS_COMPILER
def test_every_planted_bug_is_caught(tmp_path):
    """All are compiled once, and each process has one of them; the first has none."""
    source = matmul.SOURCE.read_text()
    for number, (right, wrong) in enumerate(BUGS.values(), 1):
        assert source.count(right) == 1
        source = source.replace(right, wrong.replace("PLANTED", f"(planted == {number})"))
    changed = tmp_path / "matmul.c"
    changed.write_text(f"extern int planted;\n{source}")
    assert examined(tmp_path, changed, "-O1", *BEST).returncode == 0
    caught = {
        bug
        for number, bug in enumerate(BUGS, 1)
        if taken(tmp_path / "exam", str(number)).returncode == 1
    }
    fused = set() if BEST else {bug for bug in BUGS if "unnamed" in bug}  # plain: there are none
    assert caught | fused == BUGS.keys()


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "bug",
    [
        "y is read though beta is 0",
        "a power of NaN that is 0",
        "the logarithm of 2 in one part",  # wrong in the last bits of few numbers
    ],
)
def test_what_multiplies_wrongly_is_not_trusted(home, monkeypatch, tmp_path, bug):
    """As a compiler with a fault would make it."""
    right, wrong = BUGS[bug]
    source = tmp_path / "matmul.c"
    source.write_text(matmul.SOURCE.read_text().replace(right, wrong.replace("PLANTED", "1")))
    monkeypatch.setattr(matmul, "SOURCE", source)
    monkeypatch.delenv("CC")
    with pytest.raises(matmul.Unbuilt, match="does not multiply right"):
        matmul.load()


def test_a_process_that_forks_goes_on_multiplying_in_both():
    code = (
        "import os, sys; from parts.device.mlx import mx\n"
        "a = mx.random.normal((64, 300)); b = mx.random.normal((300, 500)); mx.eval(a, b)\n"
        "from kernels import matmul; from parts.device import blas\nfrom parts.device import mlx as device\n"
        "library = device.blas.library\n"
        "form = device.blas.kernels.split(',')[0]\n"
        "if not (child := os.fork()): os._exit(bool(library and matmul.why_unfit(library, form)))\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or mx.isnan(mx.sum(a @ b)).item())\n"
    )
    for _ in range(3):
        done = python(code)
        assert done.returncode == 0, done


def test_mlx_calls_our_product_or_says_that_it_does_not():
    code = "from parts.device import mlx as device; print(device.blas.name, device.blas.why_not)"
    late = (
        "import ctypes; from parts.device import blas; blas.Blas.products = property(lambda self: 7); "
        + code
    )
    here = python(code)
    if COMPILER:
        assert here.stdout == "rows \n", here
        deaf = python(late)
        assert deaf.stdout.startswith("mlx this version of MLX does not"), deaf


# --- threads ------------------------------------------------------------------------------------


def test_threads_are_as_many_as_were_asked_for_or_as_there_are_cores(monkeypatch):
    monkeypatch.delenv("NANOBATCH_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(5))
    monkeypatch.setattr(limits, "quota", lambda: float("inf"))
    assert matmul.threads() == 5
    monkeypatch.setattr(limits, "quota", lambda: 2.5)
    assert matmul.threads() == 2
    monkeypatch.setattr(limits, "quota", lambda: 0.3)
    assert matmul.threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(500))
    monkeypatch.setattr(limits, "quota", lambda: float("inf"))
    assert matmul.threads() == matmul.MOST_THREADS
    monkeypatch.setenv("NANOBATCH_THREADS", "3")
    assert matmul.threads() == 3


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", "9999999999999", " "])
def test_a_number_of_threads_that_is_none_is_refused_in_one_line(count):
    done = run("ask.py", "x", NANOBATCH_THREADS=count)
    lines = done.stderr.splitlines()
    assert (
        done.returncode == 2 and len(lines) == 1 and "a whole number from 1 to 1,024" in lines[0]
    ), done


# --- building and keeping -----------------------------------------------------------------------


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A library that is compiled soon, and slow."""
    library = tmp_path_factory.mktemp("made") / "rows.so"
    if COMPILER:
        options = [option.replace("-O3", "-O0") for option in matmul.OPTIONS]
        subprocess.run([COMPILER, *options, "-o", library, matmul.SOURCE], check=True)
    return library


@pytest.fixture
def home(made, monkeypatch, tmp_path) -> Path:
    """A user's cache in which nothing has been kept yet. The compiler is done at once: it copies
    what was made before. Another one compiles plain and slow, and is done soon."""
    copies = f'while [ "$1" != -o ]; do shift; done; cp {shlex.quote(str(made))} "$2"'
    monkeypatch.setenv("CC", script(tmp_path / "copies", copies))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        matmul, "OPTIONS", [option.replace("-O3", "-O0") for option in matmul.OPTIONS]
    )
    return tmp_path / "cache" / "nanobatch"


def load() -> tuple[str, ctypes.CDLL]:
    """What was said, and the library."""
    said = []
    library, form = matmul.load("plain", said.append)
    assert form.startswith("plain, ") and len(said) <= 1
    return "".join(said), library


def is_right(library: ctypes.CDLL) -> bool:
    return not matmul.why_unfit(library, "plain")


@NEEDS_COMPILER
def test_the_first_start_compiles_and_the_second_does_not(home, monkeypatch):
    monkeypatch.delenv("CC")
    said, _ = load()
    assert said.startswith("compiling matmul.c") and "once" in said
    assert home.stat().st_mode & 0o777 == 0o700
    (kept,) = home.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o700
    said, library = load()
    assert said == "" and library._name == str(kept)


@NEEDS_COMPILER
def test_another_source_compiler_option_or_processor_makes_another_library(
    home, monkeypatch, tmp_path
):
    compiler = matmul.find_compiler()
    names = {
        matmul.file_name(compiler, matmul.OPTIONS),
        matmul.file_name(compiler, [*matmul.OPTIONS, "-mavx2"]),
    }
    changed = tmp_path / "matmul.c"
    changed.write_text(matmul.SOURCE.read_text() + "\n")
    with monkeypatch.context() as patch:
        patch.setattr(matmul, "SOURCE", changed)
        names.add(matmul.file_name(compiler, matmul.OPTIONS))
    with monkeypatch.context() as patch:
        patch.setattr(matmul, "processor", lambda: frozenset({"avx9"}))
        names.add(matmul.file_name(compiler, matmul.OPTIONS))
    with monkeypatch.context() as patch:
        patch.setattr(matmul.platform, "machine", lambda: "riscv64")
        names.add(matmul.file_name(compiler, matmul.OPTIONS))
    older = script(tmp_path / "cc", f'[ "$1" = --version ] && echo 1.0 || exec {COMPILER} "$@"')
    names.add(matmul.file_name(shlex.split(older), matmul.OPTIONS))
    assert len(names) == 6


def script(path: Path, text: str) -> str:
    """A program, as CC names it."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return shlex.quote(str(path))


LOADS = """
from kernels import matmul
said = []
library, _ = matmul.load("plain", said.append)
print(len(said), not matmul.why_unfit(library, "plain"), library._name)
"""


def start() -> subprocess.Popen:
    command = [sys.executable, "-c", LOADS]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **output)


def loaded() -> tuple[int, str]:
    """In a process of its own: how many lines it has said, and where its library lies."""
    process = start()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, (process.returncode, said)
    count, right, name = said.split(maxsplit=2)
    assert right == "True"
    return int(count), name.strip()


DAMAGES = {
    "empty": lambda whole: b"",
    "cut to a page": lambda whole: whole[:4096],
    "cut to a third": lambda whole: whole[: len(whole) // 3],
    "its last byte is gone": lambda whole: whole[:-1],
    "a bit has turned": lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
    "zeros to its end": lambda whole: whole[:4096] + bytes(len(whole) - 4096),
}


@NEEDS_COMPILER
def test_a_library_that_was_damaged_is_never_loaded_and_is_made_anew(home):
    """One that was cut to between 4,096 and 24,000 bytes ended each start with "Bus error", and
    nothing else was said."""
    assert loaded()[0] == 1
    count, name = loaded()
    assert count == 0
    kept = Path(name)
    whole = kept.read_bytes()
    for how, damage in DAMAGES.items():
        assert damage(whole) != whole
        kept.write_bytes(damage(whole))
        assert loaded() == (1, name), how
        assert kept.read_bytes() == whole, how


@NEEDS_COMPILER
def test_any_cut_and_any_bit_that_turns_is_seen(home, tmp_path):
    dice = random.Random(1)
    made, kept = tmp_path / "made", tmp_path / "kept"
    made.write_bytes(dice.randbytes(3000))
    assert matmul.keep(made, kept) == "" and matmul.is_whole(kept)
    whole = kept.read_bytes()
    seen = 0
    for length in range(0, len(whole), 7):
        kept.write_bytes(whole[:length])
        seen += not matmul.is_whole(kept)
    for _ in range(300):
        place = dice.randrange(len(whole))
        turned = whole[place] ^ 1 << dice.randrange(8)
        kept.write_bytes(whole[:place] + bytes([turned]) + whole[place + 1 :])
        seen += not matmul.is_whole(kept)
    assert seen == 300 + len(range(0, len(whole), 7))


@NEEDS_COMPILER
@pytest.mark.parametrize("case", ["a folder", "a folder with a file in it", "it cannot be read"])
def test_what_lies_in_the_librarys_place_and_cannot_be_used_is_replaced_or_named(
    home, monkeypatch, case
):
    """Its start compiled each time, and said "once" each time."""
    kept = Path(load()[1]._name)
    if case == "it cannot be read":  # for root there is no such file
        read = Path.read_bytes

        def refuse(file: Path) -> bytes:
            if file == kept:
                raise PermissionError("no")
            return read(file)

        monkeypatch.setattr(Path, "read_bytes", refuse)
        assert "once" in load()[0]
        return
    kept.unlink()
    kept.mkdir()
    if case == "a folder with a file in it":
        (kept / "mine").write_text("")
    said = []
    library, _ = matmul.load("plain", said.append)
    assert is_right(library) and len(said) == 2
    assert said[1].startswith(f"{kept} cannot be kept (") and "compiles again" in said[1]
    assert kept.is_dir() and [file.name for file in home.iterdir()] == [kept.name]


@NEEDS_COMPILER
def test_processes_that_compile_at_once_all_get_a_whole_library(home):
    started = [start() for _ in range(4)]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4, said
    assert len({line.split(maxsplit=2)[2] for line in said}) == 1
    assert all(" True " in line for line in said)
    (kept,) = home.iterdir()
    assert matmul.is_whole(kept) and loaded()[0] == 0


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "case", ["a link", "another user's", "others may write", "a file", "nothing may run there"]
)
def test_a_folder_that_is_not_safe_is_not_used(home, monkeypatch, tmp_path, case):
    home.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    if case == "a link":
        home.symlink_to(tmp_path / "elsewhere")
    elif case == "a file":
        home.write_text("")
    else:
        home.mkdir(mode=0o700)
    if case == "another user's":
        monkeypatch.setattr(os, "getuid", lambda: home.stat().st_uid + 1)
    elif case == "others may write":
        home.chmod(0o770)
    elif case == "nothing may run there":
        monkeypatch.setattr(matmul, "may_run", lambda folder: Path(folder) != home)
    said, library = load()
    assert str(home.parent) in said and "kept" in said
    assert not (tmp_path / "elsewhere").exists() or not list((tmp_path / "elsewhere").iterdir())
    assert home.is_file() or not list(home.iterdir())
    assert not Path(library._name).exists(), (
        "a private folder goes as soon as the library is loaded"
    )
    assert is_right(library)


@NEEDS_COMPILER
@pytest.mark.parametrize("cache", ["/proc/no/such/place", "/dev/null/x"])
def test_without_a_home_a_private_folder_serves_for_this_process(home, monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    said, library = load()
    assert "cannot be written to" in said and not Path(library._name).exists()


@NEEDS_COMPILER
def test_a_relative_cache_is_the_homes_and_a_missing_home_is_survived(home, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert matmul.cache_folder() == (tmp_path / ".cache/nanobatch", "")
    monkeypatch.setattr(matmul.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert matmul.cache_folder()[0] is None


@NEEDS_COMPILER
def test_where_nothing_may_be_run_the_reason_is_told(home, monkeypatch):
    no_programs = os.statvfs_result((0,) * 8 + (os.ST_NOEXEC, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: no_programs)
    with pytest.raises(matmul.Unbuilt, match="allows programs to be run"):
        load()


@NEEDS_COMPILER
def test_where_only_the_cache_allows_programs_to_be_run_it_is_compiled_there(home, monkeypatch):
    monkeypatch.setattr(matmul, "may_run", lambda folder: Path(folder) == home)
    assert "once" in load()[0]
    assert [file.suffix for file in home.iterdir()] == [".so"]


def test_no_compiler_a_broken_one_and_one_that_is_none_are_reasons(home, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(matmul.Unbuilt, match="there is no C compiler; apt install gcc"):
        load()
    broken = '[ "$1" = --version ] && exit 0\necho "matmul.c:1: fatal error: pthread.h: No such file" >&2\nexit 1'
    script(tmp_path / "cc", broken)
    with pytest.raises(
        matmul.Unbuilt, match=r"fails with code 1: matmul.c:1: fatal error: pthread.h"
    ):
        load()
    script(tmp_path / "cc", "exit 0")
    with pytest.raises(matmul.Unbuilt, match="has compiled nothing"):
        load()
    (tmp_path / "cc").write_text("no program")
    with pytest.raises(matmul.Unbuilt, match="cannot be run"):
        load()
    monkeypatch.setenv("CC", "'")
    with pytest.raises(matmul.Unbuilt, match="CC is no command"):
        load()


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def hanging(path: Path, mark: Path) -> str:
    """A compiler that starts a process, and waits for it. `mark`: how often it was run, and the
    numbers of both."""
    return script(path, f"sleep 1000 &\necho $$ $! >> {shlex.quote(str(mark))}\nwait")


def test_a_compiler_that_hangs_is_ended_with_all_that_it_has_started(home, monkeypatch, tmp_path):
    mark = tmp_path / "mark"
    monkeypatch.setenv("CC", hanging(tmp_path / "cc", mark))
    monkeypatch.setattr(matmul, "PATIENCE_S", 1.0)
    with pytest.raises(matmul.Unbuilt, match=r"did not end within 1.0 seconds"):
        load()
    wait_for(lambda: all(map(is_gone, map(int, mark.read_text().split()))))


def test_a_compiler_that_hung_is_not_tried_again_for_an_hour_or_until_a_file_is_removed(
    home, monkeypatch, tmp_path
):
    """Each start waited for it."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("CC", hanging(tmp_path / "cc", mark))
    monkeypatch.setattr(matmul, "PATIENCE_S", 1.0)
    said = []

    def runs() -> int:
        with pytest.raises(matmul.Unbuilt) as caught:
            matmul.load("plain", said.append)
        (note,) = home.iterdir()
        assert str(caught.value).endswith(f"; to try again within the hour, remove {note}")
        return len(mark.read_text().splitlines())

    assert (runs(), runs(), runs(), len(said)) == (1, 1, 1, 1)
    (note,) = home.iterdir()
    old = time.time() - matmul.HUNG_S - 1
    os.utime(note, (old, old))
    assert (runs(), runs()) == (2, 2)
    note.unlink()
    assert (runs(), runs()) == (3, 3)
    hanging(tmp_path / "cc", tmp_path / "other")  # another compiler is another matter
    assert load_fails_with(mark) == 3 and (tmp_path / "other").exists()


def load_fails_with(mark: Path) -> int:
    with pytest.raises(matmul.Unbuilt, match="did not end"):
        load()
    return len(mark.read_text().splitlines())


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_program_that_ends_while_it_compiles_leaves_neither_compiler_nor_folder(tmp_path, by):
    """The program ends at once, as nothing of its own has to be closed yet. So nobody ended the
    compiler, and nobody removed the folder."""
    mark = tmp_path / "mark"
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = {
        "CC": hanging(tmp_path / "cc", mark),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": str(folder),
    }

    def as_in_a_terminal() -> (
        None
    ):  # a background job ignores one, and what `nohup` starts the other
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, str(ROOT / "ask.py"), "x"],
        env=os.environ | environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=as_in_a_terminal,
    )
    wait_for(lambda: mark.exists() and len(mark.read_text().split()) == 2)
    compiler, started = map(int, mark.read_text().split())
    assert not is_gone(compiler) and not is_gone(started) and list(folder.iterdir())
    process.send_signal(by)
    assert process.wait(60) == (130 if by == signal.SIGINT else -by)
    wait_for(lambda: is_gone(compiler) and is_gone(started) and not list(folder.iterdir()))


ENDS = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void end(void) { %s; }
"""


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (
            'fputs("runtime does not come first\\n", stderr); exit(1)',
            "code 1: runtime does not come",
        ),
        ("abort()", "code 134: no message"),
        ("*(volatile int *)8 = 0", "code 139: no message"),
        ("exit(0)", "code 0: no message"),
    ],
)
def test_a_library_that_ends_whoever_loads_it_ends_another_process_than_ours(
    home, monkeypatch, tmp_path, act, said
):
    """`CC="cc -fsanitize=address"` makes one. The program was gone, with a line that named no
    cause."""
    (tmp_path / "ends.c").write_text(ENDS % act)
    compiled = f"exec {COMPILER} -shared -fPIC {shlex.quote(str(tmp_path / 'ends.c'))} -o"
    text = f'while [ "$1" != -o ]; do shift; done; {compiled} "$2"'
    monkeypatch.setenv("CC", script(tmp_path / "cc", text))
    with pytest.raises(matmul.Unbuilt, match=said):
        load()
    assert not list(home.iterdir())


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("options", "said"),
    [("-E", "invalid ELF header"), ("-c", "ET_DYN"), ("-fsyntax-only", "nothing")],
)
def test_what_is_no_library_is_said_to_be_none(home, monkeypatch, options, said):
    """The reason was that no folder allowed programs to be run from it."""
    monkeypatch.setenv("CC", f"{COMPILER} {options}")
    with pytest.raises(matmul.Unbuilt, match=f"cc.*{said}"):
        load()


@NEEDS_COMPILER
def test_bytes_that_are_no_text_are_read_in_cc_and_shown_by_another_sign(
    home, monkeypatch, tmp_path
):
    monkeypatch.setenv("CC", f"{COMPILER} -DNAME=\udcff")
    assert is_right(load()[1])
    monkeypatch.setenv("CC", script(tmp_path / "c\udcff", "exit 1"))
    with pytest.raises(matmul.Unbuilt, match=r"/c\? fails with code 1: no message"):
        load()


@NEEDS_COMPILER
def test_a_library_that_another_could_have_put_there_is_not_loaded(home):
    load()
    (kept,) = home.iterdir()
    for mode, said in ((0o777, True), (0o700, False)):
        kept.chmod(mode)
        assert ("compiling" in load()[0]) == said
        (kept,) = home.iterdir()
        assert kept.stat().st_mode & 0o777 == 0o700


@NEEDS_COMPILER
def test_options_of_the_compiler_make_another_library_and_none_under_a_false_name(
    home, monkeypatch
):
    monkeypatch.setenv("CC", f"{COMPILER} -fvisibility=hidden")
    with pytest.raises(matmul.Unbuilt, match="does not multiply right"):
        load()
    monkeypatch.setenv("CC", f"{COMPILER} -ffast-math")
    with pytest.raises(matmul.Unbuilt, match="any order"):
        load()
    if matmul.forms_here()[0] != "plain":
        monkeypatch.setenv("CC", f"{COMPILER} {matmul.FORMS[matmul.forms_here()[0]].options}")
        with pytest.raises(matmul.Unbuilt, match="does not multiply right"):
            load()
    monkeypatch.setenv("CC", COMPILER)
    assert is_right(load()[1])


# --- as a user sees it --------------------------------------------------------------------------


def ask(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    usual = {"NANOBATCH_BLAS": "", "CC": "", "XDG_CACHE_HOME": str(tmp_path)}
    return run("ask.py", "What is 17 + 6?", "--max-tokens", "20", **usual | environment)


@NEEDS_COMPILER
def test_a_first_start_says_in_one_line_that_it_compiles(tmp_path):
    first, second = ask(tmp_path), ask(tmp_path)
    assert first.stdout.split("[")[0] == second.stdout.split("[")[0] and "23" in first.stdout
    lines = first.stderr.splitlines()
    assert (
        len(lines) == 2
        and lines[0].startswith("nanobatch: compiling matmul.c")
        and "; rows (" in lines[1]
    )
    assert len(second.stderr.splitlines()) == 1


def test_without_a_compiler_the_tokens_are_right_and_the_first_line_says_what_would_change(
    tmp_path,
):
    done = ask(tmp_path, PATH=str(tmp_path))
    assert "23" in done.stdout
    (line,) = done.stderr.splitlines()
    assert "so bits may differ with the company: there is no C compiler; apt install gcc" in line


def test_what_was_asked_for_and_cannot_be_had_is_an_error_in_one_line(tmp_path):
    for choice, said in (("rows", "there is no C compiler"), ("rows:sse", "no form 'sse'")):
        done = ask(tmp_path, PATH=str(tmp_path), NANOBATCH_BLAS=choice)
        (line,) = done.stderr.splitlines()
        assert (
            done.returncode == 2
            and line.startswith(f"nanobatch: NANOBATCH_BLAS={choice}: ")
            and said in line
        )


def test_an_engine_says_whether_it_is_exact(tmp_path):
    code = "from nanobatch import Engine; print(Engine.load('demo').exact)"
    for choice, exact in (("rows", bool(COMPILER)), ("openblas", False), ("off", False)):
        done = python(code, NANOBATCH_BLAS=choice)
        assert done.stdout == f"{exact}\n", done


def test_on_a_mac_or_a_gpu_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(blas.rows, "load", lambda *_: pytest.fail("it was compiled"))
    monkeypatch.delenv("NANOBATCH_BLAS", raising=False)
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    assert str(blas.preload()) == "mlx"
    monkeypatch.setattr(blas.sys, "platform", "linux")
    monkeypatch.setattr(
        blas.importlib.metadata, "distributions", lambda name: [name] * (name == "mlx-cuda-13")
    )
    assert str(blas.preload()) == "mlx"
