"""Slots are saved to disk. Their rows are restored bit for bit, or not at all."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import Tap, exactly
from processes import python
from slow_folder import slow_folder
from waiting import wait_for

from engine import disk_prefix_cache
from engine.slot_files import DIGEST, STALE_S, Damaged, SlotFolder
from kernels import library
from kernels.device import mx
from models.load import read_model
from nanobatch import Engine, Tokenizer

SHORT = exactly(4)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def engine(parts, folder: object, slots: int = 2, **options) -> Engine:
    return Engine(*parts, slots=slots, max_len=256, chunk=32, slot_cache=str(folder), **options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


@pytest.fixture
def saved(parts, tmp_path) -> tuple[Path, list[int]]:
    """A folder with one saved slot, and the prompt of its conversation's second turn."""
    folder = tmp_path / "slots"
    with engine(parts, folder) as first:
        answer = first.submit(tokens(100), SHORT).result().tokens
    return folder, [*tokens(100), *answer, *tokens(9, seed=1)]


def test_second_turn_after_a_restart_reads_only_what_is_new(parts, saved):
    """In llama.cpp (issues 26676, 25913) the slot was restored, but the whole prompt was prefilled anyway. In
    oMLX (2255) the output was wrong after a restore."""
    folder, prompt = saved
    with (
        engine(parts, folder) as restarted,
        Engine(*parts, slots=2, max_len=256, chunk=32) as plain,
    ):
        taps = Tap(restarted), Tap(plain)
        turn = restarted.submit(prompt, SHORT)
        other = plain.submit(prompt, SHORT)
        turn.result(), other.result()
        read = [
            (start, stop) for step in restarted.snapshot().steps for *_, start, stop in step.prefill
        ]
        assert read == [(103, 113)]
        assert (turn.metrics.cached_tokens, turn.metrics.cached_from) == (103, "disk")
        assert turn.request.prefix.own == 103
        assert np.array_equal(taps[0].of(turn), taps[1].of(other))
    assert len(files(folder)) == 1, "the longer conversation has replaced the shorter one"


def test_saved_slot_is_a_private_safetensors_file(parts, saved):
    folder, prompt = saved
    (file,) = files(folder)
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    tensors = mx.load(str(file))
    assert tensors["tokens"].tolist() == prompt[:103]
    config = parts[0].config
    assert tensors["layers.0"].shape == (2 * config.Hkv, 103, config.Dh)


def test_the_whole_prompt_is_never_restored(parts, saved):
    """At least one token is left to prefill. In mlx-examples (977) none was left, and the program failed."""
    folder, prompt = saved
    with engine(parts, folder) as restarted:
        result = restarted.submit(prompt[:103], SHORT).result()
    assert (result.finish_reason, result.metrics.cached_tokens) == ("length", 102)


@pytest.mark.parametrize(
    "place", ["header", "tokens", "layers", "digest", "cut off", "empty", "foreign"]
)
def test_damaged_file_is_never_answered_from(parts, saved, caplog, place):
    folder, prompt = saved
    (file,) = files(folder)
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    at = {"header": 100, "tokens": start + 400, "layers": start + 500, "digest": -1}
    if place in at:
        data[at[place]] ^= 1
    else:
        data = {"cut off": data[:-40], "empty": b"", "foreign": b"<html>" * 500}[place]
    file.write_bytes(data)
    with engine(parts, folder) as restarted:
        assert restarted.submit(prompt, SHORT).result().metrics.cached_tokens == 0
        assert not file.exists()
        assert [file.name in record.message for record in caplog.records] == [True]


def rewritten(file: Path, change) -> None:
    """Change a file's header and data, and recompute its digest."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    body = change(entries, data[start:-DIGEST])
    header = json.dumps(entries).encode()
    data = (
        len(header).to_bytes(8, "little") + header + (data[start:-DIGEST] if body is None else body)
    )
    file.write_bytes(data + blake2b(data, digest_size=DIGEST).digest())


SHAPES = [
    [None],
    [],
    "ab",
    [True],
    [-1],
    [2**70],
    [4, 103],
    {"a": 1},
    7,
    [4, 103, 16.0],
    [4, 52, 32],
]
OFFSETS = [[0], [0, 1, 2], [-5, 10], [0, "9"], [0, 2**70], None, [True, False], [412, 413], [9, 0]]


@pytest.mark.parametrize("name", ["tokens", "layers.0", "digest"])
@pytest.mark.parametrize("field", ["shape", "data_offsets", "dtype"])
def test_damaged_entry_is_damage(saved, name, field):
    """Regression: one changed comma in a header ended all running requests, and then the server did not
    start."""
    folder = SlotFolder(str(saved[0]))
    (file,) = files(saved[0])
    whole = file.read_bytes()
    listed = folder.read_head(file.name)
    dtypes = ["F64", "F16", [], None, 1]
    for value in {"shape": SHAPES, "data_offsets": OFFSETS, "dtype": dtypes}[field]:
        file.write_bytes(whole)
        rewritten(file, lambda entries, data, new=value: entries[name].update({field: new}))
        with pytest.raises(Damaged):
            folder.read_head(file.name)
        with pytest.raises(Damaged):
            folder.read_tensors(listed)


def test_any_changed_byte_is_damage_or_a_miss(saved):
    """A change to any byte of the header, or to every 4,999th byte of the data, is detected."""
    folder = SlotFolder(str(saved[0]))
    (file,) = files(saved[0])
    whole = file.read_bytes()
    listed = folder.read_head(file.name)
    start = 8 + int.from_bytes(whole[:8], "little")
    for at in (*range(start), *range(start, len(whole), 4_999)):
        data = bytearray(whole)
        for mask in (0x20, 0x80, 1):
            data[at] = whole[at] ^ mask
            file.write_bytes(data)
            with suppress(Damaged):
                folder.read_head(file.name)
        with pytest.raises(Damaged):
            folder.read_tensors(listed)


def one_layer_less(entries, data):
    last = entries.pop("layers.1")["data_offsets"]
    entries["digest"]["data_offsets"] = [last[0], last[0] + DIGEST]
    return data[: last[0]]


@pytest.mark.parametrize(
    "change",
    [
        one_layer_less,
        lambda entries, data: entries.update({"layers.7": entries.pop("layers.1")}),
        lambda entries, data: entries.update({"layers.7": entries["layers.1"]}),
        lambda entries, data: entries["layers.1"].update(shape=entries["layers.1"]["shape"][::-1]),
        lambda entries, data: entries["layers.1"].update(dtype="I32"),
    ],
)
def test_layers_of_another_model_are_damage(parts, saved, caplog, change):
    """Regression: rows of a different shape, with a correct digest and key, ended all running requests."""
    folder, prompt = saved
    (file,) = files(folder)
    rewritten(file, change)
    with engine(parts, folder) as restarted:
        neighbour = restarted.submit(tokens(20, seed=5), SHORT)
        assert restarted.submit(prompt, SHORT).result().metrics.cached_tokens == 0
        assert neighbour.result().finish_reason == "length"
    assert [file.name in record.message for record in caplog.records] == [True]


def test_named_pipe_among_the_slots(parts, saved):
    """Regression: opening a named pipe hung the engine at startup."""
    folder, prompt = saved
    (file,) = files(folder)
    pipe = folder / f"{file.name[:17]}{'0' * 32}.safetensors"
    os.mkfifo(pipe)
    with engine(parts, folder) as restarted:
        assert restarted.submit(prompt, SHORT).result(60).metrics.cached_tokens == 103


@pytest.mark.skipif("fma" not in library.processor(), reason="no fused multiply-add on this x86")
def test_rows_of_another_arithmetic_are_not_restored(parts, tmp_path):
    """Regression: kernels without fused multiply-adds compute different bits, yet the rows that they had
    saved were restored for kernels with them."""
    folder = tmp_path / "slots"
    model = parts[1].folder
    code = f"""
from nanobatch import Engine
options = dict(slots=1, max_len=256, chunk=32, slot_cache={str(folder)!r})
with Engine.load({str(model)!r}, **options) as engine:
    engine.generate([{tokens(80)}])
"""
    assert python(code, NANOBATCH_BLAS="rows:plain").returncode == 0
    assert len(files(folder)) == 1
    with Engine.load(model, slots=1, max_len=256, chunk=32, slot_cache=str(folder)) as here:
        assert here.submit([*tokens(80), 1], SHORT).result().metrics.cached_tokens == 0


def test_file_of_another_model_is_ignored(parts, saved, tmp_path, caplog):
    """Each model finds only its own files, even if a file is renamed to match another model."""
    folder, prompt = saved
    other = make_checkpoint(tmp_path, seed=2)
    with engine((read_model(other), Tokenizer(other, 272)), folder) as second:
        assert second.submit(prompt, SHORT).result().metrics.cached_tokens == 0
        assert not caplog.records
    ours, theirs = sorted(files(folder), key=lambda file: file.stat().st_mtime)
    theirs.rename(folder / f"{ours.name[:16]}{theirs.name[16:]}")
    ours.unlink()
    with engine(parts, folder) as restarted:
        assert restarted.submit(prompt, SHORT).result().metrics.cached_tokens == 0
        assert ["another model" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("change", [{"kv_dtype": mx.float16}, {"arithmetic": "int8"}])
def test_how_a_model_computes_is_part_of_it(parts, saved, change):
    folder, prompt = saved
    model, text = parts
    with engine((replace(model, **change), text), folder) as other:
        assert other.submit(prompt, SHORT).result().metrics.cached_tokens == 0


def test_positions_are_part_of_the_model(tmp_path):
    """With longrope, the rotation of a position depends on the slot length, so rows of another slot length
    are not restored."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]}
    scaling = {"rope_type": "longrope", "factor": 2.0, **factors}
    lengths = {"max_position_embeddings": 100, "original_max_position_embeddings": 100}
    folder = make_checkpoint(tmp_path, rope_scaling=scaling, **lengths)
    cached = []
    for max_len in (96, 256, 96):
        options = {"slots": 1, "chunk": 32, "slot_cache": str(tmp_path / "slots")}
        with Engine.load(folder, max_len=max_len, **options) as turns:
            cached.append(turns.submit(tokens(80), SHORT).result().metrics.cached_tokens)
    assert cached == [0, 0, 79]


def test_longer_rows_in_memory_win(parts, saved):
    """A longer prefix in memory is preferred to one on disk. In llama.cpp (28276) the restored slot hid it."""
    folder, prompt = saved
    with engine(parts, folder, slots=3) as restarted:
        longer = restarted.submit([*prompt, *tokens(60, seed=2)], SHORT)
        longer.result()
        turn = restarted.submit([*prompt, *tokens(60, seed=2), 1], SHORT).result()
        assert (turn.metrics.cached_tokens, turn.metrics.cached_from) == (173, "other_slot")


def test_overwritten_slot_is_saved(parts, tmp_path):
    """Four conversations take turns in one slot, whose rows are saved before they are overwritten."""
    turns = []
    with engine(parts, tmp_path / "slots", slots=1) as only:
        for seed in (1, 2, 3, 4, 1, 2, 3, 4):
            turns.append(only.submit(tokens(80, seed=seed), SHORT).result().metrics)
            only.slot_cache.save_all(only.runner, only.sched)  # waits for the writing threads
    assert [turn.cached_tokens for turn in turns] == [0] * 4 + [79] * 4
    assert {turn.cached_from for turn in turns[4:]} == {"disk"}


def test_scrub_comes_before_restored_rows(parts, saved):
    """A cancelled prompt's rows are scrubbed before other rows are restored to the slot, not afterwards."""
    folder, prompt = saved
    with engine(parts, folder, slots=1) as restarted, Engine(*parts, slots=1, max_len=256) as plain:
        cancelled = restarted.submit(tokens(200, seed=7), SHORT)
        for _ in range(3):
            restarted.step()
        cancelled.cancel()
        turn = restarted.submit(prompt, SHORT).result()
        assert turn.metrics.cached_from == "disk"
        assert turn.tokens == plain.submit(prompt, SHORT).result().tokens


def test_slots_are_saved_when_the_model_is_unloaded(tmp_path):
    with Engine.load(
        "demo", slots=1, max_len=256, chunk=32, slot_cache=str(tmp_path / "slots")
    ) as demo:
        demo.submit(tokens(80), SHORT).result()
        demo.release()
        turn = demo.submit([*tokens(80), 1], SHORT).result()
        assert (turn.metrics.cached_tokens, turn.metrics.cached_from) == (80, "disk")


def test_reload_damages_no_files_of_the_model_before(tmp_path, monkeypatch):
    """Regression: a search that outlived `reload` took the files of the model before for damaged ones, and
    deleted them."""
    folder = tmp_path / "slots"
    options = {"slots": 1, "max_len": 256, "chunk": 32, "slot_cache": str(folder)}
    with Engine.load("demo", **options) as demo:
        demo.submit(tokens(80), SHORT).result()
    with Engine.load("demo", **options) as demo, slow_folder(folder, "open") as slow:
        monkeypatch.setattr(disk_prefix_cache, "PATIENCE_S", 0.1)
        with demo.serving():
            turn = demo.submit([*tokens(80), 1], SHORT)
            assert slow.is_asked.wait(60)
            turn.cancel()
        demo.reload(make_checkpoint(tmp_path / "other"))
        monkeypatch.undo()
        slow.answer()
    assert len(files(folder)) == 1


def test_fault_in_a_search_is_a_miss(parts, saved, monkeypatch, caplog):
    def broken(folder, key):
        raise KeyError("of ours")

    monkeypatch.setattr(SlotFolder, "names", broken)
    with engine(parts, saved[0]) as restarted:
        result = restarted.submit(saved[1], SHORT).result()
    assert (result.finish_reason, result.metrics.cached_tokens) == ("length", 0)
    assert "in broken" in caplog.text


def test_request_without_prefix_cache_is_neither_saved_nor_restored(parts, saved):
    folder, prompt = saved
    before = files(folder)
    with engine(parts, folder) as restarted:
        private = restarted.submit(prompt, SHORT, prefix_cache=False)
        assert private.result().metrics.cached_tokens == 0
    assert files(folder) == before


def test_another_clients_rows_are_not_reported(parts, saved):
    """A hit on another client's rows is not reported to the client, on disk as in memory, because it would
    confirm a guess at the other client's text."""
    folder, prompt = saved
    with engine(parts, folder) as restarted:
        turn = restarted.submit(prompt, SHORT, client="another")
        assert (turn.result().metrics.cached_tokens, turn.request.prefix.own) == (103, 0)
    assert b"another" not in b"".join(file.read_bytes() for file in files(folder))


def hold(monkeypatch, name: str) -> threading.Event:
    """Make a method of the folder wait until the returned event is set."""
    may_go = threading.Event()
    method = getattr(SlotFolder, name)

    def waits(self, *arguments):
        assert may_go.wait(60)
        return method(self, *arguments)

    monkeypatch.setattr(SlotFolder, name, waits)
    return may_go


@pytest.mark.parametrize("kind", ["list", "open"])
def test_nobody_waits_for_a_slow_folder(parts, saved, kind):
    """Regression: a read from disk blocked new requests, even after its own request was cancelled. Listing
    the folder blocked every submit."""
    folder, prompt = saved
    with (
        Engine(*parts, slots=2, max_len=128, chunk=32) as another,
        engine(parts, folder, slots=3) as restarted,
        slow_folder(folder, kind) as slow,
        restarted.serving(),
    ):
        neighbour = restarted.submit(tokens(20, seed=5), exactly(9))
        turn = restarted.submit(prompt, SHORT)
        assert slow.is_asked.wait(60)
        assert restarted.snapshot().submitted == 2
        assert another.submit(tokens(20), SHORT).result(60).finish_reason == "length"
        assert neighbour.result(60).finish_reason == "length"
        assert restarted.submit(tokens(20, seed=6), SHORT).result(60).finish_reason == "length"
        cancelled = restarted.submit(prompt, SHORT)
        wait_for(lambda: cancelled.request.slot is not None)
        cancelled.cancel()
        assert restarted.submit(tokens(20, seed=7), SHORT).result(60).finish_reason == "length"
        assert turn.request.slot is not None and turn.request.prefilled == 0
        slow.answer()
        assert turn.result(60).metrics.cached_tokens == 103


def test_closing_engine_holds_no_lock_while_slots_are_written(parts, tmp_path):
    """Regression: an engine that was closed or unloaded held the device lock until its slots were written,
    so no other engine of the program could step."""
    folder = tmp_path / "slots"
    closing = engine(parts, folder)
    assert closing.submit(tokens(100), SHORT).result().finish_reason == "length"
    with (
        Engine(*parts, slots=2, max_len=128, chunk=32) as another,
        another.serving(),
        slow_folder(folder, "open") as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        closed = pool.submit(closing.close)
        assert slow.is_asked.wait(60)
        assert another.submit(tokens(20), SHORT).result(5).finish_reason == "length"
        assert not closed.done()
        slow.answer()
        closed.result(60)
    assert len(files(folder)) == 1


@pytest.mark.parametrize("name", ["names", "read_tensors", "write", "make_room"])
def test_folder_that_does_not_answer_holds_nobody_up(parts, saved, monkeypatch, caplog, name):
    """Regression: if the server of a network folder was gone, `close` waited forever, and so did a prompt
    whose rows were saved there."""
    folder, prompt = saved
    monkeypatch.setattr(disk_prefix_cache, "PATIENCE_S", 0.3)
    may_go = hold(monkeypatch, name)
    with engine(parts, folder) as restarted:
        turn = restarted.submit(prompt, SHORT).result(60)
        assert turn.finish_reason == "length"
        assert (turn.metrics.cached_tokens == 0) == (name in ("names", "read_tensors"))
    assert "has not answered" in caplog.text
    may_go.set()


def test_two_engines_share_a_folder(parts, saved, monkeypatch):
    """Each engine finds what the other has saved in the meantime. A file that vanishes before it is read is a
    miss."""
    folder, _ = saved
    with engine(parts, folder, slots=1) as one, engine(parts, folder, slots=1) as other:
        for seed in (1, 2):
            one.submit(tokens(80, seed=seed), SHORT).result()
        one.slot_cache.save_all(one.runner, one.sched)
        assert other.submit(tokens(80, seed=2), SHORT).result().metrics.cached_tokens == 79
        size = SlotFolder.size

        def vanished(self, name):
            (self.path / name).unlink()
            return size(self, name)

        monkeypatch.setattr(SlotFolder, "size", vanished)
        assert other.submit(tokens(80, seed=1), SHORT).result().metrics.cached_tokens == 0


def test_folder_that_cannot_be_written_stops_nothing(parts, saved, caplog):
    """Requests are answered, and one line reports the slots that are not saved."""
    folder, prompt = saved
    with engine(parts, folder) as restarted:
        (file,) = files(folder)
        file.unlink()
        folder.rmdir()
        assert restarted.submit(prompt, SHORT).result().finish_reason == "length"
    messages = [record.message for record in caplog.records]
    assert sum("slots are not saved" in message for message in messages) == 1
    # A thread that has listed the folder before may log that a file is gone
    assert all("No such file" in message for message in messages), messages


def test_more_slots_than_may_be_pending_are_dropped(parts, saved, monkeypatch, caplog):
    folder, _ = saved
    may_write = threading.Event()
    write = SlotFolder.write

    def slow(self, *arguments):
        assert may_write.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(SlotFolder, "write", slow)
    with engine(parts, folder, slots=1) as only:
        for seed in range(1, 5):
            only.submit(tokens(80, seed=seed), SHORT).result()
        may_write.set()
    assert (
        len(caplog.records) == 1
        and f"{disk_prefix_cache.WRITES} slots" in caplog.records[0].message
    )
    assert len(files(folder)) == 1 + 3


# --- the folder ---------------------------------------------------------------------------------


def test_size_is_kept(parts, saved):
    """Files of other models and temporary files count towards the limit, and the least recently used file is
    deleted first. In oMLX (1915, 2115) the limit was exceeded, and temporary files of dead processes were
    never deleted."""
    folder, _ = saved
    (file,) = files(folder)
    size = file.stat().st_size
    data = file.read_bytes()
    limit = SlotFolder(str(folder))
    limit.limit = 4 * size
    names = [f"{'0' * 16}-{n:032x}.safetensors" for n in range(4)]
    for age, name in enumerate([*names, f"{'0' * 16}-{9:032x}.{'a' * 16}.tmp", "notes.txt"]):
        (folder / name).write_bytes(data)
        os.utime(folder / name, (time.time() - 2 * STALE_S - age,) * 2)
    limit.make_room(size)
    left = {each.name for each in files(folder)}
    assert left == {file.name, *names[:2], "notes.txt"}, "the oldest two, and a dead writer's file"
    future = folder / f"{'0' * 16}-{8:032x}.{'b' * 16}.tmp"
    future.write_bytes(data)
    os.utime(future, (time.time() + 2 * STALE_S,) * 2)  # as if the clock had been set back
    limit.make_room(size)
    assert not future.exists() and file.exists()
    with pytest.raises(OSError, match="exceed"):
        limit.limit = 100
        limit.write(limit.read_head(file.name), {})


def test_folder_that_others_can_read_is_refused(parts, tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        engine(parts, tmp_path)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ValueError, match="another user"):
        engine(parts, tmp_path)


def test_setting_has_a_folder_and_a_size(tmp_path):
    for size, nbytes in {
        "": 8 * 2**30,
        ":500M": 500 * 2**20,
        ":1.5g": 3 * 2**29,
        ":2GiB": 2**31,
    }.items():
        assert SlotFolder(f"{tmp_path / 'new'}{size}").limit == nbytes
    for wrong in (f"{tmp_path}:", f"{tmp_path}:10", f"{tmp_path}:10X", ":10G", ""):
        with pytest.raises(ValueError, match="slot cache"):
            SlotFolder(wrong)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="File exists"):
        SlotFolder(str(tmp_path / "file"))
