"""Stage 9: the KV cache in pages. You write `grow`, `leave` and `place` of `Pool`, `write` and
`read` of `PagedWindow`, in pages.py."""

from itertools import chain

import pytest

from course.from_zero.reference import pages
from course.from_zero.shared_by_tests import ANSWERS, assert_close, drawn, numbered, row_pictures
from course.from_zero.small_llama import DH, HKV, LAYERS, answer, forward, tokenizer
from kernels.device import mx


def check_pages(pool: pages.Pool, count: int) -> None:
    __tracebackhide__ = True
    held = [*pool.free, *chain(*pool.tables.values())]
    assert all(pool.tables.values()), f"an empty table is left: {pool.tables}"
    assert sorted(held) == [*range(count)], (
        f"of {count} pages each should be free or in one table, once: {pool.tables}, free {pool.free}"
    )


def story(pool: pages.Pool, *events: tuple[str, int]) -> list[str]:
    """Return a line for each event; a square is a page.

    In an event, a sequence grows to some rows, or leaves (0 rows).
    """
    lines = []
    for name, rows in events:
        sequence = "AB".index(name)
        fits = pool.grow(sequence, rows) if rows else pool.leave(sequence)
        check_pages(pool, 6)
        held = [f"{'AB'[each]} {'■' * len(table)}" for each, table in pool.tables.items() if table]
        said = f"{name} to {rows}" if rows else f"{name} leaves"
        said += ": no room" if fits is False else ""
        lines.append(f"{said:<18}{' '.join([*held, 'free', '■' * len(pool.free)])}".rstrip())
    return lines


@pytest.mark.about("grow", "leave")
def test_block_tables():
    """A sequence takes a page when its next row needs one, and gives all of them back at once."""
    came = story(
        pages.Pool(1, 6, 1, 4),
        ("A", 16), ("A", 17), ("B", 40), ("A", 30), ("B", 65), ("A", 0), ("B", 65),
        ("B", 96), ("A", 1),
    )  # fmt: skip
    assert came == [
        "A to 16           A ■ free ■■■■■",
        "A to 17           A ■■ free ■■■■",
        "B to 40           A ■■ B ■■■ free ■",
        "A to 30           A ■■ B ■■■ free ■",
        "B to 65: no room  A ■■ B ■■■ free ■",
        "A leaves          B ■■■ free ■■■",
        "B to 65           B ■■■■■ free ■",
        "B to 96           B ■■■■■■ free",
        "A to 1: no room   B ■■■■■■ free",
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
    """New rows are written where the block table says, in every head, also across a page's end."""
    pool = pool_with({7: [4, 0, 2], 8: [1]})
    k = numbered(19)
    pages.PagedWindow(pool, [7], [14], 19).write(1, k, k + 20)
    assert row_pictures(pool.arrays, "page") == [
        "layer 1, k, page 0, head 0  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18",
        "layer 1, k, page 0, head 1 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28",
        "layer 1, k, page 2, head 0 19  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, k, page 2, head 1 29  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, k, page 4, head 0  .  .  .  .  .  .  .  .  .  .  .  .  .  .  1  2",
        "layer 1, k, page 4, head 1  .  .  .  .  .  .  .  .  .  .  .  .  .  . 11 12",
        "layer 1, v, page 0, head 0 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38",
        "layer 1, v, page 0, head 1 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48",
        "layer 1, v, page 2, head 0 39  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, v, page 2, head 1 49  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, v, page 4, head 0  .  .  .  .  .  .  .  .  .  .  .  .  .  . 21 22",
        "layer 1, v, page 4, head 1  .  .  .  .  .  .  .  .  .  .  .  .  .  . 31 32",
    ]
    pages.PagedWindow(pool, [8, 7], [3, 20], 1).write(0, k[:2], k[:2])
    assert row_pictures(pool.arrays, "page")[:4:2] == [
        "layer 0, k, page 0, head 0  .  .  .  .  2  .  .  .  .  .  .  .  .  .  .  .",
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


class Service:
    """A service that answers as many prompts at once as fit in its pages, up to `most`."""

    def __init__(self, size: int, most: int = 99):
        self.pool = pages.Pool(LAYERS, size, HKV, DH)
        self.most = most
        self.steps = self.at_once = self.copied = self.preempted = 0

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        texts = [list(prompt) for prompt in prompts]
        line = [*range(len(texts))]
        running: list[int] = []
        while line or running:
            assert self.steps < 500, "after 500 steps, requests still run or wait"
            new = []
            for number in [*running]:  # the oldest first
                while number in running and not self.pool.grow(number, len(texts[number])):
                    self.pool.leave(running[-1])  # preempt the newest
                    line.insert(0, running.pop())
                    self.preempted += 1
            while (
                line and len(running) < self.most and self.pool.grow(line[0], len(texts[line[0]]))
            ):
                new.append(line.pop(0))
                running.append(new[-1])
            starts = [0 if each in new else len(texts[each]) - 1 for each in running]
            for number, token in zip(running, self.step(texts, running, starts), strict=True):
                texts[number].append(token)
                if token in tokenizer().end_tokens:
                    self.pool.leave(number)
            running = [each for each in running if texts[each][-1] not in tokenizer().end_tokens]
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def step(self, texts: list[list[int]], running: list[int], starts: list[int]) -> list[int]:
        """Put the new tokens of each text in. Return the next token of each."""
        ids: list[int] = []
        ends = []
        windows = []
        for number, start in zip(running, starts, strict=True):
            new = texts[number][start:]
            windows.append(pages.PagedWindow(self.pool, [number], [start], len(new)))
            ids += new
            ends.append(len(ids) - 1)
        self.steps += 1
        self.at_once = max(self.at_once, len(running))
        self.copied = max(self.copied, sum(window.groups[0].T for window in windows))
        return mx.argmax(forward(ids, windows)[mx.array(ends)], axis=-1).tolist()


def test_more_at_once():
    """Each prompt gets the same tokens as alone, and far more requests fit into the same memory."""
    prompts = [tokenizer().ask(prompt) for prompt in ANSWERS]
    alone = [answer(prompt) for prompt in prompts]
    slots, paged, small = Service(16, most=2), Service(16), Service(7)
    for service in (slots, paged, small):
        assert service.run(prompts) == alone
        assert not service.pool.tables, "pages are held at the end"
    assert paged.at_once == 6
    print("256 rows as      2 slots   16 pages")
    print(f"at once         {slots.at_once:>8}   {paged.at_once:>8}   requests")
    print(f"all six take    {slots.steps:>8}   {paged.steps:>8}   steps")
    print(f"a step copies   {0:>8}   {paged.copied:>8}   rows in each layer, at most: the price")
    print(f"with 7 pages, {small.preempted} requests are preempted: {small.steps} steps")
