"""The progress of a prompt's prefill: tokens done, rate, and time left.

The time left is estimated from the cost of the remaining tokens (`step_time.py`). The rate so far does not
predict it: later tokens cost more, and a prefill gets faster when other prefills finish. Cached tokens count
as done, but are excluded from the rate.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

LONG_S = 2.0  # progress is shown for prompts that take longer than this
RECENT = 16  # number of newest chunks over which the rate is measured


class PrefillProgress(NamedTuple):
    """The progress of one prompt's prefill."""

    done: int = 0  # prompt tokens with rows in the slot, including cached ones
    total: int = 0  # tokens in the prompt
    cached: int = 0  # tokens reused from an earlier prompt
    seconds: float = 0.0  # since the request was admitted to its slot
    tokens_per_s: float | None = None  # over the newest chunks
    left_s: float | None = None  # estimated seconds until the prefill is complete; None: unknown

    @property
    def is_long(self) -> bool:
        """True during a prefill that takes longer than LONG_S in total."""
        return self.done < self.total and self.seconds + (self.left_s or 0.0) > LONG_S

    @property
    def words(self) -> str:
        """The progress in words: "11,339 of 18,813 tokens, 182 tokens/s, about 6 min"."""
        words = f"{self.done:,} of {self.total:,} tokens"
        return f"{words}, {self.pace}" if self.pace else words

    @property
    def pace(self) -> str:
        """The rate and time left: "182 tokens/s, about 6 min". Unknown parts are left out."""
        if self.tokens_per_s is None:
            return ""
        digits = 1 if self.tokens_per_s < 10 else 0
        rate = f"{self.tokens_per_s:,.{digits}f} tokens/s"
        return f"{rate}, about {self.left}" if self.left else rate

    @property
    def left(self) -> str:
        """The time left, rounded up coarsely, because it is an estimate: "40 s", "6 min", "2.5 h"."""
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
    """Records when the newest chunks of a prompt were computed."""

    def __init__(self) -> None:
        self.left_s: float | None = None  # estimated seconds left after the newest chunk
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)  # (time, tokens done)

    def record_chunk(self, start: int, stop: int, began: float, ended: float) -> None:
        """Record that the chunk prompt[start:stop] was computed."""
        if not self._marks or self._marks[-1][1] != start:  # the first chunk, or a restart
            self._marks.clear()
            self._marks.append((began, start))
        self._marks.append((ended, stop))

    def progress(self, total: int, cached: int, admitted: float, now: float) -> PrefillProgress:
        """Return the progress at the time `now`. `admitted`: when the request got its slot."""
        seconds = max(0.0, now - admitted)
        if not self._marks:
            return PrefillProgress(cached, total, cached, seconds)
        (since, first), (last, done) = self._marks[0], self._marks[-1]
        if last <= since:
            return PrefillProgress(done, total, cached, seconds)
        left = self.left_s
        if left is not None:  # subtract the time since the newest chunk
            left = max(0.0, left - max(0.0, now - last))
        return PrefillProgress(done, total, cached, seconds, (done - first) / (last - since), left)
