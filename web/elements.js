// Elements of the page: how they are found, made, and written to.
//
// What this file keeps. Texts of a recording or of a server enter as text only, so markup in a prompt does nothing.

// The element with the attribute `data-NAME`.
export const $ = (name) => document.querySelector(`[data-${name}]`);

// An element with a class, and with what is in it: texts, which can only become texts, and elements.
export function make(tag, name = "", ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

// Writes only what is new: most texts stay the same from frame to frame.
export function write(element, text) {
  if (element.firstChild?.data !== text) element.textContent = text;
}

export function buttonFor(act, name, ...children) {
  const button = make("button", name, ...children);
  button.type = "button";
  button.onclick = act;
  return button;
}

// A row of a table.
export function rowOf(values, name = "") {
  return make("tr", name, ...values.map((value) => make("td", "", value)));
}

// Copies a text for the reader, and says so; `otherwise`: what to say if the browser does not let the page.
export async function copy(text, say, otherwise) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say(`The browser does not let this page copy; ${otherwise}.`);
  }
}
