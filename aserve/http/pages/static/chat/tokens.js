// An answer as its tokens: each tinted by how likely it was; pointed at, or reached by the arrow keys, it shows what
// else might have stood there.

import { element, newId } from "../shared/dom.js";

const BOUNDS = [0.9, 0.7, 0.4, 0.15]; // of likely-0, likely-1, ...; below the last, likely-4

/** The probability in words: 93 %, 0.4 %. */
export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share >= 0.1 ? share.toFixed(1) : "<0.1"} %`;
}

/** White space in signs, for where a token stands alone. */
export function spelled(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";
}

export class TokensView {
  constructor(root) {
    this.popover = element("div", { class: "token-card", id: newId("tokens"), role: "tooltip", hidden: true });
    this.list = element("div", {
      class: "tokens",
      role: "listbox",
      "aria-label": "Tokens of the answer, with their probabilities",
      on: {
        pointerover: (event) => this.#point(event.target),
        pointerleave: () => this.#hide(),
        focusin: (event) => this.#point(event.target),
        focusout: () => this.#hide(),
        keydown: (event) => this.#move(event),
      },
    });
    this.tokens = [];
    root.replaceChildren(this.list, this.popover);
  }

  /** Tokens that were there before stay as they are. */
  show(tokens) {
    const from = this.list.childElementCount;
    this.tokens = tokens;
    this.list.append(...tokens.slice(from).map((token, index) => this.#span(token, from + index)));
  }

  #span({ text, logprob }, index) {
    const likely = BOUNDS.findIndex((bound) => Math.exp(logprob) >= bound);
    return element("span", {
      class: `token likely-${likely < 0 ? BOUNDS.length : likely}`,
      role: "option",
      "aria-selected": "false",
      "aria-label": `${spelled(text)}, ${percent(logprob)}`,
      tabIndex: index === 0 ? 0 : -1,
      data: { index },
      text,
    });
  }

  #point(target) {
    const span = target.closest(".token");
    if (!span) return;
    this.#unmark();
    const token = this.tokens[Number(span.dataset.index)];
    span.setAttribute("aria-selected", "true");
    span.setAttribute("aria-describedby", this.popover.id);
    this.popover.replaceChildren(...cardOf(token));
    this.popover.hidden = false;
    this.#place(span.getClientRects()[0] ?? span.getBoundingClientRect());
  }

  /** Below the token, or above it where there is no room; never beyond the window. */
  #place(rect) {
    const { offsetWidth: width, offsetHeight: height } = this.popover;
    const left = Math.min(rect.left, document.documentElement.clientWidth - width - 8);
    const isRoom = rect.bottom + 6 + height <= window.innerHeight;
    this.popover.style.left = `${Math.max(8, left)}px`;
    this.popover.style.top = `${isRoom ? rect.bottom + 6 : rect.top - 6 - height}px`;
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const { children } = this.list;
    const here = Number(event.target.dataset.index);
    const next = event.key === "Home" ? 0 : event.key === "End" ? children.length - 1 : here + (step ?? 0);
    if (event.key === "Escape") this.#hide();
    if (next === here || !children[next]) return;
    event.preventDefault();
    children[here].tabIndex = -1;
    children[next].tabIndex = 0;
    children[next].focus();
  }

  #hide() {
    this.#unmark();
    this.popover.hidden = true;
  }

  #unmark() {
    for (const span of this.list.querySelectorAll('[aria-selected="true"]')) {
      span.setAttribute("aria-selected", "false");
      span.removeAttribute("aria-describedby");
    }
  }
}

function cardOf({ text, logprob, top }) {
  const isAmong = top.some((other) => other.text === text);
  const rows = isAmong ? top : [{ text, logprob }, ...top];
  return rows.map((other) => {
    const bar = element("span", { class: "bar-fill" });
    bar.style.width = `${Math.max(1, 100 * Math.exp(other.logprob))}%`;
    const classes = other.text === text ? "alternative chosen" : "alternative";
    const words = element("code", { text: spelled(other.text) });
    const likely = element("span", { class: "percent", text: percent(other.logprob) });
    return element("div", { class: classes }, words, element("span", { class: "bar-track" }, bar), likely);
  });
}
