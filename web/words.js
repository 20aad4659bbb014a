// What a step and a request come to, in words.
//
// The problem. A picture shows that something happened, and not why. The plan of a step knows it: who
// was admitted and to which slot, who had to wait, which slots were shut.
//
// What this file keeps. Each function takes plain values and gives plain text. Nothing in here touches
// the page, so whatever a prompt holds can only become text.

// Seconds, with three digits.
export function span(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  const [value, unit] = seconds < 0.9995 ? [seconds * 1000, "ms"] : [seconds, "s"];
  const digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${unit}`;
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function percent(part) {
  return `${Math.round(100 * part)} %`;
}

// "r1", "r1 and r2", "r1, r2 and r3"
export function listed(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

export function shorten(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1).trimEnd()}…`;
}

const r = (number) => `r${number}`;
const slotsNamed = (slots) => `${slots.length > 1 ? "slots" : "slot"} ${listed(slots)}`;

// The plan of a step, in sentences.
export function planInWords(lane, index) {
  const step = lane.steps[index];
  const said = [];
  for (const [i, [slot, request]] of step.admitted.entries()) {
    const why = step.why[i] ? ` (${step.why[i]})` : "";
    said.push(`${r(request)} is admitted to slot ${slot}${why}.`);
  }
  for (const [slot, request, start, stop] of step.prefill) {
    const whole = lane.requests.get(request)?.promptTokens;
    const copied = start && isFirstChunk(lane, request, index) ? copiedWords(start) : "";
    if (start === 0 && stop === whole) {
      said.push(`The whole prompt of ${r(request)}, ${count(stop, "token")}, goes into slot ${slot}.`);
    } else {
      const part = `${start} to ${stop}${whole ? ` of ${whole}` : ""}`;
      said.push(`Tokens ${part} of ${r(request)}'s prompt go into slot ${slot}.${copied}`);
    }
  }
  const decoding = step.decode.filter(([slot]) => !step.ghosts.includes(slot));
  if (decoding.length) {
    const names = listed(decoding.map(([, request]) => r(request)));
    said.push(`${count(decoding.length, "row")} decode${decoding.length > 1 ? "" : "s"}: one more token for ${names}.`);
  }
  for (const [, request] of step.held) {
    said.push(`${r(request)} is held: the budget is spent, or a beginning that it shares is being written.`);
  }
  for (const slot of step.ghosts) {
    said.push(`Slot ${slot} runs a ghost: its request had ended when this step was planned, but that was not known yet. Its token is dropped.`);
  }
  if (step.blocked.length) {
    const [is, are] = step.blocked.length > 1 ? ["are", "stay"] : ["is", "stays"];
    said.push(`${capital(slotsNamed(step.blocked))} ${is} free, but ${are} shut while ${count(step.waiting, "request")} wait${step.waiting === 1 ? "s" : ""}.`);
  }
  return said;
}

function isFirstChunk(lane, request, index) {
  return lane.requests.get(request)?.chunks[0]?.index === index;
}

function copiedWords(rows) {
  return ` The first ${rows} were known already: another prompt began alike.`;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// What a step paid of its budget.
export function costInWords(lane, index) {
  const step = lane.steps[index];
  const took = span(lane.ended[index] - lane.began[index]);
  return `${step.cost} of the budget of ${lane.limits.budget}; ${took}; ${count(step.tokens, "token")} out`;
}

// What became of a request in a lane, in one sentence.
export function fateInWords(lane, request) {
  if (request.admittedStep === null) return "It never had a slot.";
  const queued = lane.began[request.admittedStep] - request.arrived;
  const waited = queued < 0.0005 ? "had a slot at once" : `waited ${span(queued)} for a slot`;
  if (request.first === undefined) return `It ${waited}.`;
  const gaps = gapsOf(lane, request);
  const longest = gaps.length ? `; the longest gap between two tokens was ${span(Math.max(...gaps))}` : "";
  const first = span(request.first - request.arrived);
  const last = span(request.last - request.arrived);
  return `It ${waited}, had its first token after ${first} and its last after ${last}${longest}.`;
}

export function gapsOf(lane, request) {
  const times = request.tokenSteps.map((index) => lane.ended[index]);
  return times.slice(1).map((time, i) => time - times[i]);
}

// One sentence that compares two lanes.
export function verdict(lanes) {
  const [slow, fast] = [...lanes].sort((a, b) => b.end - a.end);
  const times = (slow.end / fast.end).toFixed(2);
  const first = `${span(fast.meanFirst)} instead of ${span(slow.meanFirst)}`;
  return `${capital(fast.policy)} takes ${fast.steps.length.toLocaleString("en")} steps instead of ${slow.steps.length.toLocaleString("en")}, and is done ${times} times as fast. A first token comes after ${first}, on average.`;
}
