// The conversations stored in this browser, and their list.
//
// Each conversation is a separate entry of localStorage, so that a full storage or a corrupt entry does not affect
// the others. Entries have versions, so that a tab does not overwrite another tab's turns in the same conversation.

import { buttonFor, make, write } from "./elements.js";
import { count, shorten } from "./words.js";

const PLACE = "nanobatch-conversation-";
const TITLE = 60; // maximum length of a title in characters
const LONGEST_FILE = 10_000_000; // maximum length of a file in characters, as in `ask.py --chat`
const DAY = { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" };

export const nameAnew = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

// --- the browser's storage, which may be disabled or full

export class Shelf {
  // The ids of all conversations.
  get all() {
    try {
      const keys = Object.keys(localStorage).filter((key) => key.startsWith(PLACE));
      return keys.map((key) => key.slice(PLACE.length));
    } catch {
      return [];
    }
  }

  text(id) {
    try {
      return localStorage.getItem(PLACE + id);
    } catch {
      return null;
    }
  }

  // Return a conversation, or null if it is missing or corrupt.
  read(id) {
    try {
      const kept = JSON.parse(this.text(id));
      return isWhole(kept) ? kept : null;
    } catch {
      return null;
    }
  }

  // Store a conversation. Return "" or the reason for a failure: "full" or "off".
  put(id, text) {
    try {
      localStorage.setItem(PLACE + id, text);
      return "";
    } catch (error) {
      return /quota/i.test(error.name) ? "full" : "off";
    }
  }

  remove(id) {
    localStorage.removeItem(PLACE + id);
  }

  get megabytes() {
    const letters = this.all.reduce((sum, id) => sum + this.text(id).length, 0);
    return `${(letters / 1e6).toFixed(1)} MB`;
  }
}

const areTexts = (...values) => values.every((value) => typeof value === "string");

// Return true for a valid turn. Storage may contain anything, because users can edit it.
function isTurn(turn) {
  if (!areTexts(turn?.question, turn.content, turn.reasoning_content, turn.facts, turn.name)) return false;
  return areFiles(turn.files);
}

const areFiles = (files) => Array.isArray(files) && files.every((file) => areTexts(file?.name, file?.text));
const areFields = (fields) => Array.isArray(fields) && areTexts(...fields);

function isWhole(kept) {
  return areTexts(kept?.title) && areFields(kept.fields) && Array.isArray(kept.turns) && kept.turns.every(isTurn);
}

// Return the text that the search looks at.
function wordsOf({ title, turns }) {
  return [title, ...turns.flatMap(({ question, content }) => [question, content])].join("\n").toLowerCase();
}

// Return true for the valid state of a tab.
export function isTab(tab) {
  return areTexts(tab?.id, tab?.text) && areFields(tab.fields) && areFiles(tab.files);
}

// --- conversations as messages

// Return the text that is sent: the files, then the question. Each file is in a code fence longer than any inside it.
export function withFiles(question, files) {
  const parts = files.map(({ name, text }) => {
    const marks = (text.match(/`{3,}/g) ?? []).map((mark) => mark.length);
    const fence = "`".repeat(Math.max(2, ...marks) + 1);
    return `${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [...parts, question].filter(Boolean).join("\n\n");
}

// Parse a file saved by this page or by the terminal's chat. Return its system message and turns.
export function readMessages(text) {
  if (text.length > LONGEST_FILE) throw new Error(`it has ${text.length} characters; at most ${LONGEST_FILE} are read`);
  const { messages } = JSON.parse(text);
  if (!Array.isArray(messages)) throw new Error("it has no messages");
  const first = messages[0]?.role === "system" ? messages.shift().content : "";
  const turns = [];
  for (let i = 0; i < messages.length; i += 2) {
    const [asked, answer] = messages.slice(i, i + 2);
    if (asked?.role !== "user" || answer?.role !== "assistant") {
      throw new Error("user and assistant must alternate, and the last message is the assistant's");
    }
    const { content, reasoning_content = "" } = answer;
    turns.push({ question: asked.content, content, reasoning_content, files: [], facts: "from a file", name: "turn" });
  }
  if (!areTexts(first) || !turns.every(isTurn)) throw new Error("each message must be a string");
  return { system: first, turns };
}

// --- the list

// The list of conversations. `open` is called with the id of the chosen one, `closed` with the id of a deleted one.
export class TalkList {
  constructor(parts, { open, closed }) {
    this.shelf = new Shelf();
    this.parts = parts;
    this.open = open;
    this.closed = closed;
    this.current = "";
    this.deleted = null; // {id, title, text} of the last deleted conversation, for undo
    parts.search.oninput = () => this.draw();
    parts.talks.ontoggle = () => this.draw();
    parts.undo.onclick = () => this.#undo();
    addEventListener("storage", () => this.draw()); // another tab has changed the storage
  }

  draw() {
    const { talks, search, list, undo } = this.parts;
    const { all } = this.shelf;
    const chosen = all.length > 1 ? `Conversations: ${all.length}` : "Conversations";
    write(talks.querySelector("summary"), chosen);
    talks.hidden = !all.length && !this.deleted;
    undo.hidden = !this.deleted;
    if (this.deleted) write(undo, `Bring back “${this.deleted.title}”`);
    search.hidden = all.length < 5;
    if (!talks.open || list.querySelector("input")) return; // a title is being typed
    const wanted = search.hidden ? "" : search.value.trim().toLowerCase();
    const known = all.map((id) => ({ id, kept: this.shelf.read(id) }));
    known.sort((one, other) => (other.kept?.at ?? 0) - (one.kept?.at ?? 0));
    const found = known.filter(({ kept }) => !wanted || (kept && wordsOf(kept).includes(wanted)));
    list.replaceChildren(...found.map((each) => this.#row(each)));
  }

  #row({ id, kept }) {
    const title = kept?.title || "without a title";
    const remove = buttonFor(() => this.#remove(id, title), "tab", "Delete");
    if (!kept) return make("li", "", make("span", "title", "A conversation that cannot be read"), remove);
    const name = buttonFor(() => this.open(id), "title", title);
    if (id === this.current) name.ariaCurrent = "true";
    const when = new Date(kept.at).toLocaleString("en", DAY);
    const facts = make("span", "facts", `${count(kept.turns.length, "question")}, ${when}`);
    const row = make("li", "", name, facts, buttonFor(() => this.#rename(id, row), "tab", "Rename"), remove);
    return row;
  }

  // Replace the title by an input field. Enter saves it, Esc cancels.
  #rename(id, row) {
    const field = make("input", "title");
    field.value = row.querySelector(".title").textContent;
    field.ariaLabel = "Title";
    row.replaceChildren(field);
    field.focus();
    field.select();
    const end = () => {
      field.onblur = null;
      row.remove();
      this.draw();
    };
    field.onblur = end;
    field.onkeydown = (event) => {
      if (event.key === "Enter" && !event.isComposing && field.value.trim()) {
        const kept = this.shelf.read(id);
        if (kept) this.shelf.put(id, JSON.stringify({ ...kept, title: field.value.trim().slice(0, TITLE) }));
      }
      if (event.key === "Enter" || event.key === "Escape") end();
    };
  }

  #remove(id, title) {
    this.deleted = { id, title, text: this.shelf.text(id) };
    this.shelf.remove(id);
    this.closed(id);
    this.draw();
  }

  #undo() {
    const { id, text } = this.deleted;
    if (!this.shelf.put(id, text)) this.deleted = null;
    this.draw();
  }

  // Store a conversation: `talk` is {id, version}, `body` its content. Return a message for the user, or "".
  keep(talk, body) {
    const kept = this.shelf.read(talk.id);
    const isOther = kept && kept.version !== talk.version;
    if (isOther) talk.id = nameAnew();
    const first = body.turns[0];
    const title = kept?.title ?? shorten((first.question || (first.files[0]?.name ?? "")).replace(/\s+/g, " "), TITLE);
    const version = nameAnew();
    const text = JSON.stringify({ title, version, at: Date.now(), ...body });
    const why = this.shelf.put(talk.id, text);
    if (!why) talk.version = version;
    this.current = talk.id;
    this.draw();
    if (why === "full") {
      const full = `The browser has no more room (${this.shelf.megabytes} are kept), so the newest turns are not kept`;
      return `${full}: save this conversation, or delete others.`;
    }
    return isOther ? "Another tab has gone on with this conversation, so it is kept as a second one." : "";
  }
}
