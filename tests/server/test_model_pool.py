"""Several models behind one address: which are loaded, which requests wait, and which model is unloaded."""

import json
import random
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from long_forms import number_of
from servers import COMPLETIONS, Server
from waiting import wait_for

from engine.loop import Loop
from engine.turns import Turns
from nanobatch import Engine, SamplingParams
from screen.commands import Session
from screen.remote_client import RemoteEngineClient
from screen.state import State
from server import model_pool
from server.body_reader import APIError
from server.model_pool import ModelPool, PooledModel, Ticket
from tui import MENU


class FakeEngine:
    """The part of an engine that a pool uses."""

    lifecycle = SimpleNamespace(is_unloaded=False)
    on_commit = None
    summary = "fake"

    def __init__(self, name, gone):
        self.text = SimpleNamespace(folder=SimpleNamespace(name=name))
        self.name = name
        self._gone = gone

    def release(self):
        """A real engine saves its slots and frees its weights."""
        if self.name == "full":
            raise OSError(28, "No space left on device")

    def close(self):
        self._gone.append(self.name)


class Pool:
    """A pool of fake models, given as name -> size in bytes. `gate` delays loading."""

    def __init__(self, sizes, memory, **options):
        self.loaded, self.gone, self.said = [], [], []
        self.gate = threading.Event()
        self.gate.set()
        models = [PooledModel(name, SimpleNamespace(nbytes=n)) for name, n in sizes.items()]
        options = {"check": self.check, "say": self.said.append, **options}
        self.pool = ModelPool(models, self.load, memory=memory, **options)
        self.pool.start()

    def check(self, model):
        if model.name.startswith("broken"):
            raise ValueError("/home/me/models/broken.gguf: its header is cut")

    def load(self, model, report):
        report("half of it")
        assert self.gate.wait(20)
        self.check(model)
        now = [*self.loaded, model.name]
        for name in self.gone:
            now.remove(name)
        self.most = sum(self.pool.named(name).nbytes for name in now)
        assert self.most <= self.pool.memory
        self.loaded.append(model.name)
        return FakeEngine(model.name, self.gone), None

    def ask(self, name):
        return self.pool.borrow(self.pool.named(name))

    def wait(self, name):
        lent = self.ask(name)
        if isinstance(lent, Ticket):
            wait_for(lambda: lent.is_over)
        return lent

    def end(self, lent):
        (self.pool.leave if isinstance(lent, Ticket) else self.pool.give_back)(lent)

    def states(self):
        return {model.name: model.state for model in self.pool.models}


@pytest.fixture
def pools(monkeypatch):
    monkeypatch.setattr(model_pool, "advised", lambda folder: {"temperature": 0.0})
    with ExitStack() as stack:

        def make(*arguments, **options):
            pool = Pool(*arguments, **options)
            stack.callback(pool.pool.close)
            stack.callback(pool.gate.set)
            return pool

        yield make


def test_the_one_used_least_recently_goes(pools):
    pool = pools({"a": 4, "b": 4, "c": 4}, 8)
    for name in ("a", "b", "a", "c"):
        pool.end(pool.wait(name))
    assert pool.gone == ["b"] and pool.states() == {"a": "loaded", "b": "on disk", "c": "loaded"}
    assert any("b is unloaded: c needs its memory" in line for line in pool.said)


def test_a_busy_model_is_never_unloaded(pools):
    """A request for another model waits in the queue and is told its position. (A comparable server ended the
    running answer.)"""
    pool = pools({"a": 6, "b": 6}, 8)
    busy = pool.wait("a")
    first, second = pool.ask("b"), pool.ask("b")
    time.sleep(0.1)
    assert not first.is_over and pool.gone == []
    assert b"waiting for b, 1 before you" in second.progress()
    pool.end(busy)
    wait_for(lambda: first.is_over and second.is_over)
    assert pool.gone == ["a"] and first.served is second.served


def test_later_requests_wait_behind_one_that_needs_the_memory(pools):
    """Later requests for the busy model wait, too. Otherwise a constant stream of them would keep it loaded
    forever."""
    pool = pools({"a": 6, "b": 6, "small": 1}, 8)
    busy, other = pool.wait("a"), pool.wait("small")
    waits = pool.ask("b")
    wait_for(lambda: pool.pool.named("a").is_leaving)
    late = pool.ask("a")
    assert isinstance(late, Ticket) and not late.is_over
    assert not isinstance(pool.ask("small"), Ticket), "it need not go, so it goes on"
    pool.end(busy)
    wait_for(lambda: waits.is_over)
    assert not late.is_over
    pool.end(waits)
    wait_for(lambda: late.is_over)
    assert pool.loaded == ["a", "small", "b", "a"] and pool.gone == ["a", "b"]
    pool.end(other)


def test_the_busy_model_that_leaves_stays_the_same(pools):
    """Regression: each finished request changed the choice between two busy models. So both kept getting
    requests, and the third model was never loaded."""
    pool = pools({"a": 4, "b": 4, "c": 4}, 8)
    first, second, other = pool.wait("a"), pool.wait("a"), pool.wait("b")
    waits = pool.ask("c")
    wait_for(lambda: pool.pool.named("a").is_leaving)
    pool.end(first)
    with pool.pool._changed:
        pool.pool._next()
    assert pool.pool.named("a").is_leaving and not isinstance(pool.ask("b"), Ticket)
    pool.end(second)
    wait_for(lambda: waits.is_over)
    assert pool.gone == ["a"]
    pool.end(other)


def test_a_waiting_client_that_leaves_unloads_nothing(pools):
    pool = pools({"a": 6, "b": 6}, 8)
    busy = pool.wait("a")
    waits = pool.ask("b")
    wait_for(lambda: pool.pool.named("a").is_leaving)
    pool.end(waits)
    wait_for(lambda: not pool.pool.named("a").is_leaving)
    assert not isinstance(pool.ask("a"), Ticket)
    pool.end(busy)
    assert pool.gone == [] and pool.loaded == ["a"]


def test_a_spoilt_model_refuses_its_own_requests_alone(pools):
    pool = pools({"broken": 1, "a": 1}, 8)
    pool.gate.clear()
    lost, waits = pool.ask("broken"), pool.ask("a")
    pool.gate.set()
    wait_for(lambda: lost.is_over and waits.is_over)
    assert lost.refusal.status == 503 and lost.refusal.headers["Retry-After"]
    assert "broken.gguf: its header is cut" in lost.refusal.message
    assert "/home/me" not in lost.refusal.message and waits.served.name == "a"


def test_a_model_with_wrong_settings_is_closed_and_refused(pools, monkeypatch):
    """Regression: an invalid `generation_config.json` ended the loader's thread, so every later request for a
    model that was not loaded hung."""

    def advised(folder):
        if folder.name == "wrong":
            raise ValueError("temperature must be at least 0, not -1")

    monkeypatch.setattr(model_pool, "advised", advised)
    pool = pools({"wrong": 1, "a": 1}, 8)
    assert "temperature must be" in pool.wait("wrong").refusal.message
    assert pool.wait("a").served and pool.gone == ["wrong"]


def test_no_engine_stays_open_on_a_full_disk(pools, monkeypatch):
    """Regression: an engine stayed in memory if the log could not be written, or its slots not be saved."""

    def advised(folder):
        if folder.name == "wrong":
            raise ValueError("temperature must be at least 0, not -1")

    def say(line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_pool, "advised", advised)
    pool = pools({"wrong": 1, "full": 8, "a": 8}, 8, say=say)
    for name in ("wrong", "full", "a"):
        pool.end(pool.wait(name))
    assert pool.gone == ["wrong", "full"]


def test_a_log_on_a_full_disk_stops_no_loading(pools):
    def say(line):
        raise OSError(28, "No space left on device")

    pool = pools({"a": 5, "broken": 1, "b": 5}, 8, say=say)
    pool.end(pool.wait("a"))
    assert pool.wait("broken").refusal
    pool.end(pool.wait("b"))
    assert pool.gone == ["a"] and pool.wait("a").served


def test_a_spoilt_model_unloads_no_other(pools):
    pool = pools({"broken": 8, "a": 1}, 8)
    pool.end(pool.wait("a"))
    assert pool.wait("broken").refusal and pool.states()["a"] == "loaded"


def test_files_are_checked_again_after_loading_failed(pools):
    """Regression: the next request for a model whose loading had failed unloaded the others at once."""
    checked = []

    def check(model):
        checked.append(model.name)
        if len(checked) == 2:
            raise ValueError("the header is cut")

    pool = pools({"broken": 8, "a": 1}, 8, check=check)
    for _ in range(2):
        pool.end(pool.wait("a"))
        assert pool.wait("broken").refusal
    assert pool.gone == ["a"] and pool.states()["a"] == "loaded"


def test_a_model_larger_than_the_memory_is_refused_at_once(pools):
    pool = pools({"a": 1, "huge": 9}, 8)
    with pytest.raises(APIError, match="needs 9 bytes, but --memory is 8 bytes"):
        pool.ask("huge")


def test_the_line_is_bounded(pools):
    """While one model is busy, a hundred requests arrive for others. Those over the limit get a 503."""
    pool = pools({f"m{i}": 5 for i in range(100)} | {"a": 5}, 8)
    busy = pool.wait("a")
    kept = []
    with pytest.raises(APIError, match="are already waiting for models") as refused:
        for i in range(100):
            kept.append(pool.ask(f"m{i}"))
    assert (refused.value.status, len(kept)) == (503, model_pool.MAX_WAITING)
    assert pool.loaded == ["a"] and pool.gone == []
    for ticket in kept:
        pool.end(ticket)
    pool.end(busy)


def test_an_idle_model_is_unloaded_after_a_while(pools):
    pool = pools({"a": 1, "b": 1}, 8, unload_after=0.2)
    busy = pool.wait("a")
    pool.end(pool.wait("b"))
    wait_for(lambda: pool.gone == ["b"])
    assert pool.states()["a"] == "loaded"
    pool.end(busy)
    wait_for(lambda: pool.gone == ["b", "a"])


def test_names(pools):
    pool = pools(
        {"qwen-coder": 1, "qwen-chat": 1, "smol": 1, "demo": 1}, 8, aliases=("gpt-4o",)
    ).pool
    for name in (None, "default", "gpt-4o", "qwen-coder"):
        assert pool.named(name).name == "qwen-coder"
    with pytest.raises(APIError, match="'smol'") as unknown:
        pool.named("smoll")
    assert unknown.value.status == 404 and "1 more at /v1/models" in unknown.value.message
    with pytest.raises(APIError, match="must be a string"):
        pool.named(["qwen-chat"])


def test_random_requests_end(pools):
    """Clients arrive, wait, leave and finish in any order. No client waits forever, and each load fits into
    memory."""
    dice = random.Random(5)
    sizes = {"a": 3, "b": 4, "c": 5, "d": 8, "broken": 2}
    pool = pools(sizes, 9)
    ended = []

    def client(seed):
        own = random.Random(seed)
        for _ in range(12):
            lent = pool.ask(own.choice([*sizes]))
            if isinstance(lent, Ticket) and own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            elif isinstance(lent, Ticket):
                wait_for(lambda lent=lent: lent.is_over)
            time.sleep(own.random() * 0.004)
            pool.end(lent)
            ended.append(lent)

    clients = [threading.Thread(target=client, args=(dice.random(),)) for _ in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(60)
    assert len(ended) == 8 * 12 and len(pool.gone) > 10
    assert all(model.requests == 0 for model in pool.pool.models)


# --- turns


def test_turns_are_shared_by_time():
    """An engine whose steps take five times as long gets a fifth of the turns."""
    now = [0.0]
    turns = Turns(lambda: now[0])
    spent = {}
    both_here = threading.Barrier(2)

    def engine(seconds):
        spent[seconds] = 0.0
        with turns.turn(seconds):
            pass
        both_here.wait()
        while now[0] < 2.0:
            with turns.turn(seconds):
                time.sleep(0.002)  # the other one queues up meanwhile, as during a step
                now[0] += seconds
                spent[seconds] += seconds
        turns.forget(seconds)

    engines = [threading.Thread(target=engine, args=(seconds,)) for seconds in (0.01, 0.05)]
    for each in engines:
        each.start()
    for each in engines:
        each.join()
    assert 0.5 < spent[0.01] / spent[0.05] < 2


def test_an_idle_engine_saves_up_no_turns():
    now = [0.0]
    turns = Turns(lambda: now[0])
    for _ in range(5):
        with turns.turn("busy") as is_shared:
            now[0] += 1.0
        assert not is_shared
    for _ in range(2):
        with turns.turn("new"):
            now[0] += 1.0
    with turns.turn("busy"):
        pass


# --- over HTTP


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for seed, name in enumerate(("one", "two", "spoilt")):
        made[name] = make_checkpoint(root / name, seed=seed, tie_word_embeddings=bool(seed))
    return made


def options(folders, *names):
    return [word for name in names for word in ("--model", f"{name}={folders[name]}")]


SMALL = ("--slots", "2", "--max-len", "256")
ASK = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def both(folders):
    with Server(*options(folders, "one", "two"), *SMALL) as server:
        yield server


def test_two_models_answer_as_each_alone(folders, both):
    """With both models loaded and busy, each produces the tokens of its own separate engine."""
    alone = {}
    for name in ("one", "two"):
        with Engine.load(folders[name], slots=1, max_len=256) as engine:
            sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
            (result,) = engine.generate([ASK["prompt"]], sampling)
            alone[name] = result.text
    assert alone["one"] != alone["two"]
    listed = {each["id"]: each for each in both.ask("/v1/models").json["data"]}
    assert [*listed] == ["one", "two"]
    for each in listed.values():
        assert (each["state"], each["kind"], each["max_model_len"]) == ("on disk", "chat", 256)
        assert each["size"] > 10**5
    refused = both.ask("/watch?model=two")
    assert refused.status == 503 and "not loaded" in refused.error["message"]
    found = []

    def client(name):
        reply = both.complete(**ASK | {"model": name})
        found.append((name, reply.json["model"], reply.json["choices"][0]["text"]))

    clients = [threading.Thread(target=client, args=(name,)) for name in [*alone] * 6]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert sorted(found) == sorted((name, name, alone[name]) for name in [*alone] * 6)
    assert both.ask("/health").json["models"] == {"one": "loaded", "two": "loaded"}
    figures = both.ask("/metrics").body.decode()
    for name in alone:
        assert f'nanobatch_generated_tokens_total{{model="{name}"}} 144.0' in figures
        assert f'nanobatch_slots{{model="{name}"}} 2.0' in figures
    assert both.complete(**ASK | {"model": "three"}).status == 404
    log = both.log.read_text()
    assert log.count("model=one") == log.count("model=two") == 6 and "Traceback" not in log
    assert "so all fit together" in log


def test_random_company_across_two_models_changes_no_bit(folders):
    """Both engines take turns at stepping while requests arrive at random. Log probabilities are compared
    with those of an engine with one slot and no other model."""
    dice = random.Random(3)
    turns = Turns()
    asked = {name: [] for name in ("one", "two")}
    with ExitStack() as stack:
        engines = {}
        for name in asked:
            options = {"slots": 3, "max_len": 256, "chunk": 32}
            engines[name] = stack.enter_context(Engine.load(folders[name], **options))
            stack.enter_context(Loop(engines[name], turns=turns))
        for number in range(number_of("MODELS_COMPANY", 24)):
            name = dice.choice([*asked])
            prompt = [dice.randrange(256) for _ in range(dice.randrange(1, 120))]
            temperature = dice.choice([0.0, 0.9])
            sampling = SamplingParams(
                max_tokens=dice.randrange(1, 30),
                temperature=temperature,
                seed=number,
                logprobs=2,
                ignore_eos=True,
            )
            asked[name].append((prompt, sampling, engines[name].submit(prompt, sampling)))
            time.sleep(dice.random() * 0.01)
        for name, requests in asked.items():
            with Engine.load(folders[name], slots=1, max_len=256, chunk=64) as alone:
                for prompt, sampling, handle in requests:
                    (expected,) = alone.generate([prompt], sampling)
                    found = handle.result()
                    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert all(len(requests) > 5 for requests in asked.values())


def test_models_that_do_not_fit_together_take_turns(folders):
    """A waiting stream reports its progress, and a model with a corrupt file does not affect the others.
    Regression: `/metrics` failed after a model was loaded again, because the new engine had fewer steps."""
    with Server(*options(folders, "one", "two", "spoilt"), *SMALL, "--memory", "1M") as server:
        assert "never fit together" in server.log.read_text()
        (folders["spoilt"] / "model.safetensors").write_bytes(b"no tensors")
        for name in ("one", "two", "one"):
            assert server.complete(**ASK | {"model": name}).json["model"] == name
            states = server.ask("/health").json["models"]
            assert states[name] == "loaded" and [*states.values()].count("loaded") == 1
        assert server.ask("/metrics").status == 200
        refused = server.complete(**ASK | {"model": "spoilt"})
        assert server.ask("/health").json["models"]["one"] == "loaded"
        assert refused.status == 503 and "cannot be loaded" in refused.error["message"]
        assert refused.headers["retry-after"]
        stream = ASK | {"stream": True}
        long = stream | {"model": "one", "n": 16, "max_tokens": 240}
        lines = [server.line().post(COMPLETIONS, long) for _ in range(4)]
        lines[0].until(b"data: ")
        waits = server.line().post(COMPLETIONS, stream | {"model": "two"})
        assert b"waiting for two, 0 before you" in waits.until(b"before you")
        for line in lines:
            line.hang_up()
        assert b'"finish_reason":"length"' in waits.until(b"[DONE]")
        waits.hang_up()
        assert server.complete(**ASK | {"model": "one", "max_tokens": 2}).status == 200
        assert server.ask("/metrics").status == 200
        assert "Traceback" not in server.log.read_text()


def test_watching_one_of_two_models(both):
    for name in ("one", "two"):
        both.complete(**ASK | {"model": name})
    for query, name in (("?model=one", "one"), ("", "two")):
        line = both.line().send(f"GET /watch{query} HTTP/1.1\nHost: localhost\n\n")
        said = line.until(b"data: [")
        hello = json.loads(said.partition(b"event: hello\ndata: ")[2].partition(b"\n")[0])
        assert (hello["model"], hello["models"]) == (name, ["one", "two"])
        line.hang_up()


def test_the_screen_watches_one_model_after_the_other(both):
    for name in ("two", "one"):
        both.complete(**ASK | {"model": name})
    client = RemoteEngineClient(both.address)
    client.start()
    session = Session(client, State(""), MENU)

    def sees(name):
        def is_there():
            session.refresh()
            return session.state.view.model.startswith(name) and session.state.view.engine

        wait_for(is_there)

    try:
        sees("one")
        assert session.obey("/model") == "two is watched from here on"
        sees("two")
        before = both.log.read_text().count("model=two")
        session.client.fire(session.asks(1))
        wait_for(lambda: both.log.read_text().count("model=two") > before)
        with pytest.raises(ValueError, match="it has one, two"):
            session.obey("/model three")
        session.obey("/model one")
        sees("one")
        assert not session.state.view.faults
    finally:
        client.stop(1)


def test_tables_of_a_config_file_are_for_each_model(folders, tmp_path):
    file = tmp_path / "models.toml"
    file.write_text(
        f"""model = ["one={folders["one"]}", "two={folders["two"]}"]
slots = 2
[models.two]
slots = 3
max-len = 128
"""
    )
    with Server("--config", str(file), "--max-len", "200") as server:
        listed = {each["id"]: each for each in server.ask("/v1/models").json["data"]}
        assert {name: each["max_model_len"] for name, each in listed.items()} == {
            "one": 200,
            "two": 200,
        }
        server.complete(**ASK | {"model": "two"})
        assert server.gauge("slots") == 3


def test_wrong_models_get_one_line(capsys, folders):
    import serve

    for arguments, words in (
        (["--model", "a=demo", "--model", "a=demo"], "two are called 'a'"),
        (["--model", "a b=demo"], "a name may have only letters"),
        (["--model", "a=/nowhere"], "'/nowhere' is not a folder"),
        (["--memory", "lots"], "give a size such as 500M"),
        (["--host", "0.0.0.0"], "name the model to serve: --model"),
    ):
        with pytest.raises(SystemExit, match="2"):
            serve.parse_arguments(arguments)
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
