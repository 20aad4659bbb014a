// The page's entry point: it chooses the recording or the server, and wires views and keys.
//
// A page made from a recording contains the recording in an element. A server's page has no such element and
// watches the server instead (live.js).

import { lanesOf } from "./recording.js";
import { PACES, Player } from "./player.js";
import { $, make, write } from "./elements.js";
import { LaneView } from "./lane_view.js";
import { RequestsView, StepView } from "./details.js";
import { bytes, count, span, verdict } from "./words.js";
import { Game } from "./game.js";
import { Lab } from "./lab.js";
import { readInks } from "./draw.js";
import { Watcher, ask } from "./live.js";
import { Chat } from "./chat.js";

const PLAYS = 10; // a recording plays for at least this many seconds, if the pace allows

function dataOf(name) {
  return JSON.parse(document.getElementById(`data-${name}`)?.textContent ?? "null");
}

class Page {
  constructor(lanes, settings = {}) {
    this.player = new Player(lanes, () => this.draw());
    this.player.change(settings);
    // A request's details are shown below the timelines unless the list has opened them
    this.choose = (request, place = $("opened")) => {
      place.append(this.requests.detail);
      this.player.change({ chosen: request });
    };
    this.step = new StepView(this.player, this.choose);
    this.requests = new RequestsView(this.player, this.choose);
    this.setLanes(lanes);
    this.#wire();
  }

  // Show new lanes, after a server's history was shortened or the server restarted.
  setLanes(lanes) {
    this.player.change({ lanes, lane: lanes.at(-1) });
    this.views = lanes.map((lane) => new LaneView(lane, this.player, this.choose));
    $("race").replaceChildren(...this.views.map((view) => view.element));
    $("answers").replaceChildren(...this.views.map((view) => view.answers));
    this.requests.rows.clear();
  }

  // --- actions

  #wire() {
    const { player } = this;
    // The same keys as in the terminal. `by`: the number of steps
    this.keys = {
      " ": () => (player.playing ? player.pause() : player.play()),
      ArrowLeft: (by) => player.goBy(-by),
      ArrowRight: (by) => player.goBy(by),
      s: () => player.goBy(1),
      Home: () => player.goTo(player.start),
      End: () => player.goTo(player.end),
      "-": () => player.changePace(1),
      "+": () => player.changePace(-1),
      "=": () => player.changePace(-1),
      p: () => player.change({ lane: player.lanes.find((lane) => lane !== player.lane) ?? player.lane }),
      Escape: () => this.choose(0),
    };
    for (const button of document.querySelectorAll("[data-press]")) {
      button.onclick = () => this.keys[button.dataset.press](1);
    }
    $("scrub").oninput = ({ target }) => {
      player.goTo(player.start + (target.value / target.max) * (player.end - player.start));
    };
    document.addEventListener("keydown", (event) => this.#key(event));
    const drawAnew = () => {
      readInks();
      player.change({ looks: player.looks + 1 });
      this.lab?.draw();
      this.game?.draw();
    };
    window.addEventListener("resize", drawAnew);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
  }

  #key(event) {
    // Arrow keys move by steps even when the scrubber has the focus
    const isTyping = event.target.matches("input:not([data-scrub]), textarea, select");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = this.keys[event.key];
    if (!act || (event.key === " " && event.target.matches("button, a, summary"))) return;
    event.preventDefault();
    act(event.shiftKey ? 10 : 1);
  }

  // --- what is shown

  draw() {
    const { player } = this;
    for (const view of this.views) view.draw();
    this.step.draw();
    this.requests.draw();
    write($("play"), player.playing ? "Pause" : player.window ? "Live" : player.now >= player.end ? "Play again" : "Play");
    write($("pace"), player.pace === 1 ? "as fast as it ran" : `${player.pace} × slower`);
    write($("now"), span(player.now));
    write($("ends"), span(player.end));
    const scrub = $("scrub");
    scrub.value = (scrub.max * (player.now - player.start)) / (player.end - player.start || 1);
    scrub.ariaValueText = span(player.now);
    const isOver = player.now >= player.end && player.lanes.length === 2;
    write($("verdict"), isOver ? verdict(player.lanes) : "");
  }
}

// Link the names of repository files. docs/make/page.py adds the links if the repository's address is known when
// the page is made. Otherwise add them here, on GitHub Pages and in a checkout, where the address is known.
// Anywhere else the names stay plain text.
function leadToRepository() {
  const known = /^https:..([\w-]+)\.github\.io.([^/]+)|^file:.*.docs.index\.html/.exec(location.href);
  if (!known) return;
  const [, owner, name] = known;
  const base = owner ? `https://github.com/${owner}/${name}/blob/main` : "..";
  for (const link of document.querySelectorAll("a[data-file]")) link.href = `${base}/${link.dataset.file}`;
  // In a checkout the annotated pages have to be built first
  if (owner) $("annotated")?.setAttribute("href", "annotated/index.html");
}

// --- a recording

function play(recording) {
  const page = new Page(lanesOf(recording));
  page.player.pace = PACES.find((pace) => pace * page.player.end >= PLAYS) ?? PACES.at(-1);
  if (!page.step.goToHash()) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) page.player.goTo(page.player.end);
    else page.player.play();
  }
  page.lab = new Lab(recording, dataOf("lab"));
  if ($("game")) page.game = new Game(dataOf("game"));
  return page;
}

// --- a server

const WINDOW = 20; // visible seconds of a server's timeline

// Return the engine's startup summary with the memory that is free now.
function summaryNow(summary, free) {
  return free ? summary.replace(/[^;]+ of memory free at start/, ` ${bytes(free)} of memory free now`) : summary;
}

function show({ lane, engine, hello, isPaused, free }) {
  const rests = engine.submitted === engine.finished;
  Object.assign(lane, { rests, inLine: engine.waiting, hidesTexts: !hello.texts });
  if (!window.nanobatch) {
    window.nanobatch = new Page([lane], { window: WINDOW, playing: true });
    document.body.classList.add("lives-on");
  }
  const { player } = window.nanobatch;
  if (player.lane !== lane) window.nanobatch.setLanes([lane]);
  if (engine.submitted < Math.max(player.chosen, ...player.mine)) {
    // The server restarted and reuses these numbers
    player.mine.clear();
    player.chosen = 0;
    for (const old of document.querySelectorAll(".log .chip")) old.remove();
  }
  player.change(player.playing ? { now: player.end } : {});
  write($("model"), hello.model);
  write($("state"), isPaused ? "paused" : "ready");
  document.title = `${hello.model}: nanobatch`;
  write($("summary"), summaryNow(hello.summary, free));
  const said = [`${count(engine.finished, "request")} ended so far.`];
  if (rests) said.push("Nothing runs now.");
  const rates = [...lane.prefills.values()].map((prefill) => prefill.tokens_per_s ?? 0);
  const rate = Math.round(rates.reduce((sum, each) => sum + each, 0));
  if (rate) said.push(`Long prompts are read at ${count(rate, "token")}/s.`);
  if (!hello.texts) said.push("Prompts and answers are not shown; the server's watch key shows them.");
  write($("status"), said.join(" "));
}

// Watch the server. Watching and chatting may need different keys: a typed key goes to the one that requested it.
function watch(shape) {
  const form = $("key-form");
  const say = (text, state = "") => {
    write($("status"), text);
    write($("state"), state);
  };
  const wantKey = (who, why) => {
    wants = who;
    say(why);
    form.hidden = false;
    $("key").focus();
  };
  const greet = (hello) => {
    form.hidden = hello.texts; // without texts, offer to enter the watch key
    chat.key ||= watcher.key;
    pick(hello.models, hello.model);
  };
  // On a server with several models, let the user pick the one that answers and is watched.
  const pick = (names, chosen) => {
    const list = $("models");
    $("picker").hidden = names.length < 2;
    if (names.length < 2) return;
    list.replaceChildren(...names.map((name) => make("option", "", name)));
    list.value = chat.model = watcher.model = chosen;
  };
  $("models").onchange = ({ target }) => {
    chat.model = target.value;
    watcher.choose(target.value);
  };
  // Fill the picker, because nothing can be watched before the first model is loaded.
  const listModels = async () => {
    try {
      const { data } = await (await ask("v1/models", { key: chat.key || watcher.key })).json();
      pick(data.filter(({ state }) => state).map(({ id }) => id), data[0].id);
    } catch {} // the watcher reports a missing key or a server that is still loading
  };
  const chat = new Chat($("chat"), wantKey);
  const watcher = new Watcher(shape, { greet, show, say, wantKey });
  let wants = watcher;
  form.onsubmit = (event) => {
    event.preventDefault();
    form.hidden = true;
    const key = $("key").value.trim();
    $("key").value = "";
    wants.useKey(key);
    wants = watcher;
  };
  listModels();
  watcher.run();
}

function start() {
  readInks();
  leadToRepository();
  const recording = dataOf("recording");
  if (recording) window.nanobatch = play(recording); // for the console, and for tests
  else watch(dataOf("shape"));
}

start();
