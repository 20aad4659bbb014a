// Descriptions of steps and requests. Each function takes plain values and returns plain text.

// Format seconds with three significant digits: "12.3 ms".
export function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const [value, unit] = seconds < 0.9995 ? [seconds * 1000, "ms"] : [seconds, "s"];
  const digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${unit}`;
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// Format a size of memory, as in base/strings.py: "11.8 MiB".
export function bytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let power = 0;
  while (number >= 1000 && power < 3) {
    number /= 1024;
    power += 1;
  }
  const shown = power === 3 ? number.toFixed(1) : Number(number.toPrecision(3)).toString();
  return `${shown} ${units[power]}`;
}

// Format an estimate of the time left, rounded coarsely as in engine/prefill_progress.py: "40 s", "6 min", "2.5 h".
export function about(seconds) {
  if (seconds < 20) return `${Math.max(1, Math.ceil(seconds))} s`;
  if (seconds < 90) return `${10 * Math.ceil(seconds / 10)} s`;
  if (seconds < 90 * 60) return `${Math.ceil(seconds / 60)} min`;
  return `${(Math.ceil(seconds / 360) / 10).toFixed(1)} h`;
}

// Describe a prompt's progress: "11,339 of 18,813 tokens, 182 tokens/s, about 6 min".
export function prefillInWords({ done, total, tokens_per_s: rate, left_s: left }) {
  const words = `${done.toLocaleString("en")} of ${count(total, "token")}`;
  if (!Number.isFinite(rate)) return words;
  const pace = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
  const speed = `${words}, ${pace} tokens/s`;
  return Number.isFinite(left) ? `${speed}, about ${about(left)}` : speed;
}

// Return true if a prompt is in prefill and takes longer than two seconds.
export function isLong({ done, total, seconds, left_s: left }) {
  return done < total && seconds + (left ?? 0) > 2;
}

export function percent(part) {
  return `${Math.round(100 * part)} %`;
}

// Join words: "r1", "r1 and r2", "r1, r2 and r3".
export function listed(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

// Cut a text to its beginning (`shorten`) or its end (`endOf`) with an ellipsis. An emoji has two code units in
// JavaScript, and is never cut in half.
export function shorten(text, most) {
  if (text.length <= most) return text;
  return `${text.slice(0, most - 1).replace(/[\ud800-\udbff]$/, "").trimEnd()}…`;
}

export function endOf(text, most) {
  if (text.length <= most) return text;
  return `…${text.slice(-most).replace(/^[\udc00-\udfff\p{M}\u200d]+/u, "")}`;
}

const UNSEEN = /[\p{Cc}\p{Zl}\p{Zp}]|(?![\u200c\u200d])\p{Cf}/gu; // joiners are part of emoji and of some scripts
const RIGHT_TO_LEFT = /^\P{L}*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

// Return a text as one line: line breaks become ¶, tabs four spaces, and characters that are invisible or change
// the writing direction become visible codes. Every font has these signs; ␊ and ␛ are missing in most.
export function inOneLine(text) {
  const seen = (sign) => `<U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`;
  return text.replaceAll("\r", "").replaceAll("\t", "    ").replaceAll("\n", "¶").replace(UNSEEN, seen);
}

export function directionOf(text) {
  return RIGHT_TO_LEFT.test(text.slice(0, 200)) ? "rtl" : "ltr";
}

const FEW = 2; // with more admissions than this, their reasons are left out

const r = (number) => `r${number}`;
const namesOf = (pairs) => listed(pairs.map(([, request]) => r(request)));

// Return the plan of a step as a list of sentences.
export function planInWords(lane, index) {
  const step = lane.steps[index];
  const { drafted } = spentOn(step);
  const decoding = step.decode.filter(([slot]) => !step.ghosts.includes(slot));
  const said = [];
  if (step.admitted.length) {
    const admissions = step.admitted.map(([slot, request], i) => {
      const why = step.admitted.length > FEW ? "" : step.why[i];
      return `${r(request)} to slot ${slot}${why && ` (${why})`}`;
    });
    said.push(`Admitted: ${listed(admissions)}.`);
  }
  if (step.prefill.length) {
    const chunks = step.prefill.map((chunk) => chunkInWords(lane, index, chunk));
    said.push(`Read of prompts: ${listed(chunks)}.`);
  }
  if (step.checkpoints.length) {
    const marks = step.checkpoints.map(([, request, row]) => `${r(request)} after ${count(row, "token")}`);
    said.push(`Checkpoints, from which prompts that begin alike may start: ${listed(marks)}.`);
  }
  if (decoding.length) {
    const many = count(decoding.length, "request");
    said.push(`One more token for ${many}: ${namesOf(decoding)}.`);
  }
  if (drafted) {
    const accepted = step.drafts.reduce((sum, [, , some]) => sum + some, 0);
    said.push(`Draft tokens: ${drafted}, ${accepted} accepted, so that many more tokens came in the same step.`);
  }
  if (step.held.length) {
    const isSpent = costOf(step) >= budgetOf(lane, step);
    const why = isSpent ? "the budget of this step is spent" : "another prompt that begins alike is being read, and its rows can be copied";
    said.push(`Held back: ${namesOf(step.held)}; ${why}.`);
  }
  for (const slot of step.ghosts) {
    said.push(`Slot ${slot} runs a ghost: its request had ended, but the engine did not know that yet when it planned this step. The token is thrown away.`);
  }
  if (step.blocked.length) {
    const slots = step.blocked.toSorted((a, b) => a - b);
    const noun = slots.length > 1 ? "slots" : "slot";
    said.push(`Free, but blocked: ${noun} ${listed(slots)}, with ${count(step.waiting, "request")} in line.`);
  }
  return said;
}

function chunkInWords(lane, index, [, number, start, stop]) {
  const request = lane.requests.get(number);
  const length = request?.prompt_tokens;
  const of = length ? ` of ${length}` : "";
  const part = start || stop !== length ? `tokens ${start + 1} to ${stop}${of}` : `all ${count(stop, "token")}`;
  const isCopied = start && request?.chunks[0]?.index === index;
  const known = `; the first ${start} were known already, because another prompt began alike`;
  return `${r(number)} (${part}${isCopied ? known : ""})`;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// Count a step's prompt tokens and draft tokens.
function spentOn(step) {
  const read = step.prefill.reduce((sum, [, , start, stop]) => sum + stop - start, 0);
  const drafted = step.drafts.reduce((sum, [, some]) => sum + some, 0);
  return { read, drafted };
}

function costOf(step) {
  const { read, drafted } = spentOn(step);
  return step.cost ?? read + drafted + step.decode.length; // old recordings have a cost in which late tokens count more
}

function budgetOf(lane, step) {
  return step.budget ?? Math.max(lane.limits.budget, step.decode.length + lane.limits.chunk);
}

// Describe a step's duration and how it spent its budget.
export function costInWords(lane, index) {
  const step = lane.steps[index];
  const took = span(lane.ended[index] - lane.began[index]);
  const { read, drafted } = spentOn(step);
  const cost = read + drafted + step.decode.length;
  const drafts = drafted ? `, ${drafted} for draft tokens` : "";
  return `${took}; ${cost} of a budget of ${budgetOf(lane, step)}: ${step.decode.length} for answers${drafts}, ${read} for prompts`;
}

// Describe in one sentence how a request fared in a lane.
export function fateInWords(lane, request) {
  if (request.before) return "It had its slot before the first step that this page knows.";
  if (request.admittedStep === null) return request.reason ? "It never had a slot." : "It waits for a slot.";
  const queued = lane.began[request.admittedStep] - request.arrived;
  const waited = queued < 0.0005 ? "had a slot at once" : `waited ${span(queued)} for a slot`;
  if (request.first === undefined) return `It ${waited}.`;
  const times = request.tokenSteps.map((index) => lane.ended[index]);
  const gaps = times.slice(1).map((time, i) => time - times[i]);
  const longest = gaps.length ? `; the longest gap between two tokens was ${span(Math.max(...gaps))}` : "";
  const first = span(request.first - request.arrived);
  const last = span(request.last - request.arrived);
  return `It ${waited}, had its first token after ${first} and its last after ${last}${longest}.`;
}

// Describe a request's prompt and answer tokens.
export function factsInWords({ prompt_tokens: prompt, cached_tokens: cached, output_tokens: output, reread_tokens: again }) {
  const known = cached ? `, ${cached} of them known from another prompt` : "";
  const reread = again ? `; read again: ${count(again, "token")}, for want of a checkpoint` : "";
  return `${count(prompt, "token")} of prompt${known}${reread}; ${count(output, "token")} of answer.`;
}

// Compare two lanes in a short text.
export function verdict(lanes) {
  const [slow, fast] = [...lanes].sort((a, b) => b.end - a.end);
  const times = (slow.end / fast.end).toFixed(2);
  const first = `${span(fast.meanFirst)} instead of ${span(slow.meanFirst)}`;
  return `${capital(fast.policy)} takes ${count(fast.steps.length, "step")} instead of ${slow.steps.length.toLocaleString("en")}, and is done ${times} times as fast. A first token comes after ${first}, on average.`;
}
