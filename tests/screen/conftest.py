"""Fixtures shared by the tests of the screen."""

from screen_fixtures import fast_keys, stage  # noqa: F401
