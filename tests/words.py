"""An engine made of words, for the tests of the screen: the real scheduler, no model, a clock that ticks as told."""

from __future__ import annotations

from nanobatch import Sampling
from parts.answers import Metrics, SlotView, Snapshot, StepView
from sched import Plan, Request, Scheduler

STORY = "once upon a time there was a fox who looked for the moon in every pond that she could find"


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class WordText:
    """A prompt has one token for each of its characters."""

    has_template = False

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


class WordHandle:
    def __init__(self, engine: WordEngine, request: Request, prompt: str):
        self.id, self.error, self._engine, self._request = request.id, None, engine, request
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._prompt = prompt

    @property
    def text(self) -> str:
        return self._engine.speak(self._prompt, len(self.tokens))

    @property
    def finish_reason(self) -> str | None:
        return self._request.finish_reason

    def cancel(self) -> None:
        self._engine.sched.finish(self._request, "cancelled", self._engine.clock())

    @property
    def metrics(self) -> Metrics:
        r, times = self._request, self.times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None
        ttft = None if r.first_token is None else r.first_token - r.arrived
        return Metrics(None, ttft, rate, None, None, None, len(r.prompt), r.reused, len(self.tokens))


class WordEngine:
    """Answers every prompt with as many words as it may."""

    def __init__(self, clock: Clock, time: Clock, slots: int = 8, max_len: int = 512, policy: str = "continuous"):
        self.sched = Scheduler(slots, max_len, chunk=16, budget=32, policy=policy)
        self.clock, self.time, self.text = clock, time, WordText()
        self.handles: dict[int, WordHandle] = {}
        self.steps: list[StepView] = []
        self.fail: Exception | None = None  # what the next step raises
        self.closed = False
        self.flight: tuple[Plan, float] | None = None

    def speak(self, prompt: str, count: int) -> str:
        """Echoes what stands between quotes, so that a test can put anything on the screen; else tells a story."""
        if '"' in prompt:
            return prompt.split('"')[1][: 4 * count]
        story = STORY.split(" ")
        return " ".join(story[i % len(story)] for i in range(count))

    def submit(self, ids: list[int], sampling: Sampling | None = None) -> WordHandle:
        request = Request(len(self.handles) + 1, tuple(ids), sampling.max_tokens, self.clock())
        self.sched.submit(request)
        self.handles[request.id] = WordHandle(self, request, "".join(map(chr, ids)))
        return self.handles[request.id]

    def step(self) -> bool:
        """10 ms a decode step, 5 ms a chunk; it runs ahead, as the real one does."""
        if self.fail:
            error, self.fail = self.fail, None
            self.sched.clear("error", self.clock())
            self.flight = None
            raise error
        began = self.clock()
        plan = self.sched.plan(began)
        flight, self.flight = self.flight, (plan, began) if plan else None
        if flight:
            self.commit(*flight)
        if plan:
            self.time.now += 0.01 * bool(plan.decodes) + 0.005 * len(plan.chunks)
        return bool(plan or flight)

    def commit(self, plan: Plan, began: float) -> None:
        now = self.clock()
        ghosts = tuple(m.slot for m in plan.emitters if m.request.finish_reason)

        def accept(request: Request, token: int) -> None:
            self.handles[request.id].tokens.append(token)
            self.handles[request.id].times.append(now)

        self.sched.commit(plan, [0] * len(plan.emitters), accept, now)
        self.steps.append(
            StepView.of(
                plan,
                ghosts,
                began=began,
                ended=now,
                plan_s=0.0002,
                build_s=0.001,
                wait_s=max(0.0, now - began - 0.002),
                commit_s=0.0008,
            )
        )

    def snapshot(self) -> Snapshot:
        sched = self.sched
        return Snapshot(
            policy=sched.policy,
            slots=tuple(self._slot(slot) for slot in range(len(sched.owners))),
            queue=tuple((r.id, self.clock() - r.arrived) for r in sched.waiting.values()),
            submitted=sched.submitted,
            finished=sched.finished,
            output_tokens=sum(len(handle.tokens) for handle in self.handles.values()),
            steps=tuple(self.steps[-256:]),
        )

    def _slot(self, slot: int) -> SlotView:
        owner, memory = self.sched.owners[slot], self.sched.memory[slot]
        if owner is None:
            return SlotView(slot, "free", None, 0, 0, 0, 0, memory.prefilled if memory else 0)
        used = owner.prefilled + max(0, owner.committed - 1)
        return SlotView(slot, owner.phase, owner.id, used, len(owner.prompt), owner.committed, owner.reused, 0)

    def close(self) -> None:
        self.closed = True
