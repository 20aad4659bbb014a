// The scheduler, in the page: sched.py as it is, over the recorded prompts, with lines that may be changed.
//
// The problem. Whoever has seen what a policy does wants to try another one, at once. And the scheduler
// is Python.
//
// The way out. When somebody asks for it, Pyodide comes from a public CDN: CPython, compiled for the
// browser. It runs sched.py, policies.py, prefix.py and simulate.py in a worker, and what comes of it is a
// lane like those above.
//
// What this file keeps. Without being asked, nothing is loaded. Each file of Pyodide is of one version and
// has one hash, or the browser refuses it. A policy that never ends is ended.

import { Lane, named, requestOf } from "./recording.js";
import { drawTimeline } from "./draw.js";
import { make, write } from "./lanes.js";
import { count, percent, span } from "./words.js";

const PATIENCE = 8000; // milliseconds for an answer
const SOON = 250; // milliseconds from a change until it is tried
const RUNS = 5; // so many of the last are listed

// Python in a worker.
class Python {
  constructor(pyodide, sources) {
    this.pyodide = pyodide;
    this.sources = sources;
    this.files = null;
    this.worker = null;
  }

  // Its files, checked by the browser.
  async load(tell) {
    const files = {};
    for (const [name, integrity] of Object.entries(this.pyodide.files)) {
      tell(name);
      const answer = await fetch(this.pyodide.at + name, { integrity, credentials: "omit" });
      if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
      files[name] = await answer.arrayBuffer();
    }
    this.files = files;
    tell("");
    return this.start();
  }

  async start() {
    const text = new Blob([this.sources["worker.js"]], { type: "text/javascript" });
    this.worker = new Worker(URL.createObjectURL(text));
    const { "worker.js": _, ...sources } = this.sources;
    const lock = { info: this.pyodide.info, packages: {} };
    return this.#tell({ files: this.files, sources, lock }, 60000);
  }

  async ask(question) {
    try {
      return JSON.parse(await this.#tell({ question: JSON.stringify(question) }, PATIENCE));
    } catch (error) {
      this.worker.terminate();
      await this.start();
      return { error: error.message, line: null };
    }
  }

  #tell(message, patience) {
    return new Promise((give, fail) => {
      const late = setTimeout(() => fail(new Error("it does not come to an end, and was stopped")), patience);
      this.worker.onmessage = ({ data }) => {
        clearTimeout(late);
        if (data.failed) fail(new Error(data.failed));
        else give(data.answer);
      };
      this.worker.onerror = (event) => {
        clearTimeout(late);
        fail(new Error(event.message || "the worker did not start"));
      };
      this.worker.postMessage(message);
    });
  }
}

export class Lab {
  // `recording`: whose prompts are played. `setup`: prices and files, as docs/make/page.py puts them here.
  constructor(place, recording, setup) {
    this.place = place;
    this.recording = recording;
    this.setup = setup;
    this.find = (name) => place.querySelector(`[data-lab-${name}]`);
    this.python = new Python(setup.pyodide, setup.sources);
    this.limits = named(recording.fields.Limits, recording.runs[0].limits);
    this.runs = [];
    this.lane = null;
    this.find("load").onclick = () => this.begin();
  }

  async begin() {
    const button = this.find("load");
    button.disabled = true;
    try {
      const found = await this.python.load((name) => this.say(name ? `Loading ${name} …` : "Starting Python …"));
      const { lines, policies } = JSON.parse(found);
      this.lines = lines;
      this.#open(policies);
      this.say("");
      await this.run();
    } catch (error) {
      button.disabled = false;
      this.say(`Python could not be loaded: ${error.message}. It is fetched from ${this.setup.pyodide.at}, which needs a network. The rest of this page works without.`);
    }
  }

  say(text) {
    write(this.find("status"), text);
  }

  #open(policies) {
    this.find("load").hidden = true;
    this.find("bench").hidden = false;
    this.find("lines").value = this.lines;
    this.find("lines").scrollTop = this.find("lines").scrollHeight; // the reader's own record is the last
    const select = this.find("policy");
    select.replaceChildren(...policies.map((name) => make("option", "", name)));
    for (const name of ["slots", "budget", "chunk"]) this.find(name).value = this.limits[name];
    for (const input of this.place.querySelectorAll("input, select, textarea")) {
      input.oninput = () => this.#soon();
    }
    this.find("reset").onclick = () => {
      this.find("lines").value = this.lines;
      this.#soon();
    };
    this.find("copy").onclick = () => this.#copy();
    window.addEventListener("resize", () => this.#draw());
    this.#showValues();
  }

  // What a reader takes along to the checkout, where the first exercise waits.
  async #copy() {
    const lines = this.find("lines").value.replaceAll('"mine"', '"gentle"');
    const head = ['# policies.py from by_arrival on, and a record for "gentle".', "# Then: python -m pytest -x exercises/test_1_policy.py", ""];
    try {
      await navigator.clipboard.writeText([...head, lines].join("\n"));
      this.say("Copied. The first exercise asks for a policy named gentle.");
    } catch {
      this.find("lines").select();
      this.say("The browser does not let this page copy; the lines are selected.");
    }
  }

  #soon() {
    this.#showValues();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), SOON);
  }

  #showValues() {
    for (const name of ["slots", "budget", "chunk", "rate"]) {
      const value = this.find(name).value;
      const text = name !== "rate" ? value : Number(value) ? `${value} a second` : "all at once";
      write(this.find(`${name}-is`), text);
    }
  }

  #question() {
    const number = (name) => Number(this.find(name).value);
    const limits = { ...this.limits, slots: number("slots"), budget: number("budget"), chunk: number("chunk") };
    return {
      fields: this.recording.fields,
      run: this.recording.runs[0],
      rate: number("rate"),
      lines: this.find("lines").value,
      limits,
      policy: this.find("policy").value,
      price: this.setup.price,
    };
  }

  async run() {
    if (this.busy) return this.#soon();
    this.busy = true;
    const question = this.#question();
    const played = await this.python.ask(question);
    this.busy = false;
    this.#mark(played);
    if (!played.error) this.#show(question, played);
  }

  #mark({ error, line }) {
    const said = error ? `${line ? `Line ${line}: ` : ""}${error}` : "";
    write(this.find("error"), said);
    this.find("lines").ariaInvalid = Boolean(error);
    const lines = this.find("lines").value.split("\n");
    write(this.find("where"), error && line ? (lines[line - 1] ?? "").trim() : "");
  }

  #show(question, played) {
    const lane = new Lane(question.policy, question.limits);
    question.run.requests.forEach((packed, i) => {
      const other = { id: i + 1, text: "", lengths: [], reason: "stop", arrived: played.arrivals[i] };
      lane.know(requestOf(question.fields, packed, other));
    });
    played.steps.forEach((step, i) => lane.add(step, ...played.clock[i]));
    this.lane = lane;
    this.#list(question, lane);
    this.#draw();
  }

  #draw() {
    if (!this.lane) return;
    const { end } = this.lane;
    drawTimeline(this.find("timeline"), this.lane, { start: 0, end, now: end, seen: end, chosen: 0 });
  }

  // The last runs, the newest first.
  #list(question, lane) {
    const figures = lane.figuresAt(lane.end);
    const { slots, budget, chunk } = question.limits;
    const isEdited = question.lines !== this.lines ? " (edited)" : "";
    const load = question.rate ? `${question.rate}/s` : "at once";
    const values = [`${question.policy}${isEdited}`, slots, budget, chunk, load, lane.steps.length, span(lane.end)];
    values.push(span(lane.firstToken(0.5)), span(lane.firstToken(0.95)), percent(figures.useful));
    if (this.runs[0]?.join() === values.join()) return;
    this.runs = [values, ...this.runs].slice(0, RUNS);
    const rows = this.runs.map((run) => make("tr", "", ...run.map((value) => make("td", "", value))));
    this.find("runs").replaceChildren(...rows);
    this.say(`${count(lane.steps.length, "step")}, ${span(lane.end)}.`);
  }
}
