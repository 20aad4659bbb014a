// A run, step by step.
//
// A recording lists what each step did. A `Lane` receives steps one by one and indexes them by slot, request and
// time. Its steps come from a recording, a watched server (live.js), or the scheduler in the page (lab.js). This
// module does not draw, and does not depend on a policy.

// The states of a slot in a step, with the names of the engine and the style sheet.
export const EMPTY = "empty";
export const BLOCKED = "blocked"; // free, but the policy does not use it although requests wait
export const HELD = "held"; // has a request in prefill that gets no chunk in this step
export const PREFILL = "prefill"; // prefills a chunk of the prompt
export const DECODE = "decode"; // produces a token, or several with draft tokens
export const GHOST = "ghost"; // its request had finished, which was noticed one step late; the token is dropped

// Return an object from a list of values and the names of its fields.
export function named(names, values) {
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}

// Count the values that are at most `limit`. `values` is in ascending order.
function countUpTo(values, limit) {
  return values.findLastIndex((value) => value <= limit) + 1;
}

// Split a text into the pieces that each token added. `lengths` are in characters, as Python counts them;
// JavaScript's strings count a character beyond U+FFFF, such as an emoji, as two.
function piecesOf(text, lengths) {
  const characters = Array.from(text);
  let end = 0;
  return lengths.map((length) => {
    end += length;
    return characters.slice(end - length, end).join("");
  });
}

// The fields of a request that are filled in from steps. `before`: its tokens before the lane's first step.
export function unseen() {
  return {
    tokenSteps: [],
    chunks: [],
    admittedStep: null,
    first: undefined,
    last: undefined,
    before: 0,
  };
}

export class Lane {
  constructor(policy, limits) {
    this.policy = policy;
    this.limits = limits;
    this.slots = limits.slots;
    this.steps = [];
    this.began = []; // start of each step, in seconds
    this.ended = [];
    this.cells = []; // [step][slot] -> {kind, request, owner}; the owner is the slot's last request
    this.useful = []; // [step] -> number of useful cells up to and including this step
    this.stretches = Array.from({ length: limits.slots }, () => []); // [slot] -> its stretches
    this.checkpoints = []; // states saved after chunks, from which other prompts may start
    this.requests = new Map(); // number -> request, in order of arrival
    this.prefills = new Map(); // number -> current progress of a long prompt, for a server
  }

  get end() {
    return this.ended.at(-1) ?? 0;
  }

  // Add or update a request, keeping the fields filled in from steps.
  know(request) {
    const known = { ...unseen(), ...this.requests.get(request.id), ...request };
    known.pieces = piecesOf(request.text, request.lengths);
    this.requests.set(request.id, known);
  }

  add(told, began, ended) {
    const step = { drafts: [], checkpoints: [], ...told }; // missing in the oldest recordings
    const index = this.steps.length;
    const cells = this.stretches.map(() => ({ kind: EMPTY, request: 0 }));
    const put = (kind, pairs) => {
      for (const [slot, request] of pairs) cells[slot] = { kind, request };
    };
    put(HELD, step.held);
    put(PREFILL, step.prefill);
    put(DECODE, step.decode);
    for (const slot of step.blocked) cells[slot].kind = BLOCKED;
    for (const slot of step.ghosts) cells[slot].kind = GHOST; // was DECODE
    let useful = step.prefill.length + step.decode.length - step.ghosts.length;
    for (const [slot, drafted, accepted] of step.drafts) {
      cells[slot].tokens = 1 + accepted;
      useful -= (drafted - accepted) / (1 + drafted);
    }
    for (const [slot, request] of step.checkpoints) {
      cells[slot].leaves = true; // leaves a checkpoint
      this.checkpoints.push({ slot, request, at: ended });
    }
    this.steps.push(step);
    this.began.push(began);
    this.ended.push(ended);
    this.cells.push(cells);
    this.useful.push((this.useful.at(-1) ?? 0) + useful);
    cells.forEach((cell, slot) => {
      cell.owner = cell.request || (this.cells[index - 1]?.[slot].owner ?? 0);
      this.#stretch(slot, cell, index);
    });
    this.#tellRequests(step, index, ended);
  }

  // Extend a slot's last stretch if kind and request are the same; otherwise start a new one.
  #stretch(slot, cell, index) {
    const stretches = this.stretches[slot];
    const last = stretches.at(-1);
    if (last?.to === index - 1 && last.kind === cell.kind && last.request === cell.request) {
      last.to = index;
    } else if (cell.kind !== EMPTY) {
      stretches.push({ ...cell, slot, from: index, to: index });
    }
  }

  #tellRequests(step, index, ended) {
    const known = (number) => this.requests.get(number) ?? unseen();
    const token = (request) => {
      request.tokenSteps.push(index);
      request.first ??= ended;
      request.last = ended;
    };
    for (const [, number] of step.admitted) known(number).admittedStep = index;
    for (const [, number, start, stop] of step.prefill) {
      const request = known(number);
      request.chunks.push({ index, start, stop });
      if (stop === request.prompt_tokens) token(request);
    }
    for (const [slot, number] of step.decode) {
      const { kind, tokens = 1 } = this.cells[index][slot];
      for (let i = 0; kind === DECODE && i < tokens; i++) token(known(number));
    }
  }

  // --- queries

  // Return the index of the step that runs at this time, or of the last one before it; -1 before the first.
  stepAt(time) {
    return countUpTo(this.began, time) - 1;
  }

  // Return the time of admission; Infinity if there is none yet. A request admitted before the lane's first step
  // did not wait in this lane.
  admittedAt({ admittedStep, slot, arrived }) {
    if (admittedStep !== null) return this.began[admittedStep];
    return Number.isInteger(slot) ? arrived : Infinity;
  }

  // Return the number of a request's output tokens at this time.
  tokensAt(request, time) {
    const done = countUpTo(this.ended, time); // number of finished steps
    return request.before + countUpTo(request.tokenSteps, done - 1);
  }

  textAt(request, time) {
    // The complete text may be longer: it may end with a broken character, which no token completed
    if (this.isAnswered(request, time)) return request.text;
    return request.pieces.slice(0, this.tokensAt(request, time)).join("");
  }

  isAnswered(request, time) {
    return Boolean(request.reason) && request.last <= time;
  }

  waitingAt(time) {
    const all = [...this.requests.values()];
    return all.filter((r) => r.arrived <= time && this.admittedAt(r) > time);
  }

  // Return the lane's figures at this time.
  figuresAt(time) {
    const done = countUpTo(this.ended, time);
    const all = [...this.requests.values()];
    const cells = done * this.slots;
    return {
      steps: done,
      useful: cells ? this.useful[done - 1] / cells : 0,
      answered: all.filter((r) => this.isAnswered(r, time)).length,
      requests: all.length,
    };
  }

  // TTFTs in ascending order.
  get waits() {
    const told = [...this.requests.values()].filter((r) => r.first !== undefined);
    const waits = told.map((r) => r.first - r.arrived);
    return waits.sort((a, b) => a - b);
  }

  // Return a quantile of the TTFTs; undefined if there are none.
  firstToken(part) {
    const { waits } = this;
    return waits[Math.ceil(part * waits.length) - 1];
  }

  get meanFirst() {
    const { waits } = this;
    return waits.reduce((sum, wait) => sum + wait, 0) / waits.length;
  }
}

// Return a request of a recording, with its metrics merged into its other fields.
export function requestOf(fields, packed) {
  const request = named(fields.RequestView, packed);
  return { ...request, ...named(fields.Metrics, request.metrics) };
}

// Return a recording's lanes, one for each run. Their clock does not include interruptions of the run.
export function lanesOf(recording) {
  const { fields, runs } = recording;
  return runs.map((run) => {
    const lane = new Lane(run.policy, named(fields.Limits, run.limits));
    run.requests.forEach((packed, i) => {
      const request = requestOf(fields, packed);
      lane.know({ ...request, arrived: run.arrivals[i], hash: run.hashes[i] });
    });
    run.steps.forEach((packed, i) => {
      const [began, ended] = run.clock[i];
      lane.add(named(fields.StepView, packed), began, ended);
    });
    return lane;
  });
}
