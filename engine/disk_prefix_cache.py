"""The slot cache on disk: the prefixes cached in slots outlive the process.

A slot's rows are saved before another prompt overwrites them, before the slab is freed, and at shutdown. A
prompt that shares a prefix with a saved slot gets those rows from the file (`Scheduler._want` decides this).
Background threads list the folder and read and write its files (`engine/slot_files.py`). The stepping thread
only copies rows out of the slab and into it.

Where next: `prefix.py`, the cache in memory.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from base.error_reports import LOG, show_fault
from base.validation import one_line
from engine.runner_protocol import RunnerProtocol
from engine.slot_files import (
    DIGEST,
    Damaged,
    SavedSlot,
    SavedTensor,
    SlotFolder,
    common_bytes,
    digest_of,
    name_of,
)
from kernels import device
from kernels.device import device_lock, device_stream, mx, readable
from models.forward_cost import arrays
from models.layers import Model
from models.memory import sources
from prefix import Remembered
from request import Request
from sched import Scheduler

if TYPE_CHECKING:
    from kv import Slab

WAIT_S = 0.1  # maximum time that a step waits for rows
PATIENCE_S = 10  # a folder without progress for this long counts as stalled
WRITES = 2  # maximum number of slot copies waiting to be written
SHARE = 8  # a file is loaded only if at least 1/SHARE of its rows can be used
NAMES = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


# (the bits as unsigned integers, the dtype, the shape)
SavedLayer = tuple[mx.array, mx.Dtype, tuple[int, ...]]


class Found(NamedTuple):
    """The best saved slot for a prompt."""

    rows: int = 0  # usable rows
    own: int = 0  # rows of this prompt that its own client saved
    base: int = 0  # number of tokens that the saved states include
    # The file's arrays, shared by all requests that restore it; freed after the last of them
    load: Future[list[SavedLayer]] | None = None


class RestoredRows:
    """A search for a saved slot that shares a prefix with a prompt, and the rows that it finds."""

    def __init__(self, cache: SlotCache, search: Future[Found]):
        self._cache = cache
        self._search = search

    @property
    def is_ready(self) -> bool:
        """True once the search has finished, with or without a match, or the folder has stalled."""
        return self._search.done() or self._cache.is_stalled

    @property
    def rows(self) -> int:
        """The number of usable rows."""
        return self._found.rows

    @property
    def own(self) -> int:
        """The length in rows of the longest match among the files of the request's own client."""
        return self._found.own

    @property
    def _found(self) -> Found:
        # The result is None after a fault
        return (self._search.done() and self._search.result()) or Found()

    @property
    def base(self) -> int:
        """The number of tokens that the matrices of `states` include."""
        return self._found.base

    def prefix(self, rows: int) -> list[mx.array]:  # (1, heads, rows, Dh) each
        """Return the saved rows in the format of `Slab.prefix`."""
        found = []
        for numbers, dtype, shape in self._found.load.result():
            if len(shape) > 1:
                found.append(numbers.view(dtype).reshape(1, *shape)[:, :, :rows])
        return found

    def states(self) -> list[mx.array]:  # (numbers,) each
        """Return the saved states in the format of `Slab.state`."""
        layers = self._found.load.result()
        return [numbers.view(dtype) for numbers, dtype, shape in layers if len(shape) == 1]


class SlotCache:
    """Saves the prefixes of slots to a folder, and finds them for new prompts.

    `setting`: DIR[:SIZE], or None to disable the cache.
    `changed`: the condition to notify when a search has finished.

    The invariant: after `__init__`, only the cache's own threads access the folder, and they hold no lock that
    a step needs while they wait for it. A folder that stalls delays a request by at most PATIENCE_S.
    """

    def __init__(self, setting: str | None, ranks: int, changed: threading.Condition):
        if setting is not None and ranks > 1:
            raise ValueError("slot cache: several ranks share the model's slots; leave it out")
        self._folder = None if setting is None else SlotFolder(str(setting))
        self._changed = changed
        self._is_closed = False
        self._key = ""
        self._layers: list[tuple[int, int]] = []  # (heads, head size) of each layer
        self._dtype = ""
        # For each layer with states: the size of a slot's place, and of a checkpoint
        self._states: list[tuple[int, int]] = []
        self._lock = threading.Lock()  # guards `_saved`, `_jobs` and `_reading`
        self._saved: dict[str, SavedSlot] = {}  # by file name
        self._unusable: set[str] = set()  # names of files that could not be read
        self._jobs: set[Future] = set()  # jobs whose threads are still running
        self._reading: WeakValueDictionary[str, Future[list[SavedLayer]]] = WeakValueDictionary()
        self._listing = threading.Lock()  # one thread lists at a time
        self._listed = -math.inf  # when the last listing began
        self._writing: list[Future] = []
        self._failure = ""  # why the last save failed
        self._is_behind = False  # True once slots have been dropped: too many were being written

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    @property
    def is_stalled(self) -> bool:
        """True if threads have been waiting for the folder for PATIENCE_S."""
        return bool(self._jobs) and time.monotonic() - self._folder.answered > PATIENCE_S

    def open(self, model: Model, max_len: int, slab: Slab) -> None:
        """From now on, save and find slots of this model."""
        if self._folder is None:
            return
        self._key = key_of(model.for_slots_of(max_len))
        self._layers = [(array.shape[1], array.shape[3]) for array in slab.arrays]
        self._dtype = NAMES[slab.dtype]
        self._states = [
            (states.place_size(0), states.heads.place_size(1)) for states in slab.states
        ]
        with self._lock:
            self._saved = {}
        self._start(self._folder.make_room, 0)

    def _start(self, work: Callable[..., Any], *arguments: Any) -> Future:
        """Call a function in a new daemon thread. A thread pool is not used, because at exit Python waits for
        its threads, even if the folder has stalled."""
        job: Future = Future()

        def run() -> None:
            result = None
            try:
                result = work(*arguments)
            except OSError as error:
                say(f"{self._folder.path}: {error.strerror}")
            except Exception as error:
                show_fault("the slot cache failed", error)
            with self._lock:
                self._jobs.discard(job)
            job.set_result(result)

        with self._lock:
            if not self._jobs:  # while jobs run, a new one must not hide a stall
                self._folder.answered = time.monotonic()
            self._jobs.add(job)
        threading.Thread(target=run, name="slot cache", daemon=True).start()
        return job

    def _settle(self) -> bool:
        """Wait until all jobs are done. Return False if the folder stalls."""
        while jobs := set(self._jobs):
            if self.is_stalled:
                say(f"{self._folder.path} has not answered for {PATIENCE_S} s; slots are not saved")
                return False
            wait(jobs, 0.1)
        return True

    # --- reading

    def find(self, request: Request, least: int) -> RestoredRows | None:
        """Start a search for the saved slot that shares the longest prefix with a prompt: at least `least` rows,
        and at most all but the last. Return None if the prompt is too short, the request uses no prefix cache, or
        the cache is off or stalled."""
        is_long = request.prefix_cache and len(request.prompt) > least
        if self._folder is None or not is_long or self.is_stalled:
            return None
        prompt = array("i", request.prompt[:-1]).tobytes()
        search = self._start(self._search, prompt, digest_of(request.client), least)
        search.add_done_callback(self._wake)
        return RestoredRows(self, search)

    def wait(self, running: Collection[Request]) -> bool:
        """If all running requests wait for rows, sleep until rows are loaded or a request arrives, for at most
        WAIT_S. Call this without holding another lock. Return False if no request is running."""
        with self._changed:
            if running and all(request.waits_for_disk for request in running):
                self._changed.wait(WAIT_S)
            return bool(running)

    def _wake(self, search: Future[Found]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _search(self, prompt: bytes, owner: str, least: int) -> Found:
        """Find the best file for a prompt, and load it."""
        self._list(time.monotonic())
        with self._lock:
            known = list(self._saved.values())
        fits = []
        for saved in known:
            rows = common_bytes(saved.tokens, prompt) // 4
            if rows >= max(least, saved.base) and SHARE * rows >= saved.rows:
                fits.append((rows, saved.owner == owner, saved))
        if not fits:
            return Found()
        rows, _, best = max(fits, key=lambda fit: (fit[0], fit[1], fit[2].name))
        own = max((rows for rows, is_own, _ in fits if is_own), default=0)
        with self._lock:
            load = self._reading.get(best.name)
            is_first = load is None
            if is_first:
                load = self._reading[best.name] = Future()
        if is_first:
            load.set_result(self._read(best))
        return Found(rows, own, best.base, load) if load.result() else Found()

    def _read(self, saved: SavedSlot) -> list[SavedLayer]:
        """Load a file. Return an empty list if it cannot be used.

        subtle: `mx.array` copies numbers into MLX's memory and adds no operation to a stream, so it needs no
        `device_lock` and delays no step. Later operations need it (`RestoredRows.prefix`).
        """
        try:
            check_room(2 * self._folder.size(saved.name))  # for the file's bytes and for the arrays
            tensors = self._folder.read_tensors(saved)
            del tensors["tokens"], tensors["digest"]
            layers = []
            for index, (heads, Dh) in enumerate(self._layers):
                layer = tensors.pop(f"layers.{index}", None)
                if layer is None or layer[:2] != (self._dtype, (heads, saved.rows, Dh)):
                    raise Damaged(f"its layer {index} does not belong to this model")
                layers.append((mx.array(layer.data), DTYPES[layer.dtype], layer.shape))
            for index, sizes in enumerate(self._states):
                state = tensors.pop(f"states.{index}", None)
                if state is None or state[:2] not in [("F32", (size,)) for size in sizes]:
                    raise Damaged(f"its state {index} does not belong to this model")
                layers.append((mx.array(state.data), mx.float32, state.shape))
            if tensors:
                raise Damaged(f"it has {len(tensors)} more layers than this model")
            self._folder.use(saved.name)
            return layers
        except MemoryError as error:
            say(f"{saved.rows:,} tokens are not restored: {error}")
        except (OSError, Damaged) as error:
            self._ignore(saved.name, error)
        except Exception as error:  # else requests waiting for the same file would hang
            show_fault(f"{saved.name} cannot be read", error)
        return []

    def _list(self, asked: float) -> None:
        """Update the list of saved slots, unless a listing began at `asked` or later."""
        with self._listing:
            if self._listed >= asked:
                return
            began = time.monotonic()
            names = self._folder.names(self._key) - self._unusable
            with self._lock:
                for name in self._saved.keys() - names:
                    del self._saved[name]
                new = names - self._saved.keys()
            for name in new:
                try:
                    saved = self._folder.read_head(name)
                    if saved.key != self._key:
                        raise Damaged("it belongs to another model")
                    with self._lock:
                        self._saved[name] = saved
                except (OSError, Damaged) as error:
                    self._ignore(name, error)
            self._listed = began

    def _ignore(self, name: str, error: OSError | Damaged) -> None:
        """Mark a file as unusable, and remove it if it is damaged. A file that has vanished counts as a miss, and
        so does one of the model before a reload."""
        if isinstance(error, FileNotFoundError) or not name.startswith(self._key[:16]):
            return
        self._unusable.add(name)
        say(f"{self._folder.path / name} is ignored: {one_line(error)}")
        if isinstance(error, Damaged):
            self._folder.remove(name)

    # --- writing

    def save(self, slab: Slab, slots: Iterable[Remembered]) -> None:
        """Copy the cached rows of slots, and write them in threads. Drop a slot
        if WRITES copies are still being written."""
        for _, each in groupby(slots, key=lambda remembered: remembered.slot):
            self._writing = [write for write in self._writing if not write.done()]
            if len(self._writing) < WRITES:
                for remembered in each:  # one save for each of the slot's states
                    self._save(slab, remembered)
                continue
            if not self._is_behind:
                say(f"slots are not saved while {WRITES} slots are being written")
            self._is_behind = True

    def save_all(self, runner: RunnerProtocol | None, sched: Scheduler) -> None:
        """Save the cached rows of all slots, one after another. Return when they are written or the folder stalls."""
        if self._folder is None or self._is_closed:
            return
        for slot in range(sched.slots):
            if not self._settle():  # without holding a lock, because the folder may be slow
                return
            with device_lock, device_stream():
                with self._changed:
                    found = sched.prefixes.remembered([slot], sched.chunk)
                for remembered in found:
                    self._save(runner.slab, remembered)
        self._settle()

    def close(self, runner: RunnerProtocol | None, sched: Scheduler) -> None:
        """Save the cached rows of all slots. Later saves are ignored."""
        self.save_all(runner, sched)
        self._is_closed = True

    def _save(self, slab: Slab, remembered: Remembered) -> None:
        """Copy a slot's rows and start writing them, unless they are already saved."""
        if self._folder is None or self._is_closed:
            return
        tokens = array("i", remembered.tokens).tobytes()
        owner = digest_of(remembered.client)
        shorter = []
        with self._lock:
            known = [saved for saved in self._saved.values() if saved.owner == owner]
        for other in known:
            if other.tokens.startswith(tokens) and other.base <= len(remembered.tokens):
                self._start(self._folder.use, other.name)
                return
            if tokens.startswith(other.tokens) and remembered.base <= other.base:
                shorter.append(other.name)
        rows = len(remembered.tokens)
        part = rows / (slab.shape[0] * slab.shape[2])
        try:
            rows_nbytes = int(part * sum(layer.nbytes for layer in slab.arrays))
            check_room(rows_nbytes + 4 * sum(size for size, _ in self._states))
        except MemoryError as error:
            say(f"{rows:,} tokens of a slot are not saved: {error}")
            return
        numbers = mx.uint16 if slab.dtype.size == 2 else mx.uint32
        copies = [copy.view(numbers) for copy in slab.prefix(remembered.slot, rows)]
        states = [state.view(mx.uint32) for state in slab.state(remembered.place)]
        mx.eval(copies, states)
        tensors = {}
        for index, copy in enumerate(copies):
            tensors[f"layers.{index}"] = SavedTensor(
                NAMES[slab.dtype], copy.shape[1:], memoryview(copy)
            )
        for index, state in enumerate(states):
            tensors[f"states.{index}"] = SavedTensor("F32", state.shape, memoryview(state))
        name = name_of(self._key, owner, tokens)
        saved = SavedSlot(name, self._key, owner, tokens, remembered.base)
        self._writing.append(self._start(self._write, saved, tensors, shorter))

    def _write(
        self, saved: SavedSlot, tensors: dict[str, SavedTensor], shorter: Sequence[str]
    ) -> None:
        try:
            self._folder.write(saved, tensors)
            with self._lock:
                self._saved[saved.name] = saved
            for name in shorter:  # the new file includes their rows
                self._folder.remove(name)
            self._failure = ""
        except OSError as error:
            if error.strerror != self._failure:  # report a full disk only once
                say(f"slots are not saved in {self._folder.path}: {error.strerror}")
            self._failure = error.strerror


def say(line: str) -> None:
    LOG.warning("nanobatch: slot cache: %s", line)


def check_room(nbytes: int) -> None:
    """Raise MemoryError if a copy would take more than half of the free memory. If memory ran out, MLX would
    crash the process."""
    free = device.free_memory()
    if free is not None and nbytes > free // 2:
        raise MemoryError(f"{readable(nbytes)} are needed, and {readable(free)} of memory are free")


def key_of(model: Model) -> str:
    """Return a hash of everything that determines the bits of a token's keys and values, except the tokens:
    weights, config, dtypes, positions, and the code that computes them."""
    blas = device.blas
    facts = [mx.__version__, blas.name, blas.bits, str(device.has_gpu()), repr(model.config)]
    for path in sources():
        if path.parent.name in ("kernels", "models") or path.stem in ("llama", "kv"):
            facts.append(f"{path.name} {zlib.crc32(path.read_bytes())}")
    for name, value in vars(model).items():  # kv_dtype, attention, ...
        if isinstance(value, (bool, str, mx.Dtype)):
            facts.append(f"{name} {value}")
    held = arrays((model.layers, model.norm, model.table, model.head, model.kinds))
    held = list({id(each): each for each in held}.values())

    def digest(each: mx.array) -> bytes:
        return blake2b(memoryview(each).cast("B"), digest_size=DIGEST).digest()

    with ThreadPoolExecutor() as pool:
        facts.append(str([(each.shape, str(each.dtype)) for each in held]))
        digests = list(pool.map(digest, plain(held)))
    return digest_of(*facts, *digests)


def plain(held: Sequence[mx.array]) -> list[mx.array]:
    """Return the arrays as uint8, which `memoryview` supports."""
    found = [mx.contiguous(each).flatten().view(mx.uint8) for each in held]
    mx.eval(found)
    return found
