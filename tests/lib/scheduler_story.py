"""A scheduler's story, step by step: requests arrive and end at given steps, and every plan is checked and
drawn."""

import math
import random
from collections.abc import Sequence

from experiments.simulator import Replay, Stuck
from policies import POLICIES
from request import Plan, Request
from sched import Scheduler, check_invariants

NAN = math.nan  # always use this object: a list finds it by identity, though it equals nothing
MOST_STEPS = 2_000  # a longer story counts as endless
BAD = -2  # a token whose row and all rows after it are not finite


class Story(Replay):
    """A replay that records what happens: P prefill, p the chunk that ends a prompt, d decode.

    `lag`: 0 is the plain loop, 1 is run-ahead. `rows` is a slab of tokens instead of keys: what the
    device would have written in each slot.
    `dice`: tokens are drafted at random, right and wrong.
    `fails`: requests whose numbers are not finite. Their rows are NaN, and their tokens -1.

    A mistake of the scheduler raises an AssertionError that names the step and the problem.
    """

    def __init__(
        self,
        slots=2,
        max_len=100,
        lag=0,
        chunk=4,
        budget=8,
        policy="continuous",
        dice: random.Random | None = None,
        **options,
    ):
        policy = POLICIES[policy]
        self.dice = dice
        if dice:
            options["draft"] = self.draft
        sched = Scheduler(slots, max_len, policy, chunk=chunk, budget=budget, **options)
        super().__init__(sched, seconds=lambda plan: 1.0, run_ahead=bool(lag))
        self.plans: list[Plan] = []
        self.tokens: dict[int, list[int]] = {}
        self.eos: dict[int, int] = {}  # request -> number of tokens before its EOS
        self.fails: set[int] = set()
        self.rows: list[list[int | float | None]] = [[None] * max_len for _ in range(slots)]

    def submit(
        self,
        prompt: int | tuple[int, ...],
        max_tokens: int,
        eos: int | None = None,
        prefix_cache: bool = True,
        client: str = "",
    ) -> Request:
        prompt = tuple(range(prompt)) if isinstance(prompt, int) else prompt
        request = Request(len(self.tokens), prompt, max_tokens, self.now, prefix_cache, client)
        self.sched.submit(request)
        self.tokens[request.id] = []
        if eos:
            self.eos[request.id] = eos
        return request

    def submit_all(self, *asks: tuple[int, int]) -> None:
        """Submit several requests, each given as prompt length and max_tokens."""
        for prompt, max_tokens in asks:
            self.submit(prompt, max_tokens)

    def says(self, request: Request, index: int) -> int:
        """Return -1 if the request fails, otherwise a token that occurs in no other request, nor in a prompt
        that does not continue this answer."""
        return -1 if self.good_rows(request) < math.inf else 1_000 * (request.id + 1) + index

    def draft(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        drafts = {}
        for request in decoding:
            most = min(left, request.max_tokens - request.planned - 1, self.dice.randint(0, 4))
            if request.planned == request.committed and most > 0:
                places = range(request.committed, request.committed + most)
                tokens = [self.says(request, index) for index in places]
                drafts[request.id] = tuple(t if self.dice.random() < 0.7 else 7 for t in tokens)
                left -= most
        return drafts

    def _may_stay_in_flight(self, plan: Plan | None) -> bool:
        if self.dice and self.dice.random() < 0.6:  # otherwise nothing could be drafted with a lag
            return False
        return super()._may_stay_in_flight(plan)

    def run(self, plan: Plan) -> dict[int, list[int]]:
        self.write(plan)
        self.plans.append(plan)
        most = max(self.sched.budget, self.sched.chunk + len(plan.decodes))
        assert plan.tokens <= most, (
            f"step {plan.step} has {plan.tokens} tokens, and may have {most}"
        )
        for chunk in plan.chunks:
            assert 0 < chunk.tokens <= self.sched.chunk, (
                f"step {plan.step}: {name(chunk.request)} has a chunk of {chunk.tokens} tokens, and may "
                f"have 1 to {self.sched.chunk}"
            )
        assert plan.waiting or not plan.blocked, (
            f"step {plan.step}: slots {plan.blocked} are blocked, though nobody waits"
        )
        said = {}
        for request, slot, *_, draft in plan.emitters:
            index = request.planned - 1 - len(draft)
            assert index >= 0, (
                f"step {plan.step}: {name(request)} yields a token, but none is planned"
            )
            is_right = True
            said[slot] = []
            for i, drafted in enumerate((*draft, None)):
                token = self.says(request, index + i)
                # After a wrong draft token, all tokens are meaningless
                said[slot].append(token if is_right else drafted or 0)
                is_right = is_right and token == drafted
        return said

    def finite(self, plan: Plan) -> list[int]:
        good = {c.slot for c in plan.chunks if c.stop <= self.good_rows(c.request)}
        return [slot for slot in super().finite(plan) if slot in good]

    def write(self, plan: Plan) -> None:
        """Write the rows as the device would. Assert that all rows that a sequence attends to were written
        for its own tokens."""
        for slot, start, stop in plan.scrubs:
            self.rows[slot][start:stop] = [None] * (min(stop, self.sched.max_len) - start)
        for chunk in plan.chunks:
            prompt = chunk.request.prompt
            rows = self.rows[chunk.slot]
            if chunk.copied_from is not None:
                rows[: chunk.start] = self.rows[chunk.copied_from][: chunk.start]
            self.look_back(plan, chunk.request, chunk.slot, prompt[: chunk.start])
            new = prompt[chunk.start : chunk.stop]
            rows[chunk.start : chunk.stop] = self.kept(chunk.request, chunk.start, new)
        for request, slot, position, draft in plan.decodes:
            rows = self.rows[slot]
            assert position + len(draft) < self.sched.max_len, "a draft beyond the slot's end"
            rows[position + 1 : position + 1 + len(draft)] = draft
            count = request.planned - 1 - len(draft)
            answer = [self.says(request, index) for index in range(count)]
            rows[position] = self.kept(request, position, answer[-1:])[0]
            self.look_back(plan, request, slot, [*request.prompt, *answer])
            last = len(request.prompt) + count - 1
            assert position == last, (
                f"step {plan.step}: the newest token of {name(request)} goes into row {position}, "
                f"but should go into row {last}"
            )

    def good_rows(self, request: Request) -> float:
        """Return how many of the request's first rows are finite."""
        if request.id in self.fails:
            return 0
        return request.prompt.index(BAD) if BAD in request.prompt else math.inf

    def kept(self, request: Request, start: int, tokens: Sequence[int]) -> list[int | float]:
        """Return the content of the rows of these tokens, from row `start` on."""
        good = self.good_rows(request)
        return [token if start + i < good else NAN for i, token in enumerate(tokens)]

    def look_back(self, plan: Plan, request: Request, slot: int, wanted: Sequence[int]) -> None:
        """Assert that a slot's first rows contain these tokens, and no row another request's NaN.
        Attention multiplies masked rows by 0, but 0 x NaN is NaN."""
        if self.good_rows(request) < math.inf:
            return
        rows = self.rows[slot]
        who = f"step {plan.step}, {name(request)}"
        assert NAN not in rows, f"{who}: in slot {slot} rows of NaN are left"
        found = rows[: len(wanted)]
        assert found == list(wanted), (
            f"{who}: the rows before its new tokens hold {found}, but should hold {list(wanted)}"
        )

    def accept(self, request: Request, token: int) -> str | None:
        said = self.tokens[request.id]
        if token < 0:
            return "error"
        wanted = self.says(request, len(said))
        assert token == wanted, (
            f"{name(request)} gets token {token}, but should get {wanted}: a token went to the "
            f"wrong request"
        )
        said.append(token)
        assert request.answer[-len(said) :] == said, (
            f"the answer of {name(request)} is {request.answer}, expected {said}"
        )
        return "stop" if len(said) == self.eos.get(request.id) else None

    def launch(self, plan: Plan, tokens: dict[int, list[int]]) -> None:
        """Put a step in flight that was planned and run elsewhere."""
        self._in_flight.append((plan, tokens))

    def read_all(self) -> None:
        while self._in_flight:
            self._commit()

    def step(self) -> bool:
        """Run one turn of the loop. Return False if there was nothing to do."""
        planned = len(self.plans)
        try:
            read = list(self.turn())
        except Stuck as error:
            raise AssertionError("\n".join([f"{error}; so far:", *self.lines()[-6:]])) from None
        check_invariants(self.sched)
        return len(self.plans) > planned or bool(read)

    def cuts(self) -> list[dict[str, tuple[int, int]]]:
        """Return for each step where the chunks start and stop."""
        return [
            {name(chunk.request): (chunk.start, chunk.stop) for chunk in plan.chunks}
            for plan in self.plans
        ]

    def drawn(self) -> list[str]:
        """Run to the end, and return a line for each step."""
        while self.step():
            if len(self.plans) > MOST_STEPS:
                begins = "\n".join(self.lines()[:6])
                raise AssertionError(f"after {MOST_STEPS} steps it has not ended:\n{begins}")
        return self.lines()

    def lines(self) -> list[str]:
        return [f"{plan.step:2} | {' '.join(sorted(cells(plan)))}" for plan in self.plans]


def cells(plan: Plan) -> list[str]:
    chunks = [f"{name(c.request)}:{'p' if c.emits else 'P'}" for c in plan.chunks]
    return chunks + [f"{name(d.request)}:d" for d in plan.decodes]


def name(request: Request) -> str:
    return chr(ord("A") + request.id)


def timeline(text: str) -> list[str]:
    """Return the lines of a drawing in the format of `Story.drawn`."""
    lines = [line.split(maxsplit=1) for line in text.strip().splitlines()]
    return [f"{step:>2} {cells}" for step, cells in lines]
