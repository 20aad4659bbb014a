"""A hub on this machine that serves a repository's files over HTTP to huggingface_hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40


class Hub:
    """A hub that serves the files of a folder as `owner/tiny`.

    `pause(name, sent)` is called with a file's name and the number of bytes sent so far, before each write.
    """

    def __init__(self, folder: Path, pause: Callable[[str, int], None] = lambda name, sent: None):
        self.folder = folder
        self.pause = pause
        self.fetched: list[str] = []  # file names, in order
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, is_head=True)

            def do_GET(self) -> None:
                hub.answer(self, is_head=False)

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, to: BaseHTTPRequestHandler, is_head: bool) -> None:
        path = unquote(urlsplit(to.path).path)
        repo, _, rest = path.removeprefix("/api/models/").removeprefix("/").partition("/tiny")
        if repo != "owner":
            self.send(to, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, is_head)
        elif path.startswith("/api/"):
            self.send(to, 200, json.dumps(self.listing(rest)).encode(), {}, is_head)
        else:
            name = rest.removeprefix(f"/resolve/{COMMIT}/")
            data = (self.folder / name).read_bytes()
            tags = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.send(to, 200, data, tags, is_head, name)

    def listing(self, rest: str) -> object:
        """Return the hub's description of the repository, or of its files."""
        files = {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}
        if rest.startswith("/tree/"):
            return [
                {"type": "file", "path": name, "size": size, "oid": "2" * 40}
                for name, size in files.items()
            ]
        siblings = [{"rfilename": name, "size": size} for name, size in files.items()]
        return {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings, "private": False}

    def send(
        self,
        to: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str],
        is_head: bool,
        name: str = "",
    ) -> None:
        to.send_response(status)
        kind = "application/octet-stream" if name else "application/json"
        for key, value in (
            {"Content-Type": kind, "Content-Length": str(len(data))} | headers
        ).items():
            to.send_header(key, value)
        to.end_headers()
        if is_head:
            return
        if name:
            self.fetched.append(name)
        step = max(1, len(data) // 4)
        for start in range(0, len(data), step):
            if name:
                self.pause(name, start)
            to.wfile.write(data[start : start + step])
            to.wfile.flush()
