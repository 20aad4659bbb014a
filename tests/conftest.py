"""What many tests share: a small random model, and an engine on it."""

# isort: off
# First, as in a program of ours: else what imports MLX leaves the tests on the slow BLAS.
from parts.device import mlx as device

# isort: on
import signal
from collections.abc import Callable, Iterator

import pytest
from checkpoints import make_checkpoint

from nanobatch import Engine, Model, Text
from parts.model.load import read_model


def pytest_report_header() -> str:
    return f"BLAS under MLX: {device.blas}"


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, which many tests raise."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def parts(tmp_path_factory) -> tuple[Model, Text]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), seed=1)
    return read_model(folder), Text(folder, 272)


@pytest.fixture
def engine(parts):
    with Engine(*parts, slots=2, max_len=128, chunk=32) as engine:
        yield engine


@pytest.fixture
def background_job() -> Iterator[Callable[[], None]]:
    """A shell's background job ignores Ctrl-C, and so does all that it starts, unless the child
    does what this says."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, before)
