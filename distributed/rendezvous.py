"""How the processes that share a model find each other.

The problem. MLX connects them by itself, and takes the first who calls for a neighbour: after a
port scan, or a browser's visit, the ranks never meet. It does not say for whom it waits, and while
it does, Python hears of no signal. Nor does it lend its connections, and the ranks need some of
their own: for orders, and to notice that a neighbour is gone.

The way out. What started the processes has left word in the environment: who this one is, and, for
MLX's ring, a file with all addresses. At these addresses the ranks call each other, each the next
one, and prove to each other who they are (`line.py`). Only then comes MLX's ring, and it does not
meet the network (`tie_ring`): each process ties its own to itself, on the loopback, and puts the
connections that are proven in the place of those that MLX has made.

    what MLX makes                               what it has afterwards

    someone here --> rank 0 --> someone here     rank 1 ==> rank 0 ==> rank 1
    someone here --> rank 1 --> someone here     rank 0 ==> rank 1 ==> rank 0

So nobody listens at the addresses any more when the model is loaded. With another backend MLX
connects all by its own means, and then the ranks tie their lines.

Where next: `line.py`, for these connections; `ranks.py`, for what the ranks then do.
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

from distributed.channel import answer, call
from distributed.group import ALONE, Ranks
from kernels.mlx import mx
from runtime import cli
from runtime.files import ModelError
from runtime.validation import one_line, shown

PYTHON = [sys.executable or "python3", "-I", "-S"]  # the standard library, and nothing else
MEET_S = 30  # so long a rank waits for its neighbours
LOOPBACK = "127.0.0.1"


@functools.cache
def join() -> Ranks:
    """The ranks that this process was started with. It waits until all have come, and says for
    whom."""
    backend = cli.backend()
    nodes = read_hosts() if backend == "ring" else []
    if not backend or (backend == "ring" and not nodes):
        return ALONE
    rank = cli.rank()
    own = nodes[rank] if nodes else [f"{own_host()}:0"]
    servers = [listens(address) for address in own]
    others = [named(n, nodes) for n in range(len(nodes)) if n != rank]
    awaited = " and ".join(others) or "the others"
    print(f"nanobatch: rank {rank} waits for {awaited}", file=sys.stderr, flush=True)
    try:
        return meet(rank, nodes, servers) if nodes else meet_by(backend, servers)
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"rank {rank} waited for {awaited} in vain ({one_line(error)}); start all ranks."
        ) from None


def meet(rank: int, nodes: list[list[str]], servers: list[socket.socket]) -> Ranks:
    """Over MLX's ring: first our own lines, then the ring."""
    size = len(nodes)
    word = os.environ.get("NANOBATCH_RING_KEY", "")
    key = hashlib.sha256(json.dumps([nodes, word]).encode()).digest()
    tied = tie(rank, nodes, servers, key, key, ["line", "ring"])
    with ends_by_signals():
        tie_ring(rank, size, *tied["ring"])
        ranks = Ranks(rank, size, "ring")
        ranks.hold(named(rank - 1, nodes), *tied["line"])
        if ranks.gather(rank) != [[n] for n in range(size)]:  # and all are there
            raise RuntimeError("MLX's ring says other numbers than it was told")
    return ranks


def tie_ring(
    rank: int,
    size: int,
    before: Sequence[socket.socket],
    after: Sequence[socket.socket],
) -> None:
    """MLX's ring, over connections from the rank before and to the next one that are there already.

    MLX wants somebody who calls it, and somebody to call: here both are ourselves. What it has then
    are the numbers of two files, and under each number we put a connection of ours (`dup2`). That
    is in time, since MLX reads and writes nothing before it computes.
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
        lines = dict(zip(here, (*before, *after), strict=True))
        listening = {each.fileno() for each in (*own, *others)}
        exchanged = [exchange(number, lines) for number in open_files() - listening]
    if sum(exchanged) != len(lines):
        raise RuntimeError(
            f"this version of MLX has {sum(exchanged)} connections and not {len(lines)}; "
            "pip install mlx==0.32.4"
        )


# Calls these addresses, one after the other, as soon as somebody listens there
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


def exchange(number: int, lines: Mapping[tuple, socket.socket]) -> bool:
    """If the open file of this number is MLX's end of a connection on the loopback, it becomes the
    line that belongs there: by the address at which MLX was called, or that MLX has called."""
    try:
        file = socket.socket(fileno=number)
    except OSError:  # no socket
        return False
    line = None
    with suppress(OSError):
        line = lines.get(file.getsockname()) or lines.get(file.getpeername())
    file.detach()
    if line is None:
        return False
    line.setblocking(False)  # as MLX has it
    os.dup2(line.fileno(), number, inheritable=False)
    line.close()
    return True


def open_files() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def meet_by(backend: str, servers: list[socket.socket]) -> Ranks:
    """Over another backend: MLX connects all. Then each rank tells all where it listens, and a key
    to that line; so a stranger cannot take a rank's place."""
    key = secrets.token_hex(16)
    here = f"{name_of(servers[0]):21} {key}".encode()  # as long on every rank
    with ends_by_signals():
        group = mx.distributed.init(strict=True, backend=backend)
        ranks = Ranks(group.rank(), group.size(), backend)
        told = [bytes(numbers).decode().split() for numbers in ranks.gather(*here)]
    nodes = [[address] for address, _ in told]
    _, key_after = told[(ranks.rank + 1) % ranks.size]
    tied = tie(ranks.rank, nodes, servers, key.encode(), key_after.encode(), ["line"])
    ranks.hold(named(ranks.rank - 1, nodes), *tied["line"])
    return ranks


def tie(
    rank: int,
    nodes: list[list[str]],
    servers: Sequence[socket.socket],
    key: bytes,
    key_after: bytes,
    kinds: Sequence[str],
) -> dict[str, tuple[list[socket.socket], list[socket.socket]]]:
    """Of each kind lines from the rank before, and lines to the next: one for each address.

    `key` is what the rank before must know, `key_after` what the next one wants to hear.
    """
    size = len(nodes)
    after = (rank + 1) % size
    until = time.monotonic() + MEET_S
    said = queue.SimpleQueue()  # the lines that were answered, or what went wrong

    def hear() -> None:
        names = {name(kind, rank, n) for kind in kinds for n in range(len(servers))}
        try:
            said.put(answer(servers, key, names, until))
        except OSError as error:
            said.put(error)

    # Each rank calls and is called at once: if all called first, all would wait
    threading.Thread(target=hear, daemon=True).start()
    called = {}
    for kind in kinds:
        called[kind] = [
            call(address, key_after, name(kind, after, n), until)
            for n, address in enumerate(nodes[after])
        ]
    answered = said.get()
    if isinstance(answered, OSError):
        raise OSError(f"{named(rank - 1, nodes)}: {answered}")
    tied = {}
    for kind in kinds:
        before = [answered[name(kind, rank, n)] for n in range(len(servers))]
        tied[kind] = before, called[kind]
    return tied


def read_hosts() -> list[list[str]]:
    """The addresses of each rank: `[["10.0.0.1:5000"], ["10.0.0.2:5000"]]`. Names become
    addresses."""
    path = Path(os.environ["MLX_HOSTFILE"])
    rank = cli.rank()
    try:
        text = path.read_text()
        # `mlx.launch -n 1` leaves it empty
        nodes = [[numeric(address) for address in node] for node in json.loads(text or "[]")]
        if text and (len(nodes) < 2 or not all(nodes)):
            raise ValueError("it lists no addresses of two ranks or more")
        if len({len(node) for node in nodes}) > 1:
            raise ValueError("its ranks have not as many addresses each")
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


def listens(address: str) -> socket.socket:
    """A socket that is called at this address. Two programs that listen at one port would be mixed
    up."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)))
    except OSError as error:
        which = f"rank {cli.rank()} ({address})"
        why = os.strerror(error.errno)
        raise ModelError(
            f"{which} cannot listen: {why}; change MLX_RANK or the hostfile."
        ) from None


def reserved() -> socket.socket:
    """A socket with a port on the loopback at which MLX can listen, and no other program."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    own.bind((LOOPBACK, 0))
    return own


def name_of(end: socket.socket) -> str:
    return "{}:{}".format(*end.getsockname())


def name(kind: str, rank: int, number: int) -> str:
    """Of the line to this rank."""
    return f"{kind} {number} to {rank}"


def named(rank: int, nodes: list[list[str]]) -> str:
    """A rank, for a message. Before rank 0 comes the last."""
    rank = rank % len(nodes)
    return f"rank {rank} ({nodes[rank][0]})"


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """While MLX waits, Python does nothing, so it hears of no signal. Meanwhile these end the
    process by themselves."""
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
    """Where the others reach this machine: the address by which it reaches their meeting point, or
    any other network."""
    point = os.environ.get("MLX_JACCL_COORDINATOR") or os.environ.get("NCCL_HOST_IP")
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as way:
        # Nothing is sent: the system only chooses the way
        way.connect(((point or "192.0.2.1").partition(":")[0], 9))
        return way.getsockname()[0]
    return LOOPBACK
