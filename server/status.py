"""Read-only routes: models, health, metrics, the page and `/watch`.

All of them are answered in the server's thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from engine.snapshot import Snapshot
from engine.watch_frames import Frame
from server import auth, live_page, openai
from server.body_reader import APIError
from server.http import HTTPRequest, Reply, reply
from server.metrics import ServerMetrics
from server.model_pool import ModelPool, PooledModel, ServedModel
from server.watch import MAX_WATCHERS, watch

if TYPE_CHECKING:
    from nanobatch import Engine
    from server.app import APIServer

MODELS = "/v1/models"  # also the parent path of each model
# A handler returns a response, or sends it itself and returns None
Answering = Callable[[HTTPRequest], Awaitable[Reply | None]]


class Status:
    """The read-only routes."""

    def __init__(self, server: APIServer):
        self.watchers = 0
        self.metrics = ServerMetrics()
        self._server = server
        self._born = int(time.time())
        # Each engine's snapshot at the last scrape
        self._scraped: WeakKeyDictionary[Engine, Snapshot] = WeakKeyDictionary()

    def routes(self) -> dict[str, tuple[str, Answering]]:
        """Return path -> (methods, handler)."""
        reads = {MODELS: self.list_models, "/health": self.health}
        reads |= {"/metrics": self.write_metrics, "/": self.page}
        return {
            **{path: ("GET, HEAD", answer) for path, answer in reads.items()},
            "/watch": ("GET", self.watch),  # no HEAD: the stream would never end
        }

    @property
    def _models(self) -> ModelPool:
        return self._server.models

    async def list_models(self, request: HTTPRequest) -> Reply:
        name = request.path[len(MODELS) + 1 :]
        if name:
            model = self._models.named(name)
            return reply(self._described(model, model.name if name == "default" else name))
        listed = [self._described(model, model.name) for model in self._models.models]
        aliases = [each for each in self._models.aliases if each != "*"]
        listed[1:1] = [self._described(self._models.default, alias) for alias in aliases]
        return reply({"object": "list", "data": listed})

    def _described(self, model: PooledModel, name: str) -> dict:
        if served := model.served:
            max_len = served.engine.sched.max_len
            quantization = served.engine.model.quantization
        else:
            max_len = model.facts.max_len
            quantization = model.facts.quantization
        facts = {"max_len": max_len, "quantization": quantization, "state": model.state}
        if model.facts:
            kind = "embeddings" if model.facts.is_embedding else "chat"
            facts |= {"kind": kind, "size": model.facts.size, "memory": model.nbytes}
        return openai.model(name, self._born, **facts)

    async def health(self, request: HTTPRequest) -> Reply:
        models = self._models
        status = "loading" if models is None else "draining" if self._server.draining else "ok"
        loaded = models.loaded if models else []
        if any(not served.loop.is_alive for served in loaded):
            status = "stopped"
        code = 200 if status == "ok" else 503
        if code == 200 and loaded and all(served.engine.lifecycle.is_unloaded for served in loaded):
            status = "unloaded"  # the next request waits until the weights are loaded
        found: dict = {"status": status}
        if models and len(models.models) > 1:
            found["models"] = {model.name: model.state for model in models.models}
        elif loaded:
            found["arithmetic"] = loaded[0].engine.model.arithmetic
        return reply(found, code)

    async def write_metrics(self, request: HTTPRequest) -> Reply:
        loaded = self._models.loaded if self._models else []
        seen = {}
        for served in loaded:
            engine = served.engine
            seen[served.name] = now = engine.snapshot(self._scraped.get(engine))
            # Drop texts and steps, which would otherwise stay in memory until the next scrape
            self._scraped[engine] = replace(now, requests=(), ended=(), steps=())
        gauges = {
            "http_connections": self._server.connections,
            "watchers": self.watchers,
            "models_loaded": len(loaded),
            "paused_seconds": sum(served.loop.paused_s for served in loaded),
        }
        text = self.metrics.text(seen, gauges)
        return Reply(text.encode(), type=CONTENT_TYPE_PLAIN_0_0_4)

    async def page(self, request: HTTPRequest) -> Reply:
        """Return the page. It contains no data from this server; its script requests them like any client."""
        text, policy = live_page.live()
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        headers |= {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
        return Reply(text.encode(), headers=headers, type="text/html; charset=utf-8")

    async def watch(self, request: HTTPRequest) -> None:
        """Stream the engine of the model in `?model=`, or of the most recently used model."""
        if self.watchers >= MAX_WATCHERS:
            words = f"{MAX_WATCHERS} watchers are connected already"
            raise APIError(429, words, "rate_limit_exceeded", Retry_After="5")
        name = request.query.get("model")
        model = self._models.named(name) if name else self._models.newest
        served = model.served
        if served is None:
            words = f"{model.name} is not loaded; its next request loads it"
            raise APIError(503, words, "not_loaded", Retry_After="1")
        hello = {"model": served.name, "summary": served.engine.summary}
        hello["models"] = [model.name for model in self._models.models]
        hello["texts"] = auth.may_read(request, self._server.options)
        hello["temperature"] = served.defaults["temperature"]
        self.watchers += 1
        try:
            await watch(request, hello, lambda before: self._frame(model, served, before))
        finally:
            self.watchers -= 1

    def _frame(self, model: PooledModel, served: ServedModel, before: Frame | None) -> Frame | None:
        """Return the current state with the events since `before`, or None if the server is shutting
        down or the model was unloaded."""
        if self._server.draining or model.served is not served:
            return None
        loop = served.loop
        engine = served.engine.snapshot(before and before.engine)
        server = self._server.view(before.server.seen if before else 0)
        if len(self._models.models) > 1:  # engines number their requests independently
            server = server.of_model(served.name)
        return Frame(loop.paused, loop.stepping, loop.slow, engine, server)
