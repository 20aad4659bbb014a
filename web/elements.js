// Elements of the page. Texts of a recording or a server enter as text, never as markup.

// The element with the attribute `data-NAME`.
export const $ = (name) => document.querySelector(`[data-${name}]`);

// An element with a class and children: texts, which stay texts, and elements.
export function make(tag, name = "", ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

// Set a text only if it is new: most stay the same from frame to frame.
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

// Copy a text and say so; `otherwise`: what to say if the browser forbids it.
export async function copy(text, say, otherwise) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say(`The browser does not let this page copy; ${otherwise}.`);
  }
}
