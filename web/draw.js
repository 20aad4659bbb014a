// Drawing on canvases: slots over time, single steps, and one request.
//
// A run has a thousand steps with eight slots each, too many for page elements. Steps are merged into stretches
// (recording.js), so a frame draws about two hundred rectangles. A picture depends only on a lane, a time and a
// size. Colours come from the style sheet, and the kinds also differ in shape, for readers who see no colours.

import { BLOCKED, DECODE, GHOST, HELD, PREFILL } from "./recording.js";

// Okabe and Ito's colour-blind-safe palette, slightly desaturated.
const HUES = ["#e3a23b", "#63b3e0", "#2fa587", "#cf86ae", "#4a83bd", "#d8cb55", "#d9713c"];
const ON_HUE = "#16181d"; // colour of text on these hues
const LEFT = 18; // width in pixels of the column with slot numbers
const GAP = 5; // pixels between diagonal lines

export function hueOf(request) {
  return HUES[(request - 1) % HUES.length];
}

// The style sheet's colours, read once per colour scheme because reading them takes longer than drawing.
const inks = {};

export function readInks() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "muted", "line", "shut", "now", "paper"]) {
    inks[name] = style.getPropertyValue(`--${name}`);
  }
}

// Clear a canvas and set its height. Scale it for the screen's pixel ratio, so that it is sharp.
function prepared(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function fill(pen, colour, x, y, width, height) {
  pen.fillStyle = colour;
  pen.fillRect(x, y, width, height);
}

// Clip drawing to this rectangle until `restore`.
function clip(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
}

// Fill a rectangle with diagonal lines at multiples of the gap, so that adjacent rectangles line up.
function hatch(pen, colour, x, y, width, height) {
  clip(pen, x, y, width, height);
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.beginPath();
  const first = GAP * Math.floor((x + y) / GAP);
  const last = x + y + width + height + GAP;
  for (let at = first; at < last; at += GAP) {
    pen.moveTo(at - y, y);
    pen.lineTo(at - y - height, y + height);
  }
  pen.stroke();
  pen.restore();
}

function print(pen, size, colour, align, words, x, y) {
  pen.font = `${size}px ui-monospace, monospace`;
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(words, x, y);
}

// Draw a cell, or a stretch of equal cells, in the shape of its kind.
function drawCell(pen, { kind, request }, x, y, width, height) {
  const hue = hueOf(request);
  if (kind === DECODE) {
    fill(pen, hue, x, y, width, height);
  } else if (kind === PREFILL) {
    const alpha = pen.globalAlpha;
    pen.globalAlpha *= 0.25;
    fill(pen, hue, x, y, width, height);
    pen.globalAlpha = alpha;
    hatch(pen, hue, x, y, width, height);
  } else if (kind === BLOCKED) {
    hatch(pen, inks.shut, x, y + height * 0.25, width, height * 0.5);
  } else if (kind === HELD || kind === GHOST) {
    pen.strokeStyle = hue;
    pen.lineWidth = 1;
    pen.setLineDash(kind === HELD ? [2, 2] : []);
    pen.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 0.5), height - 1);
    pen.setLineDash([]);
  }
}

// Draw slots over time, from `start` to `end`: solid up to `now`, and faint from there to `seen`, the latest
// moment shown so far. `chosen`: highlight this request. `mine`: mark the slots of these requests. Return a
// function that converts an x coordinate of the canvas to a time.
export function drawTimeline(canvas, lane, player) {
  const { now, seen, start, end, chosen, mine } = player;
  const narrow = canvas.clientWidth < 560;
  const row = lane.slots > 16 ? 8 : narrow ? 15 : 14;
  const { pen, width, height } = prepared(canvas, lane.slots * row);
  const wide = width - LEFT - 1;
  const span = end - start || 1;
  const xOf = (time) => LEFT + ((time - start) / span) * wide;
  const cells = lane.cells[lane.stepAt(now)];
  for (let slot = 0; slot < lane.slots; slot++) {
    const y = slot * row;
    const isMine = mine?.has(cells?.[slot].owner);
    if (isMine) {
      fill(pen, inks.now, 0, y + 1, LEFT - 3, row - 2);
    }
    const ink = isMine ? inks.paper : inks.muted;
    print(pen, row - 3, ink, "right", slot, LEFT - 6, y + row / 2);
    fill(pen, inks.line, LEFT, y + row / 2 - 0.5, width - LEFT, 1);
  }
  const paint = (until, alpha) => {
    clip(pen, LEFT, 0, Math.max(0, xOf(until) - LEFT), height);
    for (const stretch of lane.stretches.flat()) {
      const began = lane.began[stretch.from];
      const ended = lane.ended[stretch.to];
      if (ended < start || began > until) continue;
      const x = xOf(began);
      const isAside = chosen && stretch.request !== chosen;
      pen.globalAlpha = alpha * (isAside ? 0.22 : 1);
      const least = Math.max(xOf(ended) - x, 0.6);
      drawStretch(pen, lane, stretch, x, least, row);
    }
    for (const { slot, request, at } of lane.checkpoints) {
      if (at < start || at > until) continue;
      pen.globalAlpha = alpha * (chosen && request !== chosen ? 0.22 : 1);
      drawCheckpoint(pen, xOf(at), slot * row, row);
    }
    pen.restore();
  };
  if (seen > now) paint(seen, 0.2);
  paint(now, 1);
  const x = xOf(Math.min(now, end, lane.end));
  fill(pen, inks.now, Math.round(x) - 0.75, 0, 1.5, height);
  return (place) => start + ((place - LEFT) / wide) * span;
}

// Draw a checkpoint (`┃` in the terminal) at the end of a chunk, over the full height of the slot.
function drawCheckpoint(pen, x, y, row) {
  fill(pen, inks.ink, x - 1.5, y, 1.5, row);
}

// Draw a stretch, with the request's number at the start of the answer and wherever else it fits.
function drawStretch(pen, lane, stretch, x, width, row) {
  const { kind, request, slot, from } = stretch;
  const y = slot * row + 1;
  drawCell(pen, stretch, x, y, width, row - 2);
  if (kind !== DECODE) return;
  const isFirst = lane.requests.get(request)?.tokenSteps[1] === from;
  const least = isFirst ? 7 * String(request).length + 4 : 60;
  const middle = y + row / 2 - 0.5;
  if (width >= least) print(pen, row - 3, ON_HUE, "left", request, x + 4, middle);
  const seam = x + width - 0.75; // a gap before the next stretch
  fill(pen, inks.paper, seam, y, 0.75, row - 2);
}

// Draw the steps around one step as columns of equal width: in the timeline a step is only a pixel or two wide.
// Return {first, column, left}: the first step drawn, the width of a column, and the x of the first one.
export function drawMicroscope(canvas, lane, index, chosen) {
  const narrow = canvas.clientWidth < 560;
  const row = narrow ? 22 : 18;
  const { pen, width } = prepared(canvas, lane.slots * row + 16);
  const column = narrow ? 21 : 17;
  const columns = Math.floor((width - LEFT) / column);
  const middle = Math.floor(columns * 0.6);
  const first = Math.max(0, Math.min(index - middle, lane.steps.length - columns));
  for (let slot = 0; slot < lane.slots; slot++) {
    const y = slot * row + row / 2;
    print(pen, 10, inks.muted, "right", slot, LEFT - 6, y);
  }
  lane.cells.slice(first, first + columns).forEach((cells, i) => {
    const x = LEFT + i * column;
    const isAhead = first + i > index;
    cells.forEach((cell, slot) => {
      const y = slot * row;
      const isAside = chosen && cell.request !== chosen;
      pen.globalAlpha = (isAhead ? 0.25 : 1) * (isAside ? 0.3 : 1);
      drawCell(pen, cell, x + 1, y + 1, column - 2, row - 2);
      if (cell.leaves) drawCheckpoint(pen, x + column - 1, y, row);
      if (cell.kind !== DECODE && cell.kind !== PREFILL) return;
      pen.globalAlpha = Math.min(1, pen.globalAlpha * 2); // keep the number readable in a faint cell
      const ink = cell.kind === DECODE && !isAhead ? ON_HUE : inks.ink;
      const middle = x + column / 2;
      print(pen, 9, ink, "center", cell.request, middle, y + row / 2 + 0.5);
      // The number of tokens, if any were drafted
      if (cell.tokens) print(pen, 7, ink, "center", cell.tokens, x + column - 5, y + 5);
    });
  });
  pen.globalAlpha = 1;
  const { step } = lane.steps[index];
  const x = LEFT + (index - first) * column;
  const bottom = lane.slots * row;
  pen.strokeStyle = inks.now;
  pen.lineWidth = 1.5;
  pen.strokeRect(x - 0.25, 0.75, column + 0.5, bottom - 1);
  print(pen, 10, inks.now, "center", step, x + column / 2, bottom + 9);
  return { first, column, left: LEFT };
}

// Draw a request over time: queued (thin line), prompt (hatched), answer (solid). `ticks`: mark each token.
export function drawLife(canvas, lane, request, { start, end, now }, height, ticks = false) {
  const { pen, width } = prepared(canvas, height);
  const until = Math.min(now, request.last ?? now);
  const span = end - start || 1;
  const xOf = (time) => ((Math.min(time, until) - start) / span) * width;
  const came = xOf(request.arrived);
  const waited = xOf(lane.admittedAt(request)) - came;
  fill(pen, inks.muted, came, height / 2 - 0.5, waited, 1);
  for (const stretch of lane.stretches.flat()) {
    const x = xOf(lane.began[stretch.from]);
    const wide = xOf(lane.ended[stretch.to]) - x;
    if (stretch.request !== request.id || wide <= 0) continue;
    drawCell(pen, stretch, x, 1, Math.max(1, wide), height - 2);
  }
  const times = request.tokenSteps.map((index) => lane.ended[index]);
  const apart = (xOf(times.at(-1)) - xOf(times[0])) / times.length;
  if (!ticks || apart < 2) return; // dense ticks would hide the bar
  for (const at of times) {
    fill(pen, inks.paper, xOf(at) - 0.5, 1, 0.5, height - 2);
  }
}
