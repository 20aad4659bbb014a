"""One model over several processes: tensor parallelism.

The problem. A model that does not fit on one machine must be divided. Here each layer is divided: every
process, called a *rank*, has some of the heads and some of the hidden units of the MLP, and computes
their contribution for all tokens. Twice per layer the contributions are summed over all ranks, by MLX's
`mx.distributed`.

    x - norm - qkv of heads 0, 1 - attention - o of heads 0, 1 --+-- sum --- x      rank 0
                                                                 |
    x - norm - qkv of heads 2, 3 - attention - o of heads 2, 3 --+-- sum --- x      rank 1

`models/sharding.py` decides which heads and units a rank has.

Rank 0 leads. Only rank 0 has requests, texts, the scheduler, the head and the sampler. Before each step
it broadcasts the batch as plain numbers, and at the end of the step the tokens. The other ranks receive
a batch, run it, and receive the next one. If each rank scheduled its own steps, a cancel that arrives a
moment earlier on one rank would make their steps differ, and MLX would sum the arrays of different
steps without an error.

The invariant: all ranks take part in the same collective operations in the same order. A step performs
the sums, each of which depends on the previous one, one operation for each chunk that yields no token
(to check that its rows are finite on every rank), and one for the tokens.

Batches do not go through MLX. Each rank has a TCP connection to the next rank, and the last rank to the
first:

    rank 0 --- batch ---> rank 1 --- batch ---> rank 2 --- (nothing, the goodbye, a loss) ---> rank 0

The loss of a rank stops all ranks, because its shard of the model is gone. MLX itself may wait forever,
but the loss is noticed, because the connection to the next rank closes. The next rank passes the news
on and exits with the code `LOST`, and so does every rank that receives the news. The leader first ends
all requests with an error.

Where next: `rendezvous.py`, how ranks find each other; `models/load.py`, which loads a rank's shard of
the weights; `Runner` in `runner.py`, which broadcasts and receives.
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
from typing import TYPE_CHECKING, Any, NoReturn

from base.validation import one_line
from distributed.channel import Message, beat, messages_of, send
from kernels.device import device_lock, device_stream, has_gpu, mx, readable

if TYPE_CHECKING:
    from models.config import Config

LOST = 3  # exit code after the loss of another rank
NEWS_S = 0.5  # after an exception, wait this long for news of a lost rank
GRACE_S = 2.0  # time for the leader's clients to receive their errors


class Ranks:
    """This process's membership in the group that shares a model. With a single process, collective
    operations return their own input, and nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1, backend: str = ""):
        self.rank = rank
        self.size = size
        self.leads = size > 1 and rank == 0  # True on the leader of several ranks
        self.backend = backend
        # Called with an error to end all requests; set on the leader only
        self.end_requests: Callable[[str], None] | None = None
        self.memory: tuple[int, ...] = ()  # bytes of weights and slab on each rank
        self._next: Sequence[socket.socket] = ()  # connections to the next rank
        self._received = queue.SimpleQueue()  # messages
        self._ends = threading.Lock()
        self._fails_together = size > 1  # until the goodbye, the loss of one rank stops all ranks
        # With a GPU, most backends transfer arrays through host memory
        self._stream = (
            mx.new_thread_unsafe_stream(mx.cpu)
            if has_gpu() and backend not in ("", "nccl")
            else None
        )

    # --- collective operations inside a graph

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum over all ranks, added in the order of the ranks.

        subtle: with three ranks or more, a backend's `all_sum` adds in an order that depends on a
        number's position in the array, so a request's bits would depend on its batch. Two numbers have
        the same sum in either order.
        """
        if self.size == 1:
            return x
        if self.size == 2:
            return mx.distributed.all_sum(x, stream=self._stream)
        return functools.reduce(
            operator.add, mx.distributed.all_gather(x[None], stream=self._stream)
        )

    def first(self, x: mx.array) -> mx.array:
        """Return rank 0's integers on every rank: a sum, to which the other ranks add zeros."""
        if self.size == 1:
            return x
        return mx.distributed.all_sum(mx.zeros_like(x) if self.rank else x, stream=self._stream)

    # --- collective operations that wait for their result

    def gather(self, *numbers: int) -> list[list[int]]:
        """Gather the numbers of all ranks, in the order of the ranks."""
        if self.size == 1:
            return [list(numbers)]
        own = mx.array([numbers], mx.int32)
        with device_lock, device_stream():
            try:
                return mx.distributed.all_gather(own, stream=self._stream).tolist()
            except RuntimeError:  # a backend may notice a lost rank before we do
                time.sleep(NEWS_S)  # let `_listen` report the loss and exit
                raise

    # --- batches

    def settle(self, c: Config, end_requests: Callable[[str], None]) -> str:
        """Exchange memory sizes, once the model is loaded. Return a description of this rank.

        From now on, if a rank is lost, the leader calls `end_requests` with the reason."""
        if self.size == 1:
            return ""
        self.end_requests = end_requests if self.leads else None
        self._fails_together = True
        used = self.gather(mx.get_active_memory() // 1024)
        self.memory = tuple(1024 * kib for (kib,) in used)
        holds = f"{c.H} query and {c.Hkv} key heads in {readable(self.memory[self.rank])}"
        return f"; rank {self.rank} of {self.size} by {self.backend}: {holds}"

    def broadcast(self, message: Message) -> None:
        """Send a message to the next rank, which passes it on: a batch, the goodbye (None), or the reason
        to exit. Does not wait for the ranks."""
        send(self._next[0], message)

    def receive(self) -> list[Any] | None:
        """Wait for the leader's next batch. Return None after the goodbye."""
        batch = self._received.get()
        if batch is None:  # the ranks before this one have finished
            self.broadcast(None)
        return batch

    def follow(self, run: Callable[[], None], summary: str) -> int:
        """Run batches until the goodbye, and return an exit code. Ctrl-C is ignored: the leader handles it."""
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
        """Shut down: the leader sends the goodbye and waits until it comes back. Each rank passes it on
        when it has finished."""
        if self.leads and self._fails_together:
            self.broadcast(None)
            self._received.get()

    # --- connections

    def attach(
        self, before: str, from_before: Sequence[socket.socket], to_next: Sequence[socket.socket]
    ) -> None:
        """Use these connections from the rank `before` and to the next rank. Batches are sent on the first
        one."""
        self._next = to_next
        for connection in to_next:
            threading.Thread(target=beat, args=[connection], daemon=True).start()
        for connection in from_before:
            threading.Thread(target=self._listen, args=[connection, before], daemon=True).start()

    def _listen(self, connection: socket.socket, before: str) -> None:
        """Receive messages from the previous rank, in a thread. A batch is passed on immediately, a goodbye
        by `receive`, and the loss of a rank by `_end`."""
        why = f"{before} is gone, and with it a shard of the model; start all ranks again"
        for message in messages_of(connection):
            if isinstance(message, str):
                self._end(message, LOST)
            if message is None:
                self._fails_together = False
            elif self.rank + 1 < self.size:
                self.broadcast(message)
            self._received.put(message)
        if self._fails_together:
            self._end(why, LOST)

    # --- failures

    def fail(self, error: BaseException) -> None:
        """Exit after an exception in a step. The other ranks are in the middle of the step, so they exit,
        too."""
        if self.size == 1:
            return
        if isinstance(error, KeyboardInterrupt):
            self._end("interrupted in a step", 130)
        time.sleep(NEWS_S)  # if a rank was lost, `_listen` reports it now, and exits
        self._end(one_line(f"{type(error).__name__}: {error}"), 1)

    def _end(self, why: str, code: int) -> NoReturn:
        """Report a lost rank to the next one, and the error to all clients, then exit. `sys.exit` would not do,
        because the device may wait for the lost rank forever."""
        with self._ends:  # never released
            try:
                with suppress(OSError):  # the program that started this process may be gone, too
                    print(
                        f"nanobatch: rank {self.rank} of {self.size}: {why}",
                        file=sys.stderr,
                        flush=True,
                    )
                if code == LOST and self.size > 2:
                    self.broadcast(why)
                if self.end_requests:
                    self.end_requests(why)
                    time.sleep(GRACE_S)
                sys.stdout.flush()
            finally:
                os._exit(code)


ALONE = Ranks()
