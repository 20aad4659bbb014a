"""HTTP requests to a server, each on a separate connection, and the server-sent events of the answers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from base.validation import one_line, printable, shown

LINE = 2**26  # maximum size of an event in bytes


def base_of(option: str, url: str) -> str:
    """Parse an option with a server's address. Return its base URL, without a trailing `/v1` or `/watch`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{option} {shown(url)} is not an address such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/watch").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def request(
    url: str, method: str, path: str, key: str, patience: float, body: str | None = None
) -> http.client.HTTPResponse:
    """Send a request and return the response, with the socket as `line`. Shutting the socket down cancels
    the answer. `patience`: seconds without data after which TimeoutError is raised."""
    address = urlsplit(url)
    kind = http.client.HTTPConnection
    if address.scheme == "https":
        kind = http.client.HTTPSConnection
    connection = kind(address.hostname, address.port, timeout=patience)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    connection.request(method, address.path + path, body, headers)
    line = connection.sock
    answer = connection.getresponse()
    answer.line = line
    return answer


def read_events(
    answer: http.client.HTTPResponse, note: Callable[[str], None] = lambda comment: None
) -> Iterator[Any]:
    """Yield the JSON data of each server-sent event but [DONE]. `note` is called with each comment."""
    while line := answer.readline(LINE):
        if line.startswith(b":"):
            note(printable(line[1:].decode(errors="replace").strip()))
        elif line.startswith(b"data:") and (data := line[5:].strip()) not in (b"", b"[DONE]"):
            try:
                yield json.loads(data)
            except RecursionError:
                raise ValueError("an event is nested too deep") from None


def refusal(answer: http.client.HTTPResponse) -> tuple[str, str]:
    """Return the message and the code of a refused request; the code is empty if there is none."""
    try:
        return error_in(json.loads(answer.read(2**16)))
    except (ValueError, LookupError, TypeError, AttributeError):
        return printable(f"{answer.status} {answer.reason}"), ""


def error_in(data: Any) -> tuple[str, str]:
    """Return the message and the code of an error, which is a body or an event."""
    error = data["error"]
    return printable(error["message"]), error.get("code") or ""


def why(error: BaseException) -> str:
    return printable(getattr(error, "strerror", None) or one_line(error) or type(error).__name__)
