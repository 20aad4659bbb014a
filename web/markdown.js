// A model's Markdown, drawn while it comes.
//
// The problem. An answer is a stranger's text. It may hold a script, an image that tells somebody that it was seen,
// lists in lists without end, or code that is never closed. And it grows by a word at a time: a page that draws the
// whole answer anew for each word becomes slower with each word.
//
// The way out. A line that is complete is drawn once, and never touched again. Only the newest line is drawn anew when
// it grows. A line that becomes long is cut into pieces, so there is never much to draw anew.
//
// The browser, too, lays an element out anew when it grows. So none has many parts.
//
// What this file keeps. Elements come from `make`, and texts enter as text. No link and no image is made: the reader
// sees their text, with the address. Signs that turn the direction of writing are seen, too. Lists nest `DEEP` times
// at most. So the time for an answer grows as its length does, whatever it holds.

import { make } from "./elements.js";
import { inOneLine } from "./words.js";

const DEEP = 6; // lists in lists; what is deeper goes on in the last one
const MANY = 40; // parts of an element; the browser lays a changed one out anew, so another one takes the next
const LONG = 1000; // letters of a line that are drawn anew, at most
// The beginning of a longer line: 500 characters, of two letters at most, or fewer, up to a blank.
const PIECE = /^.{1,500}(?<= )|^.{500}/su;
const FENCE = /^(`{3,}|~{3,})[^`]*$/;
const RULE = /^([-*_])( *\1){2,} *$/;
const HEADING = /^#{1,6} +/;
const ITEM = /^(?:[-*+]|(\d{1,9})[.)]) +(.*)/;
const QUOTE = /^(?:> ?)+/;
const MARKED = /(`{1,3})(.+?)\1|(\*\*|__)(?=\S)(.*?\S)\3|(?<!\w)([*_])(?=\S)(.*?\S)\5(?!\w)/g;

// The element, with this text in it: code, bold and slanted words are elements of their own.
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
    this.text = ""; // all that has come,
    this.fresh = ""; // and what is not drawn yet
    this.line = ""; // the newest one, as far as it is drawn anew
    this.drawn = null; // what was drawn of it,
    this.before = {}; // and what all below was before
    this.block = null; // the next line may go on with it
    this.lists = []; // the open ones: {list, indent}
    this.fence = null; // of the open code: {mark, code, indent}
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
    }
    this.line = this.#cut(newest);
    this.before = { block: this.block, lists: this.lists, fence: this.fence, isCut: this.isCut };
    this.drawn = this.#draw(this.line);
  }

  // Draws all of a long line but its end, and answers with the end.
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

  // Puts a line where it belongs, in one new node, and answers with the node. Null: there is nothing to be seen.
  #draw(line) {
    const text = line.trimStart();
    const indent = line.length - text.length;
    if (this.fence) return this.#drawCode(line, text);
    const hasRoom = this.block?.childNodes.length < MANY;
    if (this.isCut && hasRoom) return this.block.appendChild(filled(make("span"), line));
    const [, fence] = FENCE.exec(text) ?? [];
    const item = ITEM.exec(text);
    if (fence) return this.#beginCode(fence, indent);
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

  // A row of a table. The style sheet makes a table of those that stand side by side.
  #addRow(text, indent) {
    if (/^[-:| ]+$/.test(text)) return null; // the line below the heads
    const cells = text.replace(/\|\s*$/, "").slice(1).split("|");
    const spans = cells.map((cell) => filled(make("span"), cell.trim()));
    return this.#add(make("div", "cells", ...spans), indent);
  }

  #beginCode(mark, indent) {
    const code = make("code");
    this.fence = { mark, code, indent };
    return this.#add(make("pre", "", code), indent);
  }

  #drawCode(line, text) {
    const { mark, code, indent } = this.fence;
    const isEnd = !this.isCut && text.startsWith(mark) && !text.trim().replaceAll(mark[0], "");
    if (isEnd) this.fence = null;
    if (isEnd) return null;
    const skipped = this.isCut ? 0 : Math.min(indent, line.length - text.length);
    const shown = inOneLine(line.slice(skipped));
    const before = this.isCut || !code.firstChild ? "" : "\n";
    const hasRoom = code.childNodes.length < MANY || code.lastChild.data === "\n"; // an empty line is never the last
    if (hasRoom) return code.appendChild(new Text(before + shown));
    this.fence = { ...this.fence, code: make("code", "", shown) };
    return code.parentNode.appendChild(this.fence.code);
  }
}
