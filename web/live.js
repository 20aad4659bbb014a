// What a server does now, as a lane: the page's end of `/watch`.
//
// The problem. A server tells ten times a second what has happened since it told last (door/wire.py):
// steps, and of each open request the part of its text that is new. It may be asked for a key, it may
// hide all texts, and it may end and come back.
//
// The way out. `fetch` reads the stream. (An `EventSource` can send no header, and a key must not stand
// in an address, where histories and logs would keep it.) What comes is put into a lane, on a clock that
// leaves out most of the time in which nothing ran.
//
// What this file keeps. A key goes into a header, and nowhere else. It is kept in this page's memory alone. A lane holds some thousand steps at
// most, however long the page is open.

import { Lane, countUpTo, named, requestOf } from "./recording.js";

const REST = 0.25; // seconds: a longer rest is shown as if it had been so long
const MOST = 6000; // steps of a lane; then the older ones go
const KEPT = 2000; // and so many stay
const AGAIN = 1500; // milliseconds until a lost server is asked again

// The events of a stream, as they come: {event, data}.
export async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n");
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      const event = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "message";
      if (data[0] === "[DONE]") return;
      if (data.length) yield { event, data: JSON.parse(data.join("\n")) };
    }
  }
}

// What the server answers. A refusal is an error in the server's words.
export async function ask(path, { key, signal, body }) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const how = { method: body ? "POST" : "GET", cache: "no-store", credentials: "omit" };
  const answer = await fetch(path, { headers, body, signal, ...how });
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
    this.known = new Map(); // open requests, with all of their texts
    this.raw = []; // by step of the lane: when it ended on the engine's clock
    this.clock = []; // and on the lane's
    this.engine = null; // the newest snapshot
  }

  // True if the lane is another one than before: it was the first frame, or the lane was shortened.
  take(packed) {
    const frame = named(this.shape.Frame, packed);
    const engine = named(this.shape.Snapshot, frame.engine);
    const before = this.lane;
    this.engine = engine;
    this.lane ??= new Lane(engine.policy, named(this.shape.Limits, engine.limits));
    this.lane.policy = engine.policy;
    const steps = engine.steps.map((step) => named(this.shape.StepView, step));
    const times = this.#timesOf(steps);
    const told = [...engine.requests, ...engine.ended].map((each) => this.#joined(each));
    for (const request of told) this.lane.know(request);
    for (const [number, waited] of engine.queue) this.#knowOf(number, engine.now - waited);
    steps.forEach((step, i) => this.lane.add(step, ...times[i]));
    for (const { id } of told) {
      const request = this.lane.requests.get(id);
      request.before = Math.max(0, request.outputTokens - request.tokenSteps.length);
    }
    const open = new Set(engine.requests.map((each) => named(this.shape.RequestView, each).id));
    this.known = new Map(told.filter((request) => open.has(request.id)).map((r) => [r.id, r]));
    if (this.lane.steps.length > this.most) this.#shorten(open);
    return this.lane !== before;
  }

  // When these steps begin and end on the lane's clock.
  #timesOf(steps) {
    let now = this.lane.end;
    return steps.map((step) => {
      const last = this.raw[this.raw.length - 1];
      const began = last === undefined ? step.began : Math.max(step.began, last);
      const rest = last === undefined ? 0 : Math.min(began - last, REST);
      const times = [now + rest, now + rest + Math.max(0, step.ended - began)];
      this.raw.push(step.ended);
      now = times[1];
      this.clock.push(now);
      return times;
    });
  }

  // What the lane's clock showed, about, when the engine's showed this.
  #moment(at) {
    const i = countUpTo(this.raw, at);
    if (i === this.raw.length) return this.clock[i - 1] ?? 0;
    return Math.max(this.clock[i - 1] ?? 0, this.clock[i] - (this.raw[i] - at));
  }

  // A request with the whole of its text: a frame has only what is new.
  #joined(packed) {
    const request = requestOf(this.shape, packed);
    const before = this.known.get(request.id);
    if (!before) return { ...request, arrived: this.#moment(request.arrived) };
    return {
      ...request,
      arrived: before.arrived,
      prompt: before.prompt,
      text: before.text + request.text,
      lengths: [...before.lengths, ...request.lengths],
    };
  }

  // One in line of which only its number is told.
  #knowOf(number, arrived) {
    if (this.lane.requests.has(number)) return;
    this.lane.know({ id: number, prompt: "", text: "", lengths: [], arrived: this.#moment(arrived) });
  }

  // The newest steps in a new lane, with the requests that are in them.
  #shorten(open) {
    const old = this.lane;
    const first = old.steps.length - this.kept;
    const from = old.began[first];
    this.lane = new Lane(old.policy, old.limits);
    for (const request of old.requests.values()) {
      const isOld = request.last !== undefined && request.last < from && !open.has(request.id);
      if (isOld) continue;
      const { tokenSteps, chunks, admittedStep, first: _, last: __, ...rest } = request;
      const gone = tokenSteps.filter((index) => index < first).length;
      this.lane.know({ ...rest, before: rest.before + gone, arrived: rest.arrived - from });
    }
    for (let i = first; i < old.steps.length; i++) {
      this.lane.add(old.steps[i], old.began[i] - from, old.ended[i] - from);
    }
    this.raw = this.raw.slice(first);
    this.clock = this.lane.ended.slice();
    for (const request of this.known.values()) request.arrived -= from;
  }
}

// Asks the server until the page is left. `show(live, isNew)` is told of each frame, `say` what a person
// should know, and `wantKey` that a key is missing or wrong; `useKey` is how one comes.
export class Watcher {
  constructor(shape, { show, say, wantKey }) {
    this.shape = shape;
    this.show = show;
    this.say = say;
    this.wantKey = wantKey;
    this.key = "";
    this.left = null; // ends what is being read
    this.wake = () => {}; // ends a wait
  }

  useKey(key) {
    this.key = key;
    this.left?.abort();
    this.wake();
  }

  async run() {
    for (;;) {
      this.left = new AbortController();
      let rest = AGAIN;
      try {
        await this.#watch(this.left.signal);
        this.say("The server has ended. It is asked again.");
      } catch (error) {
        if (this.left.signal.aborted) continue;
        if (error.status === 401) {
          rest = Infinity; // until there is another key
          this.wantKey(this.key ? "The server does not take this key." : "The server wants a key.");
        } else {
          this.say(`No news from the server: ${error.message}. It is asked again.`);
        }
      }
      await new Promise((wake) => {
        this.wake = wake;
        if (isFinite(rest)) setTimeout(wake, rest);
      });
    }
  }

  // One stream, from its first event to its last.
  async #watch(signal) {
    const answer = await ask("watch", { key: this.key, signal });
    const live = new LiveLane(this.shape);
    for await (const { event, data } of eventsOf(answer.body)) {
      if (event !== "hello") this.show(live, live.take(data));
      else if (data.protocol === this.shape.protocol) live.hello = data;
      else throw new Error("it is of another version; load this page again");
    }
  }
}
