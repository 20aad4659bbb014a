"""How the processes that share a model find each other.

The problem. MLX connects them by itself, but it does not say for whom it waits, and while it does,
Python hears of no signal. Nor does it lend its connections, and the ranks need some of their own:
for orders, and to notice that a neighbour is gone.

The way out. What started the processes has left word in the environment: who this one is, and, for
MLX's ring, a file with all addresses. So `join` can say what it waits for. Once MLX has connected
all, each rank calls the next one at the same addresses, and is called by the one before.

Where next: `line.py`, for these connections; `ranks.py`, for what the ranks then do.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import socket
import sys
from collections import Counter
from contextlib import suppress
from itertools import chain
from pathlib import Path

from parts import program
from parts.checks import one_line, shown
from parts.device.mlx import mx
from parts.files import ModelError
from parts.ranks.line import answer, call
from parts.ranks.ranks import ALONE, Ranks


@functools.cache
def join() -> Ranks:
    """The ranks that this process was started with. It waits until all have come, and says for
    whom."""
    backend = program.backend()
    nodes = read_hosts() if backend == "ring" else []
    if not backend or (backend == "ring" and not nodes):
        return ALONE
    rank = program.rank()
    own = nodes[rank] if nodes else [f"{own_host()}:0"]
    for address in own:
        bound(address).close()
    others = [f"rank {n} ({node[0]})" for n, node in enumerate(nodes) if n != rank]
    awaited = " and ".join(others) or "the others"
    print(f"nanobatch: rank {rank} waits for {awaited}", file=sys.stderr, flush=True)
    # While MLX waits, Python does nothing, so it hears of no signal. Meanwhile these end the
    # process by themselves.
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(ValueError):  # not in the main thread
            for each, handler in handlers.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(each, signal.SIG_DFL)
        group = mx.distributed.init(strict=True, backend=backend)
        ranks = Ranks(group.rank(), group.size(), backend)
        tie(ranks, own, nodes)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"rank {rank} waited for {awaited} in vain ({one_line(error)}); start all ranks."
        ) from None
    finally:
        with suppress(ValueError):
            for each, handler in handlers.items():
                signal.signal(each, handler)
    return ranks


def read_hosts() -> list[list[str]]:
    """The addresses of each rank: `[["10.0.0.1:5000"], ["10.0.0.2:5000"]]`. Names become
    addresses."""
    path, rank = Path(os.environ["MLX_HOSTFILE"]), program.rank()
    try:
        text = path.read_text()
        # `mlx.launch -n 1` leaves it empty
        nodes = [[numeric(address) for address in node] for node in json.loads(text or "[]")]
        if text and (len(nodes) < 2 or not all(nodes)):
            raise ValueError("it lists no addresses of two ranks or more")
        if twice := [address for address, count in Counter(chain(*nodes)).items() if count > 1]:
            raise ValueError(f"it lists {twice[0]} twice")
    except (OSError, TypeError, ValueError) as error:
        raise ModelError(
            f'MLX_HOSTFILE {path} is no hostfile ({one_line(error)}): [["10.0.0.1:5000"], ...].'
        ) from None
    if rank >= len(nodes) > 0:
        raise ModelError(
            f"MLX_RANK = {rank}, but {path} lists {len(nodes)} ranks, from 0 to {len(nodes) - 1}."
        )
    return nodes


def numeric(address: str) -> str:
    """MLX wants an address in numbers."""
    host, _, port = str(address).rpartition(":")
    with suppress(OSError, ValueError):
        if host and 0 < int(port) < 65536:
            return f"{socket.gethostbyname(host)}:{int(port)}"
    raise ValueError(f"{shown(address)} is no address with a port")


def bound(address: str) -> socket.socket:
    """Can this process listen here? MLX would share the port with another program of its own, and
    mix the two up."""
    host, _, port = address.rpartition(":")
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, int(port)))
    except OSError as error:
        which = f"rank {program.rank()} ({address})"
        raise ModelError(
            f"{which} cannot listen: {error.strerror}; change MLX_RANK or the hostfile."
        ) from None
    return server


def tie(ranks: Ranks, own: list[str], nodes: list[list[str]]) -> None:
    """A line to the next rank for each of its addresses, and so from the rank before.

    `own`: where this rank listens. MLX has left the ports of the hostfile by now. Without a
    hostfile (`nodes`) the system picks a port.
    The first words on a line are a secret of the rank that listens. By way of MLX it has told the
    ranks alone, so a stranger cannot take a rank's place.
    """
    before = (ranks.rank - 1) % ranks.size
    after = (ranks.rank + 1) % ranks.size
    servers = [bound(address) for address in own]
    for server in servers:
        server.listen()
    here = "{}:{}".format(*servers[0].getsockname())
    secret = f"{here:21} {secrets.token_hex()}".encode()  # as long on every rank
    told = [bytes(numbers) for numbers in ranks.gather(*secret)]  # from here on all listen
    nodes = nodes or [each.decode().split()[:1] for each in told]
    called = [call(address, told[after]) for address in nodes[after]]
    answered = [answer(server, secret) for server in servers]
    ranks.hold(f"rank {before} ({nodes[before][0]})", answered, called)


def own_host() -> str:
    """Where the others reach this machine: the address by which it reaches their meeting point, or
    any other network."""
    point = os.environ.get("MLX_JACCL_COORDINATOR") or os.environ.get("NCCL_HOST_IP")
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as way:
        # Nothing is sent: the system only chooses the way
        way.connect(((point or "192.0.2.1").partition(":")[0], 9))
        return way.getsockname()[0]
    return "127.0.0.1"
