"""Helpers for strings that arrive in pieces or that a model wrote, and for readable sizes."""

import json
from typing import Any


def json_or_none(text: str) -> Any:
    """Parse JSON; allow control characters in strings, which small models write. Return None if it is
    invalid."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def beginning(mark: str, text: str) -> str:
    """Return the longest suffix of the text that is a proper prefix of the mark."""
    first = len(text) - len(mark) + 1
    for place in range(max(first, 0), len(text)):
        if mark.startswith(text[place:]):
            return text[place:]
    return ""


def readable(nbytes: float) -> str:
    """Format a size: 12345678 -> '11.8 MiB'."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"
