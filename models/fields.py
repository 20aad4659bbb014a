"""Typed access to the fields of a config.json.

A missing, mistyped or out-of-range field raises a one-line `ModelError` with the file, the field and its
value.
"""

import re
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from base.untrusted_files import ModelError
from base.validation import real, shown, whole


class Fields:
    def __init__(self, path: Path, values: dict):
        self.path = path
        self.get = values.get

    def number(self, key: str, default=None, least=1) -> int:
        return self._checked(whole, key, default, least)

    def real(self, key: str, default=None, least=1e-6) -> float:
        return self._checked(real, key, default, least)

    def _checked(self, check, key, default, least):
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.path} lacks {key!r}; download it again.")
        if check is whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            return check(f"{self.path}: {key}", value, least, 2**62 - 1)
        except ValueError as error:
            raise ModelError(f"{error}.") from None

    def refuse(self, key: str, value, supported) -> ModelError:
        said = f"{self.path}: {key} = {shown(value)} is not supported. Supported: {', '.join(supported)}."
        return ModelError(said, f"{key} {shown(value)} not supported")


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the known name most similar to an unknown one, followed by "is".

    It begins with the same word and shares the longest prefix. Of several such names, the highest
    version wins. Empty if no name begins with that word.
    """
    stem = re.match(r"[a-z]+", name) if isinstance(name, str) else None
    near = [each for each in known if stem and each.startswith(stem[0])]

    def nearness(each: str) -> tuple[int, list[str], int]:
        alike = [*takewhile(lambda pair: pair[0] == pair[1], zip(each, name, strict=False))]
        return len(alike), re.findall(r"\d+", each), -len(each)

    return f"{max(near, key=nearness)} is" if near else ""
