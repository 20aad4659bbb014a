// What one looks at more closely: a step, with its plan in words, and a request, from its arrival to its
// last token.

import { drawLife, drawMicroscope, hueOf } from "./draw.js";
import { capital, costInWords, count, fateInWords, inOneLine, planInWords, shorten } from "./words.js";
import { buttonFor, chip, make, write } from "./lanes.js";

const READABLE = 400; // milliseconds
const FEW_REQUESTS = 6; // of the list, until all are asked for

// Steps that are worth a look: what to call one, and how to know it.
const EXAMPLES = [
  ["a request that joins the others", (step) => step.admitted.length > 0 && step.decode.length > 4],
  ["a prompt in chunks", (step, lane) => step.prefill.some(([, r, , stop]) => stop < lane.requests.get(r)?.promptTokens)],
  ["a prompt that begins like another", (step, lane) => step.prefill.some(([, r, start]) => start && lane.requests.get(r)?.chunks[0].start === start)],
  ["a ghost", (step) => step.ghosts.length > 0],
  ["a slot kept shut", (step) => step.blocked.length > 2],
];

export class StepView {
  constructor(player, place, choose) {
    this.player = player;
    this.choose = choose;
    this.title = place.querySelector("[data-step-title]");
    this.canvas = place.querySelector("[data-microscope]");
    this.cost = place.querySelector("[data-step-cost]");
    this.words = place.querySelector("[data-step-words]");
    this.tabs = place.querySelector("[data-lanes]");
    this.panel = place.querySelector(".panel");
    this.shown = "";
    this.told = 0; // when words were written last
    this.lane = null; // whose step is shown,
    this.index = 0; // and which
    this.isAsked = false; // the words are to be brought in sight
    this.#makeTabs();
    this.#makeExamples(place.querySelector("[data-examples]"));
    this.canvas.onclick = (event) => this.#point(event);
    place.querySelector("[data-step-back]").onclick = () => player.goBy(-1);
    place.querySelector("[data-step-on]").onclick = () => player.goBy(1);
  }

  #makeTabs() {
    if (this.player.lanes.length < 2) return;
    const tabs = this.player.lanes.map((lane) => buttonFor(() => this.player.change({ lane }), "tab", lane.policy));
    this.tabs.replaceChildren(...tabs);
  }

  // The first step of each kind, of the lane that is shown if it has one.
  #makeExamples(place) {
    const { player } = this;
    if (player.lanes.every((lane) => !lane.steps.length)) return;
    const buttons = EXAMPLES.map(([name, isOne]) => {
      const lane = player.lanes.findLast((each) => each.steps.some((step) => isOne(step, each)));
      const index = lane?.steps.findIndex((step) => isOne(step, lane));
      const show = () => {
        this.choose(0); // a chosen request would leave all others faint
        this.isAsked = true;
        player.lane = lane;
        player.goToStep(index);
      };
      return lane ? buttonFor(show, "tab", name) : "";
    });
    place.replaceChildren("Show me ", ...buttons);
  }

  #point(event) {
    if (!this.grid) return;
    const { lane } = this.player;
    const column = Math.floor((event.offsetX - this.grid.left) / this.grid.column);
    const index = this.grid.first + column;
    if (column < 0 || index >= lane.steps.length) return;
    this.choose(0);
    this.player.goToStep(index);
  }

  draw() {
    const { player } = this;
    const { lane } = player;
    if (!lane.steps.length) return;
    // While it plays, the step changes so seldom that its words can be read
    const isSoon = player.playing && !player.window && performance.now() - this.told < READABLE;
    if (lane !== this.lane || !isSoon) this.index = Math.max(0, player.step);
    this.lane = lane;
    const { index } = this;
    this.grid = drawMicroscope(this.canvas, lane, index, player.chosen);
    const key = `${player.lanes.indexOf(lane)} ${index} ${lane.steps.length}`;
    if (key !== this.shown) this.#tell(lane, index, key);
    // A frame later, when a request that was open above is closed
    if (this.isAsked) requestAnimationFrame(() => this.panel.scrollIntoView({ block: "nearest" }));
    this.isAsked = false;
  }

  #tell(lane, index, key) {
    const { player } = this;
    this.told = performance.now();
    this.shown = key;
    [...this.tabs.children].forEach((tab, i) => {
      tab.ariaPressed = player.lanes[i] === lane;
    });
    const of = player.window && player.playing ? "" : ` of ${lane.steps.length.toLocaleString("en")}`;
    write(this.title, `${capital(lane.policy)}, step ${lane.steps[index].step.toLocaleString("en")}${of}`);
    write(this.cost, costInWords(lane, index));
    const said = planInWords(lane, index);
    this.words.replaceChildren(...said.map((sentence) => make("li", "", sentence)));
  }
}

// All requests, each with its life in every lane. The chosen one is open: where it was chosen, below the
// timelines (`home`) or in the list.
export class RequestsView {
  constructor(player, place, home, choose) {
    this.player = player;
    this.choose = choose;
    this.list = place.querySelector("[data-requests]");
    this.detail = home.querySelector("[data-request]");
    this.every = place.querySelector("[data-every]");
    this.isWhole = false; // all are listed
    this.every.onclick = () => {
      this.isWhole = !this.isWhole;
      player.change();
    };
    this.rows = new Map(); // by number
    this.shown = "";
    this.said = null; // the answer up to now,
    this.rest = null; // and what is still to come
  }

  // Does the list lack a request? It is filled before it is seen, so that nothing below it moves.
  get isStale() {
    return this.list.children.length !== this.#numbers().length;
  }

  // Of a server, the newest requests; of a recording, the first ones, or all.
  #numbers() {
    const all = this.#known();
    if (this.isWhole) return all;
    return this.player.window ? all.slice(-FEW_REQUESTS) : all.slice(0, FEW_REQUESTS);
  }

  #known() {
    const all = new Set(this.player.lanes.flatMap((lane) => [...lane.requests.keys()]));
    return [...all].slice(-40);
  }

  #rowOf(number) {
    if (this.rows.has(number)) return this.rows.get(number);
    const first = this.player.lanes.map((lane) => lane.requests.get(number)).find(Boolean);
    const prompt = make("bdi", "prompt", inOneLine(shorten(first.prompt || "(not shown)", 90)));
    const lives = this.player.lanes.map(() => make("canvas", "life"));
    const open = () => {
      this.choose(number === this.player.chosen ? 0 : number);
      element.append(this.detail);
    };
    const button = buttonFor(open, "request", make("span", "number", number), prompt);
    button.style.setProperty("--hue", hueOf(number));
    const element = make("li", "", button, make("span", "lives", ...lives));
    const row = { element, lives, button, shown: [] };
    this.rows.set(number, row);
    return row;
  }

  draw() {
    const { player } = this;
    const numbers = this.#numbers();
    const rows = numbers.map((number) => this.#rowOf(number));
    const isNew = rows.length !== this.list.children.length || rows[0]?.element !== this.list.firstChild;
    if (isNew) this.list.replaceChildren(...rows.map((row) => row.element));
    const many = this.#known().length;
    this.every.hidden = many <= FEW_REQUESTS;
    write(this.every, this.isWhole ? "show fewer" : `show all ${many}`);
    rows.forEach((row, i) => {
      row.button.ariaPressed = numbers[i] === player.chosen;
      row.lives.forEach((canvas, lane) => {
        const request = player.lanes[lane].requests.get(numbers[i]);
        if (!request) return;
        // Most lives have not begun, or are over: their pictures stay as they are
        const now = Math.max(Math.min(player.now, request.last ?? Infinity), request.arrived);
        const key = `${now} ${player.start} ${player.end} ${player.looks}`;
        if (row.shown[lane] === key) return;
        row.shown[lane] = key;
        drawLife(canvas, player.lanes[lane], request, player, 8);
      });
    });
  }

  // What stands there is made once for a request; its answer grows with each frame.
  drawDetail() {
    const { player } = this;
    const known = player.lanes
      .map((lane) => ({ lane, request: lane.requests.get(player.chosen) }))
      .filter((one) => one.request);
    this.detail.hidden = !known.length;
    if (!known.length) return;
    const { lane, request } = known.at(-1);
    const key = `${player.chosen} ${player.looks} ${player.window && request.tokenSteps.length}`;
    if (key !== this.shown) {
      this.shown = key;
      this.#fillDetail(known);
    }
    const said = lane.textAt(request, player.now);
    write(this.said, said);
    write(this.rest, request.text.slice(said.length));
  }

  #fillDetail(known) {
    const { request } = known[0];
    const close = buttonFor(() => this.choose(0), "tab", "×");
    close.ariaLabel = "close this request";
    const prompt = make("bdi", "", request.prompt || "(not shown)");
    const head = make("p", "asked", chip(request.id, this.choose), prompt, close);
    const canvases = known.map(() => make("canvas", "waterfall"));
    const lives = known.map(({ lane, request: own }, i) => {
      const fate = `${capital(lane.policy)}. ${fateInWords(lane, own)}`;
      return make("div", "", make("p", "fate", fate), canvases[i]);
    });
    this.said = make("span");
    this.rest = make("span", "rest");
    const answer = make("bdi", "answer", this.said, this.rest);
    this.detail.replaceChildren(head, ...lives, answer, make("p", "facts", factsOf(known)));
    const hashes = [...hashesOf(known)];
    const proof = make("p", "facts", `The sha256 of the answer begins with ${hashes.join(" or ")}.`);
    if (hashes.length) this.detail.append(make("details", "", make("summary", "", "proof"), proof));
    const { start, end } = this.player;
    const whole = { start, end, now: end };
    known.forEach(({ lane, request: own }, i) => drawLife(canvases[i], lane, own, whole, 16, true));
  }
}

function factsOf(known) {
  const { request } = known.at(-1);
  const said = [`${count(request.promptTokens, "token")} of prompt`, `${count(request.outputTokens, "token")} of answer`];
  if (request.cached) said.push(`${count(request.cached, "token")} of it known from another prompt`);
  if (known.length > 1 && hashesOf(known).size === 1) said.push("the same answer in both runs");
  return `${said.join("; ")}.`;
}

// They show that two runs gave the same answer.
function hashesOf(known) {
  return new Set(known.map((one) => one.request.hash).filter(Boolean));
}
