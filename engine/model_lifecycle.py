"""The lifecycle of an engine's model: unloading it, loading it again, replacing it with another one.

`model_source.py` describes where a model comes from; `idle_unload.py` decides when a server unloads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from base.foreign_modules import labelled
from engine.deferred_interrupt import defer_interrupt
from engine.model_source import Checked, ModelSource
from engine.runner_protocol import RunnerProtocol
from engine.step_time import StepTime
from kernels import device
from kernels.delta_net import LOG
from kernels.device import device_lock, device_stream
from models import memory
from models.layers import Model
from models.memory import Sizes
from prompt_lookup import Drafter
from request import Stateless
from runner import Runner
from state_places import StatePlaces
from text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanobatch import Engine


class Lifecycle:
    """Manages the model of an engine. It sets the attributes that depend on the model: the engine's `model`,
    `text`, `runner`, `drafter`, `step_time`, `is_batch_invariant` and `summary`, its scheduler's sizes, drafts
    and states, and the key of its slot cache.

    `speculate`, `step_ms`: the arguments of `Engine`.

    The invariant: no lock is held while folders are listed and files are checked, because a network folder
    may not respond. Only the tensors are loaded under `device_lock`.
    """

    def __init__(self, engine: Engine, speculate: int | Drafter | None, step_ms: int | None):
        self.source: ModelSource | None = None  # None: the model was not loaded from files
        self.is_reloading = False  # while True, no request is accepted
        self.needs_slab = False  # True if the slab was unloaded, or lost in a failed step
        # A weak reference, so that dropping an engine frees its slab immediately
        self._engine: Engine = weakref.proxy(engine)
        self._speculate = speculate
        self._step_ms = step_ms
        self._sizes: Sizes | None = None
        self._opened: Future[Checked] | None = None  # the result of `open_files`, for `restore`

    @property
    def is_unloaded(self) -> bool:
        return self._engine.runner is None

    @property
    def free_memory(self) -> int | None:
        """The free memory in bytes; None if unknown."""
        return device.free_memory()

    def serve(
        self, model: Model, text: Tokenizer, sizes: Sizes, runner: RunnerProtocol | None = None
    ) -> None:
        """From now on, serve this model with a slab of these sizes."""
        engine = self._engine
        summary = memory.described(model, sizes)
        if text.folder.suffix == ".gguf":  # the folder may contain several such files
            summary = f"{text.folder.name}; {summary}"
        with device_lock, device_stream():
            runner = runner or Runner(model, sizes, engine.clock)
            engine.slot_cache.open(model, sizes.max_len, runner.slab)
        with engine.changed:
            self._sizes = sizes
            self.needs_slab = False
            engine.runner = runner
            engine.model = model
            engine.text = text
            engine.is_batch_invariant = memory.is_batch_invariant(model)
            engine.drafter = self._drafter(model, engine.is_batch_invariant)
            engine.step_time = StepTime(model.cost, self._step_ms, engine.is_batch_invariant)
            engine.summary = f"{summary}; {labelled(device.named())}"
            engine.registry.model = model.cost
            sched = engine.sched
            sched.states = state_places(model, sizes)
            sched.resize(*sizes[:4])
            sched.draft = engine.drafter
            sched.find_saved = engine.slot_cache.find if engine.slot_cache.is_on else None

    def _drafter(self, model: Model, is_batch_invariant: bool) -> Drafter:
        asked = self._speculate
        most = asked.most if isinstance(asked, Drafter) else asked
        if model.config.delta and (most or 0) >= LOG:
            limit = f"the log of a state has room for {LOG - 1} draft tokens"
            raise ValueError(f"speculate = {most}, but {limit} with this model; choose fewer")
        if isinstance(asked, Drafter):
            return asked
        return Drafter(0 if asked is None and not is_batch_invariant else asked)

    # --- unload, and load again with the next request

    def unload(self) -> None:
        """Unload weights and slab. Raise RuntimeError if a request is open, or the model cannot be reloaded."""
        self._save_slots()
        with self._engine.between_steps():
            self._unload()

    def _unload(self, is_reloading: bool = False) -> None:
        engine = self._engine
        with engine.changed:
            self._check_unused()
            self.is_reloading = is_reloading
            self.needs_slab = True
            engine.runner = None
            engine.model = engine.model.without_weights()
            engine.sched.start_over()  # also clears the prefix cache
        device.give_back()

    def _save_slots(self) -> None:
        with self._engine.changed:
            self._check_unused()
        self._engine.slot_cache.save_all(self._engine.runner, self._engine.sched)

    def open_files(self) -> None:
        """Check the model's files if requests wait for an unloaded model. Called before a step, without a
        lock. `restore` then loads the tensors, or raises the error that was found here."""
        if not (self.is_unloaded and self._engine.has_work):
            return
        opened: Future[Checked] = Future()
        try:
            opened.set_result(self._check_again())
        except Exception as error:
            opened.set_exception(error)
        self._opened = opened

    def restore(self) -> bool:
        """Load unloaded weights, and replace a lost slab. Called in a step. Return False if this is not needed
        yet."""
        if not self._engine.has_work:
            return False
        if not self.is_unloaded:
            self._engine.runner.reset()
            self.needs_slab = False
            return True
        opened = self._opened
        self._opened = None
        if opened is None:  # the first request arrived after `open_files`
            return False
        self._serve(opened.result())
        return True

    def _serve(self, checked: Checked) -> None:
        self.serve(checked.read_model(), checked.text, checked.sizes)

    def _check_again(self) -> Checked:
        """Check the files of the same model again, for a slab of the same sizes."""
        source = self.source._replace(asked=self._sizes._asdict())
        return source.check(text=self._engine.text)

    # --- another model

    def reload(self, model: str | Path | None, sizes: Mapping[str, int | None]) -> None:
        """Serve another model, or the same model with other sizes (`Engine.reload`)."""
        engine = self._engine
        with engine.changed:
            self._check_unused()
        held = 0 if self.is_unloaded else memory.slab_of(engine.model, self._sizes)
        held += memory.nbytes_of(engine.model)
        checked = self.source.with_changes(model, sizes).check(held)
        self._save_slots()
        try:
            with engine.between_steps():
                self._unload(is_reloading=True)
                self._serve(checked)
            self.source = checked.source
        except BaseException:
            if self.is_reloading:  # else nothing was unloaded yet
                checked = self._check_again()
                with engine.between_steps():
                    self._serve(checked)
            raise
        finally:
            self.is_reloading = False

    def _check_unused(self) -> None:
        """Raise RuntimeError if weights and slab cannot be unloaded."""
        engine = self._engine
        if engine.driver.is_closed:
            raise RuntimeError("the engine is closed; load another")
        if engine.ranks.size > 1:
            raise RuntimeError("several ranks share this model, so it cannot be unloaded")
        if self.source is None:
            raise RuntimeError("this model was not loaded from files; use Engine.load")
        if requests := len(engine.registry.open):
            raise RuntimeError(f"open requests: {requests}; wait for them, or cancel")

    # --- shutdown

    def follow(self) -> int:
        """Run a rank other than rank 0 until shutdown. Return the program's exit code."""
        engine = self._engine
        return engine.ranks.follow(engine.runner.follow, engine.summary)

    def close(self) -> None:
        """Save the cached rows of all slots, and wait for the device. Call this when no step can run any
        more."""
        engine = self._engine
        with defer_interrupt():
            engine.slot_cache.close(engine.runner, engine.sched)
            with device_lock, device_stream():
                device.synchronize()  # before `leave`, which tells the other ranks to exit
                engine.ranks.leave()


def state_places(model: Model, sizes: Sizes) -> Stateless:
    """Return the places for a model's states, if it has states."""
    if not model.config.delta:
        return Stateless()
    return StatePlaces(sizes.slots, sizes.checkpoints, sizes.chunk, LOG)
