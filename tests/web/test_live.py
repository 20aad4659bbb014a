"""The page that a server sends: it contains none of the server's data, and rebuilds what `/watch` sends."""

import json
import re
import time

import pytest
from browsers import in_node, needs_node
from servers import Server
from word_engine import Clock, word_engine

from engine import watch_frames
from engine.prefill_progress import PrefillProgress
from engine.server_snapshot import ServerView
from nanobatch import SamplingParams
from server import live_page


def test_the_servers_page_needs_no_key():
    """A browser that opens a URL sends no key, so the page itself is public and empty."""
    with Server("--api-key", "hush", "--watch-key", "eye") as server:
        server.ask("/v1/chat/completions", {}, authorization="Bearer hush")
        reply = server.ask("/")
        assert reply.status == 200 and reply.headers["content-type"].startswith("text/html")
        assert reply.body.decode() == live_page.live()[0]
        assert server.ask("/watch").status == 401
        assert server.ask("/", method="POST").status == 405
        assert b"hush" not in reply.body
    rules = reply.headers["content-security-policy"].split("; ")
    assert {"connect-src 'self'", "default-src 'none'", "frame-ancestors 'none'"} <= set(rules)
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_servers_page_has_the_data_that_it_reads():
    """Regression: the data was embedded under a name that the script does not use, so the page stayed empty."""
    text = live_page.live()[0]
    (name,) = re.findall(r'watch\(dataOf\("(\w+)"\)\)', text)
    (data,) = re.findall(rf'<script type="application/json" id="data-{name}">(.*?)</script>', text)
    shape = live_page.SHAPE | {"protocol": watch_frames.PROTOCOL}
    assert json.loads(data) == json.loads(json.dumps(shape))


SENDS = """
import { ask } from "./live.js";
let sent;
globalThis.fetch = async (path, how) => (sent = { path, ...how }, { ok: true });
await ask("watch", { key: asked });
tell([sent.path, sent.headers.authorization, sent.credentials]);
"""


@needs_node
def test_the_key_is_sent_in_a_header():
    assert in_node(SENDS, "secret") == ["watch", "Bearer secret", "omit"]


TAKES = """
import { LiveLane, eventsOf } from "./live.js";
import { fateInWords } from "./words.js";
const live = new LiveLane(asked.shape, asked.bounds);
const texts = [];
const waiting = [];
for (const frame of asked.frames) {
  live.receiveFrame(frame);
  const all = [...live.lane.requests.values()];
  waiting.push(live.lane.waitingAt(live.lane.end).length);
  texts.push(all.map((r) => [r.id, live.lane.textAt(r, live.lane.end)]));
}
const bytes = new TextEncoder().encode('event: hello\\ndata: {"a":1}\\n\\n: ping\\n\\ndata: [2]\\n\\ndata: "unfini');
const pieces = new ReadableStream({
  start(out) {
    for (let i = 0; i < bytes.length; i += 7) out.enqueue(bytes.slice(i, i + 7));
    out.close();
  },
});
const events = [];
for await (const event of eventsOf(pieces)) events.push(event);
const lane = live.lane;
const fates = [...lane.requests.values()].map((r) => fateInWords(lane, r));
const waits = [...lane.requests.values()].map((r) => [
  lane.admittedAt(r) - r.arrived,
  lane.steps[r.admittedStep]?.began - r.came,
]);
const figures = lane.figuresAt(lane.end);
const tokens = lane.steps.reduce((sum, step) => sum + step.tokens, 0);
const ascending = lane.began.every((began, i) => began >= (lane.ended[i - 1] ?? 0) - 1e-9);
tell({ texts, waiting, fates, waits, events, steps: lane.steps.length, tokens, figures, ascending });
"""


def play(frames: list[str], **bounds: int) -> dict:
    shape = live_page.SHAPE | {"protocol": watch_frames.PROTOCOL}
    told = [json.loads(frame) for frame in frames]
    return in_node(TAKES, {"shape": shape, "frames": told, "bounds": bounds})


def packed(sender: watch_frames.Sender, seen) -> str:
    nothing = ServerView("http://127.0.0.1:8000", False, 3, 1, (), (), 0, 0)
    return sender.pack(watch_frames.Frame(False, 0, 0.0, seen, nothing))


def frames_of(engine, texts: bool, begin: int = 0) -> tuple[list[str], list[list], list[int]]:
    """Return frames of five requests from step `begin` on, and for each frame the texts and the number of
    waiting requests."""
    sender = watch_frames.Sender(texts)
    for n in range(5):
        engine.submit(
            f"prompt {n}", SamplingParams(max_tokens=60, ignore_eos=True), origin="10.0.0.1"
        )
    seen, frames, told, lines = None, [], [], []
    for step in range(400):
        if step >= begin:
            seen = engine.snapshot(seen)
            frames.append(packed(sender, seen))
            lines.append(seen.waiting)
            told.append([[r.id, r.text] for r in (*seen.requests, *seen.ended)])
        engine.step()
    assert seen.finished == 5
    return frames, told, lines


def check_texts(played: dict, told: list[list]) -> None:
    """Assert that the page had the same texts as the engine at each frame."""
    compared = 0
    for got, sent in zip(played["texts"], told, strict=True):
        for number, text in sent:
            assert dict(map(tuple, got))[number] == text
            compared += len(text) > 5
    assert compared > 100 and played["ascending"]


@needs_node
@pytest.mark.parametrize("begin", [0, 25])
def test_the_page_rebuilds_each_text_as_it_grew(engine, begin):
    """A page that is opened while answers grow has their complete texts, too."""
    frames, told, lines = frames_of(engine, True, begin)
    played = play(frames)
    check_texts(played, told)
    assert played["figures"]["answered"] == 5 and played["waiting"] == lines


@needs_node
def test_an_open_page_forgets_old_steps(engine):
    """Regression: a request whose admission was forgotten was shown as queued, without a slot."""
    frames, told, lines = frames_of(engine, True)
    played = play(frames, most=40, kept=15)
    check_texts(played, told)
    assert 15 <= played["steps"] <= 41
    assert played["waiting"] == lines and max(lines) == 5
    assert played["fates"][-1].startswith("It had its slot before")


@needs_node
@pytest.mark.parametrize("at_once", [False, True])
def test_rests_that_the_page_leaves_out_are_no_waits(engine, at_once):
    """Regression: if the page was opened later, a request after an idle time seemed to have waited a
    quarter of a second, and one after several idle times even longer."""
    sender, seen, frames = watch_frames.Sender(True), None, []
    for n in range(3):
        engine.submit(f"prompt {n}", SamplingParams(max_tokens=2, ignore_eos=True))
        for step in range(6):
            if not at_once or (n, step) == (2, 5):
                seen = engine.snapshot(seen)
                frames.append(packed(sender, seen))
            engine.step()
        time.sleep(0.3)
    waits = play(frames)["waits"]
    assert len(waits) == 3
    for shown, real in waits:
        assert shown == pytest.approx(real, abs=1e-6)


@needs_node
def test_a_page_that_may_not_read_shows_figures(engine):
    frames, *_ = frames_of(engine, False)
    played = play(frames)
    assert played["tokens"] == 300 and played["steps"] > 60
    assert not any(text for texts in played["texts"] for _, text in texts)


@needs_node
def test_a_stream_is_read_wherever_it_is_cut(engine):
    played = play(frames_of(engine, True)[0][:1])
    assert [event["event"] for event in played["events"]] == ["hello", "comment", "message"]
    assert [event["data"] for event in played["events"]] == [{"a": 1}, "ping", [2]]


PREFILLS = """
import { LiveLane } from "./live.js";
import { prefillInWords } from "./words.js";
const live = new LiveLane(asked.shape, {});
const said = asked.frames.map((frame) => {
  live.receiveFrame(frame);
  return [...live.lane.prefills].map(([request, prefill]) => [request, prefillInWords(prefill)]);
});
tell(said);
"""


@needs_node
def test_the_page_agrees_with_the_screen_on_long_prompts():
    """Regression: the page showed a hatched bar for minutes, without the remaining time."""
    clock, sender = Clock(), watch_frames.Sender(False)
    frames, told, seen = [], [], None
    with word_engine(clock, clock, slots=2, max_len=9_000) as engine:
        engine.runner.time = SlowClock(clock)
        engine.submit([1] * 5_000, SamplingParams(max_tokens=2))
        engine.submit([2] * 20, SamplingParams(max_tokens=30))
        while engine.step():
            seen = engine.snapshot(seen)
            frames.append(packed(sender, seen))
            long = [slot for slot in seen.slots if slot.prefill.is_long]
            told.append([[slot.request, slot.prefill.words] for slot in long])
    shape = live_page.SHAPE | {"protocol": watch_frames.PROTOCOL}
    said = in_node(PREFILLS, {"shape": shape, "frames": [json.loads(f) for f in frames]})
    assert said == told and sum(map(bool, told)) > 200 and told[-1] == []


class SlowClock:
    """A clock on which everything takes a hundred times as long: a chunk takes half a second."""

    def __init__(self, clock: Clock):
        self.clock = clock

    @property
    def now(self) -> float:
        return self.clock.now

    @now.setter
    def now(self, now: float) -> None:
        self.clock.now += 100 * (now - self.clock.now)


ROUNDED = """
import { about } from "./words.js";
tell(asked.map(about));
"""


@needs_node
def test_the_page_rounds_like_the_engine():
    seconds = [n / 8 for n in range(1_000)] + [60 * n / 4 for n in range(800)]
    said = in_node(ROUNDED, seconds)
    assert said == [PrefillProgress(left_s=each).left for each in seconds]
