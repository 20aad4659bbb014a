"""How the processes that share a model find and authenticate each other.

The problem. MLX connects the ranks itself, and accepts the first connection as its peer, so after a
port scan or a browser's request the ranks never connect. It does not report which rank it waits for,
and while it waits, Python handles no signals. MLX does not share its connections either, and the ranks
need connections for batches and to notice the loss of a neighbour.

The solution. The launcher passes this process's rank in the environment and, for MLX's ring, a file
with all addresses. The ranks connect at these addresses, each to the next one, and prove to each other
that they know the key (`channel.py`). Only then is MLX's ring created, and it never uses the network
(`tie_ring`): each process connects its ring to itself, on the loopback interface, and then replaces
MLX's connections with the authenticated ones.

    connections that MLX opens                   after the replacement

    this machine --> rank 0 --> this machine     rank 1 ==> rank 0 ==> rank 1
    this machine --> rank 1 --> this machine     rank 0 ==> rank 1 ==> rank 0

So nothing listens at the addresses once the model is loaded. With another backend, MLX connects the
ranks in its own way, and the ranks open their connections afterwards.

Where next: `channel.py`, the connections; `group.py`, how the ranks use them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path

from base.untrusted_files import ModelError
from base.validation import one_line, shown
from distributed import environment
from distributed.channel import accept, connect
from distributed.group import ALONE, Ranks
from kernels.device import mx

PYTHON = [sys.executable or "python3", "-I", "-S"]  # with the standard library only
MEET_S = 30  # how long a rank waits for its neighbours
LOOPBACK = "127.0.0.1"


@functools.cache
def join() -> Ranks:
    """Connect to the ranks that were started with this process, and print which ranks it waits for. Return
    `ALONE` for a single process."""
    backend = environment.backend()
    nodes = read_hosts() if backend == "ring" else []
    if not backend or (backend == "ring" and not nodes):
        return ALONE
    rank = environment.rank()
    own = nodes[rank] if nodes else [f"{own_host()}:0"]
    servers = [listens(address) for address in own]
    others = [named(n, nodes) for n in range(len(nodes)) if n != rank]
    awaited = " and ".join(others) or "the others"
    print(f"nanobatch: rank {rank} waits for {awaited}", file=sys.stderr, flush=True)
    try:
        return meet(rank, nodes, servers) if nodes else meet_by(backend, servers)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"rank {rank} gave up waiting for {awaited} ({one_line(error)}); start all ranks."
        ) from None


def meet(rank: int, nodes: list[list[str]], servers: list[socket.socket]) -> Ranks:
    """Connect with MLX's ring: open our own connections first, then create the ring."""
    size = len(nodes)
    word = os.environ.get("NANOBATCH_RING_KEY", "")
    key = hashlib.sha256(json.dumps([nodes, word]).encode()).digest()
    tied = tie(rank, nodes, servers, key, key, ["batches", "ring"])
    with ends_by_signals():
        tie_ring(rank, size, *tied["ring"])
        ranks = Ranks(rank, size, "ring")
        ranks.attach(named(rank - 1, nodes), *tied["batches"])
        if ranks.gather(rank) != [[n] for n in range(size)]:  # also waits for all ranks
            raise RuntimeError("MLX's ring numbers the ranks in another order")
    return ranks


def tie_ring(
    rank: int,
    size: int,
    before: Sequence[socket.socket],
    after: Sequence[socket.socket],
) -> None:
    """Create MLX's ring on existing connections from the previous rank and to the next one.

    For each address, MLX accepts one connection and opens another; here both lead to this machine. Then
    `dup2` replaces its file descriptors with our connections. This is early enough, because MLX does not read or write
    before it computes.
    """
    with ExitStack() as at_last:
        own = [at_last.enter_context(reserved()) for _ in before]
        others = [at_last.enter_context(listens(f"{LOOPBACK}:0")) for _ in after]
        hosts = [[f"{LOOPBACK}:1"] * len(own)] * size
        hosts[rank] = [name_of(each) for each in own]
        hosts[(rank + 1) % size] = [name_of(each) for each in others]
        hostfile = at_last.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        json.dump(hosts, hostfile)
        hostfile.flush()
        caller = at_last.enter_context(subprocess.Popen([*PYTHON, "-c", CALLS, *hosts[rank]]))
        at_last.callback(caller.kill)
        at_last.callback(os.environ.__setitem__, "MLX_HOSTFILE", os.environ["MLX_HOSTFILE"])
        os.environ["MLX_HOSTFILE"] = hostfile.name
        mx.distributed.init(strict=True, backend="ring")
        here = [each.getsockname() for each in (*own, *others)]
        connections = dict(zip(here, (*before, *after), strict=True))
        listening = {each.fileno() for each in (*own, *others)}
        exchanged = [exchange(number, connections) for number in open_files() - listening]
    if sum(exchanged) != len(connections):
        raise RuntimeError(
            f"this version of MLX has {sum(exchanged)} connections instead of {len(connections)}; "
            "pip install mlx==0.32.4"
        )


# A program that connects to the given addresses, one after another, retrying until something listens
CALLS = """
import socket, sys, time
until = time.monotonic() + 30
for address in sys.argv[1:]:
    host, port = address.split(":")
    while time.monotonic() < until:
        try:
            socket.create_connection((host, int(port))).close()
            break
        except OSError:
            time.sleep(0.002)
"""


def exchange(number: int, connections: Mapping[tuple, socket.socket]) -> bool:
    """Replace this file descriptor with our connection and return True, if it is MLX's end of a loopback
    connection. It is recognized by the address that MLX listened at or connected to."""
    try:
        file = socket.socket(fileno=number)
    except OSError:  # not a socket
        return False
    connection = None
    with suppress(OSError):
        connection = connections.get(file.getsockname()) or connections.get(file.getpeername())
    file.detach()
    if connection is None:
        return False
    connection.setblocking(False)  # like MLX's own sockets
    os.dup2(connection.fileno(), number, inheritable=False)
    connection.close()
    return True


def open_files() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def meet_by(backend: str, servers: list[socket.socket]) -> Ranks:
    """Connect with another backend: MLX connects all ranks. Then each rank sends all others the address
    where it listens, and a key, so that no other program can take a rank's place."""
    key = secrets.token_hex(16)
    here = f"{name_of(servers[0]):21} {key}".encode()  # the same length on every rank
    with ends_by_signals():
        group = mx.distributed.init(strict=True, backend=backend)
        ranks = Ranks(group.rank(), group.size(), backend)
        told = [bytes(numbers).decode().split() for numbers in ranks.gather(*here)]
    nodes = [[address] for address, _ in told]
    _, key_after = told[(ranks.rank + 1) % ranks.size]
    tied = tie(ranks.rank, nodes, servers, key.encode(), key_after.encode(), ["batches"])
    ranks.attach(named(ranks.rank - 1, nodes), *tied["batches"])
    return ranks


def tie(
    rank: int,
    nodes: list[list[str]],
    servers: Sequence[socket.socket],
    key: bytes,
    key_after: bytes,
    kinds: Sequence[str],
) -> dict[str, tuple[list[socket.socket], list[socket.socket]]]:
    """Return, for each kind, the connections from the previous rank and to the next one: one per address.

    `key` authenticates the previous rank, `key_after` the next one.
    """
    size = len(nodes)
    after = (rank + 1) % size
    until = time.monotonic() + MEET_S
    accepted = queue.SimpleQueue()  # the accepted connections, or an OSError

    def accept_all() -> None:
        names = {name(kind, rank, n) for kind in kinds for n in range(len(servers))}
        try:
            accepted.put(accept(servers, key, names, until))
        except OSError as error:
            accepted.put(error)

    # Connect and accept at the same time: if every rank connected first, all would wait forever
    threading.Thread(target=accept_all, daemon=True).start()
    to_next = {}
    for kind in kinds:
        to_next[kind] = [
            connect(address, key_after, name(kind, after, n), until)
            for n, address in enumerate(nodes[after])
        ]
    from_before = accepted.get()
    if isinstance(from_before, OSError):
        raise OSError(f"{named(rank - 1, nodes)}: {from_before}")
    tied = {}
    for kind in kinds:
        before = [from_before[name(kind, rank, n)] for n in range(len(servers))]
        tied[kind] = before, to_next[kind]
    return tied


def read_hosts() -> list[list[str]]:
    """Return the addresses of each rank: `[["10.0.0.1:5000"], ["10.0.0.2:5000"]]`. Host names are resolved."""
    path = Path(os.environ["MLX_HOSTFILE"])
    rank = environment.rank()
    try:
        text = path.read_text()
        # The file is empty with `mlx.launch -n 1`
        nodes = [[numeric(address) for address in node] for node in json.loads(text or "[]")]
        if text and (len(nodes) < 2 or not all(nodes)):
            raise ValueError("it lists no addresses of two ranks or more")
        if len({len(node) for node in nodes}) > 1:
            raise ValueError("its ranks have different numbers of addresses")
        if twice := [address for address, count in Counter(chain(*nodes)).items() if count > 1]:
            raise ValueError(f"it lists {twice[0]} twice")
    except (OSError, TypeError, ValueError) as error:
        raise ModelError(
            f'MLX_HOSTFILE {path} is not a hostfile ({one_line(error)}): [["10.0.0.1:5000"], ...].'
        ) from None
    if rank >= len(nodes) > 0:
        raise ModelError(
            f"MLX_RANK = {rank}, but {path} lists {len(nodes)} ranks, from 0 to {len(nodes) - 1}."
        )
    return nodes


def numeric(address: str) -> str:
    """Resolve the host name of an address, because MLX needs a numeric address."""
    host, _, port = str(address).rpartition(":")
    with suppress(OSError, ValueError):
        if host and 0 < int(port) < 65536:
            return f"{socket.gethostbyname(host)}:{int(port)}"
    raise ValueError(f"{shown(address)} is not an address with a port")


def listens(address: str) -> socket.socket:
    """Return a socket that listens at this address. It does not share the port with another program."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)))
    except OSError as error:
        which = f"rank {environment.rank()} ({address})"
        why = os.strerror(error.errno)
        raise ModelError(
            f"{which} cannot listen: {why}; change MLX_RANK or the hostfile."
        ) from None


def reserved() -> socket.socket:
    """Return a socket that reserves a loopback port for MLX."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    own.bind((LOOPBACK, 0))
    return own


def name_of(end: socket.socket) -> str:
    return "{}:{}".format(*end.getsockname())


def name(kind: str, rank: int, number: int) -> str:
    """Return the name of a connection to this rank."""
    return f"{kind} {number} to {rank}"


def named(rank: int, nodes: list[list[str]]) -> str:
    """Return a rank's name for messages. Rank -1 is the last rank."""
    rank = rank % len(nodes)
    return f"rank {rank} ({nodes[rank][0]})"


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """Restore the default signal handlers while MLX waits, because Python cannot run its own."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(ValueError):  # not in the main thread
            for each, handler in handlers.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(each, signal.SIG_DFL)
        yield
    finally:
        with suppress(ValueError):
            for each, handler in handlers.items():
                signal.signal(each, handler)


def own_host() -> str:
    """Return this machine's address for the other ranks: the local address of a route to their
    coordinator, or to any other network."""
    point = os.environ.get("MLX_JACCL_COORDINATOR") or os.environ.get("NCCL_HOST_IP")
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as way:
        # Nothing is sent: the system only chooses a route
        way.connect(((point or "192.0.2.1").partition(":")[0], 9))
        return way.getsockname()[0]
    return LOOPBACK
