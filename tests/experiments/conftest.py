"""The experiments appear on the screen, so their tests share its fixtures."""

from screen_fixtures import fast_keys, stage  # noqa: F401
