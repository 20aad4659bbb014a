"""The models of a server: load them on demand, queue requests for them, and unload idle ones.

    a request:  named -> borrow -> answer -> give_back
                           |_ not loaded: wait in line -> the loader unloads idle models, then loads this one

The first request for a model loads it. It stays loaded, because loading takes seconds. If another model
does not fit next to it, the least recently used model is unloaded.

The invariants: weights, slabs and states of all loaded models together fit in `memory`. A model with
open requests is never unloaded. No request waits forever: while one waits for a model to be unloaded,
later requests for that model queue behind it.

Next: `engine/turns.py`, how engines share the cores.
"""

from __future__ import annotations

import difflib
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from base.error_reports import describe, show_fault
from base.installation import command
from base.strings import readable
from base.validation import one_line, shown
from sampling_params import advised
from server.body_reader import APIError, bad, without_folders

if TYPE_CHECKING:
    from engine.loop import Loop
    from engine.model_headers import ModelFacts
    from nanobatch import Engine

MAX_WAITING = 64  # requests that may wait for models; more are refused


class ServedModel(NamedTuple):
    """A loaded model, as requests borrow it from the pool."""

    name: str
    engine: Engine
    loop: Loop
    defaults: dict[str, float]  # sampling settings used when a request leaves them out
    max_tokens: int | None = None  # default limit of an answer; None: the rest of the slot
    # Suffix of the answers' ids, so that they differ from those of other engines and servers
    suffix: str = ""


class PooledModel:
    """A model that clients may request. Guarded by the pool's lock, except `stage` and `is_checked`, which only
    the loader's thread sets."""

    def __init__(self, name: str, facts: ModelFacts | None = None):
        self.name = name
        self.facts = facts  # None if the engine was created outside the pool
        self.served: ServedModel | None = None  # set while the model is loaded
        self.requests = 0  # number of open requests
        self.used = 0.0  # when the model was loaded, or its last request finished
        self.stage = ""  # the current stage of loading
        self.is_leaving = False  # accepts no more requests, because it will be unloaded
        self.is_checked = False  # its files were checked, so other models may be unloaded for it

    @property
    def state(self) -> str:
        if self.served:
            return "unloaded" if self.served.engine.lifecycle.is_unloaded else "loaded"
        return "loading" if self.stage else "on disk"

    @property
    def nbytes(self) -> int:
        return self.facts.nbytes if self.facts else 0


class Ticket:
    """A request's place in the queue for a model. Stands in for `AnswerWriter` until the model is loaded."""

    lag = 0  # unsent bytes

    def __init__(self, pool: ModelPool, model: PooledModel):
        self.model = model
        self.served: ServedModel | None = None  # set when the model is borrowed for the request
        self.refusal: APIError | None = None  # set if the model cannot be loaded
        self.wake: Callable[[], None] = lambda: None
        self._pool = pool

    @property
    def is_over(self) -> bool:
        return bool(self.served or self.refusal)

    def progress(self) -> bytes:
        """Return the progress as a comment for the event stream."""
        return f": {self._pool.progress_of(self)}\n\n".encode(errors="replace")

    def prefill_to_log(self, now: float) -> None:
        """Return None: prefill has not started."""


Load = Callable[[PooledModel, Callable[[str], None]], tuple["Engine", "Loop"]]


class ModelPool:
    """Loads and unloads models as requests need them.

    `load` creates an engine and the loop that steps it; `check` raises an error if loading would fail.
    `memory`: limit for all loaded models together. `unload_after`: seconds of idleness after which a
    model is unloaded. `say` receives a line for each model that is loaded or unloaded.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        load: Load | None = None,
        *,
        check: Callable[[PooledModel], None] = lambda model: None,
        memory: float = math.inf,
        unload_after: float | None = None,
        aliases: Sequence[str] = (),
        max_tokens: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.models = list(models)
        self.default = self.models[0]
        self.aliases = aliases  # names of the default model; "*" matches any name
        self.memory = memory
        self.on_load: Callable[[ServedModel], None] = lambda served: None
        self._load = load
        self._check_files = check
        self._unload_after = unload_after
        self._max_tokens = max_tokens
        self._say = say
        self._line: list[Ticket] = []  # first come, first served
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="model loader", daemon=True)

    @classmethod
    def of_one(cls, engine: Engine, loop: Loop, name: str, **options) -> ModelPool:
        """Return a pool with one model that is already loaded and stays loaded."""
        pool = cls([PooledModel(name)], **options)
        pool.default.served = pool._served(pool.default, engine, loop)
        return pool

    def start(self) -> ModelPool:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the loader and close the engines that it loaded. A load in progress cannot be
        interrupted."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self._load:
            return
        if self._thread.ident:
            self._thread.join(5)
        for model in self.models:
            if model.served:
                model.served.engine.close()

    @property
    def sums(self) -> str:
        """A sentence about the memory that the models need, and whether they fit together."""
        needs = [f"{model.name} {readable(model.nbytes)}" for model in self.models]
        total = sum(model.nbytes for model in self.models)
        words = f"{', '.join(needs)}: {readable(total)}"
        if math.isinf(self.memory):
            return words
        words += f" of {readable(self.memory)}"
        if total <= self.memory:
            return f"{words}, so all fit together"
        largest = sorted(self.models, key=lambda model: -model.nbytes)[:2]
        if sum(model.nbytes for model in largest) > self.memory:
            alone = " and ".join(model.name for model in largest)
            return f"{words}; {alone} never fit together, and take turns"
        return f"{words}; the least recently used one is unloaded when another needs its memory"

    # --- for requests, in any thread

    @property
    def loaded(self) -> list[ServedModel]:
        return [served for model in self.models if (served := model.served)]

    @property
    def newest(self) -> PooledModel:
        """The most recently used loaded model; the default if none is loaded."""
        here = [model for model in self.models if model.served]
        return max(here, key=lambda model: (model.requests > 0, model.used), default=self.default)

    def named(self, name: object) -> PooledModel:
        """Return the model with this name or alias. None means the first model."""
        if name is None:
            return self.default
        if not isinstance(name, str):
            raise bad("model", name, "a string")
        for model in self.models:
            if name == model.name:
                return model
        if name in ("default", *self.aliases) or "*" in self.aliases:
            return self.default
        words = f"the model {shown(name, 200)} does not exist here; there is "
        names = [model.name for model in self.models]
        if len(names) == 1:
            words += f"{names[0]!r}, also as 'default'"
            words += f"; {command('serve.py')} --alias gives it more names"
        else:
            near = difflib.get_close_matches(name[:200], names, 3, 0.0)
            words += f"{', '.join(map(repr, near))}"
            words += f" and {len(names) - 3} more at /v1/models" if len(names) > 3 else ""
        raise APIError(404, words, "model_not_found", "model")

    def borrow(self, model: PooledModel) -> ServedModel | Ticket:
        """Return a loaded model, and keep it loaded until `give_back`. Return a ticket to wait for one that is not
        loaded. Raise APIError if it is too large, or too many requests wait."""
        with self._changed:
            if model.served and not model.is_leaving:
                model.requests += 1
                return model.served
            if model.nbytes > self.memory:
                needs = f"needs {readable(model.nbytes)}, but --memory is {readable(self.memory)}"
                raise APIError(503, f"the model {model.name} {needs}", "model_too_large")
            if len(self._line) >= MAX_WAITING:
                words = f"{MAX_WAITING} requests are already waiting for models"
                raise APIError(503, words, "busy", Retry_After="5")
            ticket = Ticket(self, model)
            self._line.append(ticket)
            self._changed.notify_all()
            return ticket

    def give_back(self, served: ServedModel) -> None:
        with self._changed:
            model = next(model for model in self.models if model.served is served)
            model.requests -= 1
            model.used = time.monotonic()
            if self._line or self._unload_after:
                self._changed.notify_all()

    def leave(self, ticket: Ticket) -> None:
        """Leave the queue, or give back the model that the ticket has borrowed."""
        with self._changed:
            if ticket in self._line:
                self._line.remove(ticket)
                self._changed.notify_all()
        if ticket.served:
            self.give_back(ticket.served)

    def progress_of(self, ticket: Ticket) -> str:
        """Describe what a request is waiting for."""
        with self._changed:
            if ticket.model.stage:
                return f"loading {ticket.model.name}: {ticket.model.stage}"
            if ticket not in self._line:
                return f"{ticket.model.name} is loaded"
            before = self._line.index(ticket)
        return f"waiting for {ticket.model.name}, {before} before you"

    # --- the loader's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                act, rest = self._next()
                if self._is_closed:
                    self._refuse(
                        self._line, APIError(503, "the server is shutting down", "draining")
                    )
                    return
                if not act:
                    self._changed.wait(rest)
                    continue
            try:
                act()
            except Exception as error:  # later requests need this thread
                show_fault("loading or unloading a model failed", error)

    def _next(self) -> tuple[Callable[[], None] | None, float | None]:
        """Serve the tickets whose model is loaded. Return the next action of the loader, if any, and
        otherwise how many seconds to wait at most. The caller holds the lock."""
        wanted = None  # the model of the first ticket that cannot be served
        leaving: list[PooledModel] = []
        for ticket in list(self._line):
            model = ticket.model
            if model.served and model not in leaving:
                model.requests += 1
                self._line.remove(ticket)
                ticket.served = model.served
                ticket.wake()
            elif wanted is None:
                wanted = model
                leaving = self._leaving_for(model)
        for model in self.models:
            model.is_leaving = model in leaving
        if wanted is None:
            return self._next_idle()
        if leaving and not wanted.is_checked:
            return lambda: self._check(wanted), None
        if any(model.requests for model in leaving):
            return None, None
        if leaving:
            return lambda: self._unload(leaving[0], f"{wanted.name} needs its memory"), None
        wanted.stage = "the files are checked"
        return lambda: self._load_model(wanted), None

    def _leaving_for(self, wanted: PooledModel) -> list[PooledModel]:
        """Return the models to unload for this one: idle models first, then by least recent use."""
        here = [model for model in self.models if model.served]
        room = self.memory - sum(model.nbytes for model in here)
        leaving = []
        # A busy model that is leaving stays the choice, or several would take turns, and none would drain
        order = sorted(here, key=lambda m: (m.requests > 0, not m.is_leaving, m.used))
        for model in order:
            if room >= wanted.nbytes:
                break
            leaving.append(model)
            room += model.nbytes
        return leaving

    def _next_idle(self) -> tuple[Callable[[], None] | None, float | None]:
        """Return the next action when no request waits: unload a model that has been idle too long."""
        idle = [model for model in self.models if model.served and not model.requests]
        if not (self._unload_after and idle):
            return None, None
        oldest = min(idle, key=lambda model: model.used)
        left = oldest.used + self._unload_after - time.monotonic()
        if left > 0:
            return None, left
        oldest.is_leaving = True
        return lambda: self._unload(oldest, f"idle for {self._unload_after:g} s"), None

    def _check(self, model: PooledModel) -> None:
        """Check a model's files before other models are unloaded for it."""
        try:
            self._check_files(model)
        except Exception as error:
            self._fail(model, error)
        else:
            model.is_checked = True

    def _load_model(self, model: PooledModel) -> None:
        def report(stage: str) -> None:
            model.stage = stage

        began = time.monotonic()
        engine = None
        try:
            engine, loop = self._load(model, report)
            served = self._served(model, engine, loop)
            self.on_load(served)
        except BaseException as error:
            try:
                self._fail(model, error)
            finally:
                if engine:
                    engine.close()
            return
        with self._changed:
            model.stage = ""
            model.is_checked = False
            model.served = served
            model.used = time.monotonic()
        seconds = time.monotonic() - began
        self._say(f"{model.name} is loaded, in {seconds:.1f} s; {engine.summary}")

    def _fail(self, model: PooledModel, error: BaseException) -> None:
        """Refuse all requests that wait for a model that cannot be loaded."""
        why = str(error)
        # Errors of these types come from the user or the files, and need no traceback
        if not isinstance(error, (ValueError, OSError, RuntimeError)):
            show_fault(f"loading {model.name} failed", error)
            why = describe(error)
        words = f"the model {model.name} cannot be loaded: {one_line(why, 300)}"
        refusal = APIError(503, without_folders(words), "model_not_loaded", Retry_After="30")
        with self._changed:
            model.stage = ""
            model.is_checked = False
            self._refuse([ticket for ticket in self._line if ticket.model is model], refusal)
        self._say(words)

    def _unload(self, model: PooledModel, why: str) -> None:
        with self._changed:
            served = model.served
            model.served = None
            model.is_leaving = False
        served.engine.on_commit = None
        try:
            with suppress(RuntimeError):
                served.engine.release()  # saves the slots, and frees the weights immediately
        finally:
            served.engine.close()
        self._say(f"{model.name} is unloaded: {why}")

    def _served(self, model: PooledModel, engine: Engine, loop: Loop) -> ServedModel:
        defaults = advised(engine.text.folder)
        suffix = secrets.token_hex(2)
        return ServedModel(model.name, engine, loop, defaults, self._max_tokens, suffix)

    def _refuse(self, tickets: Sequence[Ticket], refusal: APIError) -> None:
        for ticket in list(tickets):
            self._line.remove(ticket)
            ticket.refusal = refusal
            ticket.wake()
