// What stands on the page for each lane: its head, its timeline, its line of waiting requests, and its
// slots, in which the answers are being typed.
//
// What this file keeps. Texts of a recording or of a server enter as `textContent` only, and are
// isolated (`<bdi>` and `unicode-bidi`), so neither markup nor turned direction in a prompt does anything.

import { BLOCKED, EMPTY, GHOST, HELD, PREFILL } from "./recording.js";
import { drawTimeline, hueOf, scaleOf } from "./draw.js";
import { count, directionOf, endOf, inOneLine, percent, shorten, span } from "./words.js";

const TAIL = 220; // letters of an answer that a slot can show, at most
const QUEUE = 40; // requests in line that are named

// An element with a class, and with what is in it: texts, which can only become texts, and elements.
export function make(tag, name = "", ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

// Writes only what is new: most texts stay the same from frame to frame.
export function write(element, text) {
  if (element.firstChild?.data !== text) element.textContent = text;
}

export function buttonFor(act, name, ...children) {
  const button = make("button", name, ...children);
  button.type = "button";
  button.onclick = act;
  return button;
}

// A request's number on its colour. Pressed, it is chosen.
export function chip(request, choose) {
  const button = buttonFor(() => choose(request), "chip", request);
  button.style.setProperty("--hue", hueOf(request));
  button.title = `request ${request}`;
  return button;
}

export class LaneView {
  constructor(lane, player, choose) {
    this.lane = lane;
    this.player = player;
    this.choose = choose;
    this.figures = make("p", "figures", make("span"), make("span"), make("span"));
    this.canvas = make("canvas", "timeline");
    this.canvas.role = "img";
    this.element = make("div", "lane", make("div", "head", make("h3", "", lane.policy), this.figures), this.canvas);
    this.slots = make("div", "slots");
    this.queue = make("p", "queue");
    this.queued = null; // what the line showed last
    this.rows = Array.from({ length: lane.slots }, (_, slot) => this.#makeRow(slot));
    this.answers = make("div", "answers", make("h4", "", lane.policy), this.slots, this.queue);
    this.canvas.onclick = (event) => this.#point(event);
  }

  #makeRow(slot) {
    const row = { request: -1, chip: make("span", "owner"), text: make("bdi", "text") };
    row.element = make("div", "row", make("span", "slot", slot), row.chip, row.text);
    // A finger hits the row more easily than the number in it
    row.element.onclick = () => row.request > 0 && this.choose(row.request);
    this.slots.append(row.element);
    return row;
  }

  // A click on the timeline: go to that moment, and choose the request there.
  #point(event) {
    const { lane, player } = this;
    const { offsetX, offsetY } = event;
    const { clientWidth, clientHeight } = this.canvas;
    const time = scaleOf(clientWidth, player).time(offsetX);
    const slot = Math.floor((offsetY / clientHeight) * lane.slots);
    const step = time <= player.seen && lane.cells[lane.stepAt(time)];
    player.lane = lane;
    player.goTo(Math.min(time, lane.end));
    this.choose((step && step[slot]?.request) || 0);
  }

  draw() {
    const { now } = this.player;
    drawTimeline(this.canvas, this.lane, this.player);
    const figures = this.lane.figuresAt(now);
    const isOver = !this.player.window && now >= this.lane.end && figures.answered === figures.requests;
    const all = this.player.window ? "" : ` of ${figures.requests}`; // a server's are never all
    const answered = `${figures.answered}${all} answered`;
    const useful = `${percent(figures.useful)} useful`;
    const steps = count(figures.steps, "step");
    const texts = [isOver ? `done in ${span(this.lane.end)}` : answered, steps, useful];
    texts.forEach((text, i) => write(this.figures.children[i], text));
    this.figures.classList.toggle("over", isOver);
    const words = `${this.lane.policy}: ${answered}, ${steps}, ${useful}`;
    if (this.canvas.ariaLabel !== words) this.canvas.ariaLabel = words;
    this.#drawSlots(now);
    this.#drawQueue(now);
  }

  #drawSlots(now) {
    const index = this.lane.stepAt(now);
    // Behind the lane's last step nothing runs any more
    const isOver = now >= this.lane.end && (!this.player.window || this.lane.rests);
    this.rows.forEach((row, slot) => {
      const isFree = { kind: EMPTY, request: 0 };
      const cell = isOver || index < 0 ? isFree : this.lane.cells[index][slot];
      const isShut = cell.kind === BLOCKED;
      const isLeft = cell.kind === EMPTY; // what the slot's last request has left there
      const owner = cell.request || (isLeft ? this.lane.ownerBefore(slot, index) : 0);
      const request = this.lane.requests.get(owner);
      if (row.request !== owner) {
        row.request = owner;
        row.chip.replaceChildren(...(owner ? [chip(owner, this.choose)] : []));
      }
      row.element.classList.toggle("shut", isShut);
      row.element.classList.toggle("mine", this.player.mine.has(owner));
      row.element.classList.toggle("left", isLeft);
      row.element.classList.toggle("reads", cell.kind === PREFILL || cell.kind === HELD);
      const said = request ? this.lane.textAt(request, now) : "";
      const text = request ? this.#textOf(request, cell, said) : isShut ? "free, but shut" : "";
      write(row.text, inOneLine(text));
      // Of the whole text: what is in sight of it may begin with a word of the other direction
      const direction = directionOf(said || text);
      if (row.text.dir !== direction) row.text.dir = direction;
    });
  }

  // The prompt while it is read, then the end of the answer, which is where it grows.
  #textOf(request, cell, said) {
    if (cell.kind === GHOST) return "a ghost: this token is dropped";
    if (this.lane.hidesTexts) return count(this.lane.tokensAt(request, this.player.now), "token");
    return said ? endOf(said, TAIL) : shorten(request.prompt || "…", TAIL);
  }

  #drawQueue(now) {
    const waiting = this.lane.waitingAt(now).map((request) => request.id);
    const key = waiting.join(" ");
    if (key === this.queued) return;
    this.queued = key;
    const shown = waiting.slice(0, QUEUE).map((request) => chip(request, this.choose));
    const words = waiting.length ? `${waiting.length} in line` : "nobody in line";
    this.queue.replaceChildren(make("span", "label", words), ...shown);
  }
}
