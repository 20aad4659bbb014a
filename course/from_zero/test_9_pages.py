"""Stage 9: the KV cache in pages. You write `grow`, `leave` and `place` of `Pool`, `write` and
`read` of `PagedWindow`, in pages.py."""

import random
from itertools import chain

import pytest

from course.from_zero.reference import pages
from course.from_zero.shared_by_tests import ANSWERS, assert_close, drawn, row_pictures
from course.from_zero.small_llama import DH, HKV, LAYERS, answer, forward, tokenizer
from kernels.mlx import mx
from kv import AttentionGroup


def story(pool: pages.Pool, *events: tuple[str, int]) -> list[str]:
    """A line for each event: a sequence grows to some rows, or leaves (0 rows). A square is a page."""
    lines = []
    for name, rows in events:
        sequence = ord(name)
        fits = pool.grow(sequence, rows) if rows else pool.leave(sequence)
        pool.check()
        held = [f"{chr(each)} {'■' * len(table)}" for each, table in pool.tables.items() if table]
        said = f"{name} to {rows}" if rows else f"{name} leaves"
        said += ": no room" if fits is False else ""
        lines.append(f"{said:<18}{' '.join([*held, 'free ' + '■' * len(pool.free)])}")
    return lines


@pytest.mark.about("grow", "leave")
def test_block_tables():
    """A sequence takes a page when its next row needs one, and leaves all of them at once."""
    came = story(
        pages.Pool(1, 6, 1, 4),
        ("A", 16), ("A", 17), ("B", 40), ("A", 30), ("B", 65), ("A", 0), ("B", 65),
    )  # fmt: skip
    assert came == [
        "A to 16           A ■ free ■■■■■",
        "A to 17           A ■■ free ■■■■",
        "B to 40           A ■■ B ■■■ free ■",
        "A to 30           A ■■ B ■■■ free ■",
        "B to 65: no room  A ■■ B ■■■ free ■",
        "A leaves          B ■■■ free ■■■",
        "B to 65           B ■■■■■ free ■",
    ]


def pool_with(tables: dict[int, list[int]], layers: int = 2) -> pages.Pool:
    pool = pages.Pool(layers, 6, 2, 4)
    pool.tables = tables
    pool.free = [page for page in range(6) if page not in chain(*tables.values())]
    return pool


@pytest.mark.about("place")
def test_place():
    """The block table says where a row is: with pages 4, 0 and 2, row 37 is in page 2, at place 5."""
    pool = pool_with({7: [4, 0, 2], 8: [1]})
    assert [pool.place(7, row) for row in (0, 15, 16, 37)] == [(4, 0), (4, 15), (0, 0), (2, 5)]
    assert pool.place(8, 3) == (1, 3)


@pytest.mark.about("write")
def test_write():
    """New rows land where the block table says, in every head, also across the end of a page."""
    pool = pool_with({7: [4, 0], 8: [1]})
    # Token i has the number i in each key's head 0, i + 10 in head 1, and in its values 20 more
    k = mx.arange(1, 4)[:, None, None] + 10 * mx.arange(2)[None, :, None]
    k = mx.broadcast_to(k, (3, 2, 4)).astype(mx.float32)
    pages.PagedWindow(pool, [7], [14], 3).write(1, k, k + 20)
    assert row_pictures(pool.arrays, "page") == [
        "layer 1, k, page 0, head 0  3  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, k, page 0, head 1 13  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, k, page 4, head 0  .  .  .  .  .  .  .  .  .  .  .  .  .  .  1  2",
        "layer 1, k, page 4, head 1  .  .  .  .  .  .  .  .  .  .  .  .  .  . 11 12",
        "layer 1, v, page 0, head 0 23  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, v, page 0, head 1 33  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, v, page 4, head 0  .  .  .  .  .  .  .  .  .  .  .  .  .  . 21 22",
        "layer 1, v, page 4, head 1  .  .  .  .  .  .  .  .  .  .  .  .  .  . 31 32",
    ]
    pool = pool_with({7: [4, 0], 8: [1]})
    pages.PagedWindow(pool, [8, 7], [3, 16], 1).write(0, k[:2], k[:2])
    assert row_pictures(pool.arrays, "page")[:4:2] == [
        "layer 0, k, page 0, head 0  2  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 0, k, page 1, head 0  .  .  .  1  .  .  .  .  .  .  .  .  .  .  .  .",
    ]


@pytest.mark.about("read")
def test_read():
    """A sequence reads its own first T rows, in their order, wherever their pages are."""
    pool = pool_with({7: [4, 0, 2], 8: [1]})
    pool.arrays[1] = drawn((6, 4, 16, 4), 9)
    window = pages.PagedWindow(pool, [8, 7], [5, 40], 1)
    keys, values = window.read(1, window.groups[1])
    rows = mx.stack(
        [pool.arrays[1][[4, 0, 2][row // 16], :, row % 16] for row in range(41)], axis=1
    )
    assert_close(keys, rows[None, :2], "the keys")
    assert_close(values, rows[None, 2:], "the values")


def test_random():
    """Sequences come, grow and leave at random: each reads what it wrote."""
    dice = random.Random(5)
    pool = pages.Pool(1, 9, 2, 4)
    wrote: dict[int, mx.array] = {}
    for number in range(120):
        sequence = dice.randrange(4)
        if sequence in wrote and dice.random() < 0.2:
            pool.leave(sequence)
            del wrote[sequence]
        old = wrote.get(sequence, mx.zeros((0, 2, 4)))
        count = dice.randint(1, 20)
        if not pool.grow(sequence, len(old) + count):
            continue
        new = drawn((count, 2, 4), number)
        window = pages.PagedWindow(pool, [sequence], [len(old)], count)
        window.write(0, new, -new)
        wrote[sequence] = mx.concatenate([old, new])
        pool.check()
        for each, rows in wrote.items():
            group = AttentionGroup(slice(0, 1), len(rows), None)
            keys, values = pages.PagedWindow(pool, [each], [0], 1).read(0, group)
            assert_close(keys[0].swapaxes(0, 1), rows, f"event {number}, keys of sequence {each}")
            assert_close(values[0].swapaxes(0, 1), -rows, f"event {number}, its values")


class Service:
    """Answers prompts, as many at once as there are pages for; or slots, if `most` is given."""

    def __init__(self, size: int, most: int = 99):
        self.pool = pages.Pool(LAYERS, size, HKV, DH)
        self.most = most
        self.said: dict[int, list[int]] = {}
        self.steps = self.at_once = self.copied = self.preempted = 0

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        self.said = {number: [] for number in range(len(prompts))}
        line = [*self.said]
        running: list[int] = []
        while line or running:
            assert self.steps < 500, "after 500 steps, requests still run or wait"
            for number in [*running]:  # the oldest first
                rows = len(prompts[number]) + len(self.said[number])
                while number in running and not self.pool.grow(number, rows):
                    self.pool.leave(running[-1])  # preempt the newest
                    line.insert(0, running.pop())
                    self.preempted += 1
            new = []
            while line and len(running) + len(new) < self.most:
                number = line[0]
                if not self.pool.grow(number, len(prompts[number]) + len(self.said[number])):
                    break
                new.append(line.pop(0))
            self.step(prompts, running, new)
            running = [each for each in running + new if self.goes_on(each)]
        return [*self.said.values()]

    def step(self, prompts: list[list[int]], running: list[int], new: list[int]) -> None:
        texts = {number: prompts[number] + self.said[number] for number in running + new}
        windows = []
        ids: list[int] = []
        ends = []
        for number in new:
            ids += texts[number]
            ends.append(len(ids) - 1)
            windows.append(pages.PagedWindow(self.pool, [number], [0], len(texts[number])))
        if running:
            starts = [len(texts[number]) - 1 for number in running]
            windows.append(pages.PagedWindow(self.pool, running, starts, 1))
            ends += range(len(ids), len(ids) + len(running))
            ids += [texts[number][-1] for number in running]
        tokens = mx.argmax(forward(ids, windows)[mx.array(ends)], axis=-1).tolist()
        for number, token in zip(new + running, tokens, strict=True):
            self.said[number].append(token)
        self.steps += 1
        self.at_once = max(self.at_once, len(texts))
        rows = sum(group.T for window in windows for group in window.groups)
        self.copied = max(self.copied, rows)

    def goes_on(self, number: int) -> bool:
        if self.said[number][-1] not in tokenizer().end_tokens:
            return True
        self.pool.leave(number)
        return False


def test_more_at_once():
    """The tokens are those of each prompt alone, and far more requests fit into the same memory."""
    prompts = [tokenizer().ask(prompt) for prompt in ANSWERS]
    alone = [answer(prompt) for prompt in prompts]
    slots, paged, small = Service(16, most=2), Service(16), Service(7)
    for service in (slots, paged, small):
        assert service.run(prompts) == alone
        assert len(service.pool.free) == service.pool.pages, "pages are left over at the end"
    assert paged.at_once == 6
    print("256 rows: as 2 slots of 128, or as 16 pages")
    print(f"at once         {slots.at_once:>5}  {paged.at_once:>5}   requests")
    print(f"all six take    {slots.steps:>5}  {paged.steps:>5}   steps")
    print(f"a step copies   {0:>5}  {paged.copied:>5}   rows in each layer, at most: the price")
    print(f"with 7 pages {small.preempted} requests are preempted: {small.steps} steps")
