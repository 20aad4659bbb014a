"""A scheduler's story, step by step: requests come and end at given steps, and every plan is
checked and drawn."""

from policies import POLICIES
from sched import Plan, Request, Scheduler


class Story:
    """Runs a scheduler and writes down what happens: P prefill, p the chunk that ends a prompt, d
    decode.

    `lag` is how many steps are started before the oldest one is committed: 0 is the plain loop, 1
    is run-ahead. `rows` is a slab of tokens instead of keys: what the device would have written in
    each slot.
    """

    def __init__(
        self, slots=2, max_len=100, lag=0, chunk=4, budget=8, policy="continuous", **options
    ):
        policy = POLICIES[policy]
        self.sched = Scheduler(slots, max_len, policy, chunk=chunk, budget=budget, **options)
        self.lag, self.flights, self.now = lag, [], 0.0
        self.plans: list[Plan] = []
        self.tokens: dict[int, list[int]] = {}
        self.eos: dict[int, int] = {}  # request -> how many tokens it says before it ends by itself
        self.ids = 0
        self.rows: list[list[int | None]] = [[None] * max_len for _ in range(slots)]

    def submit(
        self,
        prompt: int | tuple[int, ...],
        max_tokens: int,
        eos: int | None = None,
        shares: bool = True,
        client: str = "",
    ) -> Request:
        prompt = tuple(range(prompt)) if isinstance(prompt, int) else prompt
        request = Request(self.ids, prompt, max_tokens, self.now, shares, client)
        self.ids += 1
        self.sched.submit(request)
        self.tokens[request.id] = []
        if eos:
            self.eos[request.id] = eos
        return request

    def says(self, request: Request, index: int) -> int:
        """A token that no other request says, and no prompt holds, unless it goes on from there."""
        return 1_000 * (request.id + 1) + index

    def write(self, plan: Plan) -> None:
        """What the device would do. All that a sequence looks back on must have been written for
        its own tokens."""
        for slot, start, stop in plan.scrubs:
            self.rows[slot][start:stop] = [None] * len(self.rows[slot][start:stop])
        for chunk in plan.chunks:
            rows, prompt = self.rows[chunk.slot], chunk.request.prompt
            if chunk.source is not None:
                rows[: chunk.start] = self.rows[chunk.source][: chunk.start]
            assert rows[: chunk.start] == list(prompt[: chunk.start]), (chunk, rows)
            rows[chunk.start : chunk.stop] = prompt[chunk.start : chunk.stop]
        for request, slot, position, *_ in plan.decodes:
            rows, said = self.rows[slot], position - len(request.prompt)
            rows[position] = self.says(request, said)
            seen = [*request.prompt, *(self.says(request, index) for index in range(said + 1))]
            assert rows[: position + 1] == seen, (request, rows)

    def accept(self, request: Request, token: int) -> str | None:
        assert token == self.says(request, len(self.tokens[request.id])), (
            "a token went to the wrong request"
        )
        self.tokens[request.id].append(token)
        return "stop" if len(self.tokens[request.id]) == self.eos.get(request.id) else None

    def step(self) -> bool:
        plan = self.sched.plan(self.now)
        if plan:
            self.write(plan)
            self.flights.append(
                (plan, [self.says(m.request, m.request.planned - 1) for m in plan.emitters])
            )
            self.plans.append(plan)
            cost = len(plan.decodes) + sum(chunk.cost for chunk in plan.chunks)
            assert cost <= max(self.sched.budget, self.sched.chunk + len(plan.decodes))
            assert all(
                0 < chunk.stop - chunk.start <= chunk.cost <= self.sched.chunk
                for chunk in plan.chunks
            )
            assert plan.waiting or not plan.blocked, "a slot is kept shut from nobody"
        done = (
            self.flights.pop(0)
            if self.flights and (len(self.flights) > self.lag or not plan)
            else None
        )
        if done:
            self.sched.commit(*done, self.accept, self.now)
        self.sched.check()
        self.now += 1.0
        return bool(plan or done)

    def cuts(self) -> list[dict[str, tuple[int, int]]]:
        """For each step, where the chunks begin and end."""
        return [
            {name(chunk.request): (chunk.start, chunk.stop) for chunk in plan.chunks}
            for plan in self.plans
        ]

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
