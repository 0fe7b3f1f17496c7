// Where messages are written.

import { button } from "../shared/dom.js";
import { icon } from "../shared/icons.js";

const MAX_SHARE = 0.4; // of the window's height

/** The form beneath the messages. acts: send(text), stop(), editLast(), showSetting(name). */
export class Composer {
  constructor(form, acts) {
    this.form = form;
    this.acts = acts;
    this.area = form.querySelector("textarea");
    this.sender = form.querySelector("[data-send]");
    this.chips = form.querySelector(".chips");
    this.isAtWork = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.area.addEventListener("input", () => this.#fit());
    this.area.addEventListener("keydown", (event) => this.#key(event));
    this.atWork(false);
  }

  focus() {
    this.area.focus();
  }

  /** Whether an answer is on its way, which the button then stops. */
  atWork(isAtWork) {
    const words = isAtWork ? "Stop" : "Send";
    this.isAtWork = isAtWork;
    this.sender.replaceChildren(icon(isAtWork ? "stop" : "arrowUp"));
    this.sender.setAttribute("aria-label", words);
    this.sender.title = isAtWork ? "Stop (Esc)" : "Send (Enter)";
    this.sender.classList.toggle("at-work", isAtWork);
  }

  /** Shows what is not as usual: each word leads to its setting. */
  showSummary(words) {
    const chips = words.map(({ field, text }) =>
      button(text, { kind: "chip", on: { click: () => this.acts.showSetting(field)?.() } }),
    );
    this.chips.replaceChildren(...chips);
    this.chips.hidden = chips.length === 0;
  }

  put(text) {
    this.area.value = text;
    this.#fit();
  }

  #submit() {
    if (this.isAtWork) return this.acts.stop();
    const text = this.area.value;
    if (text.trim() && this.acts.send(text)) this.put("");
    return undefined;
  }

  #key(event) {
    const isPlain = !event.shiftKey && !event.altKey && !event.isComposing;
    const isTouch = matchMedia("(pointer: coarse)").matches; // whose keyboards have no other way to break a line
    if (event.key === "Enter" && isPlain && !isTouch) {
      event.preventDefault();
      if (!this.isAtWork) this.#submit();
    }
    if (event.key === "ArrowUp" && !this.area.value) {
      event.preventDefault();
      this.acts.editLast();
    }
  }

  #fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight + 2, window.innerHeight * MAX_SHARE)}px`;
  }
}
