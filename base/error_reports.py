"""How an exception is reported: in one line to the user, and once with its traceback, on stderr or on the
screen's page of errors (which gives the logger `nanobatch` a handler of its own)."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from base.validation import GrammarError

LOG = logging.getLogger("nanobatch")  # without a handler of the program's, Python writes to stderr


def describe(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, GrammarError):  # a mistake of the request's owner
        return f"grammar: {error}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def show_fault(what: str, error: BaseException) -> None:
    """Show what has failed, and the traceback. Any thread may call it."""
    LOG.error("nanobatch: %s", what, exc_info=error)
    let_go(error)


@contextmanager
def shown(what: str) -> Iterator[None]:
    """Show the traceback of an exception that the caller reports in one line: it may be a bug of ours."""
    try:
        yield
    except Exception as error:
        show_fault(what, error)
        raise


def let_go(error: BaseException) -> None:
    """Remove the tracebacks of an exception that will be kept, and of its causes.

    subtle: a traceback keeps its frames, and a frame of `forward` keeps the slab. After a failure the
    engine makes a new slab, and there may not be memory for two. Frames that still run refer to the
    handle that keeps the exception: a cycle, which only the garbage collector would free.
    """
    seen = set()
    left = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)  # a record in a log may have it, too
        each.__traceback__ = None
        left += [each.__cause__, each.__context__]
