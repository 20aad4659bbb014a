"""The slot cache on disk: prefixes that slots have cached outlive the process.

A slot's rows are saved when another prompt overwrites them, before the slab is freed, and at the end. A
prompt that begins like a saved slot gets its rows from there (`Scheduler._cut` decides it). Threads
write and read the files (`engine/slot_files.py`); the thread that steps only copies rows from the slab,
and into it.

Where next: `prefix.py`, the same for slots in memory.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from hashlib import blake2b
from weakref import WeakValueDictionary

from base.error_reports import LOG
from base.validation import one_line
from engine.runner_protocol import RunnerProtocol
from engine.slot_files import (
    DIGEST,
    Damaged,
    Saved,
    SlotFolder,
    Tensor,
    common_bytes,
    digest_of,
    name_of,
)
from kernels import device
from kernels.device import mx, readable
from models.forward_cost import arrays
from models.layers import Model
from models.memory import sources
from prefix import Remembered
from sched import Request, Scheduler

WRITES = 2  # copies of slots that wait to be written, at most
SHARE = 8  # a file is read if at least 1/SHARE of its rows are of use
NAMES = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


Layer = tuple[mx.array, mx.Dtype, tuple[int, ...]]  # the bits as numbers; their dtype and shape


class RestoredRows:
    """The first rows of a saved slot, for one prompt."""

    def __init__(self, load: Future[list[Layer]], rows: int, owner: str):
        self._load = load  # of the file; no layers if it cannot be used
        self._rows = rows
        self._owner = owner

    @property
    def is_ready(self) -> bool:
        """True once the file has been read, whether its rows can be used or not."""
        return self._load.done()

    @property
    def rows(self) -> int:
        """The number of rows that can be used."""
        return self._rows if self._load.result() else 0

    def is_of(self, client: str) -> bool:
        """True if this client has written them."""
        return self._owner == digest_of(client)

    def prefix(self, rows: int) -> list[mx.array]:  # (1, 2 Hkv, rows, Dh) each
        """As `Slab.prefix` has it."""
        found = []
        for numbers, dtype, shape in self._load.result():
            found.append(numbers.view(dtype).reshape(1, *shape)[:, :, :rows])
        return found


class SlotCache:
    """`setting`: DIR[:SIZE], or None, and then nothing is saved or found."""

    def __init__(self, setting: str | None, ranks: int = 1):
        if setting is not None and ranks > 1:
            raise ValueError("slot cache: several ranks share the model's slots; leave it out")
        self._folder = None if setting is None else SlotFolder(str(setting))
        self._key = ""
        self._saved: dict[str, Saved] = {}  # by name, as last listed
        self._unusable: set[str] = set()  # names
        self._failure = ""  # why the last slot was not saved
        self._is_behind = False  # slots were dropped because they came too quickly
        self._threads = ThreadPoolExecutor(thread_name_prefix="slot cache")
        self._reading: WeakValueDictionary[str, Future[list[Layer]]] = WeakValueDictionary()
        self._writing: list[Future[None]] = []

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    def open(self, model: Model, max_len: int) -> None:
        """Save and find slots of this model from now on."""
        if self._folder is None:
            return
        self._key = key_of(model.for_slots_of(max_len))
        self._saved = {}
        with suppress(OSError):
            self._folder.make_room(0)
        self._list()

    # --- reading

    def find(self, request: Request, least: int) -> RestoredRows | None:
        """The saved slot with the most rows of a prompt, if these are at least as many, and not the
        whole prompt. A thread begins to read it."""
        if self._folder is None or not request.prefix_cache or len(request.prompt) <= least:
            return None
        self._list()
        prompt = array("i", request.prompt[:-1]).tobytes()
        owner = digest_of(request.client)
        best = None
        for saved in self._saved.values():
            rows = common_bytes(saved.tokens, prompt) // 4
            if rows >= least and SHARE * rows >= saved.rows:
                best = max(best or (0, False, ""), (rows, saved.owner == owner, saved.name))
        if best is None:
            return None
        rows, _, name = best
        saved = self._saved[name]
        load = self._reading.get(name)
        if load is None:
            load = self._reading[name] = self._threads.submit(self._read, saved)
        return RestoredRows(load, rows, saved.owner)

    def wait(self) -> bool:
        """Wait until no file is being read. False if none was."""
        reading = [load for load in self._reading.values() if not load.done()]
        wait(reading)
        return bool(reading)

    def _read(self, saved: Saved) -> list[Layer]:
        """Read a file, in a thread of its own. No layers if it cannot be used.

        subtle: `mx.array` copies numbers into memory of MLX and adds no operation to a stream, so it
        needs no `device_lock`, and other rows are not held up. What follows does (`RestoredRows.prefix`).
        """
        try:
            check_room(2 * self._folder.size(saved.name))  # the file, and its arrays
            tensors = self._folder.read(saved)
            layers = [tensor for name, tensor in tensors.items() if name.startswith("layers.")]
            self._folder.use(saved.name)
            return [(mx.array(each.data), DTYPES[each.dtype], each.shape) for each in layers]
        except MemoryError as error:
            say(f"{saved.rows:,} tokens are not read: {error}")
        except (OSError, Damaged) as error:
            self._ignore(saved.name, error)
        return []

    def _list(self) -> None:
        """See which files have come and gone."""
        names = self._folder.names(self._key) - self._unusable
        for name in self._saved.keys() - names:
            del self._saved[name]
        for name in names - self._saved.keys():
            try:
                saved = self._folder.look(name)
                if saved.key != self._key:
                    raise Damaged("it is of another model")
                self._saved[name] = saved
            except (OSError, Damaged) as error:
                self._ignore(name, error)

    def _ignore(self, name: str, error: OSError | Damaged) -> None:
        """Do not read an unusable file again. One that has vanished is a miss."""
        if isinstance(error, FileNotFoundError):
            return
        self._unusable.add(name)
        say(f"{self._folder.path / name} is ignored: {one_line(error)}")
        if isinstance(error, Damaged):
            self._folder.remove(name)

    # --- writing

    def save(self, slab, slots: Iterable[Remembered]) -> None:
        """Copy what slots remember, and write it in threads. More than WRITES at once are dropped."""
        for remembered in slots:
            self._writing = [write for write in self._writing if not write.done()]
            if len(self._writing) >= WRITES:
                if not self._is_behind:
                    say(f"slots are not saved while {WRITES} slots are being written")
                self._is_behind = True
                continue
            write = self._copied(slab, remembered)
            if write is not None:
                self._writing.append(self._threads.submit(write))

    def finish(self, runner: RunnerProtocol | None, sched: Scheduler) -> None:
        """Save what all slots remember, one after the other, and return when it is written."""
        if self._folder is None:
            return
        wait([*self._reading.values(), *self._writing])
        for remembered in sched.prefixes.remembered(range(sched.slots), sched.chunk):
            write = self._copied(runner.slab, remembered)
            if write is not None:
                write()

    def close(self, runner: RunnerProtocol | None, sched: Scheduler) -> None:
        """Save what all slots remember, and nothing after that."""
        self.finish(runner, sched)
        self._folder = None
        self._threads.shutdown()

    def _copied(self, slab, remembered: Remembered) -> Callable[[], None] | None:
        """Copy a slot's rows. Returns the function that writes them; None if there is nothing to do."""
        if self._folder is None:
            return None
        self._list()
        tokens = array("i", remembered.tokens).tobytes()
        owner = digest_of(remembered.client)
        shorter = []
        for other in self._saved.values():
            if other.owner == owner and other.tokens.startswith(tokens):
                self._folder.use(other.name)
                return None  # all of it is saved
            if other.owner == owner and tokens.startswith(other.tokens):
                shorter.append(other.name)
        rows = len(remembered.tokens)
        part = rows / (slab.shape[0] * slab.shape[2])
        try:
            check_room(int(part * sum(layer.nbytes for layer in slab.arrays)))
        except MemoryError as error:
            say(f"{rows:,} tokens of a slot are not saved: {error}")
            return None
        numbers = mx.uint16 if slab.dtype.size == 2 else mx.uint32
        copies = [copy.view(numbers) for copy in slab.prefix(remembered.slot, rows)]
        mx.eval(copies)
        tensors = {}
        for index, copy in enumerate(copies):
            tensors[f"layers.{index}"] = Tensor(NAMES[slab.dtype], copy.shape[1:], memoryview(copy))
        saved = Saved(name_of(self._key, owner, tokens), self._key, owner, tokens)
        return lambda: self._write(saved, tensors, shorter)

    def _write(self, saved: Saved, tensors: dict[str, Tensor], shorter: Sequence[str]) -> None:
        try:
            self._folder.write(saved, tensors)
            for name in shorter:  # the new file begins with all that they hold
                self._folder.remove(name)
            self._failure = ""
        except OSError as error:
            if error.strerror != self._failure:  # on a full disk, one line is enough
                say(f"slots are not saved in {self._folder.path}: {error.strerror}")
            self._failure = error.strerror


def say(line: str) -> None:
    LOG.warning("nanobatch: slot cache: %s", line)


def check_room(nbytes: int) -> None:
    """Raise MemoryError if a copy of this size would not fit: in MLX that would end the process."""
    free = device.free_memory()
    if free is not None and nbytes > free // 2:
        raise MemoryError(f"{readable(nbytes)} are needed, and {readable(free)} of memory are free")


def key_of(model: Model) -> str:
    """A hash of all that the bits of a token's keys and values depend on, but for the tokens: weights,
    config, dtypes, positions, and the program that computes."""
    facts = [mx.__version__, device.blas.name, str(device.has_gpu()), repr(model.config)]
    for path in sources():
        if path.parent.name in ("kernels", "models") or path.stem in ("llama", "kv"):
            facts.append(f"{path.name} {zlib.crc32(path.read_bytes())}")
    for name, value in vars(model).items():  # such as kv_dtype and attention
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
    """The same bytes, in a form that a `memoryview` can have."""
    found = [mx.contiguous(each).flatten().view(mx.uint8) for each in held]
    mx.eval(found)
    return found
