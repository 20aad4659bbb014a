// Be the scheduler: admit requests and cut prompts by hand.
//
// The recorded prompts arrive over time; the player admits them and sets the chunk size. A step takes as long as
// a similar step in the recording. The other policies' results were computed with sched.py when the page was made.
// Like a scheduler, the player knows the prompts and their lengths, but not the lengths of the answers.

import { Lane } from "./recording.js";
import { drawTimeline } from "./draw.js";
import { Frames } from "./player.js";
import { $, buttonFor, copy, make, rowOf, write } from "./elements.js";
import { count, percent, span } from "./words.js";

const SLOWER = 25; // slowdown factor compared with the engine
const IDLE = 0.002; // seconds by which the clock advances while nothing runs
const AFTER = 1200; // milliseconds before another request may take an admitted one's place

// The state of the game: a scheduler without a policy.
export class Hand {
  constructor({ requests, price, slots }) {
    this.price = price;
    this.now = 0;
    this.cut = 64; // maximum number of prompt tokens per step
    this.admitted = []; // admissions for the next step
    this.coming = requests.map((request) => ({ ...request, read: 0, said: 0 }));
    this.line = [];
    this.slots = Array(slots).fill(null);
    this.lane = new Lane("you", { slots });
    this.used = 0; // slot-seconds of work
    this.open = 0; // slot-seconds that were free while requests waited
    this.arrive();
  }

  get isOver() {
    return !this.coming.length && !this.line.length && this.slots.every((each) => each === null);
  }

  arrive() {
    while (this.coming.length && this.coming[0].arrived <= this.now) {
      const request = this.coming.shift();
      this.line.push(request);
      this.lane.know({ ...request, text: "", lengths: [], reason: "stop" });
    }
  }

  // Admit a request to the first free slot, if there is one.
  admit(request) {
    const slot = this.slots.indexOf(null);
    if (slot < 0 || !this.line.includes(request)) return;
    this.line.splice(this.line.indexOf(request), 1);
    this.slots[slot] = request;
    request.slot = slot;
    this.admitted.push([slot, request.id]);
  }

  // Run one step: each decoding row gets a token, and prompts are prefilled up to the cut, oldest first. If all
  // slots are empty, only the clock advances.
  step() {
    const working = this.slots.filter(Boolean).sort((a, b) => a.id - b.id);
    const decoding = working.filter((request) => request.read === request.prompt_tokens);
    const emits = [...decoding];
    const prefill = [];
    const held = [];
    let left = this.cut;
    for (const request of working.filter((each) => each.read < each.prompt_tokens)) {
      const { slot, id, read: start, prompt_tokens: length } = request;
      const stop = Math.min(length, start + left);
      if (stop === start) held.push([slot, id]);
      else prefill.push([slot, id, start, stop]);
      if (stop === length) emits.push(request);
      left -= stop - start;
      request.read = stop;
    }
    const { step, row, token } = this.price;
    const price = step + row * decoding.length + token * (this.cut - left);
    const seconds = working.length ? price : IDLE;
    const free = this.slots.flatMap((each, slot) => (each ? [] : [slot]));
    const blocked = this.line.length ? free : [];
    const decode = decoding.map((each) => [each.slot, each.id]);
    const tokens = emits.length;
    const plan = { admitted: this.admitted, prefill, held, decode, blocked, ghosts: [], tokens };
    this.lane.add(plan, this.now, this.now + seconds);
    this.admitted = [];
    this.now += seconds;
    this.open += blocked.length * seconds;
    this.used += (prefill.length + decode.length) * seconds;
    for (const request of emits) {
      request.said += 1;
      if (request.said === request.output_tokens) this.slots[request.slot] = null;
    }
    this.arrive();
  }

  get figures() {
    const useful = this.used / (this.now * this.slots.length);
    return { done: this.now, first: this.lane.firstToken(0.95), useful };
  }
}

// Say in one sentence what cost the most time.
export function whyInWords(hand) {
  const open = hand.open / (hand.now * hand.slots.length);
  if (open > 0.04) {
    return `What cost you time: slots were free while requests waited, for ${percent(open)} of all their time.`;
  }
  const all = [...hand.lane.requests.values()];
  const last = all.sort((a, b) => b.last - a.last)[0];
  const waited = hand.lane.admittedAt(last) - last.arrived;
  return `What cost you time: request ${last.id} ended last. Its answer has ${count(last.output_tokens, "token")}, and it waited ${span(waited)} for a slot; long answers should begin first.`;
}

// Return the result as text to share. `address`: the URL of the game; may be empty.
export function scoreText(rows, address) {
  const lines = rows.map(({ policy, done, first, useful }) =>
    `${policy.padEnd(11)}${span(done).padStart(8)}   first token p95 ${span(first).padStart(7)}   slots used ${percent(useful)}`);
  return ["nanobatch, be the scheduler: 24 prompts, 8 slots", ...lines, address].join("\n").trimEnd();
}

export class Game {
  constructor(setup) {
    this.setup = setup;
    this.hand = null;
    this.running = false;
    this.frames = new Frames((passed) => this.#frame(passed));
    this.places = []; // places in the queue: {request, left, element}
    $("game-start").onclick = () => this.press();
    $("game-copy").onclick = () => this.copy();
    document.addEventListener("keydown", (event) => this.#key(event), true);
  }

  press() {
    if (!this.hand || this.hand.isOver) this.deal();
    this.running = !this.running;
    this.frames.ask();
    this.draw();
  }

  deal() {
    this.hand = new Hand(this.setup);
    this.time = 0; // the page's clock, in seconds of the game
    this.places = [];
    $("game-line").replaceChildren();
    $("game-table").hidden = true;
    $("game-line").hidden = false;
    $("game-bench").hidden = false;
  }

  // While the game runs, digits admit requests, q, w and e set the cut, and the space bar pauses. Otherwise the
  // keys control the recording's player.
  #key(event) {
    if (!this.running || event.ctrlKey || event.metaKey || event.altKey) return;
    const number = "123456789".indexOf(event.key);
    const cut = "qwe".indexOf(event.key);
    if (number >= 0) this.admit(this.places[number]?.request);
    else if (cut >= 0) $("game-cuts").elements[cut].checked = true;
    else if (event.key === " ") this.press();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  admit(request) {
    this.hand.admit(request);
    this.draw();
  }

  #frame(passed) {
    if (!this.running) return;
    this.time += passed / SLOWER;
    this.hand.cut = Number($("game-cuts").querySelector(":checked").value);
    while (this.hand.now <= this.time && !this.hand.isOver) {
      this.hand.step();
    }
    if (this.hand.isOver) this.end();
    else this.frames.ask();
    this.draw();
  }

  draw() {
    const { hand } = this;
    if (!hand) return;
    write($("game-start"), this.running ? "Pause" : hand.isOver ? "Play again" : "Go on");
    const end = Math.max(this.setup.runs[0].done, hand.now);
    drawTimeline($("game-timeline"), hand.lane, { start: 0, end, now: hand.now });
    if (hand.isOver) return;
    const free = hand.slots.filter((each) => each === null).length;
    const coming = hand.coming.length ? `; ${hand.coming.length} to come` : "";
    const slots = free ? `${count(free, "slot")} free` : "all slots are taken";
    this.say(`${span(hand.now)}; ${slots}${coming}`);
    this.#drawLine();
  }

  // Draw the queue. A request keeps its place, and an admitted one leaves a gap for a moment, so that a quick
  // second click does not admit another request.
  #drawLine() {
    const now = performance.now();
    const { line } = this.hand;
    for (const place of this.places) {
      if (place.left || line.includes(place.request)) continue;
      place.left = now;
      place.element.className = "gone";
    }
    const placed = this.places.map((place) => place.request);
    for (const request of line.filter((each) => !placed.includes(each))) {
      let place = this.places.find(({ left }) => left && now - left > AFTER);
      if (!place) {
        place = { element: make("li") };
        this.places.push(place);
        $("game-line").append(place.element);
      }
      this.#fill(place, request);
    }
  }

  #fill(place, request) {
    const number = this.places.indexOf(place);
    const what = make("bdi", "prompt", request.prompt);
    const note = make("span", "hint", `${request.prompt_tokens} tokens to read`);
    const key = make("kbd", "", number < 9 ? number + 1 : "·");
    const button = buttonFor(() => this.admit(request), "card", key, what, note);
    place.request = request;
    place.left = 0;
    // Keep the elements below from moving up
    place.element.style.minHeight = `${place.element.offsetHeight}px`;
    place.element.className = "";
    place.element.replaceChildren(button);
  }

  say(text) {
    write($("game-status"), text);
  }

  end() {
    this.running = false;
    const you = { policy: "you", does: "", ...this.hand.figures };
    this.rows = [you, ...this.setup.runs].sort((a, b) => a.done - b.done);
    const fastest = this.rows.find((row) => row !== you);
    const place = `place ${this.rows.indexOf(you) + 1} of ${this.rows.length}`;
    this.say(`You ${span(you.done)}, ${fastest.policy} ${span(fastest.done)}: ${place}.`);
    write($("game-why"), whyInWords(this.hand));
    const lines = this.rows.map(({ policy, does, done, first, useful }) => {
      const name = make("span", "", policy, make("small", "", does));
      const isYou = policy === "you";
      return rowOf([name, span(done), span(first), percent(useful)], isYou ? "you" : "");
    });
    $("game-rows").replaceChildren(...lines);
    $("game-table").hidden = false;
    $("game-line").hidden = true;
  }

  copy() {
    const here = location.protocol === "https:" ? `${location.href.split("#")[0]}#game` : this.setup.address;
    const text = scoreText(this.rows, here);
    write($("game-score"), text);
    $("game-score").hidden = false;
    copy(text, (said) => this.say(said), "the text stands below");
  }
}
