// Text files attached to the next question. The server counts their tokens before they are sent.

import { buttonFor, make } from "./elements.js";
import { count } from "./words.js";

const LARGEST_FILE = 2_000_000; // bytes; a request body may have 4 MiB
const LEAST = 16; // minimum number of tokens that must stay free for the answer

const said = (number) => number.toLocaleString("en");

export class Attachments {
  // `counted`: returns the number of prompt tokens with these files. `limit`: returns the number of tokens in a
  // slot. `say`: shows a message; its second argument is the error, if any.
  constructor(place, { counted, limit, say }) {
    Object.assign(this, { place, counted, limit, say });
    this.files = []; // {name, text, tokens}; files that were put back have no count
    this.work = Promise.resolve(); // resolves when all files are counted
    this.waiting = 0; // number of files being counted
    this.isRefused = false; // true if a file was refused
  }

  // Add files that were dropped, pasted or chosen. They are counted one after another.
  add(files) {
    this.isRefused = false;
    for (const file of files) {
      this.waiting += 1;
      this.work = this.work.then(async () => {
        try {
          await this.#take(file);
          this.say("");
        } catch (error) {
          this.isRefused = true;
          this.say(error.message, error);
        }
        this.waiting -= 1;
        this.draw();
      });
    }
    this.draw();
  }

  async #take(file) {
    const text = await textOf(file);
    let before;
    let total;
    try {
      const wanted = [this.files, [...this.files, { name: file.name, text }]];
      [before, total] = await Promise.all(wanted.map((files) => this.counted(files)));
    } catch (error) {
      const why = error.status === 400 ? "does not fit" : "is not attached"; // 400 means longer than a slot
      error.message = `${file.name} ${why}: ${error.message}.`;
      throw error;
    }
    const tokens = total - before;
    const limit = await this.limit();
    if (total + LEAST > limit) {
      const whole = `with the conversation that makes ${said(total)}, and a slot holds ${said(limit)}, answer included`;
      throw new Error(`${file.name} has ${count(tokens, "token")}; ${whole}: begin anew, or take a shorter file.`);
    }
    this.files.push({ name: file.name, text, tokens });
  }

  // Remove and return all files.
  take() {
    const files = this.files.map(({ name, text }) => ({ name, text }));
    this.put([]);
    return files;
  }

  put(files) {
    this.files = files;
    this.draw();
  }

  draw() {
    const chips = this.files.map((file) => {
      const remove = buttonFor(() => this.put(this.files.filter((each) => each !== file)), "tab", "×");
      remove.ariaLabel = `remove ${file.name}`;
      const tokens = file.tokens === undefined ? "" : `, ${count(file.tokens, "token")}`;
      return make("span", "attached", file.name + tokens, remove);
    });
    if (this.waiting) chips.push(make("span", "attached", `counting ${count(this.waiting, "file")} …`));
    this.place.replaceChildren(...chips);
  }
}

async function textOf(file) {
  if (file.size > LARGEST_FILE) {
    throw new Error(`${file.name} has ${said(file.size)} bytes; at most ${said(LARGEST_FILE)} can be attached.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {}
  throw new Error(`${file.name} is not text (UTF-8), and the model reads nothing else.`);
}
