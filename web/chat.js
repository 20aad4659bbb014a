// A chat with the served model on the server's page.
//
// The page is an ordinary client of `/v1/chat/completions`. An answer's id contains its request's number, so
// the page can mark the user's own row. Conversations are stored in this browser (talks.js). The page never
// drops turns on its own, and puts a refused question back into the box.

import { Markdown } from "./markdown.js";
import { copy, make, write } from "./elements.js";
import { Frames } from "./player.js";
import { chip } from "./lane_view.js";
import { ask, eventsOf } from "./live.js";
import { TalkList, isTab, nameAnew, readMessages, withFiles } from "./talks.js";
import { Attachments } from "./attachments.js";
import { count, prefillInWords, span } from "./words.js";

const TIGHT = 0.25; // fraction of a slot below which the page says how much is left
const NEAR = 50; // pixels; closer to the end of the log, it scrolls along with the answer
const AT_ONCE = 0.005; // seconds; a faster answer arrived in one piece, so it has no meaningful rate
const TAB = "nanobatch-tab"; // key in sessionStorage for the tab's conversation and unsent question
const TEXTS = ["content", "reasoning_content"]; // text fields of an answer
const OPTIONS = { stream: true, stream_options: { include_usage: true }, return_progress: true };
const NOTHING = { text: "", files: [] }; // an empty question

// The server's lane, or undefined if the page may not watch.
const lane = () => window.nanobatch?.player.lane;

// Convert a turn to messages for the model.
function messagesOf({ question, files, content, reasoning_content: thought }) {
  const answer = { role: "assistant", content: content.text, reasoning_content: thought.text };
  return [{ role: "user", content: withFiles(question, files) }, answer];
}

// Join two questions, such as those sent while an answer was running.
function joined(one, other) {
  return { text: [one.text, other.text].join("\n").trim(), files: [...one.files, ...other.files] };
}

// Describe the progress of a prompt from an event of its stream.
function readOf({ total, processed, tokens_per_second: rate, left_ms: left }) {
  return prefillInWords({ done: processed, total, tokens_per_s: rate, left_s: left / 1000 });
}

export class Chat {
  constructor(place, wantKey) {
    this.wantKey = wantKey;
    this.parts = {};
    for (const part of place.querySelectorAll("[data-chat-part]")) this.parts[part.dataset.chatPart] = part;
    const { form, box, log, file, pick } = this.parts;
    this.fields = [this.parts.system, this.parts.temperature, this.parts.length]; // saved with a conversation
    this.model = "default";
    this.key = "";
    this.turns = [];
    this.talk = { id: nameAnew(), version: "" };
    this.kept = ""; // the conversation as last saved
    this.waiting = NOTHING; // a question to send after the running answer
    this.isAtEnd = true; // the log is scrolled to the end
    this.isTight = false; // the slot is almost full
    this.left = null; // AbortController of the running answer
    this.isLeft = false; // the page is being closed or hidden
    this.edited = null; // the turn whose question is being edited
    this.replaced = []; // the turns that the running question replaces; they return if it is refused
    this.at = 0; // their place among the turns
    this.refused = null; // the turn whose question was asked again and refused
    this.list = new TalkList(this.parts, { open: (id) => this.#open(id), closed: (id) => this.#close(id) });
    this.files = new Attachments(this.parts.files, {
      counted: (files) => this.#count(files),
      limit: () => this.#limit(),
      say: (text, error) => {
        write(this.parts.note, text);
        if (error?.status === 401) this.wantKey(this, text);
      },
    });
    // Each button's name is the name of its method
    form.onclick = ({ target }) => this[target.dataset.chatPart]?.();
    box.onkeydown = (event) => {
      if (event.key === "Escape") this.escape();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    };
    box.onpaste = (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.files.add(event.clipboardData.files);
    };
    // By default the browser would navigate to a dropped file
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.files.add(event.dataTransfer.files);
    });
    file.onchange = () => this.#openFile(file);
    pick.onchange = () => {
      this.files.add([...pick.files]);
      pick.value = "";
    };
    log.onscroll = () => {
      this.isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    };
    this.sizes = new ResizeObserver(() => {
      if (this.isAtEnd) log.scrollTop = log.scrollHeight;
    });
    this.sizes.observe(log);
    place.hidden = false;
    this.#bringBackTab();
    document.addEventListener("visibilitychange", () => this.#keep()); // also fires when the page is closed
    addEventListener("pagehide", () => {
      this.isLeft = true; // requests are about to fail as if the server were gone
    });
    addEventListener("pageshow", () => {
      this.isLeft = false;
    });
  }

  // Use a key that the user entered, and send the refused question again.
  useKey(key) {
    this.key = key;
    this.#retry();
  }

  // The turns that are sent to the model.
  get told() {
    return this.turns.filter(({ element }) => !element.matches(".dropped"));
  }

  // The waiting question together with the text in the box.
  get unsent() {
    return joined(this.waiting, { text: this.parts.box.value, files: this.files.files });
  }

  // --- actions

  // Send the text in the box. While an answer is running, it waits, joined to earlier waiting text.
  async send() {
    if (this.files.waiting) {
      await this.files.work;
      if (this.files.isRefused) return; // the question probably needs the file
    }
    const { text, files } = this.unsent;
    if (this.edited && (text || files.length)) this.#replace(this.turns.indexOf(this.edited));
    this.waiting = joined(this.waiting, { text: this.parts.box.value, files: this.files.take() });
    this.parts.box.value = "";
    this.#ask();
  }

  stop() {
    this.left?.abort();
  }

  // Cancel editing a question, or stop the answer.
  escape() {
    if (!this.edited) return this.stop();
    this.parts.box.value = "";
    this.files.put([]);
    this.#mark(null);
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

  // Open a file of `save`, or of the terminal's `/save`.
  open() {
    this.parts.file.click();
  }

  attach() {
    this.parts.pick.click();
  }

  // Ask the last question again. The box keeps its text.
  again() {
    const turn = this.turns.at(-1);
    const { question: text, files } = turn;
    if (!text && !files.length) return write(this.parts.note, "The last question is empty.");
    this.#replace(this.turns.length - 1);
    this.waiting = { text, files };
    this.#ask(turn);
  }

  anew() {
    this.#leave();
    this.#goOnWith({ id: nameAnew(), version: "" }, []);
  }

  // Drop the older half of the turns and ask the question again that did not fit.
  drop() {
    const { told } = this;
    for (const turn of told.slice(0, Math.ceil(told.length / 2))) {
      turn.element.classList.add("dropped");
      write(turn.figures, "left out: the model no longer sees this question and its answer");
    }
    this.#show(false);
    this.#retry();
  }

  // Send the refused question again: the one that was asked again, or the one in the box.
  #retry() {
    if (this.refused && this.refused === this.turns.at(-1)) this.again();
    else this.send();
  }

  // Edit a turn's question in the box. Sending it replaces this turn and all later ones.
  #edit(turn) {
    const { box } = this.parts;
    box.value = turn.question;
    this.files.put([...turn.files]);
    this.#mark(turn);
    box.focus();
  }

  // Mark the turns that the question in the box will replace: this one and all later ones, or none for null.
  #mark(turn) {
    this.edited = turn;
    const index = this.turns.indexOf(turn);
    this.turns.forEach(({ element }, i) => element.classList.toggle("edited", turn && i >= index));
    const how = "Edit the question and send it: it takes the place of what is faint above. Esc leaves it.";
    write(this.parts.note, turn ? how : "");
  }

  // Remove the turns from this index on. They are gone once the answer to the next question begins.
  #replace(first) {
    this.stop();
    this.at = first;
    this.replaced.unshift(...this.turns.splice(first));
    for (const { element } of this.replaced) element.remove();
    this.#mark(null);
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
    const { element, question, files } = this.turns.pop();
    element.remove();
    return { text: question, files };
  }

  // Put a question back into the box, before the text that is already there.
  #putBack(question) {
    const { text, files } = joined(question, this.unsent);
    this.parts.box.value = text;
    this.files.put(files);
    this.waiting = NOTHING;
  }

  // --- conversations

  // Save and leave the conversation before another one is opened. A waiting question returns to the box.
  #leave() {
    this.#mark(null);
    this.#putBack(NOTHING);
    this.#keep("stopped: another conversation was opened");
    this.stop();
  }

  // Show a conversation. `talk`: {id, version}. `turns`: the stored turns.
  #goOnWith(talk, turns) {
    this.talk = talk;
    this.kept = "";
    this.turns = [];
    this.replaced = [];
    this.parts.log.replaceChildren();
    for (const kept of turns) {
      const turn = this.#begin(kept);
      turn.reason = "kept";
      turn.element.className = kept.name;
      for (const part of TEXTS) turn[part].push(kept[part]);
      write(turn.figures, kept.facts);
      this.#draw(turn);
    }
    const { log } = this.parts;
    log.scrollTop = log.scrollHeight;
    this.#mark(null);
    this.#show(false);
    this.list.current = talk.id;
    this.list.draw();
  }

  #open(id) {
    if (id === this.talk.id) return;
    this.#leave();
    this.#bringBack(id);
  }

  #bringBack(id) {
    const kept = this.list.shelf.read(id);
    if (!kept) return;
    this.#goOnWith({ id, version: kept.version }, kept.turns);
    this.#fill(kept.fields);
    this.kept = JSON.stringify(this.#body());
  }

  #fill(values) {
    this.fields.forEach((field, i) => {
      field.value = values[i];
    });
  }

  // Start a new conversation if the deleted one was open.
  #close(id) {
    if (id !== this.talk.id) return;
    this.stop();
    this.#goOnWith({ id: nameAnew(), version: "" }, []);
  }

  async #openFile(input) {
    const [file] = input.files;
    input.value = "";
    let found;
    try {
      found = readMessages(await file.text());
    } catch (error) {
      return write(this.parts.note, `${file.name} is not a conversation: ${error.message}.`);
    }
    this.#leave();
    this.#goOnWith({ id: nameAnew(), version: "" }, found.turns);
    this.parts.system.value = found.system;
    this.#keep();
  }

  // Return the conversation in its stored form. `broken`: the note on an answer that is still running.
  #body(broken) {
    const turns = this.turns.toSpliced(this.at, 0, ...this.replaced).map((turn) => ({
      question: turn.question,
      files: turn.files,
      content: turn.content.text,
      reasoning_content: turn.reasoning_content.text,
      facts: turn.reason ? turn.figures.textContent : broken,
      name: turn.element.className,
    }));
    return { fields: this.fields.map((field) => field.value), turns };
  }

  // Store the conversation in the browser, and its id with the unsent question in the tab.
  #keep(broken = "broken off: the page was left") {
    const body = this.#body(broken);
    const text = JSON.stringify(body);
    if (body.turns.length && text !== this.kept) {
      const said = this.list.keep(this.talk, body);
      if (said) write(this.parts.note, said);
      else this.kept = text;
    }
    const { unsent } = this;
    const tab = { id: this.talk.id, text: unsent.text, files: unsent.files, fields: body.fields };
    try {
      sessionStorage.setItem(TAB, JSON.stringify(tab));
    } catch {} // storage may be disabled or full
  }

  // Restore the tab's conversation and unsent question after a reload.
  #bringBackTab() {
    let tab = null;
    try {
      tab = JSON.parse(sessionStorage.getItem(TAB));
    } catch {}
    this.list.draw();
    if (!isTab(tab)) return;
    this.#bringBack(tab.id);
    this.#fill(tab.fields);
    this.#putBack(tab);
  }

  // --- queries to the server

  // Return the number of prompt tokens if these files are attached to the next question.
  async #count(files) {
    const system = this.parts.system.value.trim();
    const told = this.told.flatMap(messagesOf).map(({ role, content }) => ({ role, content }));
    const messages = [...told, { role: "user", content: withFiles("", files) }];
    const body = JSON.stringify({ model: this.model, system, messages });
    const answer = await ask("v1/messages/count_tokens", { key: this.key, body });
    return (await answer.json()).input_tokens;
  }

  // Return the number of tokens in a slot.
  async #limit() {
    const answer = await ask("v1/models", { key: this.key });
    const { data } = await answer.json();
    return (data.find(({ id }) => id === this.model) ?? data[0]).max_model_len;
  }

  // --- one question

  // Send the waiting question unless an answer is running. `repeated`: the turn whose question is asked again.
  async #ask(repeated = null) {
    const { text, files } = this.waiting;
    const waits = [...files.map(({ name }) => name), text].filter(Boolean).join(", ");
    write(this.parts.waiting, this.left && waits ? `waits for the answer above (Esc stops that): ${waits}` : "");
    if (!waits || this.left) return;
    this.waiting = NOTHING;
    this.refused = null;
    const system = this.parts.system.value.trim();
    const messages = system ? [{ role: "system", content: system }] : [];
    messages.push(...this.told.flatMap(messagesOf), { role: "user", content: withFiles(text, files) });
    // An empty field gives NaN, which becomes null in JSON
    const temperature = this.parts.temperature.valueAsNumber;
    const max_tokens = this.parts.length.valueAsNumber;
    const body = JSON.stringify({ model: this.model, messages, temperature, max_tokens, ...OPTIONS });
    const turn = this.#begin({ question: text, files });
    turn.element.scrollIntoView({ block: "nearest" });
    this.left = new AbortController();
    const { signal } = this.left;
    this.#show();
    try {
      const answer = await ask("v1/chat/completions", { key: this.key, signal, body });
      for await (const { event, data } of eventsOf(answer.body)) {
        if (event === "comment") this.#wait(turn, data);
        else this.#hear(turn, data);
      }
    } catch (error) {
      if (this.isLeft) return; // already saved
      turn.error = error;
      turn.reason = signal.aborted ? "stopped" : `broken off: ${error.message}`;
    }
    this.left = null;
    const isEmpty = turn.error && !turn.tokens;
    if (!this.turns.includes(turn)) {
      // Another conversation was opened, or another question replaces this one
      if (isEmpty) this.replaced = this.replaced.filter((each) => each !== turn);
      this.#show();
    } else if (isEmpty) this.#refuse(turn.error, repeated);
    else {
      this.replaced = [];
      this.#end(turn);
      this.#keep();
    }
    this.#ask();
  }

  // Add a turn. Its text fields have the protocol's names, such as `reasoning_content`.
  #begin({ question, files }) {
    const element = this.parts.turn.content.firstElementChild.cloneNode(true);
    const [owner, asked, edit, thoughts, thought, reply, figures, copies] = element.querySelectorAll("[data-of]");
    const turn = { question, files, element, owner, thoughts, figures, copies, tokens: 0, about: "about ", asked: performance.now() };
    edit.onclick = () => this.#edit(turn);
    copies.onclick = () => copy(turn.content.text, (said) => write(copies, said), "select the answer");
    turn.frames = new Frames(() => this.#draw(turn));
    turn.content = new Markdown(reply);
    turn.reasoning_content = new Markdown(thought);
    write(asked, question);
    asked.before(...files.map(({ name }) => make("span", "attached", name)));
    this.parts.log.append(element);
    this.sizes.observe(element);
    this.turns.push(turn);
    return turn;
  }

  // Show a comment of the stream that says which model the request is waiting for.
  #wait(turn, words) {
    if (!turn.number && /^(loading|waiting)/.test(words)) write(turn.figures, words);
  }

  // Handle one event of the stream.
  #hear(turn, { id, model, choices, usage, error, prompt_progress: progress }) {
    if (error) throw new Error(error.message);
    if (!turn.number) {
      turn.model = model;
      turn.number = Number(/\d+/.exec(id)[0]);
      turn.owner.append(chip(turn.number, (request) => window.nanobatch?.choose(request)));
      window.nanobatch?.player.mine.add(turn.number);
    }
    if (progress) turn.progress = progress;
    for (const name of TEXTS) {
      const text = choices[0]?.delta[name];
      if (!text) continue;
      turn[name].push(text);
      turn.tokens += 1; // approximate, since a piece may have several tokens; the last event has the exact count
      turn.last = performance.now();
      turn.first ??= turn.last;
      if (this.turns.includes(turn)) this.replaced = [];
    }
    turn.reason ||= choices[0]?.finish_reason;
    if (usage) Object.assign(turn, { tokens: usage.completion_tokens, about: "" });
    turn.frames.ask();
  }

  // Draw the text that has arrived since the last frame.
  #draw(turn) {
    turn.content.draw();
    turn.reasoning_content.draw();
    turn.thoughts.hidden = !turn.reasoning_content.text;
    turn.copies.hidden = !turn.reason || !turn.content.text;
    if (turn.reason) return;
    const isRead = turn.tokens || !turn.progress;
    write(turn.figures, isRead ? turn.about + count(turn.tokens, "token") : `reading: ${readOf(turn.progress)}`);
  }

  // Show the figures of a finished answer.
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
    if (this.model !== "default") said.push(`by ${turn.model}`);
    if (turn.reason === "length") said.push("cut, as long as it may be");
    else if (turn.reason !== "stop") said.push(turn.reason);
    this.#show(room < TIGHT * length);
    if (this.isTight) said.push(`${count(room, "token")} are left: begin anew, or leave the older half out`);
    write(turn.figures, said.join("; "));
    write(this.parts.note, "");
    this.#draw(turn);
  }

  // Put a refused question back into the box and say why. What it was to replace returns, and is marked again.
  // A question that was asked again returns with its turn, so it is not put into the box.
  #refuse({ name, message, code, status }, repeated) {
    const { log, note } = this.parts;
    const question = this.#takeBack();
    this.#putBack(repeated ? NOTHING : question);
    this.refused = repeated;
    const first = repeated ? null : (this.replaced[0] ?? null);
    for (const turn of this.replaced) {
      this.turns.push(turn);
      log.append(turn.element);
      this.#draw(turn);
    }
    this.replaced = [];
    this.#mark(this.turns.includes(this.edited) ? this.edited : first);
    this.#show(code === "context_length_exceeded");
    let why = name === "TypeError" ? `The server does not answer: ${message}.` : message;
    if (name === "AbortError") why = "";
    if (status === 401) {
      why = "The server wants its API key before it answers: type it above.";
      this.wantKey(this, why);
    }
    write(note, `${why} ${note.textContent}`.trim());
  }
}
