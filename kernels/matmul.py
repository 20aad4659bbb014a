"""Our own matrix product, `matmul.c`: compiled at the first start, kept for the next, and looked at
before it is trusted.

The problem. `matmul.c` is what makes an answer independent of its company, and it is written for the
processor that it runs on. A wheel that is built elsewhere cannot know the processor, and to ship
one for each is another project. But most machines have a C compiler, and a few seconds are short.

The way out. At the first start the machine's compiler makes a library of `matmul.c`. The library is
kept in the user's cache, under a name that says all it was made from: the source, the compiler, its
options and the processor. So homes that are shared between machines hold one for each, and a change
of anything makes a new one.

What this file keeps:
    A program loads code only from a folder that nobody else can write to, or from one that it has just made itself.
    It loads no file that has changed since it was kept: the file ends with the hash of its contents.
    No product is trusted by its name: at each start it takes an exam, of whose results each bit is known (`Form.bits`).
    What was just compiled is loaded in another process first, since it may end the process that loads it.
    A compiler that is missing, broken or hangs is a reason for the next best library (`blas.py`), and never an error.
    A program that ends while it compiles leaves neither compiler nor folder behind (`keeper.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import random
import shlex
import shutil
import stat
import struct
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from parts.checks import read_whole
from parts.device.keeper import PYTHON, Keeper
from parts.device.limits import cores
from parts.files import replace
from parts.program import cpuinfo

SOURCE = Path(__file__).with_name("matmul.c")
OPTIONS = [
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
]
ROOT = SOURCE.resolve().parents[1]
PATIENCE_S = 120  # for the compiler: beside busy programs it takes a minute instead of seconds
UNFIT = 3  # the exit code if a library has been looked at and is of no use
FITS = "it multiplies right"
HASH = 32  # bytes at the end of a kept library: the hash of those before
HUNG_S = 3600  # so long a compiler that hung is not tried again
MOST_THREADS = 16  # by default; memory is the limit before so many, and nobody has tried more


# What another process does, for `examine`
LOOK = (
    "import sys; sys.path.insert(0, sys.argv[1]); from kernels import matmul; "
    "sys.exit(matmul.examine(*sys.argv[2:]))"
)


class Form(NamedTuple):
    """One of the ways in which `matmul.c` can be compiled. Each has an order of its own, so bits of
    its own."""

    machine: str  # the architecture that the form is for; empty: any
    features: str  # words of /proc/cpuinfo: what the processor must be able to do
    # What the compiler is told; instruction sets are named, since "native" means another on each
    # machine
    options: str
    # The hash of what the form computes in the exam, on any machine. Who changes the order of a sum
    # finds the new one in the line that refuses it.
    bits: str
    openblas: str = ""  # the kernels that OpenBLAS has for such a processor. Empty: let it choose


FORMS = {  # the first one that fits is taken
    "avx512": Form(
        "x86_64",
        "avx512f avx512bw avx512dq avx512vl avx512cd avx2 fma f16c",
        "-mavx512f -mavx2 -mfma -mf16c",
        "468ddc22f8351dd498abadd148b1f2d8",
        "SkylakeX",
    ),
    "avx2": Form(
        "x86_64",
        "avx2 fma f16c",
        "-mavx2 -mfma -mf16c",
        "3350e60e36c72738d4515cb1bc304bba",
        "Haswell",
    ),
    "neon": Form("aarch64", "", "", "a135b9db6b1a738eb051517d489a1f65"),
    "plain": Form("", "", "", "23863c5f993d0661ca252ea2bc1402f6"),
}


# How `matmul.c` calls the ways in which numbers are written, and operations on rows (its `enum`)
FLOAT32, FLOAT16, BFLOAT16, FOUR_BITS, EIGHT_BITS, SOFTMAX, SWIGLU, GEGLU, NORM = range(9)
LINE = 64  # bytes: a packed matrix begins with so many that say what it is


class Unbuilt(Exception):
    """The product cannot be had here. The text says why, and what would help."""

    def __init__(self, why: str):
        super().__init__(readable(why))


def readable(line: str) -> str:
    """Commands and paths may hold bytes that are no text, and no screen could show them."""
    return line.encode(errors="replace").decode()


def load(name: str = "", say: Callable[[str], None] = lambda line: None) -> tuple[ctypes.CDLL, str]:
    """The library in this form, or in the best one for this processor; and in words, what it is.

    `say` is told if the compiler has to run.
    """
    forms = forms_here()
    if name and name not in forms:
        raise Unbuilt(
            f"this processor has no form {name!r} of matmul.c; choose among {', '.join(forms)}"
        )
    form = name or forms[0]
    count = threads()
    library = _load_kept(form, say)
    if why := why_unfit(library, form):
        Path(library._name).unlink(missing_ok=True)
        raise Unbuilt(f"the matrix product of matmul.c {why}")
    started = library.rows_start(count)
    return library, f"{form}, {started} thread{'s' * (started > 1)}"


def forms_here() -> list[str]:
    """The names of the forms that this processor can run, the best one first."""
    able = processor()

    def fits(form: Form) -> bool:
        return form.machine in ("", platform.machine()) and set(form.features.split()) <= able

    return [name for name, form in FORMS.items() if fits(form)]


@cache
def processor() -> frozenset[str]:
    """What the first processor says that it can do, word by word."""
    said = cpuinfo()
    return frozenset(said.get("flags", said.get("Features", "")).split())


# --- threads ------------------------------------------------------------------------------------


def threads(most: int = MOST_THREADS) -> int:
    """How many threads multiply: NANOBATCH_THREADS, or as many as there are cores for this process,
    and `most` at most."""
    asked = os.environ.get("NANOBATCH_THREADS", "")
    if not asked:
        return min(cores(), most)
    try:
        return read_whole("NANOBATCH_THREADS", asked, 1, 1024)
    except ValueError as error:
        raise ImportError(str(error)) from None


# --- from source to library ---------------------------------------------------------------------


def _load_kept(form: str, say: Callable[[str], None]) -> ctypes.CDLL:
    """The library from the user's cache; compiled first, if it is not there, or not whole."""
    compiler = find_compiler()
    options = [*OPTIONS, *FORMS[form].options.split()]
    kept, why_not = cache_folder()
    target = kept and kept / file_name(compiler, options)
    if target and is_ours(target, stat.S_ISREG) and is_whole(target):
        with suppress(OSError, ValueError):
            return ctypes.CDLL(str(target))
    hung = target and target.with_suffix(".hung")
    if hung and is_recent(hung):
        raise _hangs(compiler, hung)
    name = Path(compiler[0]).name
    how_often = why_not or "once, in seconds"
    say(readable(f"compiling matmul.c, the matrix product, with {name}; {how_often}"))
    try:
        keeper = Keeper(place_to_compile(kept))
    except OSError as error:
        raise Unbuilt(f"there is no folder to compile in ({error})") from None
    with closing(keeper):
        made = keeper.folder / "rows.so"
        try:
            compile_to(made, compiler, options, keeper)
        except TimeoutError:
            raise _hangs(compiler, hung) from None
        try_out(made, compiler, form, keeper)
        if target and (why_not := keep(made, target)):
            say(readable(f"{target} cannot be kept ({why_not}); the next start compiles again"))
        elif target:
            made = target
        try:
            return ctypes.CDLL(str(made))  # stays loaded when its file goes
        except (OSError, ValueError) as error:
            raise Unbuilt(f"the matrix product of matmul.c cannot be loaded ({error})") from None


def _hangs(compiler: list[str], hung: Path | None) -> Unbuilt:
    """Note that the compiler hangs, for the next start. Without a cache, each start waits."""
    why = f"{compiler[0]} did not end within {PATIENCE_S} seconds"
    with suppress(OSError):
        if hung and not is_recent(hung):
            hung.touch(mode=0o600)
    again = hung and hung.exists()
    return Unbuilt(f"{why}; to try again within the hour, remove {hung}" if again else why)


def is_recent(note: Path) -> bool:
    """Was this file of ours written within `HUNG_S`?"""
    return is_ours(note, stat.S_ISREG) and 0 <= time.time() - note.stat().st_mtime < HUNG_S


def place_to_compile(kept: Path | None) -> str:
    """A folder from which programs may be run: the usual one for temporary files, or the cache."""
    with suppress(OSError):
        for folder in (tempfile.gettempdir(), kept):
            if folder and may_run(folder):
                return str(folder)
    raise Unbuilt("no folder that this process can write to allows programs to be run from it")


def find_compiler() -> list[str]:
    """The machine's C compiler, as the beginning of a command."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unbuilt(f"the environment's CC is no command ({error})") from None
    for command in (named, ["cc"], ["gcc"], ["clang"]):
        found = command and shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise Unbuilt("there is no C compiler; apt install gcc")


def file_name(compiler: list[str], options: list[str]) -> str:
    """A name that says all that a library is made from. The compiler is known by its file, so it
    need not be run to know it."""
    about = os.stat(compiler[0])
    source = SOURCE.read_text(encoding="utf-8")
    made_from = [source, str(about.st_size), str(about.st_mtime_ns), *compiler, *options]
    made_from += [platform.machine(), *sorted(processor())]
    words = chr(0).join(made_from).encode(errors="surrogateescape")
    return f"rows-{hashlib.sha256(words).hexdigest()[:32]}.so"


def compile_to(target: Path, compiler: list[str], options: list[str], keeper: Keeper) -> None:
    command = [*compiler, *options, "-o", str(target), str(SOURCE)]
    code, said = keeper.run(command, PATIENCE_S)
    if code:
        errors = [line for line in said if "error" in line.lower()]
        first = [*errors, *said, "no message"][0]
        raise Unbuilt(f"{compiler[0]} fails with code {code}: {first}")
    if not target.exists():
        raise Unbuilt(f"{compiler[0]} has compiled nothing")


def try_out(made: Path, compiler: list[str], form: str, keeper: Keeper) -> None:
    """Load a library and look at it, in another process: some libraries end the process at once."""
    try:
        code, said = keeper.run([*PYTHON, "-c", LOOK, str(ROOT), str(made), form], PATIENCE_S)
    except TimeoutError:
        code, said = UNFIT, [f"does not multiply within {PATIENCE_S} seconds"]
    if said[-1:] == [FITS]:
        return
    why = [*said, "no message"][0]
    if code != UNFIT:
        why = f"ends the process that loads it, with code {code}: {why}"
    raise Unbuilt(f"what {' '.join(compiler)} makes of matmul.c {why}")


def examine(made: str, form: str) -> int:
    """Say that the library can be used, or why not. An exit code alone would say nothing: the
    library may end this process with any."""
    try:
        library = ctypes.CDLL(made)
    except OSError as error:
        print(f"cannot be loaded ({str(error).removeprefix(f'{made}: ')})")
        return UNFIT
    why = why_unfit(library, form)
    print(why or FITS)
    return UNFIT if why else 0


# --- where libraries are kept -------------------------------------------------------------------


def cache_folder() -> tuple[Path | None, str]:
    """The folder for libraries in the user's cache. None if there is no safe one; then also why
    not.

    Whoever can write to this folder can make us run anything. So it must be ours, a real folder,
    and nobody else may write to it, nor put another in its place. Before that is known, nothing is
    made there.
    """
    try:
        place = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not place.is_absolute():
            place = Path.home() / ".cache"
        folder = place / "nanobatch"
        place.mkdir(parents=True, exist_ok=True)
        if not is_ours(place.resolve(), stat.S_ISDIR, shared=True):
            return (
                None,
                f"{place} belongs to another user, or others may write to it, so nothing is kept there",
            )
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        return None, f"{folder} is no folder, so it cannot be kept"
    except (OSError, RuntimeError):
        return None, "the user's cache cannot be written to, so it cannot be kept"
    if not is_ours(folder, stat.S_ISDIR):
        return (
            None,
            f"{folder} is a link, or another user's, or others may write to it, so nothing is kept there",
        )
    if not may_run(folder) or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return None, f"no program may be written to {folder} and run from it, so it cannot be kept"
    return folder, ""


def may_run(folder: str | Path) -> bool:
    """May programs be run from there? A file system can be mounted so that they may not."""
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def is_ours(path: Path, is_kind: Callable[[int], bool], shared: bool = False) -> bool:
    """Is this a real folder or file (`is_kind`) of this user, that nobody else can change?

    `shared`: root's will do, and so will a folder like /tmp, where nobody can rename what is
    another's (sticky bit).
    """
    try:
        about = path.lstat()
    except OSError:
        return False
    if not is_kind(about.st_mode):
        return False
    if not shared:
        return about.st_uid == os.getuid() and not about.st_mode & 0o022
    is_closed = not about.st_mode & 0o002 or bool(about.st_mode & stat.S_ISVTX)
    return about.st_uid in (os.getuid(), 0) and is_closed


def is_whole(file: Path) -> bool:
    """Does the file end with the hash of what stands before? A library that was cut, by a full disk
    or a power cut, ends the process that uses it, without a word."""
    try:
        contents = file.read_bytes()
    except OSError:
        return False
    return hashed(contents[:-HASH]) == contents[-HASH:]


def hashed(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()


def keep(made: Path, target: Path) -> str:
    """Put a library into the cache, with its hash. Returns why it cannot be kept; else nothing.

    Another process sees all of it or nothing.
    """
    try:
        contents = made.read_bytes()
        replace(str(target), contents + hashed(contents))
        target.chmod(0o700)
    except OSError as error:
        return str(error.strerror)
    return ""


# --- a look before it is trusted ----------------------------------------------------------------

# Rows, columns, numbers in a sum: each height that a tile may have, and what is no whole vector
SHAPES = [(1, 5, 3), (2, 4, 16), (5, 9, 33), (6, 8, 40), (7, 37, 17), (13, 3, 20), (9, 130, 40)]
# How a packed matrix may be written: the form of its weights, their bits, the form of its scales
PACKED = [(FLOAT16, 16, FLOAT32), (BFLOAT16, 16, FLOAT32)]
for _scales in (FLOAT32, FLOAT16, BFLOAT16):
    PACKED += [(FOUR_BITS, 4, _scales), (EIGHT_BITS, 8, _scales)]


def why_unfit(library: ctypes.CDLL, form: str) -> str:
    """The exam: no library is used that has not passed it, at each start. Nothing if it has."""
    try:
        found = computed(library)
    except AttributeError:  # it has none of our names
        found = "none"
    if found == FORMS[form].bits:
        return ""
    return f"does not multiply right: its bits are {found}, and those of {form} {FORMS[form].bits}"


def computed(library: ctypes.CDLL) -> str:
    """The hash of all that the library computes of some numbers, which are the same everywhere.

    Of both layouts, of weights packed in each form, of each operation: one row, few and many. These
    products are too small to be shared among threads, so it is done before any is started.
    """
    draw = random.Random(0)
    seen = hashlib.sha256()

    def multiply(x: array, w: array, M: int, N: int, K: int, turned: bool = False) -> None:
        """x (M, K) times W: (N, K) as stored, or (K, N) turned, or the memory of a packed one."""
        y = array("f", [math.nan]) * (M * N)  # whatever the memory of the result held before
        x_at, w_at, y_at = (ctypes.c_void_p(each.buffer_info()[0]) for each in (x, w, y))
        layout = (111, N) if turned else (112, K)
        sizes = (M, N, K, ctypes.c_float(1), x_at, K, w_at, layout[1])
        library.cblas_sgemm(101, 111, layout[0], *sizes, ctypes.c_float(0), y_at, N)
        seen.update(str(y.tolist()).encode())  # a NaN has no sign there

    for M, N, K in SHAPES:
        w = drawn(draw, N * K)
        for turned in (False, True):
            multiply(drawn(draw, M * K), w, M, N, K, turned)
    for form, bits, form_of_scales in PACKED:
        N, K, group = (6, 75, 75) if bits == 16 else (6, 96, 32)
        w = packed(library, draw, form, bits, form_of_scales, N, K, group)
        for M in (1, 4, 5, 25):
            multiply(drawn(draw, M * K), w, M, N, K)
    for operation in (SOFTMAX, SWIGLU, GEGLU, NORM):
        for M, N in ((1, 1), (3, 5), (4, 75)):
            K = N if operation in (SOFTMAX, NORM) else 2 * N
            w = array("f", bytes(LINE)) + drawn(draw, N)  # of a norm, the weights
            at = ctypes.c_void_p(w.buffer_info()[0])
            library.rows_operation(at, operation, N, ctypes.c_float(0.3))
            x = drawn(
                draw, M * K, 150
            )  # some powers are too large for a float32, and some too small
            if M > 1:
                x[0] = math.nan
                x[-1] = -math.inf  # as what attention hides
            # MLX takes a matrix of one number for a turned one
            multiply(x, w, M, N, K, turned=K == 1)
    return seen.hexdigest()[:32]


def drawn(draw: random.Random, count: int, most: float = 1) -> array:
    return array("f", [draw.uniform(-most, most) for _ in range(count)])


def packed(
    library: ctypes.CDLL,
    draw: random.Random,
    form: int,
    bits: int,
    form_of_scales: int,
    N: int,
    K: int,
    group: int,
) -> array:
    """The memory of a packed matrix of random numbers."""
    if bits == 16:
        weights = written(drawn(draw, N * K), form)
    else:
        weights = ctypes.create_string_buffer(N * library.rows_width(form, ctypes.c_long(K)))
        in_a_file = draw.randbytes(N * K * bits // 8)
        library.rows_lay(in_a_file, bits, weights, form, ctypes.c_long(N), ctypes.c_long(K))
    memory = bytes(LINE)
    places = []  # of weights, scales and offsets, in lines
    for part in (
        weights,
        *(written(drawn(draw, N * K // group), form_of_scales) for _ in range(2)),
    ):
        places.append(len(memory) // LINE)
        memory += bytes(part) + bytes(-len(part) % LINE)
    matrix = array("B", memory + bytes(LINE))
    at = ctypes.c_void_p(matrix.buffer_info()[0])
    library.rows_pack(at, form, form_of_scales, N, K, group, *places[1:])
    return matrix


def written(numbers: array, form: int) -> bytes:
    """Numbers in this form."""
    if form == FLOAT16:
        return struct.pack(f"={len(numbers)}e", *numbers)
    if form == BFLOAT16:  # the upper half of each
        return array("H", numbers.tobytes())[1::2].tobytes()
    return numbers.tobytes()
