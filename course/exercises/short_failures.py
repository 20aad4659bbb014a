"""Report what is missing or wrong in an exercise in one line, without a traceback.

`from None`: some hints are given while an exception is handled. Without it, that exception's
traceback would precede the hint.
"""

from typing import NoReturn

import pytest


def not_done(what: str) -> NoReturn:
    raise pytest.fail.Exception(f"not done yet: {what}", pytrace=False) from None


def not_right(what: str) -> NoReturn:
    raise pytest.fail.Exception(f"not right yet: {what}", pytrace=False) from None
