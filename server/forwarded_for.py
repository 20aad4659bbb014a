"""Find the client's address behind trusted proxies (`--trust-proxy`).

A proxy appends its client's address to `X-Forwarded-For`. Entries to the left of it come from that
client and may be forged. So the list is walked from its end, as long as the address that forwarded
the request is a trusted proxy.
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
    """Wrap `serve` so that each connection's client is the address that the trusted proxies report."""
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
    """Return the last address that is not a trusted proxy; the first one if all are. `forwarded`: the value of
    `X-Forwarded-For`."""
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
    """Return the address in an entry such as 192.0.2.7, 192.0.2.7:4711 or [2001:db8::7]:4711; empty if
    the entry contains no address, such as "unknown"."""
    text = entry.strip()
    if found := re.fullmatch(r"\[([^]]+)\](?::\d+)?|([\d.]+):\d+", text):
        text = found[1] or found[2]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)
