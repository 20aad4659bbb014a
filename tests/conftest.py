"""Shared fixtures: a small random model, and engines that serve it."""

# isort: off
# Our modules come first, as in the programs: device has to be imported before MLX is.
from kernels import device

# isort: on
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from quick import QUICK

from kernels import library
from models.load import read_model
from nanobatch import Engine, Model, Tokenizer
from text import grammar, untrusted_model_files

# Settings from a user's environment that would disturb the tests
STRANGE = "NO_COLOR FORCE_COLOR COLUMNS LINES PYTHONDONTWRITEBYTECODE NANOBATCH_API_KEY"
STRANGE += " NANOBATCH_WATCH_KEY NANOBATCH_HISTORY NANOBATCH_RING_KEY"
STRANGE += " NANOBATCH_ZERO_LIMIT"
SHORT = {"NANOBATCH_THREADS", "NANOBATCH_BLAS"}  # any other NANOBATCH_* selects a long form
LONG = (
    "distributed",
    "kernels/test_matmul",
    "core/test_batch_invariance",
    "core/test_schemas",
    "course/test_exercises",
)
# These limits are wall-clock time. On a busy machine a user is asked to try again, but a test waits.
grammar.SANDBOX_LIMITS = grammar.SANDBOX_LIMITS._replace(patience=60.0)
untrusted_model_files.LIMITS = untrusted_model_files.LIMITS._replace(patience=60.0)
MOST_WORKERS = 4  # by default; on a machine with many cores, more workers mostly wait


def pytest_report_header() -> str:
    from parity import CLOSE

    return f"computes on: {device.named()}; parity within {CLOSE}; BLAS under MLX: {device.blas}"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite, or a folder, on several workers. A single file, a single test and whatever
    `-k` selects run in this process, where a debugger works. `-n` overrides this.

    Each worker, and each program that it starts, uses only its share of the cores for matrix products,
    because threads that wait for each other on busy cores are many times slower.

    Tests start hundreds of programs. Remove a user's settings from their environment, such as a key or the
    size and colours of a terminal, and bypass a proxy. Keep bytecode, because otherwise each program would
    compile everything that it imports.
    """
    for name in STRANGE.split():
        os.environ.pop(name, None)
    os.environ["no_proxy"] = "localhost,127.0.0.1"  # all servers of the tests are local
    is_refused = any(library.library(form).exists() for form in library.forms_here())
    if is_refused and device.blas.why_not and not os.environ.get("NANOBATCH_BLAS"):
        raise pytest.UsageError(str(device.blas))  # otherwise the library's tests would be skipped
    sys.dont_write_bytecode = False
    option = config.option
    if not hasattr(option, "numprocesses") or hasattr(config, "workerinput"):
        return  # without xdist, or in a worker
    if option.numprocesses is None and not is_small(config):
        option.numprocesses = min(cores() + 1, MOST_WORKERS)  # + 1, because some tests only wait
        option.dist = "worksteal"
    if option.numprocesses == 1:
        option.numprocesses = 0
    if isinstance(option.numprocesses, int) and option.numprocesses > 1:
        share = max(1, cores() // option.numprocesses)
        os.environ.setdefault("NANOBATCH_THREADS", str(share))


def cores() -> int:
    return library.cores() if sys.platform == "linux" else os.cpu_count() or 1


def is_small(config: pytest.Config) -> bool:
    """True if an option needs a single process, or if files or tests are named instead of folders."""
    option = config.option
    alone = option.usepdb or option.collectonly or option.capture == "no" or option.keyword
    return bool(alone) or not all(Path(each).is_dir() for each in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests listed in `quick.py`, and lift the time limit of long forms. Run the longest tests
    first, so that all workers finish at about the same time."""
    here = f"{Path(__file__).parent.name}/"
    beginnings = tuple(here + each for each in QUICK)
    long = tuple(here + each for each in LONG)
    for item in items:
        if item.nodeid.startswith(beginnings):
            item.add_marker("quick")
        if is_long_form(item):
            item.add_marker(pytest.mark.timeout(0))
    items.sort(key=lambda item: not item.nodeid.startswith(long))


def is_long_form(item: pytest.Item) -> bool:
    """True if long forms are selected (CONTRIBUTING.md), or for a test of a published model: no time limit."""
    asked = [name for name in os.environ if name.startswith("NANOBATCH_")]
    return bool({*asked} - SHORT) or "published" in item.fixturenames


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_long_form(item):
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze everything that is imported and collected, so that the garbage collector does not scan it."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    """Restore Python's Ctrl-C handler in a shell's background job, because many tests raise the signal."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def parts(tmp_path_factory) -> tuple[Model, Tokenizer]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), seed=1)
    return read_model(folder), Tokenizer(folder, 272)


@pytest.fixture(scope="session", params=["smollm2", "qwen"])
def published(request) -> Path:
    """The folder of a published model. The first use downloads 90 or 490 MB, and a test takes minutes,
    so these tests run only by name, or if NANOBATCH_PUBLISHED is set.

    For a test of one model: `@pytest.mark.parametrize("published", ["qwen"], indirect=True)`."""
    asked = [request.config.option.keyword, *request.config.args]
    is_asked_for = any("published" in Path(each).name for each in asked)
    if not is_asked_for and "NANOBATCH_PUBLISHED" not in os.environ:
        pytest.skip("published models are tried by: python -m pytest -k published")
    import published  # imported here, because it needs a package that no other test does

    try:
        return published.folder(request.param)
    except published.Missing as why:
        pytest.skip(f"the model is unavailable: {why}")


@pytest.fixture
def make_engine(parts) -> Iterator[Callable[..., Engine]]:
    """Make engines on the small model, by default with two slots of 128 tokens. They are closed after the
    test."""
    sizes = {"slots": 2, "max_len": 128, "chunk": 32}
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Engine(*parts, **sizes | options))


@pytest.fixture
def engine(make_engine) -> Engine:
    return make_engine()


@pytest.fixture
def background_job() -> Iterator[Callable[[], None]]:
    """Ignore Ctrl-C, as in a shell's background job. Child processes inherit this. Yield a function that a
    child calls to restore the default."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, before)
