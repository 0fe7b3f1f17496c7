// The chat page: its parts, put together.

import { element } from "../shared/dom.js";
import { fillIcons } from "../shared/icons.js";
import { fillNavigation } from "../shared/navigation.js";
import { App } from "./app.js";
import { Composer } from "./composer.js";
import { awaitsResults, pathTo } from "./conversation.js";
import { chooseFrom, showKeys } from "./dialogs.js";
import { Drawers } from "./drawers.js";
import { copy } from "./clipboard.js";
import { asCurl, asJson, asMarkdown, download, fileName } from "./export.js";
import { read } from "./import.js";
import { SettingError, summary } from "./settings.js";
import { SettingsPanel } from "./settings_panel.js";
import { showConversations } from "./sidebar.js";
import { readyModels, showNoChat } from "./status.js";
import { Store } from "./store.js";
import { Transcript } from "./transcript.js";

const NEAR_PX = 80; // of the end: who is so near follows what comes
const MAX_REST_MS = 500; // between two frames of a growing answer
const EXAMPLES = ["What is paged attention?", "Tell me a story about a fox.", "Write JSON: name Grace, age 42."];
const KEYS = [
  ["Enter", "send the message; with Shift, a new line"],
  ["Esc", "stop the answer"],
  ["↑", "in an empty message: edit the last one"],
  ["/", "go to the message"],
  ["Ctrl Shift O", "a new conversation"],
  ["?", "these keys"],
];
const $ = (id) => document.getElementById(id);

class Page {
  constructor(store) {
    this.app = new App(store, this);
    this.drawers = new Drawers({ list: $("list"), settings: $("settings") }, [$("main")], $("backdrop"));
    this.panel = new SettingsPanel($("fields"), () => this.settingsChanged());
    this.transcript = new Transcript($("transcript"), this.#messageActs());
    this.composer = new Composer($("composer"), {
      send: (text) => this.#sent(this.app.send(text)),
      stop: () => this.app.stop(),
      editLast: () => this.#editLast(),
      showSetting: (name) => this.#showSetting(name),
    });
    this.isFollowing = true;
    this.isFrameAsked = false;
    this.restMs = 0;
    this.#listen();
  }

  #messageActs() {
    const { app } = this;
    const acts = ["regenerate", "retry", "saveEdit", "choose", "fork", "sendResults", "answer", "open"];
    const bound = Object.fromEntries(acts.map((name) => [name, app[name].bind(app)]));
    return { ...bound, showSetting: (name) => this.#showSetting(name) };
  }

  // What the app tells of.

  /** Another conversation, or another path of it. */
  opened() {
    const { current, run } = this.app;
    const isOther = this.shown !== current.id;
    this.shown = current.id;
    this.transcript.show(current);
    this.composer.atWork(run !== null);
    const hash = current.leaf ? `#${current.id}` : "";
    if (location.hash !== hash) history[isOther ? "pushState" : "replaceState"](null, "", hash || location.pathname);
    $("empty").hidden = current.leaf !== null;
    $("export").disabled = current.leaf === null;
    if (isOther) this.panel.show(current.settings);
    if (isOther || run) this.isFollowing = true;
    this.settingsShown();
    this.listed();
    this.#follow();
  }

  listed() {
    const { app } = this;
    document.title = app.current.title ? `${app.current.title} · aserve` : "aserve chat";
    showConversations($("conversations"), app.conversations, app.current.id, {
      open: (id) => {
        app.open(id);
        this.drawers.closeInFront();
      },
      rename: (conversation) => app.rename(conversation),
      remove: (conversation) => app.remove(conversation),
    });
  }

  /** Shown with the next frame; the longer that took, the later the one after it, so that the page stays at hand. */
  grew(nodes) {
    this.grown = nodes;
    if (this.isFrameAsked) return;
    this.isFrameAsked = true;
    const show = () => {
      const startMs = performance.now();
      this.isFrameAsked = false;
      this.transcript.update(this.grown);
      this.#follow();
      this.restMs = Math.min(MAX_REST_MS, 4 * (performance.now() - startMs));
    };
    setTimeout(() => requestAnimationFrame(show), this.restMs);
  }

  ended({ nodes, isReduced }) {
    const { current } = this.app;
    this.composer.atWork(false);
    this.refused(null);
    this.transcript.update(nodes);
    const last = current.nodes[current.leaf];
    const isAwaiting = awaitsResults(current, last);
    if (isAwaiting || isReduced) this.transcript.show(current);
    if (isAwaiting && matchMedia("(pointer: fine)").matches) document.querySelector(".results textarea").focus();
    this.#follow();
    const words = { done: "The answer is complete.", stopped: "The answer was stopped." };
    this.announced(last.calls?.length ? "The model calls a tool, and waits for its result." : words[last.status] ?? "");
  }

  /** Something that cannot be sent as it is; null: all is well. */
  refused(error) {
    const place = $("refused");
    place.hidden = error === null;
    place.textContent = error?.message ?? "";
    if (error) this.#showSetting(error.field)?.();
  }

  announced(words) {
    $("announced").textContent = words;
  }

  // What the reader does.

  settingsChanged() {
    this.app.settingsChanged();
    this.settingsShown();
  }

  settingsShown() {
    const { settings } = this.app.current;
    const names = this.panel.models.map(({ id }) => id);
    const model = names.includes(settings.model) ? settings.model : names[0] ?? "";
    $("model").textContent = model;
    $("model").hidden = !model;
    $("model").title = "The model. Change it in the settings";
    this.composer.showSummary(summary(settings));
  }

  #sent(isSent) {
    if (isSent) this.isFollowing = true;
    this.#follow();
    return isSent;
  }

  #editLast() {
    const last = pathTo(this.app.current).findLast(({ role }) => role === "user");
    if (last && !this.app.run) this.transcript.edit(last);
  }

  #showSetting(name) {
    if (!this.panel.has(name)) return null;
    return () => {
      this.drawers.set("settings", true);
      this.panel.focus(name);
    };
  }

  #listen() {
    $("new").addEventListener("click", () => this.#new());
    $("model").addEventListener("click", () => this.#showSetting("model")?.());
    $("export").addEventListener("click", () => this.#export());
    $("import").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => this.#import());
    $("latest").addEventListener("click", () => {
      this.isFollowing = true;
      this.#follow();
      this.composer.focus();
    });
    $("scroller").addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = $("scroller");
      this.isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_PX;
      $("latest").hidden = this.isFollowing;
    });
    window.addEventListener("popstate", () => this.app.open(location.hash.slice(1)));
    document.addEventListener("keydown", (event) => this.#key(event));
  }

  #new() {
    this.app.open(null);
    this.drawers.closeInFront();
    this.composer.focus();
  }

  #export() {
    const { current } = this.app;
    const file = (text, suffix, type) => download(text, fileName(current, suffix), type);
    chooseFrom("Export the conversation", {
      "As Markdown": () => file(asMarkdown(current), "md", "text/markdown"),
      "As JSON": () => file(asJson(current), "json", "application/json"),
      "Copy the request as a curl line": async () => {
        this.announced((await copy(asCurl(current))) ? "Copied." : "It could not be copied.");
      },
    });
  }

  async #import() {
    const [file] = $("file").files;
    if (!file) return;
    this.drawers.closeInFront();
    try {
      this.app.take(await read(file));
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.refused(error);
    }
    $("file").value = ""; // the same one can be chosen again
  }

  #key(event) {
    if (document.querySelector("dialog[open]")) return;
    const isWriting = event.target.closest("input, textarea, select");
    if (event.key === "Escape" && !event.target.closest(".editor")) {
      if (!this.drawers.closeInFront()) this.app.stop();
    } else if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) {
      event.preventDefault();
      this.#new();
    } else if (event.key === "/" && !isWriting) {
      event.preventDefault();
      this.composer.focus();
    } else if (event.key === "?" && !isWriting) {
      showKeys(KEYS);
    }
  }

  #follow() {
    if (this.isFollowing) $("scroller").scrollTop = $("scroller").scrollHeight;
    $("latest").hidden = this.isFollowing;
  }

  /** What stands where there are no messages yet. */
  welcome() {
    const prompts = EXAMPLES.map((text) =>
      element("button", { class: "button example", type: "button", text, on: { click: () => this.app.send(text) } }),
    );
    const name = this.panel.models[0]?.id;
    $("empty").replaceChildren(
      element("h2", { text: name ? `Talk with ${name}` : "aserve" }),
      element("div", { class: "examples" }, ...prompts),
    );
  }
}

async function start() {
  fillIcons();
  fillNavigation(document.querySelector("nav.pages"));
  const store = await Store.open();
  if (!store.isLasting) $("kept").textContent = "This browser keeps nothing: conversations are gone with the page.";
  const page = new Page(store);
  await page.app.load();
  page.app.open(location.hash.slice(1));
  const models = await readyModels($("status"));
  if (models[0].task && models[0].task !== "generate") return showNoChat($("main"), models[0]);
  page.panel.models = models;
  page.panel.show(page.app.current.settings);
  page.settingsShown();
  page.welcome();
  if (matchMedia("(pointer: fine)").matches) page.composer.focus();
  return page;
}

start();
