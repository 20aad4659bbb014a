// A run, step by step.
//
// A recording lists what each step did. A `Lane` takes in steps one by one and indexes them by slot, request
// and time. A recording fills it at once, a watched server as things happen (live.js), and the scheduler in
// the page as well (lab.js). Nothing here draws or knows a policy.

// What a slot does in a step, as named by the engine and the style sheet.
export const EMPTY = "empty";
export const BLOCKED = "blocked"; // free, but kept shut while others wait
export const HELD = "held"; // its request is in the slot, but without a chunk in this step
export const PREFILL = "prefill"; // a chunk of the prompt goes in
export const DECODE = "decode"; // one more token comes out, or several with draft tokens
export const GHOST = "ghost"; // its request had ended; that was seen one step late, and the token is dropped

// A list of values as an object, by the names of a recording's fields.
export function named(names, values) {
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}

// Number of the ascending `values` that are at most `limit`.
function countUpTo(values, limit) {
  return values.findLastIndex((value) => value <= limit) + 1;
}

// What each token brought of a text. The engine counts characters, and JavaScript counts a character
// beyond 65,535, such as an emoji, as two.
function piecesOf(text, lengths) {
  const characters = Array.from(text);
  let end = 0;
  return lengths.map((length) => {
    end += length;
    return characters.slice(end - length, end).join("");
  });
}

// What only steps say of a request. `before`: its tokens before the lane's first step.
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
    this.began = []; // by step, in seconds
    this.ended = [];
    this.cells = []; // by step, then by slot: {kind, request, owner}; the owner is the slot's last request
    this.useful = []; // by step: cells up to and with it that did something for a request
    this.stretches = Array.from({ length: limits.slots }, () => []); // by slot
    this.checkpoints = []; // where chunks left states that other prompts may start from
    this.requests = new Map(); // by number, in the order of arrival
    this.prefills = new Map(); // of a server, by number: how far each long prompt is now
  }

  get end() {
    return this.ended.at(-1) ?? 0;
  }

  // Add or update a request, keeping what the steps said of it.
  know(request) {
    const known = { ...unseen(), ...this.requests.get(request.id), ...request };
    known.pieces = piecesOf(request.text, request.lengths);
    this.requests.set(request.id, known);
  }

  add(told, began, ended) {
    const step = { drafts: [], checkpoints: [], ...told }; // the earliest recordings know of neither
    const index = this.steps.length;
    const cells = this.stretches.map(() => ({ kind: EMPTY, request: 0 }));
    const put = (kind, pairs) => {
      for (const [slot, request] of pairs) cells[slot] = { kind, request };
    };
    put(HELD, step.held);
    put(PREFILL, step.prefill);
    put(DECODE, step.decode);
    for (const slot of step.blocked) cells[slot].kind = BLOCKED;
    for (const slot of step.ghosts) cells[slot].kind = GHOST; // one of those that decode
    let useful = step.prefill.length + step.decode.length - step.ghosts.length;
    for (const [slot, drafted, accepted] of step.drafts) {
      cells[slot].tokens = 1 + accepted;
      useful -= (drafted - accepted) / (1 + drafted);
    }
    for (const [slot, request] of step.checkpoints) {
      cells[slot].leaves = true; // a checkpoint
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

  // Extend a slot's stretch while it does the same for the same request.
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

  // The step that runs at this moment, or the last one before it; -1 before the first.
  stepAt(time) {
    return countUpTo(this.began, time) - 1;
  }

  // A request that had its slot before the lane's first step did not wait in this lane.
  admittedAt({ admittedStep, slot, arrived }) {
    if (admittedStep !== null) return this.began[admittedStep];
    return Number.isInteger(slot) ? arrived : Infinity;
  }

  // Number of output tokens of a request at this time.
  tokensAt(request, time) {
    const done = countUpTo(this.ended, time); // number of steps that have ended
    return request.before + countUpTo(request.tokenSteps, done - 1);
  }

  textAt(request, time) {
    // An end may bring more: the rest of a character whose last token never came
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

  // The figures of a lane up to a moment.
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

  // A quantile of the waits.
  firstToken(part) {
    const { waits } = this;
    return waits[Math.ceil(part * waits.length) - 1];
  }

  get meanFirst() {
    const { waits } = this;
    return waits.reduce((sum, wait) => sum + wait, 0) / waits.length;
  }
}

// A request of a recording, with its metrics beside its other values.
export function requestOf(fields, packed) {
  const request = named(fields.RequestView, packed);
  return { ...request, ...named(fields.Metrics, request.metrics) };
}

// The lanes of a recording: one for each run, on the clock that interruptions do not reach.
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
