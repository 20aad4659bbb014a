// Helpers that create elements of the page. Texts from a recording or a server are never parsed as markup.

// Return the element with the attribute `data-NAME`.
export const $ = (name) => document.querySelector(`[data-${name}]`);

// Create an element with a class and children. Strings among the children become text nodes.
export function make(tag, name = "", ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

// Set an element's text only if it changed, because most texts stay the same between frames.
export function write(element, text) {
  if (element.firstChild?.data !== text) element.textContent = text;
}

export function buttonFor(act, name, ...children) {
  const button = make("button", name, ...children);
  button.type = "button";
  button.onclick = act;
  return button;
}

// Create a table row.
export function rowOf(values, name = "") {
  return make("tr", name, ...values.map((value) => make("td", "", value)));
}

// Copy a text to the clipboard. `say` shows the result; `otherwise`: advice if the browser forbids copying.
export async function copy(text, say, otherwise) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say(`The browser does not let this page copy; ${otherwise}.`);
  }
}
