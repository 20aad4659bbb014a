// Text files that go with the next question. The server counts their tokens before they are sent.

import { buttonFor, make } from "./elements.js";
import { count } from "./words.js";

const LARGEST_FILE = 2_000_000; // bytes of a file: a request has at most 4 MiB
const LEAST = 16; // tokens of an answer for which there must be room

const said = (number) => number.toLocaleString("en");

export class Attachments {
  // `counted`: the tokens of the prompt with these files; `limit`: the tokens of a slot; `say`: a line for the
  // reader, and the error.
  constructor(place, { counted, limit, say }) {
    Object.assign(this, { place, counted, limit, say });
    this.files = []; // {name, text, tokens}
    this.work = Promise.resolve(); // until all files are counted
    this.waiting = 0; // files that are being counted
    this.isRefused = false; // one of them was
  }

  // Files that were dropped, pasted or chosen, one after the other.
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
      before = this.files.at(-1)?.total ?? (await this.counted(this.files));
      total = await this.counted([...this.files, { name: file.name, text }]);
    } catch (error) {
      const why = error.status === 400 ? "does not fit" : "is not attached"; // longer than a slot, or no answer
      error.message = `${file.name} ${why}: ${error.message}.`;
      throw error;
    }
    const tokens = total - before;
    const limit = await this.limit();
    if (total + LEAST > limit) {
      const whole = `with the conversation that makes ${said(total)}, and a slot holds ${said(limit)}, answer included`;
      throw new Error(`${file.name} has ${count(tokens, "token")}; ${whole}: begin anew, or take a shorter file.`);
    }
    this.files.push({ name: file.name, text, tokens, total });
  }

  // The files, which are gone from here.
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
  throw new Error(`${file.name} is no text (UTF-8), and the model reads nothing else.`);
}
