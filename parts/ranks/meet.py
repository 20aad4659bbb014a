"""How the processes that share a model find each other, and how each of them sees that a neighbour
is gone.

The problem. MLX connects them by itself, but it does not say for whom it waits, and while it does,
Python hears of no signal. Later it does not notice that another process is gone: a collective
operation may then wait for ever.

The way out. What started the processes has left word in the environment: who this one is, and, for
MLX's ring, a file with all addresses. So `join` can say what it waits for. The ring's connections
are ordinary TCP, and open files of this process. We find them by their addresses, and look at them
from the outside; not a byte of theirs is read or written.

Where next: `ranks.py`, for what the ranks then do.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import stat
import sys
from collections import Counter
from contextlib import suppress
from itertools import chain
from pathlib import Path

from parts import program
from parts.checks import one_line, shown
from parts.device.mlx import mx
from parts.files import ModelError
from parts.ranks.line import Line, keep_alive
from parts.ranks.ranks import ALONE, Ranks


@functools.cache
def join() -> Ranks:
    """The ranks that this process was started with. It waits until all have come, and says for
    whom."""
    backend = program.backend()
    if not backend:
        return ALONE
    nodes = read_hosts() if backend == "ring" else []
    if backend == "ring" and not nodes:
        return ALONE
    rank, size = program.rank(), len(nodes)
    for address in nodes[rank] if nodes else ():
        check_free(address)
    neighbours = dict.fromkeys((rank + step) % size for step in (-1, 1)) if nodes else ()
    awaited = (
        " and ".join(f"rank {other} ({nodes[other][0]})" for other in neighbours) or "the others"
    )
    print(f"nanobatch: rank {rank} waits for {awaited}", file=sys.stderr, flush=True)
    # While MLX waits, Python does nothing, so it hears of no signal. Meanwhile these end the
    # process by themselves.
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(ValueError):  # not in the main thread
            for each in (
                each for each, handler in handlers.items() if handler is not signal.SIG_IGN
            ):
                signal.signal(each, signal.SIG_DFL)
        group = mx.distributed.init(strict=True, backend=backend)
    except RuntimeError as error:
        raise ModelError(
            f"rank {rank} waited for {awaited} in vain ({one_line(error)}); start all ranks."
        ) from None
    finally:
        with suppress(ValueError):
            for each, handler in handlers.items():
                signal.signal(each, handler)
    return Ranks(group.rank(), group.size(), backend, find_lines(nodes, rank))


def read_hosts() -> list[list[str]]:
    """The addresses of each rank: `[["10.0.0.1:5000"], ["10.0.0.2:5000"]]`. Names become
    addresses."""
    path, rank = Path(os.environ["MLX_HOSTFILE"]), program.rank()
    try:
        text = path.read_text()
        nodes = json.loads(text or "[]")  # `mlx.launch -n 1` leaves it empty
        is_list = isinstance(nodes, list) and all(isinstance(node, list) and node for node in nodes)
        if text and not (
            is_list and len(nodes) > 1 and all(isinstance(each, str) for each in chain(*nodes))
        ):
            raise ValueError("it lists no addresses of two ranks or more")
        nodes = [[numeric(address) for address in node] for node in nodes]
        if twice := [address for address, count in Counter(chain(*nodes)).items() if count > 1]:
            raise ValueError(f"it lists {twice[0]} twice")
    except (OSError, ValueError) as error:
        raise ModelError(
            f'MLX_HOSTFILE {path} is no hostfile ({one_line(error)}): [["10.0.0.1:5000"], ...].'
        ) from None
    if rank >= len(nodes) > 0:
        raise ModelError(
            f"MLX_RANK = {rank}, but {path} lists {len(nodes)} ranks, from 0 to {len(nodes) - 1}."
        )
    return nodes


def numeric(address: str) -> str:
    """A connection shows its address in numbers, so by a name we would not find it."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        if host and 0 < int(port) < 65536:
            return f"{socket.gethostbyname(host)}:{int(port)}"
    raise ValueError(f"{shown(address)} is no address with a port")


def check_free(address: str) -> None:
    """Can this process listen here? MLX would share the port with another program of its own, and
    mix the two up."""
    host, _, port = address.rpartition(":")
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except OSError as error:
            which = f"rank {program.rank()} ({address})"
            raise ModelError(
                f"{which} cannot listen: {error.strerror}; change MLX_RANK or the hostfile."
            ) from None


def find_lines(nodes: list[list[str]], rank: int) -> list[Line]:
    """The ring's own connections among the open files of this process, by their addresses."""
    lines = []
    for file in sorted(map(int, os.listdir("/dev/fd"))) if nodes else []:
        with suppress(OSError):  # it is closed by now, or not connected
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                continue
            ours = socket.socket(fileno=os.dup(file))
            if ours.family == socket.AF_UNIX:
                continue
            near, far = (
                f"{host}:{port}" for host, port in (ours.getsockname()[:2], ours.getpeername()[:2])
            )
            left, right = (rank - 1) % len(nodes), (rank + 1) % len(nodes)
            if near in nodes[rank] or far in nodes[right]:
                other = left if near in nodes[rank] else right
                keep_alive(ours)
                lines.append(Line(other, nodes[other][0], ours))
    return lines
