// The guided tour: recorded scenes of the real engine, told in captions, each of which belongs to a record.

import { Lives } from "./lives.js";
import { opened } from "./recording.js";

const FOLDER = new URL("./scenes/", import.meta.url);
const SCENE_S = 3;

export class Tour {
  /** show(history, lives): a scene is to be shown. told({title, place, caption, ...}): what to say of it. */
  constructor(player, { show, told }) {
    this.#player = player;
    this.#show = show;
    this.#told = told;
  }

  #player;
  #show;
  #told;
  #names = [];
  #scene = 0;
  #caption = 0;
  #captions = [];
  #title = "";

  async begin() {
    this.#names = await (await fetch(new URL("index.json", FOLDER))).json();
    await this.#open(0);
  }

  async next() {
    if (this.#caption + 1 < this.#captions.length) {
      this.#caption += 1;
      this.#moveOn();
    } else if (this.#scene + 1 < this.#names.length) await this.#open(this.#scene + 1);
  }

  async before() {
    if (this.#caption > 0) {
      this.#caption -= 1;
      this.#player.showNumber(this.#captions[this.#caption].number);
      this.#tell();
    } else if (this.#scene > 0) await this.#open(this.#scene - 1);
  }

  async #open(scene) {
    const raw = await (await fetch(new URL(this.#names[scene], FOLDER))).json();
    const lives = new Lives();
    const recording = opened(raw);
    const history = recording.load((made) => made.onRecord((record, head) => lives.take(record, head)));
    this.#scene = scene;
    this.#caption = 0;
    this.#captions = recording.captions;
    this.#title = recording.title;
    this.#show(history, lives);
    this.#player.showNumber(this.#captions[0].number);
    this.#tell();
  }

  /** Plays up to the next caption, in some seconds however long it took. */
  #moveOn() {
    const { number } = this.#captions[this.#caption];
    const us = this.#player.history.after(number).atUs - this.#player.state.atUs;
    this.#player.speed = Math.min(1, us / 1e6 / SCENE_S || 1);
    this.#tell();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches || us <= 0) this.#player.showNumber(number);
    else this.#player.play(number);
  }

  #tell() {
    const isLastScene = this.#scene === this.#names.length - 1;
    this.#told({
      title: this.#title,
      place: `scene ${this.#scene + 1} of ${this.#names.length}, ${this.#caption + 1} of ${this.#captions.length}`,
      caption: this.#captions[this.#caption].words,
      isFirst: this.#scene === 0 && this.#caption === 0,
      isLast: isLastScene && this.#caption === this.#captions.length - 1,
    });
  }
}
