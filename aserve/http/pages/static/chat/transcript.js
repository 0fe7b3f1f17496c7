// The messages of a conversation, one beneath the other; answers that were asked for together stand side by side.

import { button, element } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { resultCard, resultsForm } from "./calls.js";
import { awaitsResults, batchOf, choose, pathTo, siblings } from "./conversation.js";
import { AnswerView, action, copyButton, showFacts, userMessage } from "./message.js";

/** Shows a conversation in an element. acts: what can be done with messages, as main.js has it. */
export class Transcript {
  constructor(root, acts) {
    this.root = root;
    this.acts = acts;
    this.answers = new Map(); // by node id
    this.editing = null;
  }

  /** Shows the path of a conversation anew. */
  show(conversation) {
    this.conversation = conversation;
    this.answers.clear();
    const path = pathTo(conversation);
    const rows = path.map((node) => this.#row(node));
    const forked = conversation.forkedFrom;
    const at = forked ? path.findIndex((node) => node.id === forked.leaf) : -1;
    if (at >= 0) rows[at].after = this.#forkLine(forked);
    const elements = rows.flatMap((row) => [row.element, row.after]).filter(Boolean);
    const last = path.at(-1);
    if (awaitsResults(conversation, last)) elements.push(this.#resultsForm(last));
    else if (last && last.role !== "assistant") elements.push(this.#answerButton());
    this.root.replaceChildren(...elements);
  }

  /** Shows what has come of some answers. */
  update(nodes) {
    for (const node of nodes) this.answers.get(node.id)?.update();
    const facts = this.root.querySelector(".side-by-side + .facts");
    if (facts && nodes.length > 1) showFacts(facts, nodes[0]);
  }

  /** Opens a message for editing; of answers side by side it is then the chosen one. */
  edit(node) {
    this.editing = node.id;
    if (!pathTo(this.conversation).includes(node)) choose(this.conversation, node);
    this.show(this.conversation);
    const area = this.root.querySelector(".editor textarea");
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  #row(node) {
    if (node.id === this.editing) return { element: this.#editor(node) };
    if (node.role === "user") return { element: userMessage(node, this.#userActions(node)) };
    if (node.role === "tool") return { element: this.#toolMessage(node) };
    const batch = batchOf(this.conversation, node);
    if (batch.length === 1 || node.id !== this.conversation.leaf) return { element: this.#answer(node).root };
    const facts = element("p", { class: "facts" });
    showFacts(facts, node);
    return { element: this.#sideBySide(batch), after: facts };
  }

  #toolMessage(node) {
    const article = { class: "message tool", "aria-label": `Result of ${node.name}`, data: { node: node.id } };
    const footer = element("footer", {}, copyButton(node.content), this.#editAction(node), ...this.#versions(node));
    const head = element("h2", { class: "visually-hidden", text: "Tool" });
    return element("article", article, head, resultCard(node), footer);
  }

  #sideBySide(nodes) {
    const columns = nodes.map((node, index) => {
      const isChosen = node.id === this.conversation.leaf;
      const label = `Answer ${index + 1} of ${nodes.length}`;
      const { root } = this.#answer(node, { label, hasFacts: false });
      const name = element("span", { class: "column-name", text: `${index + 1}` });
      const chooser = button(isChosen ? "Chosen" : "Choose", {
        icon: isChosen ? icon("check") : null,
        kind: isChosen ? "small chosen" : "small",
        "aria-pressed": String(isChosen),
        "aria-label": isChosen ? `Answer ${index + 1} is chosen to go on with` : `Go on with answer ${index + 1}`,
        data: { choose: node.id },
        on: { click: () => this.acts.choose(node, `[data-choose="${node.id}"]`) },
      });
      const head = element("div", { class: "column-head" }, name, chooser);
      return element("div", { class: isChosen ? "column is-chosen" : "column" }, head, root);
    });
    const label = `${nodes.length} answers side by side`;
    return element("div", { class: "side-by-side", role: "group", "aria-label": label, tabIndex: 0 }, ...columns);
  }

  #answer(node, options = {}) {
    const actions = () => [
      this.#mayGoOn(node) && action("Go on", "right", () => this.acts.answer(node)),
      action("Answer again", "redo", () => this.acts.regenerate(node)),
      this.#editAction(node),
      this.#forkAction(node),
    ];
    const versions = options.label ? [] : this.#versions(node);
    const acts = { actions, versions, retry: () => this.acts.retry(node), showSetting: this.acts.showSetting };
    const view = new AnswerView(node, { ...acts, ...options });
    this.answers.set(node.id, view);
    return view;
  }

  /** Whether it is the beginning of a text that was cut. What has a structure would begin that anew. */
  #mayGoOn({ id, finish, status, content, reasoning, calls }) {
    const { leaf, settings } = this.conversation;
    const isCut = status === "stopped" || finish === "length";
    return id === leaf && isCut && content && !reasoning && !calls.length && settings.format === "text";
  }

  #userActions(node) {
    return [copyButton(node.content), this.#editAction(node), this.#forkAction(node), ...this.#versions(node)];
  }

  #editAction(node) {
    return action("Edit", "edit", () => this.edit(node));
  }

  #forkAction(node) {
    return action("Fork: a new conversation from here", "fork", () => this.acts.fork(node));
  }

  /** From one version of a message to the next: what was edited, or answered again. */
  #versions(node) {
    const all = siblings(this.conversation, node);
    if (all.length < 2) return [];
    const at = all.indexOf(node);
    const step = (words, drawing, offset) => {
      const focus = `[data-node="${all[at + offset]?.id}"] [aria-label="${words}"]`;
      const made = action(words, drawing, () => this.acts.choose(all[at + offset], focus));
      made.disabled = !all[at + offset];
      return made;
    };
    const named = { class: "versions", role: "img", "aria-label": `Version ${at + 1} of ${all.length}` };
    const count = element("span", named, `${at + 1}/${all.length}`);
    return [step("Version before", "left", -1), count, step("Version after", "right", 1)];
  }

  #editor(node) {
    const area = element("textarea", { class: "input", value: node.content, rows: 4, "aria-label": "The message" });
    const close = () => {
      this.editing = null;
      this.show(this.conversation);
      this.root.querySelector(`[data-node="${node.id}"] [aria-label="Edit"]`)?.focus();
    };
    const save = () => {
      this.editing = null;
      if (!this.acts.saveEdit(node, area.value)) this.editing = node.id;
    };
    const words = node.role === "assistant" ? "Save" : "Save and answer";
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    });
    const actions = [
      button("Cancel", { kind: "quiet", on: { click: close } }),
      button(words, { kind: "primary", on: { click: save } }),
    ];
    return element("div", { class: "editor" }, area, element("div", { class: "actions" }, ...actions));
  }

  #forkLine({ id, title }) {
    const words = title || "a conversation";
    const link = button(words, { kind: "quiet small", on: { click: () => this.acts.open(id) } });
    return element("div", { class: "fork-line" }, element("span", {}, "Forked here from", link));
  }

  /** For a path that ends with what nobody has answered: forked there, or edited. */
  #answerButton() {
    return element("div", {}, button("Answer", { kind: "primary", on: { click: () => this.acts.answer() } }));
  }

  #resultsForm(node) {
    return resultsForm(node.calls, (results) => this.acts.sendResults(node, results));
  }
}
