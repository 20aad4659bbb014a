"""How far a prompt has been read, how fast, and when it will be done.

The time left comes from the prices of tokens (`step_time.py`), because neither rate so far says it: later
tokens cost more, and a prompt that is read beside others will be read faster when they are done.
Cached tokens count as done, but not in the rate.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

LONG_S = 2.0  # a prompt that takes longer than this is shown
RECENT = 16  # chunks: the rate is measured over the newest ones


class PrefillProgress(NamedTuple):
    """How far one prompt has been read."""

    done: int = 0  # prompt tokens with rows in the slot, cached ones included
    total: int = 0  # tokens of the prompt
    cached: int = 0  # of those: taken over from an earlier prompt
    seconds: float = 0.0  # since it got its slot
    tokens_per_s: float | None = None  # over the newest chunks
    left_s: float | None = None  # until the last token of the prompt is read; None: not known yet

    @property
    def is_long(self) -> bool:
        """True while it is being read, if that takes longer than two seconds."""
        return self.done < self.total and self.seconds + (self.left_s or 0.0) > LONG_S

    @property
    def words(self) -> str:
        """ "11,339 of 18,813 tokens, 182 tokens/s, about 6 min" """
        words = f"{self.done:,} of {self.total:,} tokens"
        return f"{words}, {self.pace}" if self.pace else words

    @property
    def pace(self) -> str:
        """ "182 tokens/s, about 6 min"; less as long as that is not known."""
        if self.tokens_per_s is None:
            return ""
        digits = 1 if self.tokens_per_s < 10 else 0
        rate = f"{self.tokens_per_s:,.{digits}f} tokens/s"
        return f"{rate}, about {self.left}" if self.left else rate

    @property
    def left(self) -> str:
        """The time left, rounded up, as coarse as the estimate: "40 s", "6 min", "2.5 h"."""
        seconds = self.left_s
        if seconds is None:
            return ""
        if seconds < 20:
            return f"{max(1, math.ceil(seconds))} s"
        if seconds < 90:
            return f"{10 * math.ceil(seconds / 10)} s"
        if seconds < 90 * 60:
            return f"{math.ceil(seconds / 60)} min"
        return f"{math.ceil(seconds / 360) / 10} h"


UNREAD = PrefillProgress()


class PrefillClock:
    """When each of the newest chunks of one prompt was done."""

    def __init__(self) -> None:
        self.left_s: float | None = None  # after the newest chunk, estimated
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)  # (moment, tokens done)

    def record_chunk(self, start: int, stop: int, began: float, ended: float) -> None:
        """Record that the chunk prompt[start:stop] was read."""
        if not self._marks or self._marks[-1][1] != start:  # the first one, or read once more
            self._marks.clear()
            self._marks.append((began, start))
        self._marks.append((ended, stop))

    def progress(self, total: int, cached: int, admitted: float, now: float) -> PrefillProgress:
        """How far the prompt has been read at `now`. `admitted`: when the request got its slot."""
        seconds = max(0.0, now - admitted)
        if not self._marks:
            return PrefillProgress(cached, total, cached, seconds)
        (since, first), (last, done) = self._marks[0], self._marks[-1]
        if last <= since:
            return PrefillProgress(done, total, cached, seconds)
        left = self.left_s
        if left is not None:  # a chunk has been under way since then
            left = max(0.0, left - max(0.0, now - last))
        return PrefillProgress(done, total, cached, seconds, (done - first) / (last - since), left)
