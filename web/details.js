// Detail views: a step with its plan in words, and a request from its arrival to its last token.

import { drawLife, drawMicroscope, hueOf } from "./draw.js";
import { capital, costInWords, factsInWords, fateInWords, inOneLine, planInWords, shorten } from "./words.js";
import { $, buttonFor, make, write } from "./elements.js";
import { chip } from "./lane_view.js";

const READABLE = 400; // minimum time in milliseconds that a step's text is shown while playing
const FEW_REQUESTS = 6; // requests in the list until the user asks for all
const MANY_REQUESTS = 40; // maximum number of requests in the list of a server

// Example steps: [URL hash (docs/make/annotated.py writes links with it), label, test for such a step].
const EXAMPLES = [
  ["join", "a request that joins the others", (step) => step.admitted.length > 0 && step.decode.length > 4],
  ["chunk", "a prompt in chunks", (step, lane) => step.prefill.some(
    ([, number, , stop]) => stop < lane.requests.get(number)?.prompt_tokens,
  )],
  ["prefix", "a prompt that begins like another", (step, lane) => step.prefill.some(
    ([, number, start]) => start && lane.requests.get(number)?.chunks[0].start === start,
  )],
  ["ghost", "a ghost", (step) => step.ghosts.length > 0],
  ["blocked", "a blocked slot", (step) => step.blocked.length > 2],
];

export class StepView {
  constructor(player, choose) {
    this.player = player;
    this.choose = choose;
    this.lane = null; // lane of the step that is shown
    this.index = 0; // index of the step that is shown
    this.since = 0; // when the step was first shown
    this.said = ""; // the step's text
    this.examples = new Map(); // hash -> function that goes to that step
    $("step-microscope").onclick = (event) => this.#point(event);
    if (player.window) return; // a server has no fixed set of steps to link to
    this.#makeExamples($("step-examples"));
    if (player.lanes.length < 2) return;
    for (const lane of player.lanes) {
      const show = () => player.change({ lane });
      $("step-lanes").append(buttonFor(show, "tab", lane.policy));
    }
  }

  // Add a button for each kind of example. It shows the first such step of the last lane that has one.
  #makeExamples(place) {
    const { player } = this;
    place.append("Show me ");
    for (const [hash, name, isOne] of EXAMPLES) {
      const lane = player.lanes.findLast((each) => each.steps.some((step) => isOne(step, each)));
      const show = () => {
        this.choose(0); // a chosen request would dim all others
        player.lane = lane;
        player.goToStep(lane.steps.findIndex((step) => isOne(step, lane)));
        // Wait for the player's frame, which closes an open request above
        requestAnimationFrame(() => $("step-panel").scrollIntoView({ block: "nearest" }));
      };
      if (!lane) continue;
      place.append(buttonFor(show, "tab", name));
      this.examples.set(`#${hash}`, show);
    }
    place.hidden = place.children.length === 0;
    window.addEventListener("hashchange", () => this.goToHash());
  }

  // Go to the example in the page's URL. Return false if there is none.
  goToHash() {
    const show = this.examples.get(location.hash);
    show?.();
    return Boolean(show);
  }

  #point({ offsetX }) {
    if (!this.grid) return; // nothing has run yet
    const { lane } = this.player;
    const column = Math.floor((offsetX - this.grid.left) / this.grid.column);
    const index = this.grid.first + column;
    if (column < 0 || index >= lane.steps.length) return;
    this.choose(0);
    this.player.goToStep(index);
  }

  draw() {
    const { player } = this;
    const { lane } = player;
    if (!lane.steps.length) return;
    // While playing, change the step slowly enough for its text to be read
    const now = performance.now();
    const isSoon = player.playing && !player.window && now - this.since < READABLE;
    if (lane !== this.lane || !isSoon) {
      this.lane = lane;
      this.index = Math.max(0, player.step);
      this.since = now;
    }
    const { index } = this;
    this.grid = drawMicroscope($("step-microscope"), lane, index, player.chosen);
    [...$("step-lanes").children].forEach((tab, i) => {
      tab.ariaPressed = player.lanes[i] === lane;
    });
    const last = lane.steps.at(-1).step.toLocaleString("en");
    const of = player.window && player.playing ? "" : ` of ${last}`;
    const step = lane.steps[index].step.toLocaleString("en");
    write($("step-title"), `${capital(lane.policy)}, step ${step}${of}`);
    write($("step-cost"), costInWords(lane, index));
    const said = planInWords(lane, index);
    if (said.join() === this.said) return;
    this.said = said.join();
    $("step-words").replaceChildren(...said.map((each) => make("li", "", each)));
  }
}

// The list of requests, each drawn for all lanes. The chosen request's details are shown in the list or below
// the timelines.
export class RequestsView {
  constructor(player, choose) {
    this.player = player;
    this.choose = choose;
    this.detail = $("request");
    this.isWhole = false; // true if all requests are listed
    $("every").onclick = () => {
      this.isWhole = !this.isWhole;
      player.change();
    };
    this.rows = new Map(); // request number -> row
    this.shown = "";
    this.said = null; // element with the answer up to now
    this.rest = null; // element with the rest of the answer
  }

  #rowOf(number) {
    if (this.rows.has(number)) return this.rows.get(number);
    const first = this.player.lanes.map((lane) => lane.requests.get(number)).find(Boolean);
    const prompt = make("bdi", "prompt", inOneLine(shorten(first.prompt || "(not shown)", 90)));
    const lives = this.player.lanes.map(() => make("canvas", "life"));
    const open = () => this.choose(number === this.player.chosen ? 0 : number, element);
    const button = buttonFor(open, "request", make("span", "number", number), prompt);
    button.style.setProperty("--hue", hueOf(number));
    const element = make("li", "", button, make("span", "lives", ...lives));
    const row = { number, element, lives, button, shown: [] };
    this.rows.set(number, row);
    return row;
  }

  // Draw the newest requests of a server, or the first (or all) requests of a recording.
  draw() {
    const { player } = this;
    const numbers = player.lanes.flatMap((lane) => [...lane.requests.keys()]);
    const all = [...new Set(numbers)];
    const known = player.window ? all.slice(-MANY_REQUESTS) : all;
    const few = player.window ? known.slice(-FEW_REQUESTS) : known.slice(0, FEW_REQUESTS);
    const rows = (this.isWhole ? known : few).map((number) => this.#rowOf(number));
    const list = $("requests");
    const isNew = rows.length !== list.children.length || rows[0]?.element !== list.firstChild;
    if (isNew) list.replaceChildren(...rows.map((row) => row.element));
    if (!this.detail.isConnected) $("opened").append(this.detail); // its row left the list
    $("every").hidden = known.length <= FEW_REQUESTS;
    write($("every"), this.isWhole ? "show fewer" : `show all ${known.length}`);
    for (const { number, button, lives, shown } of rows) {
      button.ariaPressed = number === player.chosen;
      player.lanes.forEach((lane, i) => {
        const request = lane.requests.get(number);
        if (!request) return;
        // Skip requests that have not started or are finished: their pictures do not change
        const now = Math.max(Math.min(player.now, request.last ?? Infinity), request.arrived);
        const key = `${now} ${player.start} ${player.end} ${player.looks}`;
        if (shown[i] !== key) drawLife(lives[i], lane, request, player, 8);
        shown[i] = key;
      });
    }
    this.#drawDetail();
  }

  // Draw the chosen request. Its elements are created once; only the answer changes with each frame.
  #drawDetail() {
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
    const hashes = new Set(known.map((one) => one.request.hash).filter(Boolean));
    const facts = make("p", "facts", factsInWords(known.at(-1).request));
    if (known.length > 1 && hashes.size === 1) facts.append(" The same answer in both runs.");
    this.detail.replaceChildren(head, ...lives, answer, facts);
    if (hashes.size) {
      const words = `The sha256 of the answer begins with ${[...hashes].join(" or ")}.`;
      const summary = make("summary", "", "proof");
      this.detail.append(make("details", "", summary, make("p", "facts", words)));
    }
    const { start, end } = this.player;
    known.forEach(({ lane, request: own }, i) => {
      drawLife(canvases[i], lane, own, { start, end, now: end }, 16, true);
    });
  }
}
