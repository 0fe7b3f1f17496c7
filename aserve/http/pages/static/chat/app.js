// The conversations, the one that is open, the answers that are on their way; and all that can be done with them.

import * as trees from "./conversation.js";
import { confirmed, lineOf } from "./dialogs.js";
import { Run } from "./run.js";
import { completed, SettingError } from "./settings.js";
import { keepSettings, lastSettings } from "./store.js";

const SAVE_EVERY_MS = 2000;

/** view: shows what has changed: opened(), listed(), grew(nodes), ended(run), refused(error), announced(words). */
export class App {
  constructor(store, view) {
    this.store = store;
    this.view = view;
    this.runs = new Map(); // by the conversation's id
    this.conversations = [];
    this.current = trees.newConversation(completed(lastSettings()));
    this.elsewhere = "BroadcastChannel" in window ? new BroadcastChannel("aserve.chat") : null;
    this.elsewhere?.addEventListener("message", ({ data }) => this.#changedElsewhere(data));
  }

  async load() {
    this.conversations = (await this.store.all()).filter(({ id }) => !this.runs.has(id)).map(restored);
    const running = [...this.runs.values()].map(({ conversation }) => conversation);
    this.conversations = [...running, ...this.conversations].sort((one, other) => other.updatedMs - one.updatedMs);
  }

  get run() {
    return this.runs.get(this.current.id) ?? null;
  }

  /** Opens a conversation; a new one where there is none of that id. */
  open(id) {
    const found = this.conversations.find((conversation) => conversation.id === id);
    if (found) this.current = found;
    else if (this.#isKept(this.current)) this.current = trees.newConversation(completed(lastSettings()));
    this.view.opened();
  }

  /** Says something; whether it could be said now. */
  send(text) {
    const { current } = this;
    if (this.run) return false;
    if (trees.awaitsResults(current, current.nodes[current.leaf])) {
      this.view.refused(new SettingError("results", "The model waits for the results of its tools, above."));
      return false;
    }
    const leaf = current.leaf;
    const node = trees.addNode(current, leaf, { role: "user", content: text });
    if (this.answer()) {
      current.title ||= trees.titleFrom(text);
      this.#keep(current);
      return true;
    }
    delete current.nodes[node.id];
    current.leaf = leaf;
    this.view.opened();
    return false;
  }

  /** Has the end of the path answered, or goes on with an answer that is there; whether that could be asked. */
  answer(begun = null) {
    const conversation = this.current;
    if (this.run) return false;
    let run;
    try {
      run = new Run(conversation, (changed) => this.#grew(changed), begun);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.view.refused(error);
      return false;
    }
    this.view.refused(null);
    this.runs.set(conversation.id, run);
    this.view.opened();
    run.finish().then(() => this.#ended(run));
    return true;
  }

  stop() {
    this.run?.stop();
  }

  /** Another answer beside one. */
  regenerate(node) {
    if (this.#isBusy()) return;
    const { leaf } = this.current;
    this.current.leaf = node.parent;
    if (this.answer()) return;
    this.current.leaf = leaf;
    this.view.opened();
  }

  /** The same again beside one that failed, or in its place where nothing had come of it. */
  retry(node) {
    if (this.#isBusy()) return;
    this.regenerate(node);
    if (this.run && !node.content) delete this.current.nodes[node.id];
    this.view.opened();
  }

  /** Another version of a message, and, unless it is an answer, what the model says to that; whether that could be. */
  saveEdit(node, text) {
    const { current } = this;
    if (this.#isBusy()) return false;
    const { role, name, callId, calls, reasoning } = node;
    const followers = trees.pathTo(current);
    const made = trees.addNode(current, node.parent, { role, content: text });
    if (role === "assistant") Object.assign(made, { calls, reasoning, isEdited: true, finish: "stop" });
    if (role === "tool") {
      Object.assign(made, { name, callId });
      for (const other of followers.slice(followers.indexOf(node) + 1)) {
        if (other.role !== "tool") break;
        trees.addNode(current, current.leaf, { ...other, id: trees.newId(), parent: current.leaf, next: null });
      }
    }
    this.#keep(current);
    if (role === "assistant" || !this.answer()) this.view.opened();
    return true;
  }

  /** Shows another version; focus: a selector of what shall have the focus then. */
  choose(node, focus) {
    if (this.#isBusy()) return;
    trees.choose(this.current, node);
    this.#keep(this.current);
    this.view.opened();
    document.querySelector(focus)?.focus();
  }

  fork(node) {
    const made = trees.fork(this.current, node);
    this.#keep(made);
    this.open(made.id);
    this.view.announced("A new conversation, forked from the other");
  }

  /** Takes in a conversation that was in a file, beside those that are here. */
  take(conversation) {
    this.#keep(restored(conversation));
    this.open(conversation.id);
    this.view.refused(null);
    this.view.announced("The conversation was imported.");
  }

  /** What the tools have come to that an answer calls. */
  sendResults(node, results) {
    const { current } = this;
    for (const [index, { id, name }] of node.calls.entries()) {
      trees.addNode(current, current.leaf, { role: "tool", callId: id, name, content: results[index] });
    }
    this.#keep(current);
    if (!this.answer()) this.view.opened();
  }

  /** Whether an answer is on its way, which is then said. */
  #isBusy() {
    if (this.run) this.view.refused(new SettingError("run", "An answer is on its way: wait for it, or stop it."));
    return this.run !== null;
  }

  settingsChanged() {
    keepSettings(this.current.settings);
    if (this.#isKept(this.current)) this.#save(this.current);
  }

  async rename(conversation) {
    const title = await lineOf("Rename the conversation", "Title", conversation.title);
    if (!title) return;
    conversation.title = title;
    this.#keep(conversation);
  }

  async remove(conversation) {
    const what = `“${conversation.title}” is kept in this browser alone, and cannot be had back.`;
    if (!(await confirmed("Delete the conversation?", what, "Delete"))) return;
    this.runs.get(conversation.id)?.stop();
    this.conversations = this.conversations.filter(({ id }) => id !== conversation.id);
    await this.store.remove(conversation.id);
    this.elsewhere?.postMessage(conversation.id);
    if (this.current.id === conversation.id) this.open(null);
    this.view.listed();
  }

  #isKept(conversation) {
    return this.conversations.includes(conversation);
  }

  #grew(run) {
    if (run.conversation === this.current) this.view.grew(run.nodes);
    const startMs = performance.now();
    if (startMs < (run.saveMs ?? 0)) return;
    this.#save(run.conversation);
    run.saveMs = startMs + Math.max(SAVE_EVERY_MS, 50 * (performance.now() - startMs)); // a long one is copied slowly
  }

  #ended(run) {
    this.runs.delete(run.conversation.id);
    if (this.#isKept(run.conversation)) this.#keep(run.conversation);
    if (run.conversation === this.current) this.view.ended(run);
  }

  /** Puts it at the head of the list, and into the browser's store. */
  #keep(conversation) {
    conversation.updatedMs = Date.now();
    this.conversations = [conversation, ...this.conversations.filter((other) => other !== conversation)];
    this.#save(conversation);
    this.view.listed();
  }

  async #save(conversation) {
    try {
      await this.store.put(conversation);
      this.elsewhere?.postMessage(conversation.id);
    } catch (error) {
      this.view.refused(new SettingError("store", `The browser does not keep the conversation: ${error.message}`));
    }
  }

  /** Another tab of this browser has changed a conversation. */
  async #changedElsewhere(id) {
    const { current } = this;
    await this.load();
    const found = this.conversations.find((conversation) => conversation.id === current.id);
    if (found) this.current = found;
    if (id === current.id && !this.run) this.view.opened();
    else this.view.listed();
  }
}

/** As it was kept; what was on its way when the page was left has ended. */
function restored(conversation) {
  conversation.settings = completed(conversation.settings);
  for (const node of Object.values(conversation.nodes)) if (node.status === "running") node.status = "stopped";
  return conversation;
}
