"""How an exercise says what is missing: in one line, without a traceback."""

from typing import NoReturn

import pytest


def not_done(what: str) -> NoReturn:
    pytest.fail(f"not done yet: {what}", pytrace=False)
