"""A connection between two ranks: messages go one way, and its end tells that a rank is lost.

The problem. MLX does not notice that another process is gone: a collective operation may then wait
for ever. A heartbeat would tell. But a thread that says "I live" every second only proves that this
thread had its turn. It has none while another one holds Python's lock, nor while the process is
stopped or its machine swaps. Such a rank is slow, and not lost.

The way out. The systems' own heartbeat. A TCP connection stays open as long as the process at its
other end exists, however slow, and the system closes it when that process ends, in whatever way.
There remain the machine that has lost its power and the cable that was cut. For these the system
here asks the system there every second, and gives the connection up after `SILENCE_S`
(`keep_alive`). No thread of either process has to be on time for that.

A thread that beats is there as well (`beat`), for networks that lose packets: a question is asked
three times only, while a byte is sent again until it has come. A beat that is late does no harm,
since the system asks then.

Strangers call, too: a port scan, a browser, something that says nothing. So the rank that listens
asks a question of random bytes, and the caller proves that it knows the ranks' key (`proof`). Then
the other one proves it as well. Only from then on is it a line.

The invariant: the end that listens never writes on a line. subtle: a system asks only while nothing
of its own is on the way. Otherwise it waits for the receipt, and tries again for a quarter of an
hour.

Where next: `meet.py`, which ties these lines; `ranks.py`, what is said on them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

SILENCE_S = 4  # a machine that has not answered for so long has lost its connection
BEAT_S = 0.5
BEAT = "\0"
PROOF = 32  # bytes of a question, and of the proof that answers it
NAME = 32  # bytes of a line's name
CALLERS = 64  # more do not wait at once to prove that they are ranks
PATIENCE_S = 5  # for a proof
AGAIN_S = 0.05
OTHERS = "it is no rank of these: another program, or another hostfile or NANOBATCH_RING_KEY"
Message = list[Any] | str | None


def call(address: str, key: bytes, name: str, until: float) -> socket.socket:
    """A line of this name to the rank that listens there. It is tried until it succeeds, or until
    the clock says `until`: then TimeoutError, with the reason."""
    host, port = address.split(":")
    named = name.encode().ljust(NAME)
    why = "there is no time left"
    while time.monotonic() < until:
        try:
            with ExitStack() as unless:
                line = socket.create_connection((host, int(port)), PATIENCE_S)
                unless.enter_context(line)
                if line.getsockname() == line.getpeername():  # TCP can: it happens on the loopback
                    raise ConnectionRefusedError("it has called itself")
                own = proof(key, receive(line, PROOF) + named)
                line.sendall(named + own)
                if not hmac.compare_digest(receive(line, PROOF), proof(key, own)):
                    raise ConnectionError(OTHERS)
                unless.pop_all()
                line.settimeout(None)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # nothing waits for more
                return line
        except (BrokenPipeError, ConnectionResetError):  # it hung up before it had read all
            why = OTHERS
        except OSError as error:
            if why != OTHERS:  # which says more than what comes later
                why = error.strerror or str(error)
        time.sleep(AGAIN_S)
    raise TimeoutError(why)


def answer(
    servers: Sequence[socket.socket], key: bytes, names: set[str], until: float
) -> dict[str, socket.socket]:
    """The lines of these names, as soon as all have come. TimeoutError when the clock says `until`.

    A caller with a wrong proof is hung up on. A silent caller keeps nobody waiting.
    """
    found: dict[str, socket.socket] = {}
    callers: dict[socket.socket, Iterator[str]] = {}  # the oldest first
    with ExitStack() as at_last:
        for server in servers:
            at_last.enter_context(server)
            server.setblocking(False)
        at_last.callback(lambda: [line.close() for line in callers])
        while names - found.keys():
            for line in ready([*servers, *callers], until):
                if line in servers:
                    let_in(line, callers, key, names)
                elif line in callers:  # and not hung up on since
                    name = next(callers[line], None)
                    if name != "":
                        del callers[line]
                    if name is None:
                        line.close()
                    elif name:
                        if name in found:  # the rank has given its first line up
                            found[name].close()
                        found[name] = line
    for line in found.values():
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(line)
    return found


def let_in(
    server: socket.socket,
    callers: dict[socket.socket, Iterator[str]],
    key: bytes,
    names: set[str],
) -> None:
    """Somebody calls, and is asked. Of too many callers, the oldest is hung up on."""
    with suppress(OSError):
        line = server.accept()[0]
        callers[line] = proven(line, key, names)
        next(callers[line], None)
    if len(callers) > CALLERS:
        oldest = next(iter(callers))
        del callers[oldest]
        oldest.close()


def ready(lines: Sequence[socket.socket], until: float) -> list[socket.socket]:
    """Those on which something has come."""
    with selectors.DefaultSelector() as watched:
        for line in lines:
            watched.register(line, selectors.EVENT_READ)
        found = watched.select(until - time.monotonic())
    if time.monotonic() > until:  # also while strangers call without end
        raise TimeoutError("it has not called")
    return [event.fileobj for event, _ in found]


def proven(line: socket.socket, key: bytes, names: set[str]) -> Iterator[str]:
    """Somebody has called, and has yet to prove that it is a rank. Each turn takes what has come.

    Yields an empty text while more must come, and the line's name once it is proven. A wrong answer
    ends it without a name.
    """
    said = b""
    with suppress(OSError):
        line.setblocking(False)
        question = secrets.token_bytes(PROOF)
        line.send(question)  # there is room for so little, so it does not wait
        while len(said) < NAME + PROOF:
            yield ""
            piece = line.recv(NAME + PROOF - len(said))
            if not piece:
                return
            said += piece
        named = said[:NAME]
        given = said[NAME:]
        name = named.decode(errors="replace").rstrip()
        is_right = hmac.compare_digest(given, proof(key, question + named))
        if is_right and name in names:
            line.send(proof(key, given))
            yield name


def proof(key: bytes, about: bytes) -> bytes:
    """What only those can say who know the key, and what tells nobody the key."""
    return hmac.digest(key, about, "sha256")


def receive(line: socket.socket, count: int) -> bytes:
    """So many bytes, within PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    said = b""
    while len(said) < count:
        line.settimeout(max(0.001, until - time.monotonic()))
        piece = line.recv(count - len(said))
        if not piece:
            raise ConnectionError(OTHERS)
        said += piece
    return said


def keep_alive(line: socket.socket) -> None:
    """While nothing is on its way, the system asks the other machine, and closes the line after
    `SILENCE_S`."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    for name, value in {idle: 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENCE_S - 1}.items():
        line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def say(line: socket.socket, message: Message) -> None:
    """If the next rank is gone, nothing happens: the rank that listens to it tells."""
    with suppress(OSError):
        line.sendall(json.dumps(message).encode() + b"\n")


def hear(line: socket.socket) -> Iterator[Message]:
    """What the rank before says, until it is gone."""
    with suppress(OSError, ValueError), line.makefile() as messages:
        for message in messages:
            yield json.loads(message.replace(BEAT, ""))


def beat(line: socket.socket) -> None:
    """In a thread of its own. subtle: a beat may fall into the middle of another thread's message,
    so it is a byte that no message has."""
    with suppress(OSError):
        while True:
            time.sleep(BEAT_S)
            line.sendall(BEAT.encode())
