"""A scheduler's story, step by step: requests come and end at given steps, and every plan is
checked and drawn."""

import random
from collections.abc import Sequence

from parts.replay import Replay
from policies import POLICIES
from sched import Plan, Request, Scheduler

BAD = -2  # a token whose row is not finite, and so is no row behind it
NAN = None, "not finite"


class Story(Replay):
    """A replay that writes down what happens: P prefill, p the chunk that ends a prompt, d decode.

    `lag`: 0 is the plain loop, 1 is run-ahead. `rows` is a slab of tokens instead of keys: what the
    device would have written in each slot.
    `dice`: tokens are guessed at random, right and wrong.
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
            options["guess"] = self.guess
        sched = Scheduler(slots, max_len, policy, chunk=chunk, budget=budget, **options)
        super().__init__(sched, seconds=lambda plan: 1.0, run_ahead=bool(lag))
        self.plans: list[Plan] = []
        self.tokens: dict[int, list[int]] = {}
        self.eos: dict[int, int] = {}  # request -> how many tokens it says before it ends by itself
        self.rows: list[list[int | None]] = [[None] * max_len for _ in range(slots)]

    def submit(
        self,
        prompt: int | tuple[int, ...],
        max_tokens: int,
        eos: int | None = None,
        reuse: bool = True,
        client: str = "",
    ) -> Request:
        prompt = tuple(range(prompt)) if isinstance(prompt, int) else prompt
        request = Request(len(self.tokens), prompt, max_tokens, self.now, reuse, client)
        self.sched.submit(request)
        self.tokens[request.id] = []
        if eos:
            self.eos[request.id] = eos
        return request

    def submit_all(self, *asks: tuple[int, int]) -> None:
        """Several requests: of each, the prompt's length and how many tokens it may say."""
        for prompt, max_tokens in asks:
            self.submit(prompt, max_tokens)

    def says(self, request: Request, index: int) -> int:
        """A token that no other request says, and no prompt holds, unless it goes on from there."""
        return 1_000 * (request.id + 1) + index

    def guess(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        guesses = {}
        for request in decoding:
            most = min(left, request.max_tokens - request.planned - 1, self.dice.randint(0, 4))
            if request.planned == request.committed and most > 0:
                places = range(request.committed, request.committed + most)
                tokens = [self.says(request, index) for index in places]
                guesses[request.id] = tuple(t if self.dice.random() < 0.7 else 7 for t in tokens)
                left -= most
        return guesses

    def _may_fly(self, plan: Plan | None) -> int:
        if self.dice and self.dice.random() < 0.6:  # else nothing could be guessed with a lag
            return 0
        return super()._may_fly(plan)

    def run(self, plan: Plan) -> dict[int, list[int]]:
        self.write(plan)
        self.plans.append(plan)
        assert plan.cost <= max(self.sched.budget, self.sched.chunk + len(plan.decodes))
        for chunk in plan.chunks:
            assert 0 < chunk.stop - chunk.start <= chunk.cost <= self.sched.chunk
        assert plan.waiting or not plan.blocked, "a slot is kept shut from nobody"
        said = {}
        for request, slot, *_, guess in plan.emitters:
            index = request.planned - 1 - len(guess)
            is_right = True
            said[slot] = []
            for i, guessed in enumerate((*guess, None)):
                token = self.says(request, index + i)
                said[slot].append(token if is_right else guessed or 0)  # behind it nonsense
                is_right = is_right and token == guessed
            if BAD in request.prompt:
                said[slot] = [-1] * (1 + len(guess))
        return said

    def finite(self, plan: Plan) -> list[int]:
        good = {c.slot for c in plan.chunks if NAN not in rows_of(c.request)[: c.stop]}
        return [slot for slot in super().finite(plan) if slot in good]

    def write(self, plan: Plan) -> None:
        """What the device would do. All that a sequence looks back on must have been written for
        its own tokens."""
        for slot, start, stop in plan.scrubs:
            self.rows[slot][start:stop] = [None] * (min(stop, self.sched.max_len) - start)
        for chunk in plan.chunks:
            rows = self.rows[chunk.slot]
            prompt = rows_of(chunk.request)
            if chunk.source is not None:
                rows[: chunk.start] = self.rows[chunk.source][: chunk.start]
            assert rows[: chunk.start] == prompt[: chunk.start], (chunk, rows)
            rows[chunk.start : chunk.stop] = prompt[chunk.start : chunk.stop]
            assert NAN in prompt or NAN not in rows, "0 x NaN is NaN, even behind a mask"
        for request, slot, position, guess in plan.decodes:
            rows = self.rows[slot]
            if BAD in request.prompt:
                rows[position] = NAN
                continue
            assert NAN not in rows, "0 x NaN is NaN, even behind a mask"
            assert position + len(guess) < self.sched.max_len, "a guess beyond the slot's end"
            rows[position + 1 : position + 1 + len(guess)] = guess
            count = position - len(request.prompt) + 1
            answer = [self.says(request, index) for index in range(count)]
            rows[position] = answer[-1]
            assert rows[: position + 1] == [*request.prompt, *answer], (request, rows)

    def accept(self, request: Request, token: int) -> str | None:
        if token < 0:
            assert BAD in request.prompt
            return "error"
        said = self.tokens[request.id]
        assert token == self.says(request, len(said)), "a token went to the wrong request"
        said.append(token)
        return "stop" if len(said) == self.eos.get(request.id) else None

    def step(self) -> bool:
        """One turn of the wheel; False if there was nothing to do."""
        planned = len(self.plans)
        read = list(self.turn())
        self.sched.check()
        return len(self.plans) > planned or bool(read)

    def cuts(self) -> list[dict[str, tuple[int, int]]]:
        """For each step, where the chunks begin and end."""
        return [
            {name(chunk.request): (chunk.start, chunk.stop) for chunk in plan.chunks}
            for plan in self.plans
        ]

    def drawn(self) -> list[str]:
        while self.step():
            pass
        print("\n".join(self.lines()))
        return self.lines()

    def lines(self) -> list[str]:
        return [f"{plan.step:2} | {' '.join(sorted(cells(plan)))}" for plan in self.plans]


def rows_of(request: Request) -> list:
    """What a prompt writes into its slot."""
    prompt = list(request.prompt)
    if BAD not in prompt:
        return prompt
    good = prompt.index(BAD)
    return [*prompt[:good], *[NAN] * (len(prompt) - good)]


def cells(plan: Plan) -> list[str]:
    chunks = [f"{name(c.request)}:{'p' if c.emits else 'P'}" for c in plan.chunks]
    return chunks + [f"{name(d.request)}:d" for d in plan.decodes]


def name(request: Request) -> str:
    return chr(ord("A") + request.id)


def timeline(text: str) -> list[str]:
    """The lines of a drawing, as `Story.drawn` writes them."""
    lines = [line.split(maxsplit=1) for line in text.strip().splitlines()]
    return [f"{step:>2} {cells}" for step, cells in lines]
