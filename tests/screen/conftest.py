"""What the tests of the screen share."""

from screen_fixtures import fast_keys, stage  # noqa: F401
