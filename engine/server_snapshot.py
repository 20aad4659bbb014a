"""What a screen knows of a server and of its HTTP requests: frozen records, which `/watch` sends, too."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RequestRecord:
    """One HTTP request. Times are wall-clock times, whatever the engine's clock does."""

    number: int
    at: float  # seconds since 1970
    client: str  # an IP address
    route: str  # method and path
    id: str = ""  # the id in the response: chatcmpl-12-7f3a
    requests: tuple[int, ...] = ()  # the engine's request ids, one per choice
    stream: bool = False
    status: int | None = None  # 499 if the client hung up before there was one
    reason: str = ""  # finish reason, or the code of the error
    message: str = ""  # of an error
    hung_up: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    draft_tokens: int = 0  # proposed for the answers
    accepted_tokens: int = 0  # of these
    ttft_s: float | None = None
    prompt_tps: float | None = None
    generation_tps: float | None = None
    latency_s: float | None = None
    model: str = ""  # whose engine answers

    @property
    def is_refused(self) -> bool:
        return bool(self.message) and not self.hung_up


@dataclass(frozen=True)
class ServerView:
    """The server at one moment, and the requests that have ended since a watcher's last frame."""

    address: str
    draining: bool
    connections: int
    watchers: int
    open: tuple[RequestRecord, ...]
    ended: tuple[RequestRecord, ...]  # since, oldest first
    missed: int  # ended since, and dropped already
    seen: int  # number of all ended ones
    free_memory: int | None = None  # bytes, now; None if that is not known

    def of_model(self, name: str) -> ServerView:
        """For a watcher of this model's engine, which knows no requests of others."""

        def own(records: tuple[RequestRecord, ...]) -> tuple[RequestRecord, ...]:
            return tuple(
                record if record.model == name else replace(record, requests=())
                for record in records
            )

        return replace(self, open=own(self.open), ended=own(self.ended))
