"""A TCP connection between two ranks: messages go one way, and a closed connection means a lost rank.

The problem. MLX does not notice that another process is gone: a collective operation may then wait
forever. A missing heartbeat does not prove that a rank is lost: the heartbeat thread cannot run while
another thread holds the GIL, or while the process is stopped or its machine swaps. Such a rank is only
slow.

The solution is the operating system. A TCP connection stays open as long as the process at its other
end exists, however slow, and is closed when that process exits for any reason. This does not cover
a power failure or a cut cable. For these, TCP keepalive sends a probe every second and gives up after
`SILENCE_S` (`keep_alive`). It does not depend on the timing of any thread.

There is a heartbeat as well (`beat`), for networks that lose packets: keepalive sends only three
probes, but a byte is retransmitted until it arrives. A late heartbeat does no harm, because keepalive
takes over.

Port scanners and browsers connect, too. So the listening rank sends a challenge of random bytes, the
caller answers with an HMAC under the ranks' key (`proof`), and then the listener authenticates itself.

The invariant: the listening end never writes messages. subtle: keepalive works only while no data is
unacknowledged. Otherwise TCP waits for the acknowledgement, and retries for a quarter of an hour.

Where next: `rendezvous.py`, which opens the connections; `group.py`, which uses them.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

SILENCE_S = 4  # a machine that is silent for this long counts as disconnected
BEAT_S = 0.5
BEAT = "\0"
PROOF = 32  # bytes of a challenge, and of the proof that answers it
NAME = 32  # bytes of a connection's name
PATIENCE_S = 5  # time limit of a handshake
AGAIN_S = 0.05
OTHERS = "it is not one of these ranks: another program, or another hostfile or NANOBATCH_RING_KEY"
Message = list[Any] | str | None


def connect(address: str, key: bytes, name: str, until: float) -> socket.socket:
    """Open the connection `name` to the rank at this address. Retry until the time `until`, then raise
    TimeoutError with the reason."""
    host, port = address.split(":")
    named = name.encode().ljust(NAME)
    why = "no time is left"
    while time.monotonic() < until:
        try:
            with ExitStack() as unless:
                connection = socket.create_connection((host, int(port)), PATIENCE_S)
                unless.enter_context(connection)
                # On the loopback interface, TCP may connect a port to itself while nothing listens there
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionRefusedError("it connected to itself")
                own = proof(key, read_exactly(connection, PROOF) + named)
                connection.sendall(named + own)
                if not hmac.compare_digest(read_exactly(connection, PROOF), proof(key, own)):
                    raise ConnectionError(OTHERS)
                unless.pop_all()
                settle(connection)
                return connection
        except (BrokenPipeError, ConnectionResetError):  # the peer closed before reading everything
            why = OTHERS
        except OSError as error:
            if why != OTHERS:  # keep the more helpful reason
                why = error.strerror or str(error)
        time.sleep(AGAIN_S)
    raise TimeoutError(why)


def accept(
    servers: Sequence[socket.socket], key: bytes, names: set[str], until: float
) -> dict[str, socket.socket]:
    """Accept the connections with these names, and close the listening sockets. Raise TimeoutError if some are
    missing at the time `until`.

    Each caller gets its own thread, so a silent caller does not block the others.
    """
    found: dict[str, socket.socket] = {}
    proven: queue.SimpleQueue[tuple[str, socket.socket]] = queue.SimpleQueue()

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), ExitStack() as unless:
            unless.enter_context(connection)
            name = proven_name(connection, key, names)
            unless.pop_all()
            proven.put((name, connection))

    with ExitStack() as at_last:
        for server in servers:
            at_last.enter_context(server)
            server.setblocking(False)
        while names - found.keys():
            if time.monotonic() > until:  # even if something keeps connecting
                raise TimeoutError("it did not connect")
            for server in select.select(servers, [], [], AGAIN_S)[0]:
                with suppress(OSError):  # the caller has already disconnected
                    connection = server.accept()[0]
                    threading.Thread(target=answer, args=[connection], daemon=True).start()
            while not proven.empty():
                name, connection = proven.get()
                if name in found:  # the rank has reconnected
                    found[name].close()
                found[name] = connection
    for connection in found.values():
        settle(connection)
        keep_alive(connection)
    return found


def proven_name(connection: socket.socket, key: bytes, names: set[str]) -> str:
    """Run the listener's side of the handshake. Return the connection's name once its caller has proven
    that it knows the key, else raise OSError."""
    challenge = secrets.token_bytes(PROOF)
    connection.sendall(challenge)
    named = read_exactly(connection, NAME)
    given = read_exactly(connection, PROOF)
    name = named.decode(errors="replace").rstrip()
    if name not in names or not hmac.compare_digest(given, proof(key, challenge + named)):
        raise ConnectionError(OTHERS)
    connection.sendall(proof(key, given))
    return name


def settle(connection: socket.socket) -> None:
    """Remove the handshake's timeout, and send small messages without delay."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def proof(key: bytes, about: bytes) -> bytes:
    """Return the HMAC of `about`: a challenge and a name, or a proof."""
    return hmac.digest(key, about, "sha256")


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly this many bytes, within PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    got = b""
    while len(got) < count:
        connection.settimeout(max(0.001, until - time.monotonic()))
        piece = connection.recv(count - len(got))
        if not piece:
            raise ConnectionError(OTHERS)
        got += piece
    return got


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keepalive: while no data is in flight, the system probes the other machine, and closes
    the connection after `SILENCE_S` without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    for name, value in {idle: 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENCE_S - 1}.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message. A lost receiver is ignored here, because the rank after it notices the loss."""
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def messages_of(connection: socket.socket) -> Iterator[Message]:
    """Yield the messages from the previous rank until the connection closes."""
    with suppress(OSError, ValueError), connection.makefile() as messages:
        for message in messages:
            yield json.loads(message.replace(BEAT, ""))


def beat(connection: socket.socket) -> None:
    """Send heartbeats forever, in a thread. subtle: a heartbeat may land in the middle of another
    thread's message, so it is a byte that no message contains."""
    with suppress(OSError):
        while True:
            time.sleep(BEAT_S)
            connection.sendall(BEAT.encode())
