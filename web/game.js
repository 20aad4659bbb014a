// Be the scheduler: the same decisions, by hand.
//
// The problem. A policy looks obvious in a picture. It is less so when a slot has just fallen free, four
// prompts wait, and one of them is a long text to be read.
//
// The way out. A hand of prompts, dealt from the recording, comes in over some time. The visitor admits
// each one, and says how much of a prompt goes into a step. A step takes what such a step took in the
// recording. Afterwards each policy has played the same hand: sched.py did so when this page was made.
//
// What this file keeps. The visitor sees what a scheduler sees: prompts and their lengths, and never how
// long an answer will be. The game is played in steps, so the machine's speed changes no score.

import { Lane } from "./recording.js";
import { drawTimeline } from "./draw.js";
import { buttonFor, make, write } from "./lanes.js";
import { count, percent, span } from "./words.js";

const SLOWER = 25; // times, than the engine would be
const IDLE = 0.002; // seconds that pass at a time while nothing runs
const CUTS = [16, 64, 256]; // tokens of prompts in a step, at most
const CUT_WORDS = [
  "A step is short, so answers go on smoothly. But a long prompt takes many steps to read.",
  "A long prompt is read in a few steps. Each of them takes somewhat longer, for everybody.",
  "A long prompt is read in one or two steps. Meanwhile everybody waits for the next token.",
];
const AFTER = 1200; // milliseconds until another request may take the place of one that was pressed
// What each policy does, in a word.
const POLICY_WORDS = {
  you: "",
  continuous: "first come, first served",
  static: "eight at a time",
  serial: "one at a time",
  fair: "each client in turn",
  short: "short prompts first",
};

// The hand, and what has become of it: a scheduler without a policy.
export class Hand {
  constructor({ wishes, price, slots }) {
    this.price = price;
    this.now = 0;
    this.cut = CUTS[1];
    this.waited = []; // what is admitted with the next step
    this.coming = wishes.map((wish, i) => ({ ...wish, id: i + 1, read: 0, said: 0, slot: null }));
    this.line = [];
    this.slots = Array(slots).fill(null);
    this.lane = new Lane("you", { slots });
    this.idle = 0; // seconds in which nothing ran
    this.open = 0; // seconds in which slots were free and requests waited, of all slots together
    this.arrive();
  }

  get isOver() {
    return !this.coming.length && !this.line.length && this.slots.every((each) => each === null);
  }

  arrive() {
    while (this.coming.length && this.coming[0].arrived <= this.now) {
      const request = this.coming.shift();
      this.line.push(request);
      this.lane.know({
        id: request.id, prompt: request.text, text: "", lengths: [], reason: "stop",
        arrived: request.arrived, promptTokens: request.prompt, outputTokens: request.tokens,
      });
    }
  }

  // Takes a request out of the line, into the first slot that is free. False if there is none.
  admit(request) {
    const slot = this.slots.indexOf(null);
    if (slot < 0 || !this.line.includes(request)) return false;
    this.line.splice(this.line.indexOf(request), 1);
    this.slots[slot] = request;
    request.slot = slot;
    this.waited.push(request);
    return true;
  }

  // One step: each row that decodes gets a token, and prompts are read, oldest first, up to the cut.
  step() {
    const working = this.slots.filter(Boolean);
    const began = this.now;
    if (!working.length) {
      this.now += IDLE;
      this.idle += IDLE;
      if (this.line.length) this.open += IDLE * this.slots.length;
      this.arrive();
      return;
    }
    const decode = working.filter((request) => request.read === request.prompt);
    let left = this.cut;
    const prefill = [];
    const held = [];
    for (const request of working.filter((each) => each.read < each.prompt).sort((a, b) => a.id - b.id)) {
      const start = request.read;
      const stop = Math.min(request.prompt, start + left);
      if (stop === start) held.push([request.slot, request.id]);
      else prefill.push([request.slot, request.id, start, stop]);
      left -= stop - start;
      request.read = stop;
    }
    this.now += this.price.step + this.price.row * decode.length + this.price.token * (this.cut - left);
    const firsts = prefill.map(([slot]) => this.slots[slot]).filter((each) => each.read === each.prompt);
    const emits = [...decode, ...firsts];
    const blocked = this.line.length ? this.slots.flatMap((each, slot) => (each ? [] : [slot])) : [];
    const step = {
      admitted: this.waited.map((each) => [each.slot, each.id]), prefill, held, ghosts: [], blocked,
      decode: decode.map((each) => [each.slot, each.id]), tokens: emits.length,
    };
    this.waited = [];
    this.open += blocked.length * (this.now - began);
    this.lane.add(step, began, this.now);
    for (const request of emits) {
      request.said += 1;
      if (request.said === request.tokens) this.slots[request.slot] = null;
    }
    this.arrive();
  }

  get figures() {
    const { useful } = this.lane.figuresAt(this.lane.end);
    const share = (this.lane.end - this.idle) / this.lane.end; // while nothing runs, nothing is useful
    return { done: this.lane.end, first: this.lane.firstToken(0.95), useful: useful * share };
  }
}

// What cost time, in one sentence.
export function whyInWords(hand) {
  const open = hand.open / (hand.now * hand.slots.length);
  if (open > 0.04) {
    return `What cost you time: slots were free while requests waited, for ${percent(open)} of all their time.`;
  }
  const last = [...hand.lane.requests.values()].sort((a, b) => b.last - a.last)[0];
  const waited = hand.lane.admittedAt(last) - last.arrived;
  return `What cost you time: request ${last.id} ended last. Its answer has ${count(last.outputTokens, "token")}, and it waited ${span(waited)} for a slot; long answers should begin first.`;
}

// What is pasted elsewhere. `address`: where others can play it, too; empty if there is none.
export function scoreText(rows, address) {
  const lines = rows.map(({ policy, done, first, useful }) =>
    `${policy.padEnd(11)}${span(done).padStart(8)}   first token p95 ${span(first).padStart(7)}   ${percent(useful)} useful`);
  return ["nanobatch, be the scheduler: 24 prompts, 8 slots", ...lines, address].join("\n").trimEnd();
}

export class Game {
  constructor(place, setup) {
    this.place = place;
    this.setup = setup;
    this.find = (name) => place.querySelector(`[data-game-${name}]`);
    this.hand = null;
    this.running = false;
    this.places = []; // of requests in line: {request, left, element}
    this.find("start").onclick = () => this.press();
    this.find("copy").onclick = () => this.copy();
    const cuts = CUTS.map((cut) => buttonFor(() => this.cutAt(cut), "tab", cut));
    this.find("cuts").replaceChildren(...cuts);
    document.addEventListener("keydown", (event) => this.key(event), true);
  }

  press() {
    if (this.running) this.running = false;
    else {
      if (!this.hand || this.hand.isOver) this.deal();
      this.running = true;
      this.before = null;
      requestAnimationFrame((time) => this.frame(time));
    }
    this.draw();
  }

  deal() {
    this.hand = new Hand(this.setup);
    this.time = 0; // how far the clock on the page is, in seconds of the hand
    this.places = [];
    this.find("line").replaceChildren();
    this.find("table").hidden = true;
    this.find("line").hidden = false;
    this.find("bench").hidden = false;
    this.cutAt(CUTS[1]);
  }

  cutAt(cut) {
    if (this.hand) this.hand.cut = cut;
    write(this.find("cut"), CUT_WORDS[CUTS.indexOf(cut)]);
    [...this.find("cuts").children].forEach((button, i) => {
      button.ariaPressed = CUTS[i] === cut;
    });
  }

  // While the game runs, digits admit, and the space bar pauses; else keys are the player's.
  key(event) {
    if (!this.running || event.ctrlKey || event.metaKey || event.altKey) return;
    const number = "123456789".indexOf(event.key);
    const cut = "qwe".indexOf(event.key);
    if (number >= 0) this.admit(this.places[number]?.request);
    else if (cut >= 0) this.cutAt(CUTS[cut]);
    else if (event.key === " ") this.press();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  admit(request) {
    if (request) this.hand.admit(request);
    this.draw();
  }

  say(text) {
    write(this.find("status"), text);
  }

  frame(time) {
    if (!this.running) return;
    const passed = this.before === null ? 0 : Math.min(100, time - this.before) / 1000;
    this.before = time;
    this.time += passed / SLOWER;
    while (this.hand.now <= this.time && !this.hand.isOver) this.hand.step();
    this.draw();
    if (this.hand.isOver) this.end();
    else requestAnimationFrame((next) => this.frame(next));
  }

  draw() {
    const { hand } = this;
    write(this.find("start"), this.running ? "Pause" : hand && !hand.isOver ? "Go on" : hand ? "Play again" : "Deal");
    if (!hand) return;
    const end = Math.max(this.setup.runs[0].done, hand.now);
    drawTimeline(this.find("timeline"), hand.lane, { start: 0, end, now: hand.now, seen: 0, chosen: 0 });
    const free = hand.slots.filter((each) => each === null).length;
    const coming = hand.coming.length ? `; ${hand.coming.length} to come` : "";
    const slots = free ? `${count(free, "slot")} free` : "all slots are taken";
    if (!hand.isOver) this.say(`${span(hand.now)}; ${slots}${coming}`);
    this.drawLine();
  }

  // Each request in line has a place, and keeps it. One that was admitted leaves its place empty for a
  // moment: whoever presses quickly must not hit another one.
  drawLine() {
    const now = performance.now();
    const { line } = this.hand;
    for (const place of this.places) {
      if (!place.request || line.includes(place.request)) continue;
      place.request = null;
      place.left = now;
      place.element.classList.add("gone");
      place.element.firstChild.disabled = true;
    }
    const placed = this.places.map((place) => place.request);
    for (const request of line.filter((each) => !placed.includes(each))) {
      let place = this.places.find((each) => !each.request && now - each.left > AFTER);
      if (!place) {
        place = { element: make("li") };
        this.places.push(place);
        this.find("line").append(place.element);
      }
      this.#fill(place, request);
    }
  }

  #fill(place, request) {
    const number = this.places.indexOf(place);
    const what = make("bdi", "prompt", request.text);
    const note = make("span", "hint", `${request.prompt} tokens to read`);
    const key = make("kbd", "", number < 9 ? number + 1 : "·");
    const button = buttonFor(() => this.admit(request), "card", key, what, note);
    place.request = request;
    // What stands below does not move up
    place.element.style.minHeight = `${place.element.offsetHeight}px`;
    place.element.classList.remove("gone");
    place.element.replaceChildren(button);
  }

  end() {
    this.running = false;
    const you = { policy: "you", ...this.hand.figures };
    this.rows = [you, ...this.setup.runs].sort((a, b) => a.done - b.done);
    const fastest = this.rows.find((row) => row !== you);
    const place = `place ${this.rows.indexOf(you) + 1} of ${this.rows.length}`;
    this.say(`You ${span(you.done)}, ${fastest.policy} ${span(fastest.done)}: ${place}.`);
    write(this.find("why"), whyInWords(this.hand));
    const lines = this.rows.map((row) => {
      const name = make("td", "", row.policy, make("small", "", POLICY_WORDS[row.policy]));
      const figures = [span(row.done), span(row.first), percent(row.useful)];
      return make("tr", row === you ? "you" : "", name, ...figures.map((text) => make("td", "", text)));
    });
    this.find("rows").replaceChildren(...lines);
    this.find("table").hidden = false;
    this.find("line").hidden = true;
    this.draw();
  }

  async copy() {
    const here = location.protocol === "https:" ? `${location.href.split("#")[0]}#game` : this.setup.address;
    const text = scoreText(this.rows, here);
    write(this.find("score"), text);
    this.find("score").hidden = false;
    try {
      await navigator.clipboard.writeText(text);
      this.say("Copied.");
    } catch {
      this.say("The browser does not let this page copy; the text stands below.");
    }
  }
}
