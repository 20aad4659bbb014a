"""Our own matrix product, `rows.c`: compiled at the first start, kept for the next, and looked at
before it is trusted.

The problem. `rows.c` is what makes an answer independent of its company, and it is written for the
processor that it runs on. A wheel that is built elsewhere cannot know the processor, and to ship
one for each is another project. But most machines have a C compiler, and a few seconds are short.

The way out. At the first start the machine's compiler makes a library of `rows.c`. The library is
kept in the user's cache, under a name that says all it was made from: the source, the compiler, its
options and the processor. So homes that are shared between machines hold one for each, and a change
of anything makes a new one.

What this file keeps:
    A program loads code only from a folder that nobody else can write to, or from one that it has just made itself.
    It loads no file that has changed since it was kept: the file ends with the hash of its contents.
    No product is trusted by its name: at each start `is_right` compares it with sums in plain Python.
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
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from parts.checks import read_whole
from parts.device.keeper import PYTHON, Keeper
from parts.files import replace
from parts.program import cpuinfo, my_cores

SOURCE = Path(__file__).with_name("rows.c")
OPTIONS = [
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
]
ROOT = SOURCE.resolve().parents[2]
PATIENCE_S = 30  # for the compiler
UNFIT = 3  # the exit code if a library has been looked at and is of no use
FITS = "it multiplies right"
HASH = 32  # bytes at the end of a kept library: the hash of those before
HUNG_S = 3600  # so long a compiler that hung is not tried again
MOST_THREADS = 16  # by default; memory is the limit before so many, and nobody has tried more


# What another process does, for `examine`
LOOK = (
    "import sys; sys.path.insert(0, sys.argv[1]); from parts.device import rows; "
    "sys.exit(rows.examine(*sys.argv[2:]))"
)


class Form(NamedTuple):
    """One of the ways in which `rows.c` can be compiled. Each has an order of its own, so bits of
    its own."""

    machine: str  # the architecture that the form is for; empty: any
    features: str  # words of /proc/cpuinfo: what the processor must be able to do
    # What the compiler is told; instruction sets are named, since "native" means another on each
    # machine
    options: str


FORMS = {  # the first one that fits is taken
    "avx512": Form("x86_64", "avx512f avx2 fma f16c", "-mavx512f -mavx2 -mfma -mf16c"),
    "avx2": Form("x86_64", "avx2 fma f16c", "-mavx2 -mfma -mf16c"),
    "neon": Form("aarch64", "", ""),
    "plain": Form("", "", ""),
}


# How `rows.c` calls the ways in which numbers are written, and operations on rows (its `enum`)
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
            f"this processor has no form {name!r} of rows.c; choose among {', '.join(forms)}"
        )
    form = name or forms[0]
    count = threads()
    library = _load_kept(form, say)
    if not passes(library, form):
        Path(library._name).unlink(missing_ok=True)
        raise Unbuilt("the matrix product of rows.c does not multiply right on this machine")
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


def threads() -> int:
    """How many threads multiply: NANOBATCH_THREADS, or as many as there are cores for this
    process."""
    asked = os.environ.get("NANOBATCH_THREADS", "")
    if not asked:
        return min(cores(), MOST_THREADS)
    try:
        return read_whole("NANOBATCH_THREADS", asked, 1, 1024)
    except ValueError as error:
        raise ImportError(str(error)) from None


def cores(root: Path = Path("/")) -> int:
    """The cores that this process may use: a scheduler, a container or an administrator may have
    taken some away.

    `root` is where the files of the system are.
    """
    return max(1, int(min(len(my_cores()), quota(root))))


def quota(root: Path) -> float:
    """How many cores' worth of time the control groups of this process allow, the narrowest of
    them.

    A group's limit holds for all groups within, so each folder from the process's own group up to
    the root is read.
    """
    least = float("inf")
    for line in _words(root / "proc/self/cgroup"):
        kind, _, path = line.partition(":")[2].partition(":")
        if kind == "":  # version 2: one tree for everything
            place = root / "sys/fs/cgroup"
        elif "cpu" in kind.split(","):
            place = root / "sys/fs/cgroup/cpu"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            least = min(least, _limit(place.joinpath(*parts[:depth])))
    return least


def _limit(group: Path) -> float:
    """What one control group allows: microseconds of work, over the microseconds in which it may be
    done."""
    numbers = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(
        group / "cpu.cfs_period_us"
    )
    try:
        allowed, period = " ".join(numbers).split()
        return int(allowed) / int(period) if int(allowed) > 0 else float("inf")
    except (ValueError, ZeroDivisionError):  # "max", or no such files
        return float("inf")


def _words(file: Path) -> list[str]:
    """A small file's lines. None if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except (OSError, ValueError):
        return []


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
    say(readable(f"compiling rows.c, the matrix product, with {name}; {how_often}"))
    try:
        keeper = Keeper(place_to_compile(kept))
    except OSError as error:
        raise Unbuilt(f"there is no folder to compile in ({error})") from None
    with keeper:
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
            raise Unbuilt(f"the matrix product of rows.c cannot be loaded ({error})") from None


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
    raise Unbuilt(f"what {' '.join(compiler)} makes of rows.c {why}")


def examine(made: str, form: str) -> int:
    """Say that the library can be used, or why not. An exit code alone would say nothing: the
    library may end this process with any."""
    try:
        library = ctypes.CDLL(made)
    except OSError as error:
        print(f"cannot be loaded ({str(error).removeprefix(f'{made}: ')})")
        return UNFIT
    if not passes(library, form):
        print("does not multiply right")
        return UNFIT
    print(FITS)
    return 0


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

# Rows, columns, numbers in a sum
SHAPES = [(1, 5, 3), (2, 4, 16), (5, 9, 33), (7, 37, 17), (13, 3, 20), (9, 130, 40)]
# How a packed matrix may be written: the form of its weights, their bits, the form of its scales
PACKED = [(FLOAT16, 16, FLOAT32), (BFLOAT16, 16, FLOAT32)]
for _scales in (FLOAT32, FLOAT16, BFLOAT16):
    PACKED += [(FOUR_BITS, 4, _scales), (EIGHT_BITS, 8, _scales)]


def is_form(library: ctypes.CDLL, form: str) -> bool:
    """Is the library of this form? A compiler may have been told, by `CC`, to use other
    instructions."""
    try:
        return (ctypes.c_char * (len(form) + 1)).in_dll(library, "rows_form").value == form.encode()
    except ValueError:  # it has no such name
        return False


def passes(library: ctypes.CDLL, form: str) -> bool:
    """The exam: no library is used that has not passed it, at each start."""
    looks = (is_right, unpacks_right, operates_right)
    return is_form(library, form) and all(look(library) for look in looks)


def is_right(library: ctypes.CDLL) -> bool:
    """Does the library multiply right, in odd shapes too, and is a row alone the same as among
    others?

    Small whole numbers have exact sums, in whatever order they are added. So Python's sums are the
    right ones. Whether a row's bits are the same in any company is seen with numbers that are
    rounded. These products are too small to be shared among threads, so it is done before any is
    started.
    """
    draw = random.Random(0)
    for M, N, K in SHAPES:
        x = [byte - 128 for byte in draw.randbytes(M * K)]
        w = [byte - 128 for byte in draw.randbytes(N * K)]
        rough = [number / 7 for number in x]
        for turned in (False, True):
            y = _multiply(library, x, w, M, N, K, turned)
            for m, n in ((0, 0), (M // 2, N // 2), (M - 1, N - 1)):
                row = x[m * K : m * K + K]
                column = w[n::N] if turned else w[n * K : n * K + K]
                if y[m * N + n] != sum(map(int.__mul__, row, column)):
                    return False
            together = _multiply(library, rough, w, M, N, K, turned)
            alone = [
                _multiply(library, rough[m * K : m * K + K], w, 1, N, K, turned) for m in range(M)
            ]
            if together.tobytes() != b"".join(row.tobytes() for row in alone):
                return False
    return True


def unpacks_right(library: ctypes.CDLL) -> bool:
    """Has a product of packed weights the same bits as one of the numbers that they stand for?

    In each form: one row, few, and many; several groups, and a row that ends within a vector.
    """
    draw = random.Random(1)
    return all(_unpacks(library, draw, *how) for how in PACKED)


def _unpacks(
    library: ctypes.CDLL, draw: random.Random, form: int, bits: int, form_of_scales: int
) -> bool:
    N, K, group = (6, 75, 75) if bits == 16 else (6, 96, 32)
    scales, scale = _written(draw, form_of_scales, N * K // group)
    offsets, offset = _written(draw, form_of_scales, N * K // group)
    if bits == 16:
        weights, numbers = _written(draw, form, N * K)
        offset = [0.0] * len(offset)
    else:
        whole = draw.getrandbits(N * K * bits)
        numbers = [whole >> i * bits & (1 << bits) - 1 for i in range(N * K)]
        in_a_file = whole.to_bytes(N * K * bits // 8, "little")
        weights = _laid(library, in_a_file, bits, form, N, K)
    products = array("f", [n * scale[i // group] for i, n in enumerate(numbers)])
    wide = [product + offset[i // group] for i, product in enumerate(products)]
    matrix = bytes(LINE)
    places = []  # of weights, scales and offsets, in lines
    for part in (weights, scales, offsets):
        places.append(len(matrix) // LINE)
        matrix += part + bytes(-len(part) % LINE)
    memory = array("B", matrix + bytes(LINE))
    at = ctypes.c_void_p(memory.buffer_info()[0])
    library.rows_pack(at, form, form_of_scales, N, K, group, *places[1:])
    for M in (1, 5, 25):
        x = [draw.uniform(-1, 1) for _ in range(M * K)]
        packed = _multiply(library, x, memory, M, N, K, turned=False)
        unpacked = _multiply(library, x, wide, M, N, K, turned=False)
        if packed.tobytes() != unpacked.tobytes():
            return False
    return True


SETTING = 0.3  # of operations: the scale of a softmax, and the eps of a norm


def operates_right(library: ctypes.CDLL) -> bool:
    """Does each operation on rows compute its formula, and is a row alone the same as among others?

    How far a softmax reads behind what is hidden must not show in a bit, and NaN must stay NaN.
    """
    draw = random.Random(2)
    for operation in (SOFTMAX, SWIGLU, GEGLU, NORM):
        for M, N in ((1, 1), (3, 5), (4, 75)):
            K = N if operation in (SOFTMAX, NORM) else 2 * N
            weight = [draw.uniform(-2, 2) for _ in range(N)]
            x = [[draw.uniform(-9, 9) for _ in range(K)] for _ in range(M)]
            together = _operate(library, operation, x, weight)
            alone = [_operate(library, operation, [row], weight)[0] for row in x]
            spoilt = _operate(library, operation, [[math.nan, *row[1:]] for row in x], weight)
            for row, y in zip(x, together, strict=True):
                right = _by_definition(operation, row, weight)
                pairs = zip(y, right, strict=True)
                if not all(abs(ours - each) <= 2e-6 * max(1, abs(each)) for ours, each in pairs):
                    return False
            if alone != together or not all(math.isnan(row[0]) for row in spoilt):
                return False
            hidden = 40
            if operation == SOFTMAX:
                far = [row + [-math.inf] * hidden for row in x]
                behind = array("f", [0] * hidden)
                if _operate(library, operation, far, weight) != [row + behind for row in together]:
                    return False
    return True


def _operate(
    library: ctypes.CDLL, operation: int, x: list[list[float]], weight: list[float]
) -> list[array]:
    """An operation on these rows. `weight`: of a norm."""
    M, K = len(x), len(x[0])
    N = K if operation in (SOFTMAX, NORM) else K // 2
    memory = array("f", bytes(LINE)) + array("f", weight)
    at = ctypes.c_void_p(memory.buffer_info()[0])
    library.rows_operation(at, operation, N, ctypes.c_float(SETTING))
    numbers = [number for row in x for number in row]
    # MLX takes a matrix of one number for a turned one
    y = _multiply(library, numbers, memory, M, N, K, turned=K == 1)
    return [y[m * N : m * N + N] for m in range(M)]


def _by_definition(operation: int, x: list[float], weight: list[float]) -> list[float]:
    if operation == SOFTMAX:
        powers = [math.exp(SETTING * number) for number in x]
        return [power / sum(powers) for power in powers]
    if operation == NORM:
        size = math.sqrt(sum(number * number for number in x) / len(x) + SETTING)
        return [number / size * each for number, each in zip(x, weight, strict=True)]
    pairs = zip(x[: len(x) // 2], x[len(x) // 2 :], strict=True)
    if operation == SWIGLU:
        return [g / (1 + math.exp(-g)) * up for g, up in pairs]
    slope = math.sqrt(2 / math.pi)
    return [g / 2 * (1 + math.tanh(slope * (g + 0.044715 * g**3))) * up for g, up in pairs]


def _laid(library: ctypes.CDLL, weights: bytes, bits: int, form: int, N: int, K: int) -> bytes:
    """Weights in the order in which they are kept."""
    laid = ctypes.create_string_buffer(N * library.rows_width(form, ctypes.c_long(K)))
    sizes = ctypes.c_long(N), ctypes.c_long(K)
    library.rows_lay(weights, bits, laid, form, *sizes)
    return laid.raw


def _written(draw: random.Random, form: int, count: int) -> tuple[bytes, list[float]]:
    """Random numbers as they are written in this form, and what they are then."""
    numbers = [draw.uniform(-2, 2) for _ in range(count)]
    if form == FLOAT16:
        written = struct.pack(f"={count}e", *numbers)
        return written, list(struct.unpack(f"={count}e", written))
    exact = array("f", numbers)
    if form == FLOAT32:
        return exact.tobytes(), exact.tolist()
    # The upper half of each: the bits of a bfloat16
    halves = [bits & 0xFFFF0000 for bits in array("I", exact.tobytes())]
    written = array("H", [bits >> 16 for bits in halves]).tobytes()
    return written, array("f", array("I", halves).tobytes()).tolist()


def _multiply(
    library: ctypes.CDLL, x: list, w: list | array, M: int, N: int, K: int, turned: bool
) -> array:
    """x (M, K) times W, (N, K) as stored or (K, N) turned, with whatever the result's memory held
    before. W is numbers, or the memory of a packed matrix."""
    x, y = array("f", x), array("f", [float("nan")]) * (M * N)
    w = w if isinstance(w, array) else array("f", w)
    places = [ctypes.c_void_p(each.buffer_info()[0]) for each in (x, w, y)]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    layout = (111, N) if turned else (112, K)
    library.cblas_sgemm(
        101, 111, layout[0], M, N, K, one, places[0], K, places[1], layout[1], zero, places[2], N
    )
    return y
