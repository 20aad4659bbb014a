"""Decide whether a request may come in: connection limit, Host, Origin, API key, watch key."""

from __future__ import annotations

import hmac
import ipaddress
import re

from runtime.validation import shown
from server.http import CONNECTIONS, LOOPBACK, Options, Reply, Visit
from server.schema import APIError


def is_allowed(visit: Visit, options: Options) -> bool:
    """Does a page of this server's names ask?"""
    names = "|".join(map(re.escape, options.names))
    return bool(re.fullmatch(rf"https?://({names})(:\d+)?", visit.headers.get("origin", "")))


def share(visit: Visit, options: Options) -> Reply | None:
    """Let a page of this server's names read the answer. If a browser asks whether the page may
    ask, this is the answer to the browser."""
    if not is_allowed(visit, options):
        return None
    shared = {"Access-Control-Allow-Origin": visit.headers["origin"], "Vary": "Origin"}
    shared["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
    visit.shared = shared
    if visit.method != "OPTIONS" or "access-control-request-method" not in visit.headers:
        return None
    asked = visit.headers.get("access-control-request-headers", "*")
    may = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": asked}
    return Reply(b"", headers=may | {"Access-Control-Max-Age": "600"})


def check_host(visit: Visit, options: Options) -> None:
    """Refuse a host that is none of this server's names. A page's owner may let the page's name point
    to this machine, and the browser then takes us for a part of the page."""
    if visit.host not in options.names:
        words = f"the Host {shown(visit.headers['host'])} is none of this server's names"
        words += "; --allow-host adds one"
        raise APIError(403, words, "host_not_allowed")


def guard(visit: Visit, options: Options, connections: int) -> None:
    """Refuse requests beyond the limit, and requests from pages that may not ask.

    A browser sends requests for any page that the user looks at. So a page must be of this machine,
    or come from the very address it asks. An address, because the owner of a page may let the
    page's name point to us: then a name proves nothing, unless there is a key.

    A page that asks sees only the answers to its own requests. A page that watches sees everybody's
    texts, so the page must be ours, or know a key: this machine may have other servers, and anybody
    may have written their pages.
    """
    if connections > CONNECTIONS:
        words = f"{CONNECTIONS} connections are open already"
        raise APIError(429, words, "rate_limit_exceeded", Retry_After="1", Connection="close")
    origin = visit.headers.get("origin", "")
    host = visit.headers["host"]
    is_ours = origin in ("", f"http://{host}", f"https://{host}")
    is_own = is_ours and (options.api_key is not None or is_address(visit.host))
    if origin and not is_own and not is_allowed(visit, options):
        words = f"pages from {shown(origin)} may not ask here; --allow-host adds one"
        raise APIError(403, words, "origin_not_allowed")
    path = visit.path
    keys = [options.api_key]
    if path == "/watch":
        keys.append(options.watch_key)
    knows_key = any(has_key(visit, key) for key in keys if key)
    is_free = not options.api_key or path in ("/", "/health")
    if not is_free and not knows_key:
        words = "no API key, or a wrong one; give it as 'Authorization: Bearer KEY'"
        raise APIError(401, words, "invalid_api_key", WWW_Authenticate="Bearer")
    if path == "/watch" and not is_ours and not knows_key:
        words = f"pages from {shown(origin)} may watch with a key alone; --watch-key sets one"
        raise APIError(403, words, "origin_not_allowed")


def has_key(visit: Visit, key: str) -> bool:
    scheme, _, given = visit.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = visit.headers.get("x-api-key", "")  # as Anthropic's clients send it
    # In constant time
    return hmac.compare_digest(given.strip().encode("latin-1"), key.encode())


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Is it an address of this machine, such as 127.0.0.1, ::1, or ::ffff:127.0.0.1?"""
    if not is_address(address):
        return False
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def may_read(visit: Visit, options: Options) -> bool:
    """May this watcher read everybody's prompts and answers?

    Where there is a key, only the watch key allows it. Else this machine itself may. (A proxy here
    that changes the host's name and adds no header looks like this machine.)
    """
    if options.api_key or options.watch_key:
        return options.watch_key is not None and has_key(visit, options.watch_key)
    signs = ("forwarded", "x-forwarded", "x-real-ip", "via")
    has_proxy = any(header.startswith(signs) for header in visit.headers)
    is_here = is_loopback(visit.connection.client)
    return is_here and not has_proxy and visit.host in LOOPBACK
