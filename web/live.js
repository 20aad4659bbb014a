// The client of `/watch`, which turns a server's frames into a lane.
//
// The stream is read with `fetch`, because an `EventSource` cannot send a key in a header. Ten times a second the
// server sends the changes (engine/watch_frames.py), which are added to a lane whose clock skips idle time. The
// key is kept only in this page's memory, and a lane keeps a bounded number of steps.

import { Lane, named, requestOf, unseen } from "./recording.js";
import { isLong } from "./words.js";

const REST = 0.25; // seconds; longer idle times are shortened to this
const MOST = 6000; // maximum number of steps in a lane; beyond it, old ones are dropped
const KEPT = 2000; // number of steps kept when old ones are dropped
const AGAIN = 1500; // milliseconds between attempts to reconnect

const EVENT = /^(?:event: (.*)\n)?data: (.*)/; // data is one line, because JSON has no line breaks

// Yield a stream's events as {event, data}. A comment is yielded as an event, too.
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

// Send a request and return the response. Throw an error with the server's message if it is refused.
export async function ask(path, { key, signal, body }) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const method = body ? "POST" : "GET";
  const answer = await fetch(path, { method, headers, body, signal, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const { error } = await answer.json();
  throw Object.assign(new Error(error.message), { code: error.code, status: answer.status });
}

// Builds a server's lane from the first frame on.
export class LiveLane {
  constructor(shape, { most = MOST, kept = KEPT } = {}) {
    this.shape = shape;
    this.most = most;
    this.kept = kept;
    this.lane = null;
    this.engine = null; // the newest snapshot
    this.isPaused = false;
    this.free = null; // bytes of free memory now
    this.skipped = null; // seconds of the engine's clock that the lane's clock skips
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

  // Return request -> progress of each long prompt.
  #prefillsOf({ slots }) {
    const known = slots.map((values) => named(this.shape.SlotView, values));
    const told = known.map(({ request, prefill }) => [request, named(this.shape.PrefillProgress, prefill)]);
    return new Map(told.filter(([, prefill]) => isLong(prefill)));
  }

  // Convert a request's arrival to the lane's clock: the time to the next step is the same on both clocks.
  #arrivalOf({ came }) {
    const { steps, began, end } = this.lane;
    const next = steps.findIndex((step) => step.began >= came);
    if (next < 0) return Math.min(came - this.skipped, end);
    return Math.max(began[next] - (steps[next].began - came), began[next - 1] ?? -Infinity);
  }

  // Return the start and end of a step on the lane's clock. The step's own times are on the engine's clock.
  #timesOf({ began, ended }) {
    const last = this.lane.steps.at(-1)?.ended ?? this.skipped;
    const start = Math.max(began, last);
    this.skipped += Math.max(0, start - last - REST);
    return [start - this.skipped, Math.max(start, ended) - this.skipped];
  }

  // Return a request with its complete text. A frame contains only new text.
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

  // Replace the lane by one with only the newest steps and their requests.
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

// Watches the server until the page is closed, and reconnects. `greet` receives the first event, `show` each frame,
// and `say` messages for the user. `wantKey` is called if a key is missing or wrong; it later calls `useKey`.
export class Watcher {
  constructor(shape, { greet, show, say, wantKey }) {
    Object.assign(this, { shape, greet, show, say, wantKey });
    this.key = "";
    this.model = ""; // the model to watch; the server chooses if empty
    this.left = new AbortController(); // aborts the current stream
    this.timer = 0; // timer of the next attempt to connect
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

  // Handle one stream from its first event to its last.
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
