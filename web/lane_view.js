// The view of a lane: its heading, its timeline, its queue, and its slots with growing answers.
//
// Texts of a recording or a server are set as `textContent` and isolated (`<bdi>`), so neither markup nor
// bidirectional control characters in a prompt have an effect.

import { BLOCKED, EMPTY, GHOST } from "./recording.js";
import { drawTimeline, hueOf } from "./draw.js";
import { buttonFor, make, write } from "./elements.js";
import { count, directionOf, endOf, inOneLine, percent, prefillInWords, shorten, span } from "./words.js";

const TAIL = 220; // maximum number of characters of an answer shown in a slot
const QUEUE = 40; // maximum number of queued requests shown

// Create a button with a request's number on its colour. A click selects the request.
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
    this.name = make("h3");
    const head = make("div", "head", this.name, this.figures);
    this.element = make("div", "lane", head, this.canvas);
    this.slots = make("div", "slots");
    this.queue = make("p", "queue");
    this.queued = null; // the queue as last drawn
    this.rows = Array.from({ length: lane.slots }, (_, slot) => this.#makeRow(slot));
    const title = make("h4", "", lane.policy);
    this.answers = make("div", "answers", title, this.slots, this.queue);
    this.canvas.onclick = (event) => this.#point(event);
  }

  #makeRow(slot) {
    const row = { request: 0, chip: make("span", "owner"), text: make("bdi", "text") };
    row.element = make("div", "row", make("span", "slot", slot), row.chip, row.text);
    // The whole row is clickable, because the number is a small target
    row.element.onclick = () => row.request && this.choose(row.request);
    this.slots.append(row.element);
    return row;
  }

  // Handle a click on the timeline: go to that time and select the request there.
  #point({ offsetX, offsetY }) {
    const { lane, player } = this;
    const time = this.timeOf(offsetX);
    const slot = Math.floor((offsetY / this.canvas.clientHeight) * lane.slots);
    const index = lane.stepAt(time);
    const cell = time <= lane.ended[index] ? lane.cells[index][slot] : null;
    player.lane = lane;
    player.goTo(Math.min(time, lane.end));
    this.choose(cell?.request ?? 0);
  }

  draw() {
    const { now } = this.player;
    this.timeOf = drawTimeline(this.canvas, this.lane, this.player);
    const figures = this.lane.figuresAt(now);
    write(this.name, this.lane.policy); // a server's policy may change
    const isOver = !this.player.window && now >= this.lane.end && figures.answered === figures.requests;
    const all = this.player.window ? "" : ` of ${figures.requests}`; // a server's total keeps growing
    const answered = `${figures.answered}${all} answered`;
    const useful = `slots used ${percent(figures.useful)}`;
    const steps = count(figures.steps, "step");
    const texts = [isOver ? `done in ${span(this.lane.end)}` : answered, steps, useful];
    texts.forEach((text, i) => write(this.figures.children[i], text));
    this.figures.classList.toggle("over", isOver);
    this.canvas.ariaLabel = `${this.lane.policy}: ${answered}, ${steps}, ${useful}`;
    this.#drawSlots(now);
    this.#drawQueue(now);
  }

  #drawSlots(now) {
    const cells = this.lane.cells[this.lane.stepAt(now)];
    // Nothing runs after the lane's last step
    const isOver = now >= this.lane.end && (!this.player.window || this.lane.rests);
    this.rows.forEach((row, slot) => {
      const cell = cells?.[slot];
      const kind = !cell || isOver ? EMPTY : cell.kind;
      const isShut = kind === BLOCKED;
      const owner = isShut || !cell ? 0 : cell.owner; // an empty slot shows its last request
      const request = this.lane.requests.get(owner);
      if (row.request !== owner) {
        row.request = owner;
        row.chip.replaceChildren(...(owner ? [chip(owner, this.choose)] : []));
      }
      row.element.dataset.kind = kind;
      row.element.classList.toggle("mine", this.player.mine.has(owner));
      const said = request ? this.lane.textAt(request, now) : "";
      const text = request ? this.#textOf(request, kind, said) : isShut ? "free, but blocked" : "";
      write(row.text, inOneLine(text));
      // Use the full text, because its visible part may begin with a word of the other direction
      row.text.dir = directionOf(said || text);
    });
  }

  // Return the text for a slot: the prompt during prefill, then the end of the growing answer.
  #textOf(request, kind, said) {
    if (kind === GHOST) return "a ghost: this token is dropped";
    const { playing, window } = this.player;
    const prefill = window && playing && this.lane.prefills.get(request.id);
    if (prefill) return `reading: ${prefillInWords(prefill)}`;
    if (this.lane.hidesTexts) {
      const tokens = this.lane.tokensAt(request, this.player.now);
      return count(tokens, "token");
    }
    return said ? endOf(said, TAIL) : shorten(request.prompt || "…", TAIL);
  }

  #drawQueue(now) {
    const waiting = this.lane.waitingAt(now).map((request) => request.id);
    // For a long queue, a server sends only the first requests and the length
    const { playing, window } = this.player;
    const many = window && playing ? this.lane.inLine : waiting.length;
    const key = `${many}: ${waiting.join(" ")}`;
    if (key === this.queued) return;
    this.queued = key;
    const shown = waiting.slice(0, QUEUE).map((request) => chip(request, this.choose));
    const words = many ? `${many} in line` : "none in line";
    this.queue.replaceChildren(make("span", "label", words), ...shown);
  }
}
