// The page, put together: which recording, which views, which keys.
//
// Where the data is. A page that was made of a recording has it in an element `recording`. The page that
// a server sends has none, and asks the server (live.js).

import { lanesOf, named } from "./recording.js";
import { PACES, Player } from "./player.js";
import { LaneView, write } from "./lanes.js";
import { RequestsView, StepView } from "./details.js";
import { count, span, verdict } from "./words.js";
import { Game } from "./game.js";
import { Lab } from "./lab.js";
import { forgetInks } from "./draw.js";
import { Watcher } from "./live.js";
import { Chat } from "./chat.js";

const PLAYS = 10; // seconds that a recording takes on the page, about

const $ = (name) => document.querySelector(`[data-${name}]`);

function dataOf(name) {
  return JSON.parse(document.getElementById(`data-${name}`)?.textContent ?? "null");
}

class Page {
  constructor(lanes) {
    this.player = new Player(lanes, () => this.draw());
    this.choose = (request) => {
      $("opened").append(document.querySelector("[data-request]")); // unless the list takes it
      this.player.change({ chosen: request });
    };
    this.views = lanes.map((lane) => new LaneView(lane, this.player, this.choose));
    $("race").replaceChildren(...this.views.map((view) => view.element));
    $("answers").replaceChildren(...this.views.map((view) => view.answers));
    $("answers").classList.toggle("two", lanes.length > 1);
    this.step = new StepView(this.player, $("step"), this.choose);
    this.requests = new RequestsView(this.player, $("all"), $("opened"), this.choose);
    this.#watchSight();
    this.#wire();
  }

  // What nobody sees is not drawn.
  #watchSight() {
    this.inSight = new Map();
    const observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.inSight.set(target, isIntersecting);
      this.player.change();
    }, { rootMargin: "200px" });
    for (const section of [$("step"), $("all")]) observer.observe(section);
  }

  // --- what can be pressed

  #wire() {
    const { player } = this;
    this.acts = {
      play: () => (player.playing ? player.pause() : player.play()),
      back: () => player.goBy(-1),
      on: () => player.goBy(1),
      slower: () => player.changePace(1),
      faster: () => player.changePace(-1),
    };
    for (const [name, act] of Object.entries(this.acts)) $(name).onclick = act;
    $("scrub").oninput = ({ target }) => {
      player.goTo(player.start + (target.value / target.max) * (player.end - player.start));
    };
    document.addEventListener("keydown", (event) => this.key(event));
    const drawAnew = () => {
      forgetInks();
      player.change({ looks: player.looks + 1 });
    };
    window.addEventListener("resize", drawAnew);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
  }

  // Another lane in place of the only one: a server's history was cut, or the server began anew.
  replace(lane) {
    this.player.lanes[0] = lane;
    Object.assign(this.player, { lane, seen: 0 });
    this.views[0].lane = lane;
    this.requests.rows.clear();
  }

  // Keys are those of the screen in the terminal, where it has the same.
  key(event) {
    // The arrows on the scrubber are single steps, too
    const isScrub = event.target === $("scrub");
    const { tagName } = event.target;
    const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(tagName) && !isScrub;
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const { player, acts } = this;
    const keys = {
      " ": acts.play,
      ArrowLeft: () => player.goBy(event.shiftKey ? -10 : -1),
      ArrowRight: () => player.goBy(event.shiftKey ? 10 : 1),
      s: acts.on,
      Home: () => player.goTo(player.start),
      End: () => player.goTo(player.end),
      "-": acts.slower,
      "+": acts.faster,
      "=": acts.faster,
      p: () => player.change({ lane: player.lanes.find((lane) => lane !== player.lane) ?? player.lane }),
      Escape: () => this.choose(0),
    };
    if (!keys[event.key] || (event.key === " " && /^(BUTTON|A)$/.test(tagName))) return;
    event.preventDefault();
    keys[event.key]();
  }

  // --- what is shown

  draw() {
    const { player } = this;
    for (const view of this.views) view.draw();
    if (this.inSight.get($("step")) || !this.step.shown) this.step.draw();
    if (this.inSight.get($("all")) || this.requests.isStale) this.requests.draw();
    this.requests.drawDetail();
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

// Files of the repository that the page names. docs/make/page.py makes links of them once the repository
// has an address. Until then this is done here where the address is known: on GitHub Pages, by the
// page's own; and in a copy of the repository, where the page lies beside them. Elsewhere they are words.
function leadToRepository() {
  const [, owner] = /^([\w-]+)\.github\.io$/.exec(location.hostname) ?? [];
  const [, name] = location.pathname.split("/");
  const isCopy = location.protocol === "file:" && location.pathname.endsWith("/docs/index.html");
  if (!owner && !isCopy) return;
  const base = owner ? `https://github.com/${owner}/${name}/blob/main` : "..";
  for (const link of document.querySelectorAll("a[data-file]")) link.href = `${base}/${link.dataset.file}`;
}

// --- a recording

function play(recording) {
  const page = new Page(lanesOf(recording));
  page.player.pace = PACES.find((pace) => pace * page.player.end >= PLAYS) ?? PACES.at(-1);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) page.player.goTo(page.player.end);
  else page.player.play();
  page.lab = new Lab($("lab"), recording, dataOf("lab"));
  if ($("game")) page.game = new Game($("game"), dataOf("game"));
  return page;
}

// --- a server

const WINDOW = 20; // seconds of a server's time that are in sight

function show(live, isNew) {
  live.lane.hidesTexts = !live.hello.texts;
  if (isNew) $("key-form").hidden = live.hello.texts; // another key may show more
  let page = window.nanobatch;
  if (!page) {
    page = window.nanobatch = new Page([live.lane]);
    Object.assign(page.player, { window: WINDOW, playing: true });
    document.body.classList.add("lives-on");
  } else if (isNew) {
    page.replace(live.lane);
  }
  const { engine, hello } = live;
  const busy = engine.waiting || engine.slots.some((slot) => named(live.shape.SlotView, slot).request !== null);
  live.lane.rests = !busy;
  const { player } = page;
  player.change(player.playing ? { now: player.end, seen: player.end } : {});
  const said = [`${hello.model}: ${hello.summary}.`, `${count(engine.finished, "request")} answered so far.`];
  if (!busy) said.push("Nothing runs now.");
  if (!hello.texts) said.push("Prompts and answers are not shown; the server's watch key shows them.");
  write($("status"), said.join(" "));
}

// Who watches may need another key than who asks. A key that is typed goes to the one who wanted it.
function watch(shape) {
  const form = $("key-form");
  const wantKey = (why, who = watcher) => {
    wants = who;
    write($("status"), why);
    form.hidden = false;
    $("key").focus();
  };
  const chat = new Chat($("chat"), (why) => wantKey(why, chat));
  const watcher = new Watcher(shape, { show, wantKey, say: (text) => write($("status"), text) });
  let wants = watcher;
  form.onsubmit = (event) => {
    event.preventDefault();
    form.hidden = true;
    const key = $("key").value.trim();
    $("key").value = "";
    wants.useKey(key);
    wants = watcher;
    chat.key ||= key;
  };
  watcher.run();
}

function begin() {
  leadToRepository();
  const recording = dataOf("recording");
  if (recording) window.nanobatch = play(recording); // for the console, and for tests
  else watch(dataOf("shape"));
}

begin();
