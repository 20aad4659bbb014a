// Pictures: what each slot did, on a scale of time; the same under a microscope; a request's life.
//
// The problem. A run has a thousand steps, and eight slots in each. As elements of a page that would be
// too many to move sixty times a second.
//
// The way out. Canvases. A slot's steps are merged into stretches (recording.js), so a frame draws some
// two hundred rectangles. Colours come from the style sheet, so light and dark need nothing here.
//
// What this file keeps. A picture depends on a lane, a moment and a size, and on nothing else. Shapes
// tell the kinds apart without any colour: hatched, full, crossed, hollow.

import { BLOCKED, DECODE, GHOST, HELD, PREFILL } from "./recording.js";

// Okabe and Ito's hues, which colour-blind people can tell apart, a little calmer.
const HUES = ["#e3a23b", "#63b3e0", "#2fa587", "#cf86ae", "#4a83bd", "#d8cb55", "#d9713c"];
const LEFT = 18; // pixels: the numbers of the slots

export function hueOf(request) {
  return HUES[(request - 1) % HUES.length];
}

// The colours of the style sheet, read once for each scheme: to ask for them takes longer than to draw.
let known = null;

export function inks() {
  if (known) return known;
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "muted", "line", "shut", "now", "paper"];
  known = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
  return known;
}

export function forgetInks() {
  known = null;
}

// A canvas of this size, sharp on every screen. What it showed is gone.
export function prepared(canvas, height) {
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

const patterns = new Map(); // by colour: diagonal lines

function hatched(pen, colour) {
  const ratio = devicePixelRatio;
  const key = `${colour} ${ratio}`;
  if (!patterns.has(key)) {
    const tile = document.createElement("canvas");
    const side = Math.round(5 * ratio);
    tile.width = tile.height = side;
    const brush = tile.getContext("2d");
    brush.strokeStyle = colour;
    brush.lineWidth = 1.5 * ratio;
    for (const shift of [-side, 0, side]) {
      brush.beginPath();
      brush.moveTo(shift - 1, side + 1);
      brush.lineTo(shift + side + 1, -1);
      brush.stroke();
    }
    patterns.set(key, tile);
  }
  const pattern = pen.createPattern(patterns.get(key), "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function fill(pen, colour, x, y, width, height) {
  pen.fillStyle = colour;
  pen.fillRect(x, y, width, height);
}

function print(pen, size, colour, align, words, x, y) {
  pen.font = `${size}px ui-monospace, monospace`;
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(words, x, y);
}

// What a slot did for a while.
function drawCell(pen, kind, request, x, y, width, height) {
  const { line, shut } = inks();
  const hue = request ? hueOf(request) : line;
  if (kind === DECODE) {
    fill(pen, hue, x, y, width, height);
  } else if (kind === PREFILL) {
    pen.save();
    pen.globalAlpha *= 0.25;
    fill(pen, hue, x, y, width, height);
    pen.restore();
    fill(pen, hatched(pen, hue), x, y, width, height);
  } else if (kind === BLOCKED) {
    fill(pen, hatched(pen, shut), x, y + height * 0.25, width, height * 0.5);
  } else if (kind === HELD || kind === GHOST) {
    pen.strokeStyle = hue;
    pen.lineWidth = 1;
    pen.setLineDash(kind === HELD ? [2, 2] : []);
    pen.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 0.5), height - 1);
    pen.setLineDash([]);
  }
}

// Which part of the lane is in sight, in seconds, and where a moment stands.
export function scaleOf(width, { start, end }) {
  const wide = width - LEFT - 1;
  return {
    x: (time) => LEFT + ((time - start) / (end - start || 1)) * wide,
    time: (x) => start + ((x - LEFT) / wide) * (end - start),
  };
}

// Slots × time, as a player shows them, from `start` to `end`. `now`: what lies behind this moment is
// drawn in full, and what lies before it and has been seen already (`seen`) faintly. `chosen`: a request
// that is to stand out; 0 for none. `mine`: requests whose slots have a mark.
export function drawTimeline(canvas, lane, player) {
  const { now, seen, end, mine } = player;
  const narrow = canvas.clientWidth < 560;
  const row = lane.slots > 16 ? 8 : narrow ? 15 : 14;
  const { pen, width, height } = prepared(canvas, lane.slots * row);
  const colours = inks();
  const scale = scaleOf(width, player);
  for (let slot = 0; slot < lane.slots; slot++) {
    const y = slot * row;
    const isMine = mine?.has(lane.ownerBefore(slot, lane.stepAt(now)));
    if (isMine) fill(pen, colours.now, 0, y + 1, LEFT - 3, row - 2);
    const ink = isMine ? colours.paper : colours.muted;
    print(pen, row - 3, ink, "right", slot, LEFT - 6, y + row / 2);
    fill(pen, colours.line, LEFT, y + row / 2 - 0.5, width - LEFT, 1);
  }
  const paint = (until, alpha) => {
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, Math.max(0, scale.x(until) - LEFT), height);
    pen.clip();
    for (const stretches of lane.stretches) {
      for (const stretch of stretches) {
        drawStretch(pen, lane, stretch, { scale, row, alpha, until, player });
      }
    }
    pen.restore();
  };
  if (seen > now) paint(seen, 0.2);
  paint(now, 1);
  const x = scale.x(Math.min(now, end, lane.end));
  fill(pen, colours.now, Math.round(x) - 0.75, 0, 1.5, height);
}

function drawStretch(pen, lane, stretch, { scale, row, alpha, until, player: { start, chosen } }) {
  const began = lane.began[stretch.from];
  const ended = lane.ended[stretch.to];
  if (ended < start || began > until) return;
  const x = scale.x(began);
  const width = Math.max(scale.x(ended) - x, 0.6);
  const y = stretch.slot * row + 1;
  const isAside = chosen && stretch.request !== chosen;
  pen.globalAlpha = alpha * (isAside ? 0.22 : 1);
  drawCell(pen, stretch.kind, stretch.request, x, y, width, row - 2);
  if (stretch.kind === DECODE) {
    const isFirst = lane.requests.get(stretch.request)?.tokenSteps[1] === stretch.from;
    if (isFirst || width > 60) label(pen, stretch.request, x, y, width, row);
    const seam = x + width - 0.75; // where the next request begins
    fill(pen, inks().paper, seam, y, 0.75, row - 2);
  }
  pen.globalAlpha = 1;
}

function label(pen, request, x, y, width, row) {
  const text = String(request);
  if (width < 7 * text.length + 4) return;
  print(pen, row - 3, "#16181d", "left", text, x + 4, y + row / 2 - 0.5);
}

// Steps as equal columns, around one of them: what is one or two pixels wide above is a cell here.
export function drawMicroscope(canvas, lane, index, chosen) {
  const narrow = canvas.clientWidth < 560;
  const row = narrow ? 22 : 18;
  const { pen, width } = prepared(canvas, lane.slots * row + 16);
  const colours = inks();
  const column = narrow ? 21 : 17;
  const columns = Math.floor((width - LEFT) / column);
  const middle = Math.floor(columns * 0.6);
  const first = Math.max(0, Math.min(index - middle, lane.steps.length - columns));
  for (let slot = 0; slot < lane.slots; slot++) {
    print(pen, 10, colours.muted, "right", slot, LEFT - 6, slot * row + row / 2);
  }
  for (let i = 0; i < columns && first + i < lane.steps.length; i++) {
    const x = LEFT + i * column;
    const at = first + i;
    lane.cells[at].forEach((cell, slot) => {
      const isAside = chosen && cell.request !== chosen;
      pen.globalAlpha = (at > index ? 0.25 : 1) * (isAside ? 0.3 : 1);
      drawCell(pen, cell.kind, cell.request, x + 1, slot * row + 1, column - 2, row - 2);
      if (cell.kind === DECODE || cell.kind === PREFILL) {
        pen.globalAlpha = Math.min(1, pen.globalAlpha * 2); // of a faint cell, too, the number can be read
        const ink = cell.kind === DECODE && at <= index ? "#16181d" : colours.ink;
        const y = slot * row;
        print(pen, 9, ink, "center", cell.request, x + column / 2, y + row / 2 + 0.5);
        // Where some were guessed: so many came
        if (cell.tokens) print(pen, 7, ink, "center", cell.tokens, x + column - 5, y + 5);
      }
    });
    pen.globalAlpha = 1;
    if (at === index) {
      pen.strokeStyle = colours.now;
      pen.lineWidth = 1.5;
      pen.strokeRect(x - 0.25, 0.75, column + 0.5, lane.slots * row - 1);
      print(pen, 10, colours.now, "center", lane.steps[at].step, x + column / 2, lane.slots * row + 9);
    }
  }
  return { first, column, left: LEFT };
}

// A request's life: in line (thin), its prompt (hatched), its answer (full). A tick is a token.
export function drawLife(canvas, lane, request, { start, end, now }, height, ticks = false) {
  const { pen, width } = prepared(canvas, height);
  const x = (time) => ((Math.min(time, now) - start) / (end - start || 1)) * width;
  // What it was from one moment to another
  const cell = (kind, from, to) => {
    const wide = Math.max(1, x(to) - x(from));
    drawCell(pen, kind, request.id, x(from), 1, wide, height - 2);
  };
  const admitted = Math.min(lane.admittedAt(request), now);
  const came = x(request.arrived);
  fill(pen, inks().muted, came, height / 2 - 0.5, x(admitted) - came, 1);
  if (admitted >= now) return;
  const first = Math.min(request.first ?? now, now);
  cell(PREFILL, admitted, first);
  if (first >= now) return;
  cell(DECODE, first, request.last);
  const apart = (x(request.last) - x(first)) / request.tokenSteps.length;
  if (!ticks || apart < 2) return; // ticks side by side would hide the bar
  for (const index of request.tokenSteps) {
    const at = lane.ended[index];
    if (at <= now) fill(pen, inks().paper, x(at) - 0.5, 1, 0.5, height - 2);
  }
}
