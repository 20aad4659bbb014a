"""Public names from before 0.6: they still work, warn, and go in 0.7."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any


def warn(old: str, new: str) -> None:
    """`old` was used outside of the function that calls the caller."""
    message = f"{old} is now {new}; the old name goes in 0.7"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def renamed_options(**names: str) -> Callable[[Callable], Callable]:
    """A decorator: keyword arguments with these names are passed on with their new ones."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                warn(f"{old}=", f"{names[old]}=")
                options[names[old]] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate


def renamed_attributes(**names: str) -> Callable[[Any, str], Any]:
    """A `__getattr__` for a class with attributes that have new names."""

    def get(self: Any, name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn(name, names[name])
        return getattr(self, names[name])

    return get


def renamed_names(module: str, names: Mapping[str, Any]) -> Callable[[str], Any]:
    """A `__getattr__` for a module: the objects that had these names."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", names[name].__name__)
        return names[name]

    return get
