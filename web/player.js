// The clock of the page, shared by all lanes, so that two runs race on the same seconds.
//
// Everything drawn depends on `now`, in seconds of the run: it follows real time, slowed down, or is stopped, or
// set by hand. Frames are drawn only when something has changed.

// Slowdown factors.
export const PACES = [1, 2, 5, 10, 20, 50, 100, 200];

// Call `draw` in each requested frame, with the seconds since the last one.
export class Frames {
  constructor(draw) {
    this.draw = draw;
    this.asked = false;
    this.last = 0;
  }

  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame((time) => {
      this.asked = false;
      // Do not catch up after a tab was in the background or at rest
      const passed = Math.min(100, time - this.last) / 1000;
      this.last = time;
      this.draw(passed);
    });
  }
}

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
    this.looks = 0; // changes with the colours
    this.draw = draw;
    this.frames = new Frames((passed) => this.#frame(passed));
  }

  get end() {
    return Math.max(0, ...this.lanes.map((lane) => lane.end));
  }

  // Where the timelines begin: a server is shown for the last seconds only.
  get start() {
    return this.window ? Math.max(this.lane.began[0] ?? 0, this.end - this.window) : 0;
  }

  get step() {
    return this.lane.stepAt(this.now);
  }

  change(changes = {}) {
    Object.assign(this, changes);
    this.now = Math.max(this.start, Math.min(this.now, this.end));
    this.seen = Math.min(Math.max(this.seen, this.now), this.end);
    this.frames.ask();
  }

  #frame(passed) {
    if (this.playing && !this.window) {
      this.change({ now: this.now + passed / this.pace });
      if (this.now >= this.end) this.playing = false;
    }
    this.draw();
  }

  play() {
    const now = this.now < this.end ? this.now : 0;
    this.change({ playing: true, now: this.window ? this.end : now });
  }

  pause() {
    this.change({ playing: false });
  }

  goTo(time) {
    this.change({ now: time, playing: false });
  }

  // Move by steps of the lane shown in detail.
  goBy(steps) {
    this.goToStep(Math.max(0, Math.min(this.lane.steps.length - 1, this.step + steps)));
  }

  // Go to the time at which this step's tokens have come.
  goToStep(index) {
    const { began, ended } = this.lane;
    const isOut = ended[index] < (began[index + 1] ?? Infinity);
    this.goTo(isOut ? ended[index] : (began[index] + ended[index]) / 2);
  }

  changePace(by) {
    this.change({ pace: PACES[PACES.indexOf(this.pace) + by] ?? this.pace });
  }
}
