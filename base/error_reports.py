"""Report exceptions: in one line to the user, and once with the traceback, on stderr or on the screen's
errors page (which adds its own handler to the logger `nanobatch`)."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from base.validation import GrammarError

LOG = logging.getLogger("nanobatch")  # without a handler, Python writes to stderr


def describe(error: BaseException) -> str:
    """Describe an exception in one line."""
    if isinstance(error, GrammarError):  # a client's mistake: omit the exception's type
        return f"grammar: {error}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def show_fault(what: str, error: BaseException) -> None:
    """Log what failed, with the traceback. May be called from any thread."""
    LOG.error("nanobatch: %s", what, exc_info=error)
    let_go(error)


@contextmanager
def shown(what: str) -> Iterator[None]:
    """Log the traceback of an exception before it is raised to the caller, who reports only one line."""
    try:
        yield
    except Exception as error:
        show_fault(what, error)
        raise


def let_go(error: BaseException) -> None:
    """Remove the tracebacks of an exception that will be kept, and of its causes.

    subtle: a traceback keeps its frames alive, and a frame of `forward` keeps the slab alive. After a
    failure the engine allocates a new slab, and there may not be enough memory for two. Frames that are
    still running refer to the handle that keeps the exception: a cycle, which only the garbage collector
    would free.
    """
    seen = set()
    left = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)  # a log record may still refer to the traceback
        each.__traceback__ = None
        left += [each.__cause__, each.__context__]
