"""Check numbers from outside, and make messages safe to print.

`whole` and `real` check numbers of Python code or JSON; `read_whole` and `read_real` parse text. They
raise a one-line ValueError with the setting's name, the value and the limits. Messages may quote text
from outside, so `shown` shortens a value, and `one_line` a message.
"""

import math
import re

# Characters that a terminal interprets: C0 and C1 control characters except tab and newline, and
# Unicode marks that change the text direction, separate lines or enclose annotations
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
)


class GrammarError(ValueError):
    """An answer cannot be continued within its request's grammar, or only too slowly."""


def whole(name: str, value: object, least: int, most: float = math.inf) -> int:
    """Return `value` if it is an int within the limits, else raise ValueError. A bool is rejected."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(_refusal(name, value, "a whole number", least, most))
    return int(value)


def real(name: str, value: object, least: float, most: float) -> float:
    """Return `value` as a float if it is an int or a float within the limits, else raise ValueError. NaN
    and bools are rejected."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(_refusal(name, value, "a number", least, most))
    return float(value)


def check_type(name: str, value: object, kind: type, what: str) -> None:
    """Raise ValueError if the value is not of this type. `what`: the type in the user's terms."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}; give {what}")


def read_whole(name: str, text: str, least: int, most: float = math.inf) -> int:
    try:
        return whole(name, int(text), least, most)
    except ValueError:
        raise ValueError(_refusal(name, text, "a whole number", least, most)) from None


def read_real(name: str, text: str, least: float, most: float) -> float:
    try:
        return real(name, float(text), least, most)
    except ValueError:
        raise ValueError(_refusal(name, text, "a number", least, most)) from None


def _refusal(name: str, value: object, what: str, least: float, most: float) -> str:
    limits = f"from {least:,} to {most:,}"
    if most == math.inf:
        limits = f"of at least {least:,}"
    return f"{name} = {shown(value)}, but it must be {what} {limits}"


def shown(value: object, longest: int = 40) -> str:
    """Return the `repr` of a value, shortened to fit a message."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format an int of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= longest else text[:longest] + "…"


def printable(text: str) -> str:
    """Return the text without control characters, so that prompts and answers cannot move the cursor."""
    return CONTROLS.sub("", text)


def one_line(message: object, longest: int = 400) -> str:
    """Return a message as one printable line. The middle of a long message is cut, because the remedy is at
    the end."""
    line = printable(" ".join(str(message).split()))
    # Some exceptions have no message, such as MemoryError
    if not line and isinstance(message, BaseException):
        return type(message).__name__
    return line if len(line) <= longest else f"{line[: longest // 2]} … {line[-longest // 2 :]}"
