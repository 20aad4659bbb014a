// A model's Markdown, drawn while it grows.
//
// A complete line is drawn once; only the newest line is drawn again, and long ones are cut into pieces, so the
// time grows with the length of the answer, whatever it holds. Elements come from `make` and texts enter as
// text. Links and images are shown as text with their address, bidirectional control characters are made
// visible, and lists nest `DEEP` levels at most.

import { buttonFor, copy, make, write } from "./elements.js";
import { coloured, colouring } from "./code.js";
import { inOneLine } from "./words.js";

const DEEP = 6; // lists in lists; what is deeper goes on in the last one
const MANY = 40; // parts of an element; the browser lays a changed one out anew, so another one takes the next
const LONG = 1000; // letters of a line that are drawn anew, at most
// The beginning of a longer line: at most 500 characters, up to a blank.
const PIECE = /^.{1,500}(?<= )|^.{500}/su;
const FENCE = /^(`{3,}|~{3,}) *([^\s`]*)[^`]*$/;
const RULE = /^([-*_])( *\1){2,} *$/;
const HEADING = /^#{1,6} +/;
const ITEM = /^(?:[-*+]|(\d{1,9})[.)]) +(.*)/;
const QUOTE = /^(?:> ?)+/;
const MARKED = /(`{1,3})(.+?)\1|(\*\*|__)(?=\S)(.*?\S)\3|(?<!\w)([*_])(?=\S)(.*?\S)\5(?!\w)/g;

// Put a text into an element: code, bold and italic words are elements of their own.
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
    this.text = ""; // the whole answer so far
    this.fresh = ""; // its end that is not drawn yet
    this.line = ""; // the newest line, or the end of a long one: it is drawn again
    this.drawn = null; // its node
    this.before = {}; // the fields below, as they were before it
    this.block = null; // the next line may go on with it
    this.lists = []; // the open ones: {list, indent}
    this.fence = null; // of the open code: {mark, code, indent, wanted, rows}
    this.row = 0; // number of complete lines
    this.isCut = false; // the line goes on in the same block
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

  // Draw a long line except its end, and return the end.
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

  // Put a line where it belongs and return its node, or null if there is nothing to see.
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

  // A block of its own, in the list that its indent leads to.
  #add(block, indent) {
    this.lists = this.lists.filter((one) => one.indent < indent);
    this.block = null;
    return this.#place(this.lists).appendChild(block);
  }

  // The last item of the innermost list, or the last part of the answer.
  #place(lists) {
    const last = this.root.lastChild;
    const hasRoom = last?.childNodes.length < MANY || last?.lastChild.className === "cells"; // a table stays whole
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

  // A row of a table. The style sheet joins adjacent rows.
  #addRow(text, indent) {
    if (/^[-:| ]+$/.test(text)) return null; // the line below the heads
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

  // The code as the model wrote it, with its tabs.
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
    const hasRoom = code.childNodes.length < MANY || code.lastChild.data === "\n"; // an empty line is never the last
    const parts = wanted && !this.isCut ? coloured(shown, wanted) : [shown];
    const line = parts.some((part) => part.tagName) ? make("span", "", before, ...parts) : new Text(before + shown);
    if (hasRoom) return code.appendChild(line);
    this.fence = { ...this.fence, code: make("code", "", line) };
    return code.parentNode.appendChild(this.fence.code);
  }
}
