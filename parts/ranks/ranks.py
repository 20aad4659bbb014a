"""One model over several processes: how they work together.

The problem. A model that does not fit one machine must be cut up. Here each layer is cut: every
process, called a *rank*, has some of the heads and some of the hidden numbers of the MLP, and
computes for all tokens what these contribute. Twice a layer the contributions are added up over all
ranks, by MLX's own `mx.distributed`. This is called tensor parallelism.

    x - norm - qkv of heads 0, 1 - attention - o of heads 0, 1 --+-- sum --- x      rank 0
                                                                 |
    x - norm - qkv of heads 2, 3 - attention - o of heads 2, 3 --+-- sum --- x      rank 1

Which heads and numbers a rank has stands in `parts/model/share.py`.

Rank 0 leads. It alone has requests, texts, the scheduler, the head and the sampler. Before each
step it tells the others the order, as plain numbers, and at its end the tokens. The others follow:
they hear an order, run it, and hear the next one. If each rank decided by itself what runs next, a
request that is cancelled a moment earlier on one of them would make their steps differ, and MLX
adds up the arrays of different steps without complaint.

The invariant: all ranks take part in the same collective operations in the same order. So there is
one operation for each order, then the sums, of which each depends on the one before, and one
operation for the tokens.

A rank that is lost is not survived, since its share of the model is gone. But it is noticed, though
MLX itself may wait for ever: every rank looks several times a second whether its neighbours'
connections still stand. If one does not, the leader ends all requests with an error, and each
process exits with the code `LOST`.

Where next: `meet.py`, how ranks find each other; `parts/model/load.py`, which takes a rank's share
of the weights; `Runner` in `nanobatch.py`, which tells and follows.
"""

from __future__ import annotations

import functools
import operator
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from parts.api.views import RanksView
from parts.checks import one_line
from parts.device.mlx import device_lock, device_stream, has_gpu, mx, readable
from parts.ranks.line import Line

LOST = 3  # the exit code of a process that another rank has left alone
LOOK_S = 0.2  # so often a rank looks after its neighbours
GOODBYE_S = 5.0  # so long the leader waits for its own goodbye, once a rank has left
GRACE_S = 1.0  # so long the leader's clients have to take their errors


class Heads(Protocol):
    """What is told of a rank's share of the model: its heads."""

    H: int  # query heads
    Hkv: int  # key heads


class Ranks:
    """This process among those that share a model. With one process, none of this does anything."""

    def __init__(self, rank: int = 0, size: int = 1, backend: str = "", lines: Sequence[Line] = ()):
        self.rank, self.size, self.backend = rank, size, backend
        self.room = 0  # how many numbers an order can have
        # The leader's: ends all requests with this error
        self.told: Callable[[str], None] | None = None
        self.view = RanksView()
        self._lines, self._ends = lines, threading.Lock()
        self._hangs_together = size > 1  # until the end, the loss of a rank is the loss of all
        # Then a rank that is gone has heard of the end, or will never hear of it
        self._takes_leave = False
        # Where the device is a GPU, most backends move numbers by way of the processor.
        self._stream = (
            mx.new_thread_unsafe_stream(mx.cpu)
            if has_gpu() and backend not in ("", "nccl")
            else None
        )
        if lines:
            threading.Thread(target=self._look_after, name="ranks", daemon=True).start()

    @property
    def leads(self) -> bool:
        """Are there others who follow?"""
        return self.size > 1 and self.rank == 0

    # --- what all ranks do together, inside of a graph

    def sum(self, x: mx.array) -> mx.array:
        """The sum over all ranks, in the order of the ranks.

        subtle: with three ranks or more, a backend adds in an order that depends on a number's
        place in the array, so a request's bits would depend on its company. Two numbers have the
        same sum in either order.
        """
        if self.size == 1:
            return x
        if self.size == 2:
            return mx.distributed.all_sum(x, stream=self._stream)
        return functools.reduce(
            operator.add, mx.distributed.all_gather(x[None], stream=self._stream)
        )

    def first(self, x: mx.array) -> mx.array:
        """What rank 0 has, whole numbers: the others add zeros."""
        if self.size == 1:
            return x
        return mx.distributed.all_sum(mx.zeros_like(x) if self.rank else x, stream=self._stream)

    # --- what they do together, and wait for

    def gather(self, *numbers: int) -> list[list[int]]:
        """The numbers of each rank."""
        if self.size == 1:
            return [list(numbers)]
        with device_lock, device_stream():
            return mx.distributed.all_gather(
                mx.array([numbers], mx.int32), stream=self._stream
            ).tolist()

    def least(self, *numbers: int) -> list[int]:
        """Of each number the least that any rank has."""
        return [min(each) for each in zip(*self.gather(*numbers), strict=True)]

    # --- orders

    def settle(self, c: Heads, told: Callable[[str], None]) -> str:
        """The model is loaded. From here on, `told` ends the leader's requests if a rank is lost.
        Says what this is."""
        if self.size == 1:
            return ""
        self.told = told if self.leads else None
        self._hangs_together = True
        memory = tuple(1024 * kib for (kib,) in self.gather(mx.get_active_memory() // 1024))
        self.view = RanksView(self.backend, memory)
        holds = f"{c.H} query and {c.Hkv} key heads in {readable(memory[self.rank])}"
        return f"; rank {self.rank} of {self.size} by {self.backend}: {holds}"

    def tell(self, order: Sequence[int]) -> None:
        """The leader: what the others do next. It does not wait until they have heard it."""
        assert len(order) < self.room, (len(order), self.room)
        mx.async_eval(
            self.first(mx.array([1, *order, *[0] * (self.room - 1 - len(order))], mx.int32))
        )

    def hear(self) -> list[int] | None:
        """The others: the next order, None if there will be none.

        While nothing comes, a rank sleeps. Inside of a collective operation it would look for
        numbers all the time.
        """
        if self._lines:
            waiting = select.poll()
            for line in self._lines:
                waiting.register(line.socket, select.POLLIN)
            waiting.poll()
        said, *order = self.first(mx.zeros(self.room, mx.int32)).tolist()
        return order if said else None

    def follow(self, run: Callable[[], None], summary: str) -> int:
        """Run orders to their end, and answer with an exit code. Ctrl-C is for the leader, which
        tells the others."""
        if self.rank == 0:
            raise RuntimeError("rank 0 leads; the others follow")
        print(f"nanobatch: {summary}; follows rank 0", file=sys.stderr, flush=True)
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            run()
        except BaseException as error:
            self.fail(error)
        self._hangs_together = False
        return 0

    def leave(self) -> None:
        """The end, as planned: the leader tells the others. They have left when they have heard of
        it."""
        ends, self._hangs_together = self._hangs_together, False
        if ends and self.leads and self.room:
            self._takes_leave = True
            with suppress(RuntimeError):  # a rank is gone before its time
                mx.eval(self.first(mx.zeros(self.room, mx.int32)))
            self._takes_leave = False

    # --- the end, not as planned

    def fail(self, error: BaseException) -> None:
        """An exception came out of a step. The others are in the middle of it, so this is the end
        of all ranks."""
        if self.size > 1:
            gone, is_ctrl_c = self._gone(), isinstance(error, KeyboardInterrupt)
            said = one_line(f"{type(error).__name__}: {error}")
            self._end(
                "interrupted in a step" if is_ctrl_c else gone or said,
                130 if is_ctrl_c else LOST if gone else 1,
            )

    def _look_after(self) -> None:
        """In a thread of its own: is a neighbour gone?"""
        while True:
            time.sleep(LOOK_S)
            if self._gone():
                # It may have heard of the end a moment before this rank.
                time.sleep(GOODBYE_S if self._takes_leave else LOOK_S)
                if gone := self._gone():
                    self._end(gone, LOST)

    def _gone(self) -> str | None:
        for line in self._lines:
            # After the goodbye each may leave.
            if line.is_mute() or ((self._hangs_together or self._takes_leave) and line.is_gone()):
                here = f"rank {line.rank} ({line.address})"
                return f"{here} is gone, and with it a share of the model; start all ranks again"
        return None

    def _end(self, why: str, code: int) -> NoReturn:
        """Tell all who wait, then leave. Not by `sys.exit`, because the device may wait for the
        lost rank for ever."""
        with self._ends:  # never released
            try:
                with suppress(OSError):  # what started this process may be gone, too
                    print(
                        f"nanobatch: rank {self.rank} of {self.size}: {why}",
                        file=sys.stderr,
                        flush=True,
                    )
                if self.told:
                    self.told(why)
                    time.sleep(GRACE_S)
                sys.stdout.flush()
            finally:
                os._exit(code)


ALONE = Ranks()
