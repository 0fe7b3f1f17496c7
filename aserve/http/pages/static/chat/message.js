// One message: what was said, what it cost, and what can be done with it. An answer's view can be updated as it grows.

import { button, element } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { callCard } from "./calls.js";
import { copy } from "./clipboard.js";
import { MarkdownView } from "./markdown.js";
import { TokensView } from "./tokens.js";

/** A button with a drawing, beneath a message. */
export function action(words, drawing, click) {
  return button(words, { icon: icon(drawing), shown: false, kind: "quiet small", on: { click } });
}

export function copyButton(text) {
  const made = action("Copy", "copy", async () => {
    const isCopied = await copy(typeof text === "function" ? text() : text);
    made.replaceChildren(icon(isCopied ? "check" : "close"));
    made.setAttribute("aria-label", isCopied ? "Copied" : "Could not be copied");
    setTimeout(() => {
      made.replaceChildren(icon("copy"));
      made.setAttribute("aria-label", "Copy");
    }, 1500);
  });
  return made;
}

export function userMessage(node, actions) {
  return element(
    "article",
    { class: "message user", "aria-label": "You", data: { node: node.id } },
    element("h2", { class: "visually-hidden", text: "You" }),
    element("div", { class: "bubble", dir: "auto", text: node.content }),
    element("footer", {}, ...actions),
  );
}

/**
 * An answer. label: its name beside others. hasFacts: what it took is told beneath it. actions: gives the buttons
 * beneath it, unless it has failed; versions: those in any case. retry: asks again; showSetting(field): gives what
 * shows a setting, or null.
 */
export class AnswerView {
  constructor(node, { label = "Answer", hasFacts = true, ...options }) {
    this.node = node;
    this.options = { hasFacts, ...options };
    this.isShownWhole = false;
    this.thoughts = new Thoughts();
    this.body = element("div", { class: "prose", dir: "auto" });
    this.tokens = element("div");
    this.calls = element("div", { class: "calls" });
    this.ending = element("div", { class: "ending" });
    this.facts = element("span", { class: "facts" });
    this.actions = element("span", { class: "actions" });
    this.root = element(
      "article",
      { class: "message answer", "aria-label": label, data: { node: node.id } },
      element("h2", { class: "visually-hidden", text: label }),
      ...[this.thoughts.root, this.body, this.tokens, this.calls, this.ending],
      element("footer", {}, this.facts, this.actions),
    );
    this.bodyView = new MarkdownView(this.body, copyButton);
    this.tokensView = new TokensView(this.tokens);
    this.update();
  }

  /** Shows what has come since. */
  update() {
    const { node } = this;
    const isAtWork = node.status === "running";
    this.#showText();
    this.thoughts.show(node.reasoning, isAtWork && !node.content);
    this.calls.hidden = node.calls.length === 0;
    this.calls.replaceChildren(...node.calls.map(callCard));
    this.root.classList.toggle("at-work", isAtWork);
    this.root.setAttribute("aria-busy", String(isAtWork));
    if (this.options.hasFacts) showFacts(this.facts, node);
    if (isAtWork || this.isShownWhole) return;
    this.isShownWhole = true;
    this.ending.replaceChildren(...endings(node, this.options));
    this.#showActions();
  }

  #showText() {
    const { node } = this;
    const showsTokens = Boolean(node.tokens?.length) && !node.showsText;
    this.tokens.hidden = !showsTokens;
    this.body.hidden = showsTokens;
    if (showsTokens) return this.tokensView.show(node.tokens);
    const json = asJson(node);
    return json ? this.bodyView.showCode("json", json) : this.bodyView.show(node.content);
  }

  #showActions() {
    const { node } = this;
    const made = node.content ? [copyButton(() => node.content)] : [];
    if (node.tokens?.length) {
      const switcher = action(node.showsText ? "Show the tokens" : "Show as text", "tokens", () => {
        node.showsText = !node.showsText;
        this.#showText();
        this.#showActions();
        this.actions.querySelector("[data-switch]").focus();
      });
      switcher.dataset.switch = "";
      made.push(switcher);
    }
    const { actions, versions } = this.options;
    const whole = node.status === "failed" ? [] : actions().filter(Boolean);
    this.actions.replaceChildren(...made, ...whole, ...versions);
  }
}

/** What a model thought before it answered, folded. */
class Thoughts {
  constructor() {
    this.head = element("summary");
    const text = element("div", { class: "prose", dir: "auto" });
    this.root = element("details", { class: "thoughts", hidden: true }, this.head, text);
    this.view = new MarkdownView(text, copyButton);
  }

  show(reasoning, isThinking) {
    this.root.hidden = !reasoning;
    if (!reasoning) return;
    this.head.textContent = isThinking ? "Thinking…" : "Thoughts";
    this.view.show(reasoning);
  }
}

function endings(node, options) {
  const { status, finish, error, stopReason } = node;
  if (status === "failed") return [errorNote(error, options)];
  if (status === "stopped") return [element("p", { class: "hint", text: "Stopped." })];
  if (finish !== "length") return [];
  const why = stopReason === "deadline" ? "at the request's deadline" : "at the length that there was room for";
  return [element("p", { class: "hint", text: `Cut ${why}.` })];
}

/** An error in words, with what may help: to try again, or to change the field that is at fault. */
function errorNote({ title, detail, field }, { retry, showSetting }) {
  const show = field && showSetting(field);
  return element(
    "div",
    { class: "note bad", role: "alert" },
    element("p", {}, element("strong", { text: title })),
    detail && element("p", { text: detail }),
    element(
      "div",
      { class: "note-actions" },
      button("Try again", { kind: "small", on: { click: retry } }),
      show && button("Show the setting", { kind: "small", on: { click: show } }),
    ),
  );
}

/** An answer that is JSON as a whole, with lines and indents; null for any other. */
function asJson({ content, status }) {
  if (status !== "done" || !/^\s*[[{]/.test(content)) return null;
  try {
    return JSON.stringify(JSON.parse(content), null, 2);
  } catch {
    return null;
  }
}

/**
 * Shows what an answer took: "96 tokens · 41 a second · first after 0.02 s · prompt of 412, 384 from the cache", and
 * the cache's share of the prompt as a bar.
 */
export function showFacts(place, { usage, times, isEdited }) {
  if (isEdited) return place.replaceChildren("edited");
  if (!usage || !times) return place.replaceChildren();
  const facts = [`${usage.generated} ${usage.generated === 1 ? "token" : "tokens"}`];
  const spentS = (times.totalMs - times.firstMs) / 1000;
  if (usage.generated > 1 && spentS > 0.02) facts.push(`${((usage.generated - 1) / spentS).toFixed(0)} a second`);
  facts.push(`first after ${(times.firstMs / 1000).toFixed(2)} s`);
  facts.push(`prompt of ${usage.prompt}${usage.cached ? `, ${usage.cached} from the cache` : ""}`);
  return place.replaceChildren(facts.join(" · "), ...(usage.cached ? [shareBar(usage.cached / usage.prompt)] : []));
}

function shareBar(share) {
  const fill = element("span", { class: "share-fill" });
  fill.style.width = `${100 * share}%`;
  return element("span", { class: "share", "aria-hidden": "true" }, fill);
}
