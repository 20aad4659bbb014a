// The page's clock, which all lanes share, so that two runs can race.
//
// Everything drawn depends on `now`, in seconds of the run. It follows real time, up to 200 times slower, or is paused,
// or is set by the user. Frames are drawn only after a change.

// Slowdown factors.
export const PACES = [1, 2, 5, 10, 20, 50, 100, 200];

// Calls `draw` in each requested frame, with the seconds since the previous one.
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
      // Do not catch up after the tab was in the background or idle
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
    this.seen = 0; // the latest time shown so far
    this.playing = false; // for a server: follow its newest step
    this.window = 0; // visible seconds of a watched server; 0 shows a complete recording
    this.pace = 10;
    this.lane = lanes.at(-1); // the lane for stepping and for the detail view
    this.chosen = 0; // number of the selected request; 0 if none
    this.mine = new Set(); // requests that this page has sent
    this.looks = 0; // incremented when colours or sizes change
    this.draw = draw;
    this.frames = new Frames((passed) => this.#frame(passed));
  }

  get end() {
    return Math.max(0, ...this.lanes.map((lane) => lane.end));
  }

  // The start of the timelines. For a server, only the last seconds are visible.
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

  // Move by a number of steps of the current lane.
  goBy(steps) {
    this.goToStep(Math.max(0, Math.min(this.lane.steps.length - 1, this.step + steps)));
  }

  // Go to the time at which this step's tokens have arrived, or into the step if the next one began before that.
  goToStep(index) {
    const { began, ended } = this.lane;
    const isOut = ended[index] < (began[index + 1] ?? Infinity);
    this.goTo(isOut ? ended[index] : (began[index] + ended[index]) / 2);
  }

  changePace(by) {
    this.change({ pace: PACES[PACES.indexOf(this.pace) + by] ?? this.pace });
  }
}
