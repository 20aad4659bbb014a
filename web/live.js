// The page's end of `/watch`: a server as a lane.
//
// `fetch` reads the stream, because an `EventSource` cannot send a key in a header. Ten times a second the
// server sends what is new (engine/watch_frames.py); it goes into a lane, on a clock that skips idle time. The
// key stays in this page's memory, and a lane keeps a bounded number of steps.

import { Lane, named, requestOf, unseen } from "./recording.js";
import { isLong } from "./words.js";

const REST = 0.25; // seconds: longer idle times are drawn this long
const MOST = 6000; // steps of a lane; above that, old ones are dropped
const KEPT = 2000; // steps that stay then
const AGAIN = 1500; // milliseconds between attempts to reconnect

const EVENT = /^(?:event: (.*)\n)?data: (.*)/; // as the server writes one: JSON has no line breaks

// The events of a stream, as they come: {event, data}. A comment is an event, too.
export async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [, event = "message", data] = EVENT.exec(part) ?? [];
      if (data === "[DONE]") return;
      if (data) yield { event, data: JSON.parse(data) };
      else if (part.startsWith(": ")) yield { event: "comment", data: part.slice(2) };
    }
  }
}

// The server's answer. A refusal is an error with the server's message.
export async function ask(path, { key, signal, body }) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const method = body ? "POST" : "GET";
  const answer = await fetch(path, { method, headers, body, signal, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const { error } = await answer.json();
  throw Object.assign(new Error(error.message), { code: error.code, status: answer.status });
}

// The lane of one server, from its first frame on.
export class LiveLane {
  constructor(shape, { most = MOST, kept = KEPT } = {}) {
    this.shape = shape;
    this.most = most;
    this.kept = kept;
    this.lane = null;
    this.engine = null; // the newest snapshot
    this.isPaused = false;
    this.free = null; // bytes of memory, now
    this.skipped = null; // seconds of the engine's clock that the lane's leaves out
  }

  receiveFrame(packed) {
    const frame = named(this.shape.Frame, packed);
    const engine = named(this.shape.Snapshot, frame.engine);
    this.engine = engine;
    this.isPaused = frame.paused;
    this.free = named(this.shape.ServerView, frame.server).free_memory;
    this.lane ??= new Lane(engine.policy, named(this.shape.Limits, engine.limits));
    this.lane.policy = engine.policy;
    for (const request of [...engine.requests, ...engine.ended]) this.lane.know(this.#joined(request));
    const steps = engine.steps.map((values) => named(this.shape.StepView, values));
    this.skipped ??= steps[0]?.began ?? engine.now;
    const known = this.lane.end;
    for (const step of steps) this.lane.add(step, ...this.#timesOf(step));
    if (this.lane.steps.length > this.most) this.#shorten();
    this.lane.prefills = this.#prefillsOf(engine);
    for (const request of this.lane.requests.values()) {
      if (!(request.arrived < known)) request.arrived = this.#arrivalOf(request);
      request.before = Math.max(0, request.output_tokens - request.tokenSteps.length);
    }
  }

  // How far each long prompt has been read, by request.
  #prefillsOf({ slots }) {
    const known = slots.map((values) => named(this.shape.SlotView, values));
    const told = known.map(({ request, prefill }) => [request, named(this.shape.PrefillProgress, prefill)]);
    return new Map(told.filter(([, prefill]) => isLong(prefill)));
  }

  // A request's arrival on the lane's clock, as long before the next step as on the engine's.
  #arrivalOf({ came }) {
    const { steps, began, end } = this.lane;
    const next = steps.findIndex((step) => step.began >= came);
    if (next < 0) return Math.min(came - this.skipped, end);
    return Math.max(began[next] - (steps[next].began - came), began[next - 1] ?? -Infinity);
  }

  // Begin and end of a step on the lane's clock; the steps themselves have the engine's times.
  #timesOf({ began, ended }) {
    const last = this.lane.steps.at(-1)?.ended ?? this.skipped;
    const start = Math.max(began, last);
    this.skipped += Math.max(0, start - last - REST);
    return [start - this.skipped, Math.max(start, ended) - this.skipped];
  }

  // A request with its whole text: a frame has only what is new.
  #joined(packed) {
    const { arrived: came, ...request } = requestOf(this.shape, packed);
    const before = this.lane.requests.get(request.id);
    if (!before) return { ...request, came };
    return {
      ...request,
      prompt: before.prompt || request.prompt,
      text: before.text + request.text,
      lengths: [...before.lengths, ...request.lengths],
    };
  }

  // A new lane with the newest steps and their requests.
  #shorten() {
    const old = this.lane;
    const first = old.steps.length - this.kept;
    this.lane = new Lane(old.policy, old.limits);
    for (const request of old.requests.values()) {
      const isOpen = !request.reason || request.last >= old.began[first];
      if (isOpen) this.lane.know({ ...request, ...unseen() });
    }
    for (let i = first; i < old.steps.length; i++) {
      this.lane.add(old.steps[i], old.began[i], old.ended[i]);
    }
  }
}

// Watch the server until the page is closed, and reconnect. `greet` gets the server's first event, `show` each
// frame, and `say` messages for the reader. `wantKey` is called if a key is missing or wrong; `useKey` takes one.
export class Watcher {
  constructor(shape, { greet, show, say, wantKey }) {
    Object.assign(this, { shape, greet, show, say, wantKey });
    this.key = "";
    this.model = ""; // of several; the server's choice if empty
    this.left = new AbortController(); // ends what is being read
    this.timer = 0; // of the next attempt
  }

  useKey(key) {
    this.key = key;
    this.#anew();
  }

  choose(model) {
    this.model = model;
    this.#anew();
  }

  #anew() {
    this.left.abort();
    clearTimeout(this.timer);
    this.run();
  }

  async run() {
    this.left = new AbortController();
    const { signal } = this.left;
    try {
      await this.#watch(signal);
      this.say("The server has ended. Reconnecting …", "ended");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) {
        return this.wantKey(this, this.key ? "The server does not take this key." : "The server wants a key.");
      }
      const state = error.code === "loading" ? "loading" : "does not answer";
      this.say(`No news from the server: ${error.message}. Reconnecting …`, state);
    }
    this.timer = setTimeout(() => this.run(), AGAIN);
  }

  // One stream, from its first event to its last.
  async #watch(signal) {
    const path = this.model ? `watch?model=${encodeURIComponent(this.model)}` : "watch";
    const answer = await ask(path, { key: this.key, signal });
    const live = new LiveLane(this.shape);
    for await (const { event, data } of eventsOf(answer.body)) {
      if (event === "hello") {
        if (data.protocol !== this.shape.protocol) throw new Error("it is of another version; load this page again");
        live.hello = data;
        this.greet(data);
      } else if (event === "message") {
        live.receiveFrame(data);
        this.show(live);
      }
    }
  }
}
