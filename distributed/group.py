"""One model over several processes: how they work together.

The problem. A model that does not fit one machine must be cut up. Here each layer is cut: every
process, called a *rank*, has some of the heads and some of the hidden numbers of the MLP, and
computes for all tokens what these contribute. Twice a layer the contributions are added up over all
ranks, by MLX's own `mx.distributed`. This is called tensor parallelism.

    x - norm - qkv of heads 0, 1 - attention - o of heads 0, 1 --+-- sum --- x      rank 0
                                                                 |
    x - norm - qkv of heads 2, 3 - attention - o of heads 2, 3 --+-- sum --- x      rank 1

Which heads and numbers a rank has stands in `models/sharding.py`.

Rank 0 leads. It alone has requests, texts, the scheduler, the head and the sampler. Before each
step it tells the others the order, as plain numbers, and at its end the tokens. The others follow:
they hear an order, run it, and hear the next one. If each rank decided by itself what runs next, a
request that is cancelled a moment earlier on one of them would make their steps differ, and MLX
adds up the arrays of different steps without complaint.

The invariant: all ranks take part in the same collective operations in the same order. A step has
the sums, of which each depends on the one before, one for each chunk that yields no token (are its
rows finite on every rank?), and one operation for the tokens.

Orders do not go through MLX. Each rank has a line of our own to the next one, and the last one to
the first:

    rank 0 --- order ---> rank 1 --- order ---> rank 2 --- (nothing, the goodbye, a loss) ---> rank 0

A rank that is lost is not survived, since its share of the model is gone. But it is noticed, though
MLX itself may wait for ever: its line to the next rank ends. That rank passes the news on and exits
with the code `LOST`, and so does each that hears of it. The leader first ends all requests with an
error.

Where next: `meet.py`, how ranks find each other; `models/load.py`, which takes a rank's share
of the weights; `Runner` in `runner.py`, which tells and follows.
"""

from __future__ import annotations

import functools
import operator
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from distributed.channel import Message, beat, hear, say
from kernels.mlx import device_lock, device_stream, has_gpu, mx, readable
from runtime.snapshot import RanksView
from runtime.validation import one_line

LOST = 3  # the exit code of a process that another rank has left alone
NEWS_S = 0.5  # so long after an exception a rank waits for news of a lost one
GRACE_S = 2.0  # so long the leader's clients have to take their errors


class Heads(Protocol):
    """What is told of a rank's share of the model: its heads."""

    H: int  # query heads
    Hkv: int  # key heads


class Ranks:
    """This process among those that share a model. With one process, none of this does anything."""

    def __init__(self, rank: int = 0, size: int = 1, backend: str = ""):
        self.rank = rank
        self.size = size
        self.backend = backend
        # The leader's: ends all requests with this error
        self.told: Callable[[str], None] | None = None
        self.view = RanksView()
        self._after: Sequence[socket.socket] = ()  # lines to the next rank
        self._heard = queue.SimpleQueue()  # messages
        self._ends = threading.Lock()
        self._hangs_together = size > 1  # until the goodbye, the loss of a rank is the loss of all
        # Where the device is a GPU, most backends move numbers by way of the processor.
        self._stream = (
            mx.new_thread_unsafe_stream(mx.cpu)
            if has_gpu() and backend not in ("", "nccl")
            else None
        )

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
        own = mx.array([numbers], mx.int32)
        with device_lock, device_stream():
            try:
                return mx.distributed.all_gather(own, stream=self._stream).tolist()
            except RuntimeError:  # a backend may notice a lost rank before we do
                time.sleep(NEWS_S)  # then `_listen` ends this process meanwhile
                raise

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

    def tell(self, message: Message) -> None:
        """What the next rank is to know, and those behind it: the leader's order, the goodbye
        (None), or why all ranks end. It does not wait until they have heard it."""
        say(self._after[0], message)

    def hear(self) -> list[Any] | None:
        """The others: the next order, None if there will be none. While nothing comes, a rank
        sleeps."""
        order = self._heard.get()
        if order is None:  # the ranks up to this one have done all they were told
            self.tell(None)
        return order

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
        return 0

    def leave(self) -> None:
        """The end, as planned: a goodbye goes around. Each passes it on when it has done all it was
        told."""
        if self.leads and self._hangs_together:
            self.tell(None)
            self._heard.get()

    # --- lines

    def hold(
        self, before: str, answered: Sequence[socket.socket], called: Sequence[socket.socket]
    ) -> None:
        """Lines from the rank `before`, and to the next one. Orders take the first."""
        self._after = called
        for line in called:
            threading.Thread(target=beat, args=[line], daemon=True).start()
        for line in answered:
            threading.Thread(target=self._listen, args=[line, before], daemon=True).start()

    def _listen(self, line: socket.socket, before: str) -> None:
        """In a thread of its own: what comes from the rank before. An order is passed on at once, a
        goodbye by `hear`, the loss of a rank on the way out."""
        why = f"{before} is gone, and with it a share of the model; start all ranks again"
        for message in hear(line):
            if isinstance(message, str):
                self._end(message, LOST)
            if message is None:
                self._hangs_together = False
            elif self.rank + 1 < self.size:
                self.tell(message)
            self._heard.put(message)
        if self._hangs_together:
            self._end(why, LOST)

    # --- the end, not as planned

    def fail(self, error: BaseException) -> None:
        """An exception came out of a step. The others are in the middle of it, so this is the end
        of all ranks."""
        if self.size == 1:
            return
        if isinstance(error, KeyboardInterrupt):
            self._end("interrupted in a step", 130)
        time.sleep(NEWS_S)  # if the reason is a lost rank, `_listen` ends this process meanwhile
        self._end(one_line(f"{type(error).__name__}: {error}"), 1)

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
                if code == LOST and self.size > 2:
                    self.tell(why)
                if self.told:
                    self.told(why)
                    time.sleep(GRACE_S)
                sys.stdout.flush()
            finally:
                os._exit(code)


ALONE = Ranks()
