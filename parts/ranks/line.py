"""A connection between two ranks, seen from the outside: is the other end gone, or has it fallen
silent?

The problem. MLX does not notice that another process is gone: a collective operation may then wait
for ever.

What this file keeps. The ring's connections are ordinary TCP. They are looked at, and not a byte is
read or written.

Where next: `meet.py`, which finds them; `ranks.py`, which looks at them several times a second.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import NamedTuple

SILENCE_MS = 4000  # a machine that has not answered for so long has lost its connection


class Line(NamedTuple):
    """A connection of MLX's ring, seen from the outside."""

    rank: int  # at the other end
    address: str
    socket: socket.socket

    def is_gone(self) -> bool:
        """Has the other end closed it, or the system given it up?"""
        look = select.poll()
        # Linux tells even if there is more to read
        look.register(self.socket, getattr(select, "POLLRDHUP", 0))
        if look.poll(0):
            return True
        try:
            return not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def is_mute(self) -> bool:
        """Linux: was something sent, and sent again, and nothing came back for `SILENCE_MS`?

        subtle: the system must not decide this by itself (`TCP_USER_TIMEOUT`). It would give up a
        rank, too, that is merely slow or stopped, and has no room for more numbers. The machine of
        such a rank still answers.
        """
        if sys.platform != "linux":
            return False
        # Its fields are in <linux/tcp.h>
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        tries, silence_ms = max(info[2], info[3]), int.from_bytes(info[56:60], sys.byteorder)
        return tries > 1 and silence_ms > SILENCE_MS


def keep_alive(line: socket.socket) -> None:
    """While nothing is on its way, the system asks the other machine, and closes the line after
    `SILENCE_MS`."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPALIVE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": SILENCE_MS // 1000 - 1,
    }
    for name, value in settings.items():  # each system has some of them
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
