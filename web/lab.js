// The real scheduler in the page: sched.py replays the recorded prompts under a policy that readers can edit.
//
// Pyodide (CPython for the browser) is loaded from a public CDN only on request, at a pinned version and checked
// by hash. It runs simulate.py, sched.py and the modules that they import in a worker. The result is a lane like
// any other. A policy that does not terminate is stopped.

import { Lane, named, requestOf } from "./recording.js";
import { drawTimeline } from "./draw.js";
import { $, copy, make, rowOf, write } from "./elements.js";
import { count, percent, span } from "./words.js";

const PATIENCE = 8000; // timeout of a simulation in milliseconds
const SOON = 250; // milliseconds between the last edit and the next run
const RUNS = 5; // number of runs in the list
const KNOBS = ["slots", "budget", "chunk", "rate"];
const TAKEN = `# policies.py from by_arrival on, and a record for "gentle".
# Then: python -m pytest -x course/exercises/test_1_policy.py

`;

// Python running in a worker.
class Python {
  constructor(pyodide, sources) {
    this.pyodide = pyodide;
    this.sources = sources;
    this.files = null;
    this.worker = null;
  }

  // Fetch Pyodide's files, whose hashes the browser checks, and start Python.
  async load(say) {
    const files = {};
    for (const [name, integrity] of Object.entries(this.pyodide.files)) {
      say(`Loading ${name} …`);
      const answer = await fetch(this.pyodide.at + name, { integrity, credentials: "omit" });
      if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
      files[name] = await answer.arrayBuffer();
    }
    this.files = files;
    say("Starting Python …");
    return this.start();
  }

  async start() {
    const text = new Blob([this.sources["worker.js"]], { type: "text/javascript" });
    this.worker = new Worker(URL.createObjectURL(text));
    const lock = { info: this.pyodide.info, packages: {} };
    return this.#tell({ files: this.files, sources: this.sources, lock }, 60000);
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
      // If the worker answers first, this late `fail` has no effect
      setTimeout(() => fail(new Error("it does not finish, and was stopped")), patience);
      this.worker.onmessage = ({ data }) => (data.failed ? fail(new Error(data.failed)) : give(data.answer));
      this.worker.onerror = (event) => fail(new Error(event.message || "the worker did not start"));
      this.worker.postMessage(message);
    });
  }
}

export class Lab {
  // `recording`: contains the prompts to replay. `setup`: prices and files from docs/make/page.py.
  constructor(recording, setup) {
    this.recording = recording;
    this.setup = setup;
    this.python = new Python(setup.pyodide, setup.sources);
    this.limits = named(recording.fields.Limits, recording.runs[0].limits);
    this.fields = $("lab-form").elements; // form fields by name
    this.runs = [];
    this.lane = null;
    $("lab-load").onclick = () => this.begin();
    $("lab-form").oninput = () => this.#soon();
    $("lab-reset").onclick = () => {
      this.fields.lines.value = this.lines;
      this.#soon();
    };
    $("lab-copy").onclick = () => this.#copy();
  }

  async begin() {
    $("lab-load").disabled = true;
    try {
      const found = await this.python.load((text) => this.say(text));
      const { lines, policies } = JSON.parse(found);
      this.lines = lines;
      this.#open(policies);
      this.say("");
      await this.run();
    } catch (error) {
      $("lab-load").disabled = false;
      this.say(`Python could not be loaded: ${error.message}. It is fetched from ${this.setup.pyodide.at}, which needs a network. The rest of this page works without.`);
    }
  }

  say(text) {
    write($("lab-status"), text);
  }

  #open(policies) {
    const { lines, policy, slots, budget, chunk } = this.fields;
    $("lab-load").hidden = true;
    $("lab-form").hidden = false;
    lines.value = this.lines;
    lines.scrollTop = lines.scrollHeight; // the reader's own policy is at the end
    policy.append(...policies.map((name) => make("option", "", name)));
    for (const knob of [slots, budget, chunk]) knob.value = this.limits[knob.name];
    this.#showValues();
  }

  // Copy the policy in the form that the checkout's first exercise expects.
  #copy() {
    const { lines } = this.fields;
    lines.select();
    copy(TAKEN + lines.value.replaceAll('"mine"', '"gentle"'), (said) => this.say(said), "the lines are selected");
  }

  #soon() {
    this.#showValues();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), SOON);
  }

  #showValues() {
    for (const name of KNOBS) {
      const { value } = this.fields[name];
      const text = name !== "rate" ? value : Number(value) ? `${value} a second` : "all at once";
      write($(`lab-${name}`), text);
    }
  }

  #question() {
    const { lines, policy } = this.fields;
    const [slots, budget, chunk, rate] = KNOBS.map((name) => this.fields[name].valueAsNumber);
    return {
      fields: this.recording.fields,
      run: this.recording.runs[0],
      price: this.setup.price,
      limits: { ...this.limits, slots, budget, chunk },
      rate,
      lines: lines.value,
      policy: policy.value,
    };
  }

  async run() {
    if (this.busy) return this.#soon();
    this.busy = true;
    const question = this.#question();
    const played = await this.python.ask(question);
    this.busy = false;
    this.#mark(question, played);
    if (!played.error) this.#show(question, played);
  }

  #mark({ lines }, { error, line }) {
    write($("lab-error"), error ? `${line ? `Line ${line}: ` : ""}${error}` : "");
    write($("lab-where"), line ? (lines.split("\n")[line - 1] ?? "").trim() : "");
    this.fields.lines.ariaInvalid = Boolean(error);
  }

  #show(question, played) {
    const lane = new Lane(question.policy, question.limits);
    question.run.requests.forEach((packed, i) => {
      lane.know({ ...requestOf(question.fields, packed), id: i + 1, arrived: played.arrivals[i] });
    });
    played.steps.forEach((step, i) => lane.add(step, ...played.clock[i]));
    this.lane = lane;
    this.#list(question, lane);
    this.draw();
  }

  draw() {
    if (!this.lane) return;
    const { end } = this.lane;
    drawTimeline($("lab-timeline"), this.lane, { start: 0, end, now: end });
  }

  // Add a run to the list of recent runs, the newest first.
  #list({ policy, limits, rate, lines }, lane) {
    const { steps, useful } = lane.figuresAt(lane.end);
    const name = lines === this.lines ? policy : `${policy} (edited)`;
    const load = rate ? `${rate}/s` : "at once";
    const firsts = [0.5, 0.95].map((part) => span(lane.firstToken(part)));
    const { slots, budget, chunk } = limits;
    const values = [name, slots, budget, chunk, load, steps, span(lane.end), ...firsts, percent(useful)];
    if (this.runs[0]?.join() === values.join()) return;
    this.runs = [values, ...this.runs].slice(0, RUNS);
    $("lab-runs").replaceChildren(...this.runs.map((run) => rowOf(run)));
    this.say(`${count(steps, "step")}, ${span(lane.end)}.`);
  }
}
