// Syntax colouring of a line of code: strings, numbers, comments, and the keywords of common languages. Each line
// is coloured independently, so multi-line strings are not recognized.

import { make } from "./elements.js";

const KEPT_WORDS = `and as async await break case catch class const continue def default defer del do elif else
  end enum except export extends false final finally fn for from func function go if impl import in interface is
  lambda let loop match mod mut new nil None not null or package pass private pub public raise return select self
  static struct super switch then this throw trait true True False try type typeof use using var void where while
  with yield SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE JOIN GROUP ORDER BY AND OR NOT NULL`;
const WORDS = KEPT_WORDS.trim().split(/\s+/).join("|");
const HASHED = /^(py|python|sh|bash|zsh|shell|console|rb|ruby|ya?ml|toml|r|perl|make|makefile|dockerfile|nix)$/i;
const DASHED = /^(sql|lua|haskell|hs|elm|ada)$/i;
const PLAIN = /^(|text|txt|plain|markdown|md|output|log|diff)$/i; // languages without colours

function pattern(comment) {
  const parts = [
    `(?<comment>(?:${comment}).*)`,
    `(?<string>"(?:\\\\.|[^"\\\\])*"|'(?:\\\\.|[^'\\\\])*'|\`(?:\\\\.|[^\`\\\\])*\`)`,
    "(?<number>\\b\\d[\\w.]*)",
    `(?<word>\\b(?:${WORDS})\\b)`,
  ];
  return new RegExp(parts.join("|"), "g");
}

const PATTERNS = { hash: pattern("(?<!\\S)#"), dash: pattern("--"), slash: pattern("\\/\\/|\\/\\*") };

// Return the pattern that colours a language's lines; null for plain text.
export function colouring(language) {
  if (PLAIN.test(language)) return null;
  return HASHED.test(language) ? PATTERNS.hash : DASHED.test(language) ? PATTERNS.dash : PATTERNS.slash;
}

// Split a line into plain strings and coloured elements.
export function coloured(line, wanted) {
  const parts = [];
  let at = 0;
  for (const found of line.matchAll(wanted)) {
    const [kind] = Object.entries(found.groups).find(([, text]) => text !== undefined);
    parts.push(line.slice(at, found.index), make("span", kind, found[0]));
    at = found.index + found[0].length;
  }
  return [...parts, line.slice(at)].filter((part) => part !== "");
}
