// The moment that is shown: the newest one, one that stands still, or one that moves on as if it were happening.

import { State } from "./state.js";

export class Player {
  constructor(changed) {
    this.history = null;
    this.lives = null;
    this.mode = "live";
    this.speed = 1;
    this.state = new State();
    this.untilNumber = Number.POSITIVE_INFINITY;
    this.onArrival = () => {};
    this.#changed = changed;
  }

  #changed;
  #us = 0;
  #lastMs = 0;

  /** Shows another history, from its newest moment on, or from its beginning. */
  use(history, lives, { fromBeginning = false } = {}) {
    this.history = history;
    this.lives = lives;
    this.untilNumber = Number.POSITIVE_INFINITY;
    if (fromBeginning) this.show(history.beginsUs);
    else this.follow();
  }

  /** Goes on showing the newest. */
  follow() {
    this.mode = "live";
    this.state = this.history?.head ?? new State();
    this.#changed();
  }

  /** Stands still at what is shown. */
  stop() {
    if (this.mode === "live") this.state = this.state.copy();
    this.mode = "stopped";
    this.#changed();
  }

  /** Stands still at a moment. */
  show(us) {
    if (!this.history || this.history.isEmpty) return;
    this.mode = "stopped";
    this.state = this.history.at(Math.max(us, this.history.beginsUs));
    this.#changed();
  }

  /** Stands still at the record of that number. */
  showNumber(number) {
    this.mode = "stopped";
    this.state = this.history.after(number);
    this.#changed();
  }

  /** A step back (-1) or on (1). */
  step(direction) {
    if (!this.history || this.history.isEmpty) return;
    const { number: here, stepNumber } = this.state;
    const number = this.history.stepBeside(direction < 0 && stepNumber >= 0 ? stepNumber : here, direction);
    if (number === null) this.stop();
    else this.showNumber(number);
  }

  /** Moves on from what is shown, at most to the record of that number; from the beginning, if it was at the end. */
  play(untilNumber = Number.POSITIVE_INFINITY) {
    if (!this.history || this.history.isEmpty) return;
    if (this.state.number >= this.history.head.number) this.show(this.history.beginsUs);
    this.mode = "playing";
    this.untilNumber = untilNumber;
    this.#us = this.state.atUs;
    this.#lastMs = performance.now();
    this.#changed();
    requestAnimationFrame((ms) => this.#tick(ms));
  }

  #tick(ms) {
    if (this.mode !== "playing") return;
    this.#us += Math.max(0, ms - this.#lastMs) * 1000 * this.speed;
    this.#lastMs = ms;
    const next = this.history.at(this.#us);
    if (next.number >= this.untilNumber) {
      this.showNumber(this.untilNumber);
      this.onArrival();
      return;
    }
    this.state = next;
    if (next.number >= this.history.head.number && this.#us >= this.history.endsUs) this.mode = "stopped";
    this.#changed();
    requestAnimationFrame((now) => this.#tick(now));
  }
}
