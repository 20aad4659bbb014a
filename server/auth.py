"""Decide whether to accept a request: connection limit, Host, Origin, API key, watch key."""

from __future__ import annotations

import hmac
import ipaddress
import re

from base.validation import shown
from server import http
from server.body_reader import APIError
from server.http import LOOPBACK, HTTPRequest, Options, Reply


def server_names(options: Options) -> list[str]:
    """Return the names of this server as they appear in a URL."""
    own = f"[{options.host}]" if ":" in options.host else options.host
    hosts = [host for host in options.allow_hosts if "://" not in host]
    return [name.lower() for name in (*LOOPBACK, own, *hosts)]


def is_allowed(request: HTTPRequest, options: Options) -> bool:
    """Return True if the Origin has one of this server's names, at any port, or is an app's that
    `--allow-host` names."""
    origin = request.headers.get("origin")
    if not origin:
        return False
    names = "|".join(map(re.escape, server_names(options)))
    is_app = "://" in origin and origin in options.allow_hosts
    return is_app or bool(re.fullmatch(rf"https?://({names})(:\d+)?", origin))


def admit(request: HTTPRequest, options: Options, is_local: bool, connections: int) -> Reply | None:
    """Return the reply to a CORS preflight, or None if the request may proceed. Raise APIError to refuse.

    `is_local`: the server listens on loopback only. `connections`: how many have a request in progress.
    """
    preflight = share(request, options)
    if preflight is None:
        if is_local:
            check_host(request, options)
        guard(request, options, connections)
    return preflight


def share(request: HTTPRequest, options: Options) -> Reply | None:
    """Add CORS headers for pages served under this server's names. Return the reply to a preflight."""
    if not is_allowed(request, options):
        return None
    shared = {"Access-Control-Allow-Origin": request.headers["origin"], "Vary": "Origin"}
    shared["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
    request.shared = shared
    if request.method != "OPTIONS" or "access-control-request-method" not in request.headers:
        return None
    asked = request.headers.get("access-control-request-headers", "*")
    may = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": asked}
    return Reply(b"", headers=may | {"Access-Control-Max-Age": "600"})


def check_host(request: HTTPRequest, options: Options) -> None:
    """Refuse a Host that is not one of this server's names.

    This prevents DNS rebinding: an attacker's domain may resolve to this machine, and the browser
    then treats this server as part of the attacker's site.
    """
    if request.host not in server_names(options):
        words = f"the Host {shown(request.headers['host'])} is not one of this server's names"
        words += "; --allow-host adds one"
        raise APIError(403, words, "host_not_allowed")


def guard(request: HTTPRequest, options: Options, connections: int) -> None:
    """Refuse requests over the connection limit, from foreign pages, or without the key.

    A browser sends requests on behalf of any page that the user visits. So the Origin must be one of
    our names, be an app's that is allowed, or equal the Host. In the last case the Host must be an IP
    address or a key must be set, because an attacker's domain may resolve to this machine.

    A page that sends a request sees only the answer to it. A page that watches sees every client's
    texts, so it must be served by this server or know a key: other servers on this machine may
    serve untrusted pages.
    """
    if connections > http.MAX_CONNECTIONS:
        words = f"{http.MAX_CONNECTIONS} connections are open already"
        raise APIError(429, words, "rate_limit_exceeded", Retry_After="1", Connection="close")
    origin = request.headers.get("origin", "")
    host = request.headers["host"]
    is_ours = origin in ("", f"http://{host}", f"https://{host}")
    is_own = is_ours and (options.api_key is not None or is_address(request.host))
    if origin and not is_own and not is_allowed(request, options):
        words = f"pages from {shown(origin)} may not send requests here"
        if origin in ("null", "file://"):  # any local file or sandboxed frame
            words += "; this origin cannot be allowed, so open the page from a web server"
        else:
            words += (
                "; --allow-host adds a page's host, or an app's origin such as app://obsidian.md"
            )
        raise APIError(403, words, "origin_not_allowed")
    path = request.path
    keys = [options.api_key]
    if path == "/watch":
        keys.append(options.watch_key)
    knows_key = any(has_key(request, key) for key in keys if key)
    is_free = not options.api_key or path in ("/", "/health")
    if not is_free and not knows_key:
        words = "no API key, or a wrong one; give it as 'Authorization: Bearer KEY'"
        raise APIError(401, words, "invalid_api_key", WWW_Authenticate="Bearer")
    if path == "/watch" and not is_ours and not knows_key:
        words = f"pages from {shown(origin)} may watch only with a key; --watch-key sets one"
        raise APIError(403, words, "origin_not_allowed")


def has_key(request: HTTPRequest, key: str) -> bool:
    """Return True if the request carries this key. The comparison takes constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")  # the header of Anthropic's clients
    return hmac.compare_digest(given.strip().encode("latin-1"), key.encode())


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return True for a loopback address, such as 127.0.0.1, ::1 or ::ffff:127.0.0.1."""
    if not is_address(address):
        return False
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def may_read(request: HTTPRequest, options: Options) -> bool:
    """Return True if this watcher may read all prompts and answers.

    If any key is set, the watch key is required. Otherwise the watcher must be on this machine. (A
    local proxy that rewrites Host and adds no header is indistinguishable from this machine.)
    """
    if options.api_key or options.watch_key:
        return options.watch_key is not None and has_key(request, options.watch_key)
    signs = ("forwarded", "x-forwarded", "x-real-ip", "via")
    has_proxy = any(header.startswith(signs) for header in request.headers)
    is_here = is_loopback(request.connection.client)
    return is_here and not has_proxy and request.host in LOOPBACK
