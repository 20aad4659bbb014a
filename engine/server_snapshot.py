"""Frozen records of a server and its HTTP requests, for the screen. `/watch` sends them, too."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RequestRecord:
    """One HTTP request. Times are on the wall clock, not on the engine's clock."""

    number: int
    at: float  # seconds since 1970
    client: str  # an IP address
    route: str  # method and path
    id: str = ""  # the id in the response: chatcmpl-12-7f3a
    requests: tuple[int, ...] = ()  # the engine's request ids, one per choice
    stream: bool = False
    status: int | None = None  # 499 if the client disconnected before the response
    reason: str = ""  # finish reason, or the error's code
    message: str = ""  # error message
    hung_up: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    draft_tokens: int = 0  # draft tokens proposed
    accepted_tokens: int = 0  # draft tokens accepted
    ttft_s: float | None = None
    prompt_tps: float | None = None
    generation_tps: float | None = None
    latency_s: float | None = None
    model: str = ""  # the model that answers

    @property
    def is_refused(self) -> bool:
        return bool(self.message) and not self.hung_up


@dataclass(frozen=True)
class ServerView:
    """The server's state, and the requests that ended since a watcher's last frame."""

    address: str
    draining: bool
    connections: int
    watchers: int
    open: tuple[RequestRecord, ...]
    ended: tuple[RequestRecord, ...]  # since the last frame, oldest first
    missed: int  # requests that ended since the last frame, but are no longer kept
    seen: int  # number of requests that have ended in total
    free_memory: int | None = None  # bytes; None if unknown

    def of_model(self, name: str) -> ServerView:
        """Return the view for a watcher of this model's engine, without other engines' request ids."""

        def own(records: tuple[RequestRecord, ...]) -> tuple[RequestRecord, ...]:
            return tuple(
                record if record.model == name else replace(record, requests=())
                for record in records
            )

        return replace(self, open=own(self.open), ended=own(self.ended))
