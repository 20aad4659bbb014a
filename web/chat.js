// A conversation with the model that a server serves, in the page that shows what the server does.
//
// The problem. A model remembers nothing: each question is sent with all that was said before. So a conversation grows
// until no slot can hold it. And whoever asks wants to see what the engine makes of a question: which slot is theirs,
// and how little of a second question has to be read.
//
// The way out. The page asks as any client does, at `/v1/chat/completions`. The answer's name has the number of its
// request, so the page knows whose row is whose. The figures under an answer are those that the server tells.
//
// What this file keeps. What was said is in this tab's memory alone. Nothing is left out of a conversation unless the
// reader says so, and what is left out is marked. A question that was refused is in the box again.

import { Markdown } from "./markdown.js";
import { chip, make, write } from "./lanes.js";
import { ask, eventsOf } from "./live.js";
import { count, span } from "./words.js";

const TIGHT = 0.25; // of a slot: with less room left, the page says how much
const OPTIONS = { model: "default", stream: true, stream_options: { include_usage: true }, return_progress: true };

// What stands under an answer. `slots`: that of the turn before, and that of this one, where they are known.
function figuresOf({ total, cached, first, tokens, reason }, [before, slot], room) {
  const [read, known] = [total - cached, cached].map((number) => number.toLocaleString("en"));
  const said = [`read ${cached ? `${read} of ` : ""}${count(total, "token")}`];
  if (cached) said.push(`${known} were still in ${slot !== undefined && slot === before ? "its" : "a"} slot`);
  said.push(`first token after ${span(first / 1000)}`, `${count(tokens, "token")} of answer`);
  if (reason !== "stop") said.push(reason === "length" ? "cut, since its slot is full" : reason ?? "broken off");
  if (room) said.push(`${room} are left: begin anew, or leave the oldest turns out`);
  return said.join("; ");
}

export class Chat {
  constructor(place, wantKey) {
    this.wantKey = wantKey;
    this.parts = {};
    for (const part of place.querySelectorAll("[data-chat-part]")) this.parts[part.dataset.chatPart] = part;
    this.key = "";
    this.turns = [];
    this.left = null; // ends the answer that runs
    this.isFull = false; // the question in the box does not fit
    // A button has the name of what it does
    this.parts.form.addEventListener("click", ({ target }) => this[target.dataset.chatPart]?.());
    this.parts.box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    place.hidden = false;
  }

  // A key that was asked for. A question that waits in the box is asked again.
  useKey(key) {
    this.key = key;
    this.send();
  }

  // What the server is seen to do, if that may be seen.
  get page() {
    return window.nanobatch;
  }

  get lane() {
    return this.page?.player.lanes[0];
  }

  // Of a slot, in tokens.
  get length() {
    return this.lane?.limits.max_len ?? Infinity;
  }

  // What the next question is sent with.
  get told() {
    return this.turns.filter((turn) => !turn.isDropped);
  }

  send() {
    const { box } = this.parts;
    const question = box.value.trim();
    if (!question || this.left) return;
    box.value = "";
    this.#ask(question);
  }

  stop() {
    this.left?.abort();
  }

  again() {
    this.#ask(this.#takeBack());
  }

  anew() {
    this.stop();
    this.turns = [];
    this.parts.log.replaceChildren();
    this.#show();
  }

  #takeBack() {
    const turn = this.turns.pop();
    turn.element.remove();
    return turn.question;
  }

  // Leaves the oldest turns out, until a quarter of the slot is free. A question in the box is asked again.
  drop() {
    const { end } = this.told.at(-1);
    let gone = 0;
    while (this.told.length && (!gone || end - gone > (1 - TIGHT) * this.length)) {
      const [turn] = this.told;
      gone = turn.end;
      turn.isDropped = true;
      turn.element.classList.add("dropped");
      write(turn.figures, "left out: from here on the model is not told this");
    }
    for (const turn of this.told) turn.end -= gone;
    this.#show();
    this.send();
  }

  // --- one question

  async #ask(question) {
    const system = this.parts.system.value.trim();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question: content, said } of this.told) {
      messages.push({ role: "user", content }, { role: "assistant", ...said });
    }
    messages.push({ role: "user", content: question });
    const turn = this.#begin(question);
    this.left = new AbortController();
    this.#show();
    const { key, left: { signal } } = this;
    let failure = null;
    try {
      turn.asked = performance.now();
      const temperature = this.parts.temperature.valueAsNumber; // an empty box is NaN, which JSON writes as null
      const body = JSON.stringify({ messages, temperature, ...OPTIONS });
      const answer = await ask("v1/chat/completions", { key, signal, body });
      for await (const { data } of eventsOf(answer.body)) this.#hear(turn, data);
    } catch (error) {
      failure = error;
      turn.reason = signal.aborted ? "stopped" : `broken off: ${error.message}`;
    }
    this.left = null;
    const isNews = this.turns.includes(turn); // else there is a new conversation
    if (isNews && failure && !turn.tokens) this.#refuse(failure);
    else if (isNews) this.#end(turn);
    this.#show();
  }

  // The texts of a turn have the names that the protocol gives them.
  #begin(question) {
    const element = this.parts.turn.content.firstElementChild.cloneNode(true);
    const [owner, asked, thoughts, thought, reply, figures] = element.querySelectorAll("[data-of]");
    const turn = { question, element, owner, thoughts, figures, total: 0, cached: 0, tokens: 0 };
    turn.said = { content: "", reasoning_content: "" };
    turn.fresh = { ...turn.said }; // what is not drawn yet
    turn.views = { content: new Markdown(reply), reasoning_content: new Markdown(thought) };
    write(asked, question);
    this.parts.log.append(element);
    element.scrollIntoView({ block: "nearest" });
    this.turns.push(turn);
    return turn;
  }

  // One event of the stream.
  #hear(turn, { id, choices, usage, error, prompt_progress: progress }) {
    if (error) throw new Error(error.message);
    if (!turn.number) {
      turn.number = Number(/\d+/.exec(id)[0]);
      turn.owner.append(chip(turn.number, (request) => this.page?.choose(request)));
      this.page?.player.mine.add(turn.number);
    }
    if (progress) Object.assign(turn, { total: progress.total, cached: progress.cache });
    for (const name of Object.keys(turn.said)) {
      const text = choices[0]?.delta[name];
      if (!text) continue;
      turn.said[name] += text;
      turn.fresh[name] += text;
      turn.tokens += 1; // about, until the server tells
      turn.first ??= performance.now() - turn.asked;
    }
    turn.reason ||= choices[0]?.finish_reason;
    if (usage) turn.tokens = usage.completion_tokens;
    if (!turn.waits) requestAnimationFrame(() => this.#draw(turn));
    turn.waits = true;
  }

  // What has come since the last frame.
  #draw(turn) {
    const { log } = this.parts;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 50;
    turn.waits = false;
    for (const name of Object.keys(turn.fresh)) {
      turn.views[name].push(turn.fresh[name]);
      turn.fresh[name] = "";
    }
    turn.thoughts.hidden = !turn.said.reasoning_content;
    if (!turn.reason) write(turn.figures, turn.tokens ? count(turn.tokens, "token") : "its prompt is read");
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  #end(turn) {
    turn.end = turn.total + turn.tokens;
    this.isFull = false;
    write(this.parts.note, "");
    const slots = this.turns.slice(-2).map(({ number }) => this.lane?.requests.get(number)?.slot);
    write(turn.figures, figuresOf(turn, slots, this.isTight ? count(this.length - turn.end, "token") : ""));
    this.#draw(turn);
  }

  // The question is in the box again.
  #refuse({ name, message, code, status }) {
    const { box } = this.parts;
    box.value = [this.#takeBack(), box.value].join("\n").trim();
    this.isFull = code === "context_length_exceeded";
    write(this.parts.note, name === "AbortError" ? "" : message);
    if (status === 401) this.wantKey("The server wants its API key before it answers.");
  }

  get isTight() {
    return this.length - this.told.at(-1)?.end < TIGHT * this.length;
  }

  // What can be pressed now.
  #show() {
    const { send, stop, again, drop, anew } = this.parts;
    send.hidden = this.left;
    stop.hidden = !this.left;
    again.hidden = this.left || !this.told.length;
    drop.hidden = again.hidden || !(this.isFull || this.isTight);
    anew.hidden = !this.turns.length;
  }
}
