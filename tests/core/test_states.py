"""Models with states: an answer has the same bits after a fork, a rejected draft, a cancel or a continued
conversation, and prompts start from the states of other requests."""

import re
from functools import cache

import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint
from harness import Tap, exactly
from long_forms import some
from parity import CONFIGS, QWEN3_5, seed_of
from qwen3_5_float64 import Float64

from benchmarks import quality
from kernels.device import mx
from models.config import read_config
from models.forward_cost import of_rows
from models.load import read_model
from models.memory import fit, nbytes_with, state_nbytes
from models.sharding import Shard
from nanobatch import Engine, Model, Tokenizer
from policies import DEFAULT, POLICIES
from prefix import Prefixes
from request import Chunk, Decode, Move, Plan, Request
from sched import Scheduler, check_invariants
from server.metrics import ServerMetrics
from state_places import Place, StatePlaces, check_apart

CHUNK = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_5"), seed=5, **QWEN3_5)


@cache
def model_of(folder, attention: str, activations: str | int) -> tuple[Model, Tokenizer]:
    model = read_model(folder, kv="float32", attention=attention, activations=activations)
    return model, Tokenizer(folder, model.config.V)


def load(folder, attention: str = "auto", activations: str | int = "auto", **options) -> Engine:
    sizes = {"slots": 2, "max_len": 320, "chunk": CHUNK}
    return Engine(*model_of(folder, attention, activations), **sizes | options)


def run(
    engine: Engine, prompt: list[int], tokens: int = 6, **options
) -> tuple[list[int], np.ndarray, int]:
    """Return an answer's tokens, the logits that they were sampled from, and the number of cached rows."""
    tap = Tap(engine)
    handle = engine.submit(prompt, exactly(tokens), **options)
    result = handle.result()
    return result.tokens, tap.of(handle), handle.request.prefix.cached


@cache
def alone(folder, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], np.ndarray]:
    with load(folder, slots=1, prefix_cache=False, speculate=0) as engine:
        return run(engine, list(prompt), tokens)[:2]


def drawn(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def assert_same(found: tuple, folder, prompt: list[int]) -> None:
    tokens, logits = alone(folder, tuple(prompt), len(found[0]))
    assert found[0] == tokens and np.array_equal(found[1], logits)


def test_users_of_a_system_prompt(folder):
    """The second user prefills part of the prompt again and leaves a checkpoint where the prompts diverge.
    The third prefills only their own tokens. `/metrics` counts tokens prefilled again only if the same client
    wrote their rows; counting others would reveal another client's prompts."""
    cached, reread, counted = [], [], []
    with load(folder) as engine:
        tap = Tap(engine)
        for user in range(4):
            prompt = drawn(1, 70 if user == 3 else 100) + drawn(10 + user, 20)
            handle = engine.submit(prompt, exactly(6), client="b" if user == 3 else "a")
            metrics = handle.result().metrics
            assert_same((handle.tokens, tap.of(handle)), folder, prompt)
            cached.append(metrics.cached_tokens)
            reread.append(metrics.reread_tokens)
            text = ServerMetrics().text({"qwen": engine.snapshot()}, {})
            found = re.findall(r"(?m)^nanobatch_(checkpoints_\w+|reread\w+)_total\S* (.+)", text)
            counted.append({name: float(value) for name, value in found})
    assert cached[0] == 0 < cached[1] < cached[2] == 100
    assert [*map(sum, zip(cached, reread, strict=True))] == [0, 100, 100, 70] and reread[3]
    counts = [[*each.values()] for each in counted]
    assert [each[:3] for each in counts[:3]] == [[4, 0, 0], [6, 1, 2], [7, 2, 3]]
    again = [each["reread_prompt_tokens"] for each in counted]
    assert again == [0, *[reread[1]] * 3]


def test_checkpoints_are_seen(folder):
    """The snapshot lists a slot's checkpoints: one at the end of the prompt, and one within it."""
    with load(folder, slots=1) as engine:
        run(engine, drawn(21, 80))
        (slot,) = engine.snapshot().slots
    assert slot.remembered == 85 and slot.checkpoints[-1] == 80 and len(slot.checkpoints) == 2


@pytest.mark.parametrize("speculate", [0, 15])
def test_a_conversation_goes_on_from_its_end(folder, speculate):
    """The next turn starts from the end of the answer, even after a partly rejected draft."""
    prompt, before = drawn(2, 50) * 2, 0
    with load(folder, speculate=speculate) as engine:
        for turn in range(3):
            found = run(engine, prompt, tokens=20)
            assert_same(found, folder, prompt)
            assert found[2] == before
            before = len(prompt) + 19  # the last token of an answer has no row
            prompt = [*prompt, *found[0], *drawn(20 + turn, 9)]


def test_a_drain_forgets_checkpoints(folder):
    """After a change of policy, the same prompts are cached as in a new engine."""
    system = drawn(8, 3 * CHUNK + 4)

    def cached(engine: Engine) -> list[int]:
        return [run(engine, system + drawn(user, 9), 2)[2] for user in (20, 21, 22)]

    with load(folder, slots=4) as engine:
        first = cached(engine)
        engine.drain("static")
        assert cached(engine) == first and any(first)


def test_the_same_prompt_again(folder):
    prompt = drawn(3, 70)
    with load(folder, slots=3) as engine:
        assert [run(engine, prompt)[2] for _ in range(3)] == [0, 69, 69]
        assert_same(run(engine, prompt), folder, prompt)


@pytest.mark.parametrize("steps", [1, 3, 4, 6, 9])
def test_a_cancelled_request_leaves_states(folder, steps):
    """Cancel the request during its prompt or its answer. The remaining states serve the same prompt, and one
    that diverges from it."""
    prompt = drawn(4, 150)
    with load(folder, speculate=0) as engine:
        handle = engine.submit(prompt, exactly(20))
        for _ in range(steps):
            engine.step()
        handle.cancel()
        for again in (prompt, prompt[:80] + drawn(5, 30)):
            found = run(engine, again)
            assert_same(found, folder, again)
            assert found[2] > 0 or steps < 3


@pytest.mark.parametrize(("common", "restored"), [(0, 0), (40, 32), (66, 64), (86, 89)])
def test_states_on_disk_are_restored(folder, tmp_path, common, restored):
    """A conversation's rows are saved with its last state and its checkpoints, each in a separate file."""
    prompt = drawn(14, 70)
    cache = {"slot_cache": f"{tmp_path / 'cache'}:1G", "slots": 1, "speculate": 0}
    cache["state_memory"] = 3 * state_nbytes(read_config(folder, True), 1)
    with load(folder, **cache) as engine:
        text = [*prompt, *run(engine, prompt, 20)[0]]
    again = text + drawn(15, 40) if common == 86 else text[:common] + drawn(15, 60)
    with load(folder, **cache) as engine:
        found = run(engine, again)
        assert found[2] == restored
    assert_same(found, folder, again)


def test_without_prefix_caching_no_state_is_kept(folder):
    prompt = drawn(6, 60)
    with load(folder) as engine:
        run(engine, prompt, prefix_cache=False)
        assert run(engine, prompt)[2] == 0


@pytest.mark.parametrize("name", some([name for name in CONFIGS if name.startswith("qwen3_5")], 2))
def test_no_further_from_float64_than_mlx_lm(name, tmp_path):
    settings = dict(CONFIGS[name])
    reference = settings.pop("reference")
    make_checkpoint(tmp_path, seed=seed_of(name), **settings)
    mlx_lm = Reference(tmp_path, reference)
    prompt = drawn(7, 70)
    with load(tmp_path, activations=32, speculate=0) as engine:
        tokens, logits, _ = run(engine, prompt, tokens=20)
    text = [*prompt, *tokens[:-1]]
    right = Float64(mlx_lm.model).logits(text)[len(prompt) - 1 :]
    assert tokens == right.argmax(axis=1).tolist()
    theirs = np.abs(mlx_lm.logits(text)[len(prompt) - 1 :] - right).max()
    assert np.abs(logits - right).max() < 2 * theirs < 1e-3


def test_formula_gives_the_same_answers(folder):
    """`--attention plain` gives the same tokens, also after a fork and with drafts."""
    prompts = [drawn(8, 60) * 2, drawn(8, 60) + drawn(9, 10), drawn(8, 60) + drawn(9, 12)]
    answers = []
    for attention in ("auto", "plain"):
        with load(folder, attention=attention, speculate=3) as engine:
            answers.append([run(engine, prompt, 10) for prompt in prompts])
    for ours, plain in zip(*answers, strict=True):
        assert ours[0] == plain[0] and ours[2] == plain[2]
        assert np.abs(ours[1] - plain[1]).max() < 1e-3


@pytest.mark.parametrize("where", ["rows", "states"])
@pytest.mark.parametrize("steps", [2, 7])
def test_not_finite(folder, where, steps):
    """A request whose rows or states are not finite ends with an error, in its prompt or its answer, and
    leaves no state from which another prompt starts."""
    prompt = drawn(16, 120)
    with load(folder, speculate=0) as engine:
        handle = engine.submit(prompt, exactly(30))
        for _ in range(steps):
            engine.step()
        slab = engine.runner.slab
        if where == "rows":
            slab.arrays[0][handle.request.slot, :, 8] = mx.nan
        else:
            for states in slab.states:
                count = states.places.size(states.heads)
                states.memory[:count] = mx.full(count, mx.nan)
        assert handle.result().finish_reason == "error"
        if where == "states":  # the NaN has overwritten the checkpoints, too
            engine.sched.start_over()
        for again in (prompt, drawn(17, 60), [*prompt[:100], *drawn(18, 9)]):
            assert_same(run(engine, again), folder, again)


# --- places -------------------------------------------------------------------------------------


def test_no_place_is_read_and_written_in_one_step():
    check_apart({0: Move(4, 9, 0, 9), 1: Move(4, 9, 1, 9), 2: Move(2, 5, 5, 9)})
    for moves in (
        {0: Move(4, 9, 0, 9), 1: Move(1, 5, 4, 9)},  # place 4 is read and written
        {0: Move(0, 5, 4, 9), 1: Move(1, 5, 4, 9)},  # place 4 is written twice
    ):
        with pytest.raises(AssertionError):
            check_apart(moves)


def test_first_dropped_are_those_whose_rows_are_gone():
    prefixes = Prefixes(3)
    places = StatePlaces(slots=3, checkpoints=3, chunk=CHUNK, log=16)
    places.clear(prefixes)
    trails = [prefixes.insert(drawn(seed, 40), True) for seed in range(3)]
    for slot, (trail, place) in enumerate(zip(trails, places.checkpoints, strict=True)):
        prefixes.record_rows(slot, trail, 40)
        place.record(trail, 31, 32)
    order = list(places.checkpoints)
    assert places._free_checkpoint(set()) is order[0]
    prefixes.forget(1)
    assert places._free_checkpoint(set()) is order[1]
    assert places._free_checkpoint({order[1]}) is order[0]


@pytest.mark.parametrize(("most", "served"), [(29, 0), (30, 30), (31, 31), (33, 33), (40, 35)])
def test_a_state_serves_from_its_base_to_its_log_end(most, served):
    prefixes = Prefixes(1)
    place = Place(0)
    place.record(prefixes.insert(drawn(1, 40), True), 30, 35)
    assert place.serves(prefixes.insert([*drawn(1, 40), 1], True), most, prefixes.segment) == served


class Shadow:
    """A model of each place's content, a base and tokens, that follows the moves of each plan."""

    def __init__(self, sched: Scheduler):
        self.sched = sched
        self.places: dict[int, tuple[int, list[int]]] = {}
        self.forks = 0

    def follow(self, plan: Plan) -> None:
        written = {}
        for member in (*plan.chunks, *plan.decodes):
            request, move = member.request, plan.moves[member.slot]
            text = [*request.prompt, *request.answer]
            start = member.start if isinstance(member, Chunk) else member.position
            if move.source >= 0:
                base, held = self.places[move.source]
                assert base == move.base <= start <= len(held) and held[:start] == text[:start]
                self.forks += move.source >= self.sched.slots
            stop = member.stop if isinstance(member, Chunk) else start + 1 + len(member.draft)
            new = text[: start + 1] + list(member.draft) if isinstance(member, Decode) else text
            written[move.target] = move.keep, new[:stop]
        assert len(written) == len(plan.moves)
        self.places |= written


@pytest.mark.parametrize("seed", range(8))
def test_moves_in_random_schedules(seed):
    """Without a model: each sequence continues from a state of its own text, whatever was cancelled,
    drafted, rejected, dropped or forked before."""
    rng = np.random.default_rng(seed)
    slots, stems = int(rng.integers(1, 6)), [drawn(100 + i, 150) for i in range(3)]

    def draft(decoding: list[Request], left: int) -> dict[int, tuple[int, ...]]:
        return {
            r.id: (1,) * min(3, left, r.max_tokens - r.planned - 1) for r in decoding if left > 3
        }

    def answers(member: Chunk | Decode) -> list[int]:
        """Return the tokens that the rows yield. They depend only on the text."""
        found: list[int] = []
        for _ in range(1 + len(member.draft)):
            text = [*member.request.prompt, *member.request.answer, *found]
            found.append(sum(text) // 3 % 2)
        return found

    sched = Scheduler(slots, 256, POLICIES[DEFAULT], draft=draft)
    sched.states = StatePlaces(slots, int(rng.integers(0, 2 * slots + 1)), CHUNK, log=16)
    sched.resize(slots, 256, CHUNK, 80)
    shadow, open_requests = Shadow(sched), []
    for step in range(400):
        if rng.random() < 0.3:
            ended = [[*r.prompt, *r.answer] for r in open_requests if r.finish_reason]
            texts = stems if rng.random() < 0.5 else [*stems, *ended[-6:]]
            text = texts[int(rng.integers(len(texts)))]
            stop = len(text) if rng.random() < 0.5 else int(rng.integers(1, len(text)))
            prompt = text[:stop][:200] + drawn(step, int(rng.integers(3)))
            request = Request(step, tuple(prompt), int(rng.integers(1, 20)), arrived=step)
            sched.submit(request)
            open_requests.append(request)
        if open_requests and rng.random() < 0.05:
            sched.finish(open_requests[int(rng.integers(len(open_requests)))], "cancelled", step)
        plan = sched.plan(step)
        if plan:
            shadow.follow(plan)
            tokens = {m.slot: answers(m) for m in plan.emitters}
            sched.prove(plan, [chunk.slot for chunk in plan.chunks])
            sched.commit(plan, tokens, lambda request, token: None, step)
        check_invariants(sched)
    assert shadow.forks > 20 or not sched.states.count


def test_a_rejected_draft_token_serves_nobody():
    """A prompt cannot start after a rejected draft token in a state's log, even if another slot has that many
    rows of the same text."""
    sched = Scheduler(
        2, 256, POLICIES[DEFAULT], draft=lambda decoding, left: {0: (9, 9)} if decoding else {}
    )
    sched.states = StatePlaces(2, 2, CHUNK, log=16)
    sched.resize(2, 256, CHUNK, 80)
    request = Request(0, tuple(drawn(1, 30)), 20, arrived=0)
    sched.submit(request)
    for step in range(4):
        plan = sched.plan(step)
        tokens = {m.slot: [1] * (1 + len(m.draft)) for m in plan.emitters}
        sched.commit(plan, tokens, lambda request, token: None, step)
    sched.finish(request, "cancelled", 4)
    text = sched.prefixes.insert([*request.prompt, *request.answer, 5], True)
    assert request.drafting.proposed and not request.drafting.accepted
    assert sched.prefixes.most_reusable(text, request.proven, request.slot).rows == request.proven
    assert (
        sched.prefixes.most_reusable(text, request.proven + 1, request.slot).rows == request.proven
    )


# --- memory -------------------------------------------------------------------------------------


def test_memory_of_states(folder):
    """A checkpoint is a third smaller than a slot's state, whose log has room for 15 draft tokens."""
    config = read_config(folder, True)
    published = config.delta._replace(Hk=16, Hv=16, Dk=128, Dv=128)
    small = config.__class__(**vars(config) | {"delta": published, "deltas": range(18)})
    assert [round(state_nbytes(small, log) / 1e6, 1) for log in (1, 16)] == [20.9, 32.0]
    sizes = fit(config, 4, 10**9)
    assert sizes.checkpoints == 2 * sizes.slots
    assert nbytes_with(config, 4, sizes) > sizes.slots * state_nbytes(config, 16)
    few = fit(config, 4, nbytes_with(config, 4, sizes) // 2)
    assert few.slots < sizes.slots
    assert fit(config, 4, 10**9, state_memory=10 * state_nbytes(config, 1)).checkpoints == 10


def test_no_checkpoints(folder):
    """Without memory for checkpoints, conversations continue, but no prompt starts from another's state."""
    prompt = drawn(11, 70)
    with load(folder, state_memory=0) as engine:
        found = run(engine, prompt)
        going_on = run(engine, [*prompt, *found[0], 7])
        assert_same(going_on, folder, [*prompt, *found[0], 7])
        assert going_on[2] == 75 and run(engine, prompt + drawn(12, 9))[2] == 0


def test_more_drafts_than_the_log_has_room_for(folder):
    with pytest.raises(ValueError, match="speculate = 16, but the log of a state has room for 15"):
        load(folder, speculate=16)


def test_cost_of_a_step(folder):
    """One layer in four reads rows, and the others read and write 4 matrices of 24 x 32."""
    cost = read_model(folder).cost
    assert cost.state_nbytes == 2 * 4 * 3 * 4 * 24 * 32
    assert of_rows(cost, 5, 100).states == 5 * cost.state_nbytes
    assert cost.layers == 4 and of_rows(cost, 1, 100).keys == 100 * cost.row_nbytes


def test_perplexity(folder):
    """`bench.py --parts quality` prefills a text in chunks without an engine, and gets the engine's logits."""
    ids = np.array(drawn(20, 2 * quality.CHUNK + 1))
    nll = np.concatenate([part.nll for part in quality.ours(folder, ids, kv="float32")])
    text = ids[:-1].tolist()
    with load(folder, max_len=1024) as engine:
        tap = Tap(engine)
        handle = engine.submit(text, exactly(1))
        handle.result()
        last = quality.Quality.from_logits(tap.of(handle), ids[-1:])
    assert np.allclose(nll[-1], last.nll[0], atol=1e-4)


def test_ranks_are_refused(folder):
    with pytest.raises(ValueError, match=r"delta nets have states\. Start one process"):
        Shard.for_rank(read_model(folder).config, 0, 2)
