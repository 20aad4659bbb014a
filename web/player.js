// The clock of the page: one for all lanes, so that two runs race on the same seconds.
//
// The problem. A burst is over in two seconds, and a step takes three milliseconds. Nobody sees anything
// at that speed. And whoever has seen something wants to go back.
//
// The way out. The page has a moment, `now`, in seconds of the run. It moves with the real time, slowed
// down, or stands, or is put somewhere by hand. Everything that is drawn depends on it.
//
// What this file keeps. `now` stays within the run. Whoever draws is told once for each frame in which
// something has changed, and never otherwise: a page that stands still costs nothing.

// How much slower than it ran.
export const PACES = [1, 2, 5, 10, 20, 50, 100, 200];

export class Player {
  constructor(lanes, draw) {
    this.lanes = lanes;
    this.now = 0;
    this.seen = 0; // the latest moment that has been shown
    this.playing = false; // of a server: its newest step is what is shown
    this.window = 0; // seconds of a server that is watched; 0: all of a recording
    this.pace = 10;
    this.lane = lanes.at(-1); // the one whose steps are stepped through
    this.chosen = 0; // a request
    this.mine = new Set(); // requests that this page has sent
    this.frames = 0;
    this.looks = 0; // changes with the colours
    this.draw = draw;
    this.asked = false; // for a frame
    this.before = null; // when the last frame was
  }

  get end() {
    return Math.max(0, ...this.lanes.map((lane) => lane.end));
  }

  // Where the timelines begin: a server is shown for so many seconds only.
  get start() {
    return this.window ? Math.max(0, this.end - this.window) : 0;
  }

  get step() {
    return this.lane.stepAt(this.now);
  }

  change(changes = {}) {
    Object.assign(this, changes);
    this.now = Math.max(this.start, Math.min(this.now, this.end));
    this.seen = Math.max(this.seen, this.now);
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame((time) => this.#frame(time));
  }

  #frame(time) {
    this.asked = false;
    this.frames += 1;
    const moves = this.playing && !this.window;
    if (moves) {
      // A tab in the background gets no frames: what it has missed is not made up for
      const passed = this.before === null ? 0 : Math.min(100, time - this.before) / 1000;
      this.before = time;
      this.now = Math.min(this.end, this.now + passed / this.pace);
      this.seen = Math.max(this.seen, this.now);
      if (this.now >= this.end) this.playing = false;
    }
    this.draw();
    if (moves && this.playing) this.change();
    else this.before = null;
  }

  play() {
    const isOver = this.now >= this.end;
    this.change({ playing: true, now: this.window ? this.end : isOver ? 0 : this.now });
  }

  pause() {
    this.change({ playing: false });
  }

  goTo(time) {
    this.change({ now: time, playing: false });
  }

  // So many steps on or back, in the lane that is under the microscope.
  goBy(steps) {
    this.goToStep(Math.max(0, Math.min(this.lane.steps.length - 1, this.step + steps)));
  }

  // To a moment at which this step is the one that runs, and its tokens are out.
  goToStep(index) {
    const { began, ended } = this.lane;
    const isOut = ended[index] < (began[index + 1] ?? Infinity);
    this.goTo(isOut ? ended[index] : (began[index] + ended[index]) / 2);
  }

  changePace(by) {
    const at = PACES.findIndex((pace) => pace >= this.pace);
    this.change({ pace: PACES[Math.max(0, Math.min(PACES.length - 1, at + by))] });
  }
}
