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

The invariant: the end that listens never writes. subtle: a system asks only while nothing of its
own is on the way. Otherwise it waits for the receipt, and tries again for a quarter of an hour.

Where next: `meet.py`, which ties these lines; `ranks.py`, what is said on them.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

SILENCE_S = 4  # a machine that has not answered for so long has lost its connection
BEAT_S = 0.5
BEAT = "\0"
MEET_S = 30  # so long a rank waits for its neighbours' lines
Message = list[int] | str | None


def call(address: str, secret: bytes) -> socket.socket:
    """A line to the rank that listens there, and wants to hear `secret` first."""
    line = socket.create_connection(address.split(":"))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an order does not wait for another
    line.sendall(secret)
    return line


def answer(server: socket.socket, secret: bytes) -> socket.socket:
    """The line on which `secret` comes first. Strangers may call, too: one that says anything else
    is hung up on, and one that says nothing is not waited for."""
    with server:
        waiting = [server]
        while ready := select.select(waiting, [], [], MEET_S)[0]:
            for line in ready:
                if line is server:
                    waiting.append(server.accept()[0])
                    continue
                with suppress(OSError):
                    if line.recv(len(secret)) == secret:
                        keep_alive(line)
                        return line
                waiting.remove(line)
                line.close()
    raise TimeoutError(f"nobody has called for {MEET_S} s")


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
