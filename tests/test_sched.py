"""The scheduler alone: no model, no array, and a clock that ticks when told."""

import os
import random
import sys
from pathlib import Path

import pytest

import sched
from sched import Plan, QueueFull, Request, Scheduler

SCHEDULES = int(os.environ.get("NANOBATCH_SCHEDULES", 4_000))  # 100,000 take less than a minute


class Story:
    """Runs a scheduler and writes down what happens: P prefill, p the chunk that ends a prompt, d decode.

    `lag` is how many steps are started before the oldest one is committed: 0 is the plain loop, 1 is run-ahead.
    """

    def __init__(self, slots=2, max_len=100, lag=0, chunk=4, budget=8, **options):
        self.sched = Scheduler(slots, max_len, chunk=chunk, budget=budget, **options)
        self.lag, self.flights, self.now = lag, [], 0.0
        self.plans: list[Plan] = []
        self.tokens: dict[int, list[int]] = {}
        self.cuts: dict[int, int] = {}  # where a chunk begins -> where it ends, unless the prompt ends first
        self.eos: dict[int, int] = {}  # request -> how many tokens it says before it ends by itself
        self.ids = 0

    def submit(self, prompt: int, max_tokens: int, eos: int | None = None) -> Request:
        request = Request(self.ids, tuple(range(prompt)), max_tokens, self.now)
        self.ids += 1
        self.sched.submit(request)
        self.tokens[request.id] = []
        if eos:
            self.eos[request.id] = eos
        return request

    def accept(self, request: Request, token: int) -> str | None:
        assert token == request.id, "a token went to the wrong request"
        self.tokens[request.id].append(token)
        return "stop" if len(self.tokens[request.id]) == self.eos.get(request.id) else None

    def step(self) -> bool:
        plan = self.sched.plan(self.now)
        if plan:
            self.flights.append(plan)
            self.plans.append(plan)
            cost = len(plan.decodes) + sum(chunk.cost for chunk in plan.chunks)
            cuts = {chunk.start: chunk.stop for chunk in plan.chunks if not chunk.emits}
            assert all(self.cuts.setdefault(start, stop) == stop for start, stop in cuts.items()), (self.cuts, cuts)
            assert cost <= max(self.sched.budget, self.sched.chunk + len(plan.decodes))
        done = self.flights.pop(0) if self.flights and (len(self.flights) > self.lag or not plan) else None
        if done:
            self.sched.commit(done, [m.request.id for m in done.emitters], self.accept, self.now)
        self.sched.check()
        self.now += 1.0
        return bool(plan or done)

    def run(self) -> list[str]:
        while self.step():
            pass
        lines = [f"{plan.step:2} | {' '.join(sorted(cells(plan)))}" for plan in self.plans]
        print("\n".join(lines))
        return lines


def cells(plan: Plan) -> list[str]:
    chunks = [f"{name(c.request)}:{'p' if c.emits else 'P'}" for c in plan.chunks]
    return chunks + [f"{name(d.request)}:d" for d in plan.decodes]


def name(request: Request) -> str:
    return chr(ord("A") + request.id)


def timeline(text: str) -> list[str]:
    return [line.removeprefix("        ") for line in text.strip("\n").splitlines()]


def test_the_scheduler_is_ours_and_not_the_standard_librarys():
    assert Path(sched.__file__).parent == Path(__file__).parent.parent


def test_a_slot_that_ends_is_taken_by_the_next_in_line_while_others_decode():
    """A: 2 tokens, B: 5, C waits. In step 3, C takes A's slot in mid-decode of B."""
    story = Story()
    story.submit(3, 2), story.submit(3, 5), story.submit(3, 2)
    assert story.run() == timeline(
        """
         1 | A:p B:p
         2 | A:d B:d
         3 | B:d C:p
         4 | B:d C:d
         5 | B:d
    """.rstrip(" ")
    )


def test_static_batching_lets_the_ended_wait_for_the_slowest():
    """The same requests: C starts when B has ended, and A's slot stands idle for three steps."""
    story = Story(policy="static")
    story.submit(3, 2), story.submit(3, 5), story.submit(3, 2)
    assert story.run() == timeline(
        """
         1 | A:p B:p
         2 | A:d B:d
         3 | B:d
         4 | B:d
         5 | B:d
         6 | C:p
         7 | C:d
    """.rstrip(" ")
    )


def test_serial_runs_one_request_at_a_time():
    story = Story(policy="serial")
    story.submit(3, 2), story.submit(3, 2)
    assert story.run() == timeline(
        """
         1 | A:p
         2 | A:d
         3 | B:p
         4 | B:d
    """.rstrip(" ")
    )


def test_a_long_prompt_is_cut_into_chunks_and_decoding_goes_on_beside_it():
    """B's 18 tokens take 5 chunks of 4. The budget of 8 allows one chunk a step beside A's row, and two alone."""
    story = Story()
    story.submit(3, 4), story.submit(18, 2)
    assert story.run() == timeline(
        """
         1 | A:p B:P
         2 | A:d B:P
         3 | A:d B:P
         4 | A:d B:P
         5 | B:p
         6 | B:d
    """.rstrip(" ")
    )


def test_in_a_step_each_slot_moves_on_by_one_unit_until_the_budget_is_spent():
    """Chunks of 4 and a budget of 8: two chunks a step, of two slots, oldest first, however long a prompt is."""
    story = Story(slots=3, budget=8, reuse=False)
    for length in (10, 6, 6):
        story.submit(length, 1)
    assert story.run() == timeline(
        """
         1 | A:P B:P
         2 | A:P B:p
         3 | A:p C:P
         4 | C:p
    """.rstrip(" ")
    )


def test_the_further_a_chunk_looks_back_the_fewer_tokens_it_takes():
    """At row 100 looking back costs as much as all the rest: a token costs 2 there, 3 at row 200. A chunk costs at most
    96, wherever it stands, or is as narrow as they get."""
    story = Story(slots=1, max_len=600, chunk=64, budget=1, far=100)
    story.submit(410, 1), story.run()
    cuts = [(chunk.start, chunk.stop) for plan in story.plans for chunk in plan.chunks]
    assert cuts[:4] == [(0, 64), (64, 96), (96, 128), (128, 160)]
    assert cuts[5:7] == [(192, 224), (224, 240)] and cuts[-1] == (400, 410)
    assert [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]


def test_a_chunk_that_looks_back_far_costs_as_much_of_the_budget_as_a_wide_one():
    """A budget of 128 lets two chunks of 64 into a step. Narrowed to 16 tokens each, two it is still."""
    story = Story(slots=4, max_len=600, chunk=64, budget=128, far=100, reuse=False)
    for _ in range(4):
        story.submit(400, 1)
    story.run()
    late = [[chunk.stop - chunk.start for chunk in plan.chunks] for plan in story.plans if plan.chunks[0].start >= 300]
    assert len(late) > 10 and all(widths == [16, 16] for widths in late)


def test_run_ahead_sees_an_end_one_step_late_and_drops_the_ghosts_token():
    """A says eos with its 2nd token, in step 2. Step 3 has been planned by then: it carries A's ghost."""
    story = Story(lag=1)
    a, b = story.submit(3, 9, eos=2), story.submit(3, 4)
    story.submit(3, 1)
    assert story.run() == timeline(
        """
         1 | A:p B:p
         2 | A:d B:d
         3 | A:d B:d
         4 | B:d C:p
    """.rstrip(" ")
    )
    assert (a.finish_reason, len(story.tokens[a.id])) == ("stop", 2)
    assert (b.finish_reason, len(story.tokens[b.id])) == ("length", 4)


def test_run_ahead_plans_no_ghost_where_the_end_is_known():
    """max_tokens is known beforehand, so the plan stops there by itself."""
    story = Story(lag=1)
    story.submit(3, 2)
    assert story.run() == timeline(
        """
         1 | A:p
         2 | A:d
    """.rstrip(" ")
    )


def test_a_prompt_moves_on_in_every_step_however_many_rows_decode():
    story = Story(slots=6, budget=4)
    for _ in range(5):
        story.submit(3, 30)
    for _ in range(6):
        story.step()
    late = story.submit(40, 1)
    steps = 0
    while late.finish_reason is None:
        before = late.prefilled
        story.step()
        steps += 1
        assert late.prefilled > before or late.finish_reason
    assert steps == 10  # 40 tokens in chunks of 4


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("when", range(9))
def test_cancel_frees_the_slot_in_every_phase_for_the_very_next_plan(lag, when):
    """B waits for A's only slot. A is cancelled before step `when`: queued, in prefill, in decode, or ended."""
    story = Story(slots=1, lag=lag)
    a, b = story.submit(10, 4), story.submit(3, 1)
    for _ in range(when):
        story.step()
    ended = a.finish_reason is not None
    story.sched.finish(a, "cancelled", story.now)
    story.sched.finish(a, "cancelled", story.now)
    story.sched.check()
    assert a.finish_reason == ("length" if ended else "cancelled")
    story.step()
    assert b.slot == 0
    story.run()
    assert b.finish_reason == "length" and len(story.tokens[b.id]) == 1


def test_a_full_queue_refuses_at_once_and_says_both_numbers():
    story = Story(max_queue=2)
    story.submit(1, 1), story.submit(1, 1)
    with pytest.raises(QueueFull, match=r"2 requests.*max_queue is 2"):
        story.submit(1, 1)
    story.run()
    assert story.sched.finished == 2


def test_what_cannot_fit_a_slot_is_refused_with_both_numbers_and_blocks_nobody():
    story = Story(max_len=20)
    with pytest.raises(ValueError, match=r"15.*6.*21.*20"):
        story.submit(15, 6)
    fits = story.submit(15, 5)
    story.run()
    assert fits.finish_reason == "length"


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"max_len": 0}, {"chunk": 0}, {"max_queue": 0}, {"policy": "fastest"}])
def test_a_wrong_setting_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Scheduler(**{"slots": 1, "max_len": 1, **wrong})


def random_schedule(seed: int) -> int:
    """One random life of a scheduler, its invariants checked after every step. Answers with the steps it took."""
    rng = random.Random(seed)
    story = Story(
        slots=rng.randint(1, 5),
        max_len=120,
        lag=rng.randint(0, 1),
        chunk=rng.choice([2, 4, 32]),
        budget=rng.randint(1, 80),
        far=rng.choice([2, 8, sys.maxsize]),
        policy=rng.choice(sched.POLICIES),
        max_queue=rng.randint(1, 6),
    )
    requests, refused = [], 0
    for _ in range(rng.randint(1, 12)):
        for _ in range(rng.choice([0, 0, 1, 3])):
            prompt, tokens = rng.randint(1, rng.choice([20, 100])), rng.randint(1, 12)
            try:
                requests.append(story.submit(prompt, tokens, rng.choice([None, rng.randint(1, tokens)])))
            except QueueFull:
                refused += 1
                assert len(story.sched.waiting) == story.sched.max_queue
        if requests and rng.random() < 0.2:
            story.sched.finish(rng.choice(requests), "cancelled", story.now)
        story.step()
    while story.step():
        assert story.now < 2_000, "somebody starves"
    for request in requests:
        said, expected = len(story.tokens[request.id]), story.eos.get(request.id, request.max_tokens)
        if request.finish_reason == "cancelled":
            assert said <= expected
        else:
            assert said == request.committed == expected
            assert request.finish_reason == ("stop" if request.id in story.eos else "length")
        assert request.ended is not None
    admitted = [r.admitted for r in requests if r.admitted is not None]
    assert admitted == sorted(admitted), "not first come first served"
    assert story.sched.finished == len(requests) and len(story.sched.free) == len(story.sched.owners)
    return story.sched.steps


def test_random_schedules_keep_every_invariant_in_every_step():
    steps = sum(random_schedule(seed) for seed in range(SCHEDULES))
    print(f"{SCHEDULES:,} schedules, {steps:,} steps", file=sys.stderr)
    assert steps > 5 * SCHEDULES


@pytest.mark.parametrize(
    "bug",
    [
        "a slot is freed twice",
        "a slot has two owners",
        "the newest is served first",
        "a ghost's token goes to the slot's new owner",
    ],
)
def test_the_invariants_have_teeth(monkeypatch, bug):
    """Each planted bug is caught by the random schedules."""
    if bug == "a slot is freed twice":
        finish = Scheduler.finish

        def finish_twice(self, request, reason, now):
            finish(self, request, reason, now)
            if request.slot is not None:
                self.free.append(request.slot)

        monkeypatch.setattr(Scheduler, "finish", finish_twice)
    elif bug == "a slot has two owners":
        admit = Scheduler._admit

        def admit_twice(self, now):
            admitted = admit(self, now)
            if admitted:
                self.free.insert(0, admitted[0].slot)
            return admitted

        monkeypatch.setattr(Scheduler, "_admit", admit_twice)
    elif bug == "the newest is served first":
        submit = Scheduler.submit

        def push_in(self, request):
            submit(self, request)
            self.waiting.move_to_end(request.id, last=False)

        monkeypatch.setattr(Scheduler, "submit", push_in)
    else:
        commit = Scheduler.commit

        def commit_by_slot(self, plan, tokens, accept, now):
            for member, token in zip(plan.emitters, tokens, strict=True):
                owner = self.owners[member.slot]
                if member.request.finish_reason and owner:
                    accept(owner, token)
            return commit(self, plan, tokens, accept, now)

        monkeypatch.setattr(Scheduler, "commit", commit_by_slot)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        for seed in range(200):
            random_schedule(seed)
