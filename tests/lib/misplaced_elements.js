// Find misplaced elements on the page: a text that overlaps the next row, a box outside of its row or
// of the screen, a row with several lines, a page that scrolls sideways. Return the number of measured
// boxes, and a message for each problem.
(() => {
  const found = new Set();
  let measured = 0;
  const say = (what, element) => found.add(`${what}: .${element.className} ${element.textContent.slice(0, 30)}`);
  const boxOf = (element) => element.getBoundingClientRect();
  const isShown = (element) => element?.checkVisibility();

  const rows = [...document.querySelectorAll(".row, .request, .card, .asked, .answer, .queue, .head, .lead, .opened, li")];
  for (const row of rows.filter(isShown)) {
    const box = boxOf(row);
    if (box.left < -0.5 || box.right > innerWidth + 0.5) say("beyond the screen", row);
    for (const inner of [...row.querySelectorAll("*")].filter(isShown)) {
      const own = boxOf(inner);
      measured += 1;
      if (own.top < box.top - 1 || own.bottom > box.bottom + 1) say("above or below its row", inner);
      if (own.left < box.left - 1 || own.right > box.right + 1) say("beside its row", inner);
    }
  }

  for (const row of [...document.querySelectorAll(".row, [data-requests] > li")].filter(isShown)) {
    const next = row.nextElementSibling;
    if (isShown(next) && boxOf(next).top < boxOf(row).bottom - 1) say("over the next row", row);
  }
  const heights = new Set([...document.querySelectorAll(".row")].map((row) => boxOf(row).height));
  if (heights.size > 1) found.add(`rows are ${[...heights].join(" and ")} pixels high`);

  // Characters of several fonts share one line, although some are taller than others
  for (const text of document.querySelectorAll(".row .text, .request .prompt")) {
    const range = document.createRange();
    range.selectNodeContents(text);
    const boxes = [...range.getClientRects()];
    const lowest = Math.max(...boxes.map((box) => box.top));
    if (boxes.some((box) => box.bottom < lowest)) say("of several lines", text);
  }

  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) found.add(`the page is ${width} pixels wide, and the screen ${innerWidth}`);
  return [measured, [...found]];
})();
