// The list of conversations at the left, and the settings at the right: beside the messages where there is room, else
// in front of them, one at a time.

import { fromStorage, toStorage } from "./store.js";

const NARROW = matchMedia("(max-width: 900px)");
const STORED = "aserve.chat.drawers";

export class Drawers {
  /** elements: those that open, by name; each has a button [data-opens=NAME]. behind: what they stand in front of. */
  constructor(elements, behind, backdrop) {
    this.elements = elements;
    this.behind = behind;
    this.backdrop = backdrop;
    this.isOpen = NARROW.matches ? {} : { list: true, settings: false, ...fromStorage(STORED, {}) };
    for (const opener of document.querySelectorAll("[data-opens]")) {
      opener.addEventListener("click", () => this.set(opener.dataset.opens, !this.isOpen[opener.dataset.opens]));
    }
    for (const closer of document.querySelectorAll("[data-closes]")) {
      closer.addEventListener("click", () => this.set(closer.dataset.closes, false));
    }
    backdrop.addEventListener("click", () => this.closeInFront());
    NARROW.addEventListener("change", () => {
      this.isOpen = NARROW.matches ? {} : { list: true, settings: false, ...fromStorage(STORED, {}) };
      this.#apply();
    });
    this.#apply();
  }

  set(name, isOpen) {
    if (NARROW.matches && isOpen) this.isOpen = {};
    this.isOpen[name] = isOpen;
    if (!NARROW.matches) toStorage(STORED, this.isOpen);
    this.#apply();
    if (isOpen) this.elements[name].querySelector("button, input, select, textarea")?.focus();
    else document.querySelector(`[data-opens="${name}"]`).focus();
  }

  /** Closes what stands in front of the messages; whether something did. */
  closeInFront() {
    if (!NARROW.matches) return false;
    const name = Object.keys(this.isOpen).find((each) => this.isOpen[each]);
    if (name) this.set(name, false);
    return name !== undefined;
  }

  #apply() {
    for (const [name, drawer] of Object.entries(this.elements)) {
      drawer.hidden = !this.isOpen[name];
      for (const opener of document.querySelectorAll(`[data-opens="${name}"]`)) {
        opener.setAttribute("aria-expanded", String(Boolean(this.isOpen[name])));
      }
    }
    const isInFront = NARROW.matches && Object.values(this.isOpen).some(Boolean);
    this.backdrop.hidden = !isInFront;
    for (const each of this.behind) each.inert = isInFront;
  }
}
