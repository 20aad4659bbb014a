// What a step and a request come to, in words.
//
// The problem. A picture shows that something happened, and not why. The plan of a step knows it: who
// was admitted and to which slot, who had to wait, which slots were shut.
//
// What this file keeps. Each function takes plain values and gives plain text. Nothing in here touches
// the page, so whatever a prompt holds can only become text.

import { guessesOf } from "./recording.js";

// Seconds, with three digits.
export function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
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
  return `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

// The beginning of a text, or its end, with an ellipsis where it is cut. An emoji is two letters to
// JavaScript, and is not cut in half.
export function shorten(text, most) {
  if (text.length <= most) return text;
  return `${text.slice(0, most - 1).replace(/[\ud800-\udbff]$/, "").trimEnd()}…`;
}

export function endOf(text, most) {
  if (text.length <= most) return text;
  return `…${text.slice(-most).replace(/^[\udc00-\udfff\p{M}\u200d]+/u, "")}`;
}

const UNSEEN = /[\p{Cc}\p{Zl}\p{Zp}]|(?![\u200c\u200d])\p{Cf}/gu; // joiners make emoji, and letters
const RIGHT_TO_LEFT = /^\P{L}*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

// A text that has one line of the page, as the terminal draws it (screen/ink.py, `clean`): a line break
// is ␊, a tab is four blanks, and what draws nothing, or turns the direction of writing, is seen.
export function inOneLine(text) {
  return text.replaceAll("\r", "").replaceAll("\t", "    ").replace(UNSEEN, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "␡";
    return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

export function directionOf(text) {
  return RIGHT_TO_LEFT.test(text.slice(0, 200)) ? "rtl" : "ltr";
}

const r = (number) => `r${number}`;
const namesOf = (pairs) => listed(pairs.map(([, request]) => r(request)));
const slotsNamed = (slots) => `${slots.length > 1 ? "slots" : "slot"} ${listed(slots)}`;

// The plan of a step, in sentences.
export function planInWords(lane, index) {
  const step = lane.steps[index];
  const said = [];
  said.push(...admissionsInWords(step), ...chunksInWords(lane, step, index));
  const decoding = step.decode.filter(([slot]) => !step.ghosts.includes(slot));
  if (decoding.length) {
    const get = decoding.length > 1 ? "requests get" : "request gets";
    said.push(`${decoding.length} ${get} one more token: ${namesOf(decoding)}.`);
  }
  const guessed = guessedIn(step);
  if (guessed) {
    const right = guessesOf(step).reduce((sum, [, , some]) => sum + some, 0);
    said.push(`Behind that, guessed ${guessed}, ${right} right: so many more tokens came in the same step.`);
  }
  if (step.held.length) {
    const is = step.held.length > 1 ? "are" : "is";
    // A step that stops for want of budget has less than the price of a token left, which is 4 at most
    const isSpent = step.cost > Math.max(lane.limits.budget, step.decode.length + lane.limits.chunk) - 4;
    const why = isSpent ? "the budget of this step is spent" : "another prompt that begins alike is being read, and its rows can be copied";
    said.push(`${namesOf(step.held)} ${is} held: ${why}.`);
  }
  for (const slot of step.ghosts) {
    said.push(`Slot ${slot} runs a ghost: its request had ended, but the engine did not know that yet when it planned this step. The token is thrown away.`);
  }
  if (step.blocked.length) {
    const [is, are] = step.blocked.length > 1 ? ["are", "stay"] : ["is", "stays"];
    said.push(`${capital(slotsNamed(step.blocked))} ${is} free, but ${are} shut while ${count(step.waiting, "request")} wait${step.waiting === 1 ? "s" : ""}.`);
  }
  const { read, charged } = spentOn(step);
  if (charged > read) {
    said.push(`The ${count(read, "token")} of prompts cost ${charged} of the budget: a token far into its prompt looks back on more, and costs more.`);
  }
  return said;
}

const FEW = 2; // so many are told one by one

function admissionsInWords(step) {
  if (step.admitted.length > FEW) {
    return [`${namesOf(step.admitted)} are admitted, to ${slotsNamed(step.admitted.map(([slot]) => slot))}.`];
  }
  return step.admitted.map(([slot, request], i) => {
    const why = step.why[i] ? ` (${step.why[i]})` : "";
    return `${r(request)} is admitted to slot ${slot}${why}.`;
  });
}

function chunksInWords(lane, step, index) {
  const lengthOf = (request) => lane.requests.get(request)?.promptTokens;
  const whole = step.prefill.filter(([, request, start, stop]) => start === 0 && stop === lengthOf(request));
  const parts = step.prefill.filter((chunk) => !whole.includes(chunk));
  const said = [];
  if (whole.length === 1) said.push(`The whole prompt of ${r(whole[0][1])}, ${count(whole[0][3], "token")}, is read.`);
  if (whole.length > 1) {
    const names = whole.map(([, request, , stop], i) => `${r(request)} (${i ? stop : count(stop, "token")})`);
    said.push(`The whole prompts of ${listed(names)} are read.`);
  }
  for (const [, request, start, stop] of parts) {
    const length = lengthOf(request);
    const of = length ? ` of ${length}` : "";
    const which = start ? `Tokens ${start + 1} to ${stop}` : `The first ${stop}${of} tokens`;
    const isCopied = start && lane.requests.get(request)?.chunks[0]?.index === index;
    const words = `The first ${start} were known already, because another prompt began alike.`;
    const copied = isCopied ? ` ${words}` : "";
    said.push(`${which} of ${r(request)}'s prompt are read.${copied}`);
  }
  return said;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// What a step spent on prompts: so many tokens are read, and so many of the budget are charged for them.
function spentOn(step) {
  const read = step.prefill.reduce((sum, [, , start, stop]) => sum + stop - start, 0);
  return { read, charged: step.cost - step.decode.length - guessedIn(step) };
}

function guessedIn(step) {
  return guessesOf(step).reduce((sum, [, guessed]) => sum + guessed, 0);
}

// What a step paid of its budget.
export function costInWords(lane, index) {
  const step = lane.steps[index];
  const took = span(lane.ended[index] - lane.began[index]);
  const { read, charged } = spentOn(step);
  const price = charged > read ? `, at a price of ${charged}` : "";
  const guessed = guessedIn(step) ? `, ${guessedIn(step)} for guesses` : "";
  return `${took}; ${step.cost} of a budget of ${lane.limits.budget}: ${step.decode.length} for answers${guessed}, ${read} for prompts${price}`;
}

// What became of a request in a lane, in one sentence.
export function fateInWords(lane, request) {
  if (request.admittedStep === null) return "It never had a slot.";
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

// One sentence that compares two lanes.
export function verdict(lanes) {
  const [slow, fast] = [...lanes].sort((a, b) => b.end - a.end);
  const times = (slow.end / fast.end).toFixed(2);
  const first = `${span(fast.meanFirst)} instead of ${span(slow.meanFirst)}`;
  return `${capital(fast.policy)} takes ${count(fast.steps.length, "step")} instead of ${slow.steps.length.toLocaleString("en")}, and is done ${times} times as fast. A first token comes after ${first}, on average.`;
}
