"""Which client sent a request that came through a proxy: `--trust-proxy`.

A proxy appends the address of its own client to `X-Forwarded-For`. Everything to the left of that was
sent by the client, who may write what it likes. So the list is read from its end, as long as each
address that passed the request on is a proxy of ours.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Sequence

import h11

from server.http import Connection

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Serve = Callable[[Connection, h11.Request], Awaitable[None]]


def seen_through(serve: Serve, trusted: Sequence[Network]) -> Serve:
    """`serve`, with each connection's client as the trusted proxies know it."""
    if not trusted:
        return serve

    async def served(connection: Connection, head: h11.Request) -> None:
        peer = connection.transport.get_extra_info("peername")
        headers = (value for name, value in head.headers if name == b"x-forwarded-for")
        forwarded = b",".join(headers).decode("latin-1")
        connection.client = client_of(peer[0] if peer else "", forwarded, trusted)
        await serve(connection, head)

    return served


def client_of(peer: str, forwarded: str, trusted: Sequence[Network]) -> str:
    """The last address that is no trusted proxy's. `forwarded`: the value of `X-Forwarded-For`."""
    client = peer
    for entry in reversed(forwarded.split(",")):
        address = address_in(entry)
        if not is_trusted(client, trusted) or not address:
            break
        client = address
    return client


def is_trusted(address: str, trusted: Sequence[Network]) -> bool:
    plain = address_in(address)
    return bool(plain) and any(ipaddress.ip_address(plain) in network for network in trusted)


def address_in(entry: str) -> str:
    """The address of an entry such as 192.0.2.7, 192.0.2.7:4711 or [2001:db8::7]:4711; empty if it
    is none, such as "unknown"."""
    text = entry.strip()
    if found := re.fullmatch(r"\[([^]]+)\](?::\d+)?|([\d.]+):\d+", text):
        text = found[1] or found[2]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)
