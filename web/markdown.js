// Renders a model's Markdown while it is being generated.
//
// A complete line is drawn once. Only the newest line is redrawn, and long lines are cut into pieces, so the total
// time is linear in the answer's length for any content. Elements are created with `make`, and text is never parsed
// as HTML. Links and images appear as text with their address, bidirectional control characters are made visible,
// and lists nest at most `DEEP` levels.

import { buttonFor, copy, make, write } from "./elements.js";
import { coloured, colouring } from "./code.js";
import { inOneLine } from "./words.js";

const DEEP = 6; // maximum depth of nested lists; deeper items join the innermost list
const MANY = 40; // maximum number of children of an element, because the browser lays out a changed element again
const LONG = 1000; // maximum number of characters of a line that are redrawn
// The first piece of a longer line: at most 500 characters, if possible up to a space
const PIECE = /^.{1,500}(?<= )|^.{500}/su;
const FENCE = /^(`{3,}|~{3,}) *([^\s`]*)[^`]*$/;
const RULE = /^([-*_])( *\1){2,} *$/;
const HEADING = /^#{1,6} +/;
const ITEM = /^(?:[-*+]|(\d{1,9})[.)]) +(.*)/;
const QUOTE = /^(?:> ?)+/;
const MARKED = /(`{1,3})(.+?)\1|(\*\*|__)(?=\S)(.*?\S)\3|(?<!\w)([*_])(?=\S)(.*?\S)\5(?!\w)/g;

// Add a text to an element, with child elements for code, bold and italic words.
function filled(element, text) {
  let at = 0;
  for (const found of text.matchAll(MARKED)) {
    const [all, , code, , bold, , slanted] = found;
    element.append(inOneLine(text.slice(at, found.index)));
    if (code) element.append(make("code", "", inOneLine(code)));
    else element.append(filled(make(bold ? "strong" : "em"), bold ?? slanted));
    at = found.index + all.length;
  }
  element.append(inOneLine(text.slice(at)));
  element.dir = "auto";
  return element;
}

export class Markdown {
  constructor(root) {
    this.root = root;
    this.text = ""; // the answer so far
    this.fresh = ""; // text that is not drawn yet
    this.line = ""; // the newest line (the last piece of a long one), which is redrawn
    this.drawn = null; // the newest line's node
    this.before = {}; // block, lists, fence and isCut, before the newest line was drawn
    this.block = null; // the block that the next line may continue
    this.lists = []; // open lists: {list, indent}
    this.fence = null; // the open code block: {mark, code, indent, wanted, rows}
    this.row = 0; // number of complete lines
    this.isCut = false; // the line continues in the same block
  }

  push(text) {
    this.text += text;
    this.fresh += text;
  }

  draw() {
    this.drawn?.remove();
    Object.assign(this, this.before);
    const lines = (this.line + this.fresh).split("\n");
    this.fresh = "";
    const newest = lines.pop();
    for (const line of lines) {
      this.#draw(this.#cut(line));
      this.isCut = false;
      this.row += 1;
    }
    this.line = this.#cut(newest);
    this.before = { block: this.block, lists: this.lists, fence: this.fence, isCut: this.isCut };
    this.drawn = this.#draw(this.line);
  }

  // Draw a long line except for its last piece, and return that piece.
  #cut(line) {
    let rest = line;
    while (rest.length > LONG) {
      const [piece] = PIECE.exec(rest);
      this.#draw(piece);
      this.isCut = true;
      rest = rest.slice(piece.length);
    }
    return rest;
  }

  // Add a line to the document. Return its node, or null if the line is not visible.
  #draw(line) {
    const text = line.trimStart();
    const indent = line.length - text.length;
    if (this.fence) return this.#drawCode(line, text);
    const hasRoom = this.block?.childNodes.length < MANY;
    if (this.isCut && hasRoom) return this.block.appendChild(filled(make("span"), line));
    const [, fence, language] = FENCE.exec(text) ?? [];
    const item = ITEM.exec(text);
    if (fence) return this.#beginCode(fence, language, indent);
    if (RULE.test(text)) return this.#add(make("hr"), indent);
    if (HEADING.test(text)) return this.#add(filled(make("h4"), text.replace(HEADING, "")), indent);
    if (item) return this.#addItem(item, indent);
    if (text.startsWith("|")) return this.#addRow(text, indent);
    const tag = QUOTE.test(text) ? "BLOCKQUOTE" : "P";
    const said = text.replace(QUOTE, "");
    const goesOn = this.block && (tag === "P" || this.block.tagName === tag);
    if (text && goesOn && hasRoom) return this.block.appendChild(filled(make("span", "", "\n"), said));
    this.block = text ? this.#add(filled(make(tag, goesOn ? "on" : ""), said), indent) : null;
    return this.block;
  }

  // Add a new block, in the list that its indent selects.
  #add(block, indent) {
    this.lists = this.lists.filter((one) => one.indent < indent);
    this.block = null;
    return this.#place(this.lists).appendChild(block);
  }

  // Return the parent for a new block: the last item of the innermost list, or the last part of the answer.
  #place(lists) {
    const last = this.root.lastChild;
    const hasRoom = last?.childNodes.length < MANY || last?.lastChild.className === "cells"; // never split a table
    return lists.at(-1)?.list.lastChild ?? (hasRoom ? last : this.root.appendChild(make("div")));
  }

  #addItem([, number, text], indent) {
    const outer = this.lists.filter((one) => one.indent + 1 < indent).slice(0, DEEP);
    const same = this.lists[outer.length]?.list;
    const tag = number ? "OL" : "UL";
    const isSame = same?.tagName === tag && same.childNodes.length < MANY;
    const list = isSame ? same : this.#place(outer).appendChild(make(tag));
    if (!isSame && number) list.start = number;
    this.lists = [...outer, { list, indent }];
    this.block = list.appendChild(filled(make("li"), text));
    return isSame ? this.block : list;
  }

  // Add a table row. The style sheet joins adjacent rows into a table.
  #addRow(text, indent) {
    if (/^[-:| ]+$/.test(text)) return null; // the line below the header
    const cells = text.replace(/\|\s*$/, "").slice(1).split("|");
    const spans = cells.map((cell) => filled(make("span"), cell.trim()));
    return this.#add(make("div", "cells", ...spans), indent);
  }

  #beginCode(mark, language, indent) {
    const code = make("code");
    const rows = { first: this.row + 1, end: undefined };
    this.fence = { mark, code, indent, wanted: colouring(language), rows };
    const copies = buttonFor(() => {
      copy(this.#source(rows, indent), (said) => write(copies, said), "select the code");
    }, "tab", "Copy");
    return this.#add(make("div", "code", make("pre", "", code), copies), indent);
  }

  // Return the code as the model wrote it, with its tabs.
  #source({ first, end }, indent) {
    const lines = this.text.split("\n").slice(first, end);
    return lines.map((line) => line.slice(Math.min(indent, line.length - line.trimStart().length))).join("\n");
  }

  #drawCode(whole, text) {
    const { mark, code, indent, wanted, rows } = this.fence;
    const isEnd = !this.isCut && text.startsWith(mark) && !text.trim().replaceAll(mark[0], "");
    rows.end = isEnd ? this.row : undefined;
    if (isEnd) this.fence = null;
    if (isEnd) return null;
    const skipped = this.isCut ? 0 : Math.min(indent, whole.length - text.length);
    const shown = inOneLine(whole.slice(skipped));
    const before = this.isCut || !code.firstChild ? "" : "\n";
    const hasRoom = code.childNodes.length < MANY || code.lastChild.data === "\n"; // no part ends with an empty line
    const parts = wanted && !this.isCut ? coloured(shown, wanted) : [shown];
    const line = parts.some((part) => part.tagName) ? make("span", "", before, ...parts) : new Text(before + shown);
    if (hasRoom) return code.appendChild(line);
    this.fence = { ...this.fence, code: make("code", "", line) };
    return code.parentNode.appendChild(this.fence.code);
  }
}
