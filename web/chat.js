// A chat with the served model, in the page that shows the server.
//
// The page is an ordinary client of `/v1/chat/completions`. The id of an answer contains the number of its
// request, so the page knows which row is the reader's. Texts stay in this tab and survive a reload. Only the
// reader drops turns from a conversation, and a question that was refused is put back into the box.

import { Markdown } from "./markdown.js";
import { copy, make, write } from "./elements.js";
import { Frames } from "./player.js";
import { chip } from "./lane_view.js";
import { ask, eventsOf } from "./live.js";
import { count, prefillInWords, span } from "./words.js";

const TIGHT = 0.25; // of a slot: if less is left, the page says so
const NEAR = 50; // pixels to the end of the log: if closer, scroll along with the answer
const AT_ONCE = 0.005; // seconds: an answer this quick came in one piece, so it has no rate
const KEEPS = 500_000; // characters kept for a reload, at most
const PLACE = "nanobatch-conversation";
const TEXTS = ["content", "reasoning_content"]; // of an answer
const OPTIONS = { model: "default", stream: true, stream_options: { include_usage: true }, return_progress: true };

// The lane of the server, if it may be watched.
const lane = () => window.nanobatch?.player.lane;

// A turn as it is sent to the model, and restored after a reload.
function messagesOf({ question, content, reasoning_content: thought }) {
  const answer = { role: "assistant", content: content.text, reasoning_content: thought.text };
  return [{ role: "user", content: question }, answer];
}

// How far a prompt has been read, by its stream.
function readOf({ total, processed, tokens_per_second: rate, left_ms: left }) {
  return prefillInWords({ done: processed, total, tokens_per_s: rate, left_s: left / 1000 });
}

export class Chat {
  constructor(place, wantKey) {
    this.wantKey = wantKey;
    this.parts = {};
    for (const part of place.querySelectorAll("[data-chat-part]")) this.parts[part.dataset.chatPart] = part;
    this.fields = [...place.querySelectorAll("textarea, input")]; // the box is the first
    this.key = "";
    this.turns = [];
    this.waiting = ""; // a question that waits for the answer above
    this.isAtEnd = true; // the newest line is in sight
    this.isTight = false; // little of the slot is left
    this.left = null; // ends the answer that runs
    this.edited = null; // the turn whose question is in the box, to be replaced
    const { form, box, log } = this.parts;
    // A button is named after its method
    form.onclick = ({ target }) => this[target.dataset.chatPart]?.();
    box.onkeydown = (event) => {
      if (event.key === "Escape") this.escape();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    };
    log.onscroll = () => {
      this.isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    };
    this.sizes = new ResizeObserver(() => {
      if (this.isAtEnd) log.scrollTop = log.scrollHeight;
    });
    this.sizes.observe(log);
    place.hidden = false;
    this.#bringBack();
    document.addEventListener("visibilitychange", () => this.#keep()); // a page that is left is hidden first
  }

  // A key was entered: send the question again that waits in the box.
  useKey(key) {
    this.key = key;
    this.send();
  }

  // The turns that the model sees.
  get told() {
    return this.turns.filter(({ element }) => !element.matches(".dropped"));
  }

  get unsent() {
    return [this.waiting, this.parts.box.value].join("\n").trim();
  }

  // --- actions

  // While an answer is running, a question waits; another one is added to it.
  send() {
    if (this.edited) this.#replace();
    this.waiting = this.unsent;
    this.parts.box.value = "";
    this.#ask();
  }

  stop() {
    this.left?.abort();
  }

  // Cancel editing a question, or stop the answer.
  escape() {
    if (this.edited) this.#edit(null);
    else this.stop();
  }

  // Save the conversation as a file for `/load` of `ask.py --chat`.
  save() {
    const system = this.parts.system.value.trim();
    const messages = system ? [{ role: "system", content: system }] : [];
    messages.push(...this.told.flatMap(messagesOf));
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify({ messages }, null, 2)], { type: "application/json" }));
    link.download = "conversation.json";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  again() {
    this.#edit(null);
    this.waiting = this.#takeBack();
    this.#ask();
  }

  anew() {
    this.stop();
    this.#edit(null);
    this.turns = [];
    this.parts.log.replaceChildren();
    this.#show(false);
  }

  // Ask a question again that did not fit.
  drop() {
    const { told } = this;
    for (const turn of told.slice(0, Math.ceil(told.length / 2))) {
      turn.element.classList.add("dropped");
      write(turn.figures, "left out: the model no longer sees this question and its answer");
    }
    this.#show(false);
    this.send();
  }

  // Put a question back into the box. When sent, it replaces this turn and all after it.
  #edit(turn) {
    const { box, note } = this.parts;
    if (turn || this.edited) box.value = turn?.question ?? "";
    this.edited = turn;
    const index = this.turns.indexOf(turn);
    this.turns.forEach(({ element }, i) => element.classList.toggle("edited", turn && i >= index));
    write(note, turn ? "Edit the question and send it: it takes the place of what is faint above. Esc leaves it." : "");
    if (turn) box.focus();
  }

  #replace() {
    this.stop();
    const first = this.turns.indexOf(this.edited);
    for (const { element } of this.turns.splice(first)) element.remove();
    this.edited = null;
    write(this.parts.note, "");
    this.#show(false);
  }

  #show(isTight = this.isTight) {
    const { stop, again, drop, anew, save } = this.parts;
    this.isTight = isTight;
    stop.hidden = !this.left;
    again.hidden = this.left || !this.told.length;
    drop.hidden = again.hidden || !isTight;
    anew.hidden = !this.turns.length;
    save.hidden = again.hidden;
  }

  #takeBack() {
    const turn = this.turns.pop();
    turn.element.remove();
    return turn.question;
  }

  // --- restoring after a reload

  #keep() {
    const turns = this.turns.map((turn) => ({
      said: messagesOf(turn),
      facts: turn.reason ? turn.figures.textContent : "broken off: the page was left",
      name: turn.element.className,
    }));
    let letters = 0;
    const lost = turns.findLastIndex((turn) => (letters += JSON.stringify(turn).length) > KEEPS) + 1;
    const [, ...fields] = this.fields.map((field) => field.value);
    const kept = { fields: [this.unsent, ...fields], lost, turns: turns.slice(lost) };
    try {
      sessionStorage.setItem(PLACE, JSON.stringify(kept));
    } catch {} // storage may be turned off
  }

  #bringBack() {
    let kept = null;
    try {
      kept = JSON.parse(sessionStorage.getItem(PLACE));
    } catch {}
    if (!kept) return;
    this.fields.forEach((field, i) => {
      field.value = kept.fields[i];
    });
    for (const { said, facts, name } of kept.turns) {
      const turn = this.#begin(said[0].content);
      turn.reason = "kept";
      turn.element.className = name;
      for (const part of TEXTS) turn[part].push(said[1][part]);
      write(turn.figures, facts);
      this.#draw(turn);
    }
    const { log, note } = this.parts;
    log.scrollTop = log.scrollHeight;
    const lost = `too long to keep, so the model no longer sees ${count(kept.lost, "older turn")}`;
    write(note, kept.lost ? lost : "");
    this.#show();
  }

  // --- one question

  // Send the waiting question unless an answer is running.
  async #ask() {
    const question = this.waiting;
    write(this.parts.waiting, this.left && question && `waits for the answer above (Esc stops that): ${question}`);
    if (!question || this.left) return;
    this.waiting = "";
    const system = this.parts.system.value.trim();
    const messages = system ? [{ role: "system", content: system }] : [];
    messages.push(...this.told.flatMap(messagesOf), { role: "user", content: question });
    // NaN for an empty field, null in JSON
    const temperature = this.parts.temperature.valueAsNumber;
    const max_tokens = this.parts.length.valueAsNumber;
    const body = JSON.stringify({ messages, temperature, max_tokens, ...OPTIONS });
    const turn = this.#begin(question);
    turn.element.scrollIntoView({ block: "nearest" });
    this.left = new AbortController();
    const { signal } = this.left;
    this.#show();
    try {
      const answer = await ask("v1/chat/completions", { key: this.key, signal, body });
      for await (const { data } of eventsOf(answer.body)) this.#hear(turn, data);
    } catch (error) {
      turn.error = error;
      turn.reason = signal.aborted ? "stopped" : `broken off: ${error.message}`;
    }
    this.left = null;
    if (!this.turns.includes(turn)) this.#show(); // there is a new conversation
    else if (turn.error && !turn.tokens) this.#refuse(turn.error);
    else this.#end(turn);
    this.#ask();
  }

  // The fields of a turn have the protocol's names.
  #begin(question) {
    const element = this.parts.turn.content.firstElementChild.cloneNode(true);
    const [owner, asked, edit, thoughts, thought, reply, figures, copies] = element.querySelectorAll("[data-of]");
    const turn = { question, element, owner, thoughts, figures, copies, tokens: 0, about: "about ", asked: performance.now() };
    edit.onclick = () => this.#edit(turn);
    copies.onclick = () => copy(turn.content.text, (said) => write(copies, said), "select the answer");
    turn.frames = new Frames(() => this.#draw(turn));
    turn.content = new Markdown(reply);
    turn.reasoning_content = new Markdown(thought);
    write(asked, question);
    this.parts.log.append(element);
    this.sizes.observe(element);
    this.turns.push(turn);
    return turn;
  }

  // One event of the stream.
  #hear(turn, { id, choices, usage, error, prompt_progress: progress }) {
    if (error) throw new Error(error.message);
    if (!turn.number) {
      turn.number = Number(/\d+/.exec(id)[0]);
      turn.owner.append(chip(turn.number, (request) => window.nanobatch?.choose(request)));
      window.nanobatch?.player.mine.add(turn.number);
    }
    if (progress) turn.progress = progress;
    for (const name of TEXTS) {
      const text = choices[0]?.delta[name];
      if (!text) continue;
      turn[name].push(text);
      turn.tokens += 1; // a piece may have several tokens; the server tells at the end
      turn.last = performance.now();
      turn.first ??= turn.last;
    }
    turn.reason ||= choices[0]?.finish_reason;
    if (usage) Object.assign(turn, { tokens: usage.completion_tokens, about: "" });
    turn.frames.ask();
  }

  // Draw what has come since the last frame.
  #draw(turn) {
    turn.content.draw();
    turn.reasoning_content.draw();
    turn.thoughts.hidden = !turn.reasoning_content.text;
    turn.copies.hidden = !turn.reason || !turn.content.text;
    if (turn.reason) return;
    const isRead = turn.tokens || !turn.progress;
    write(turn.figures, isRead ? turn.about + count(turn.tokens, "token") : `reading: ${readOf(turn.progress)}`);
  }

  // The engine's own figures of an answer.
  #end(turn) {
    const { total, cache } = turn.progress;
    const length = lane()?.limits.max_len;
    const room = length - total - turn.tokens;
    const [before, slot] = this.turns.slice(-2).map(({ number }) => lane()?.requests.get(number)?.slot);
    const whose = Number.isInteger(slot) && slot === before ? "its" : "a";
    const of = cache ? ` of ${total.toLocaleString("en")}` : "";
    const said = [`read ${(total - cache).toLocaleString("en")}${of} tokens`];
    if (cache) said.push(`${cache.toLocaleString("en")} were still in ${whose} slot`);
    said.push(`first token after ${span((turn.first - turn.asked) / 1000)}`);
    const seconds = (turn.last - turn.first) / 1000;
    const rate = seconds > AT_ONCE ? `, ${Math.round((turn.tokens - 1) / seconds)} tokens/s` : "";
    said.push(turn.about + count(turn.tokens, "token") + rate);
    if (turn.reason === "length") said.push("cut, as long as it may be");
    else if (turn.reason !== "stop") said.push(turn.reason);
    this.#show(room < TIGHT * length);
    if (this.isTight) said.push(`${count(room, "token")} are left: begin anew, or leave the older half out`);
    write(turn.figures, said.join("; "));
    write(this.parts.note, "");
    this.#draw(turn);
  }

  // Put the question back into the box.
  #refuse({ name, message, code, status }) {
    const { box, note } = this.parts;
    box.value = `${this.#takeBack()}\n${this.unsent}`.trim();
    this.waiting = "";
    this.#show(code === "context_length_exceeded");
    let why = name === "TypeError" ? `The server does not answer: ${message}.` : message;
    if (name === "AbortError") why = "";
    if (status === 401) {
      why = "The server wants its API key before it answers: type it above.";
      this.wantKey(this, why);
    }
    write(note, why);
  }
}
