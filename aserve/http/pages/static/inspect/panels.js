// What is told in words and numbers: figures, requests, the queue, what has just happened.

import { element } from "../shared/dom.js";
import { cleared, colourOf, duration, theme } from "./colours.js";
import { HOLDS, count, nameOfCard } from "./state.js";

const MAX_ROWS = 60;
const MAX_ENDED = 8;
const ENDED_US = 5e6;
const STATES = { running: "runs", waiting: "waits", swapped: "on the host" };
const OF_OTHERS = { running: "run", waiting: "wait", swapped: "are on the host" };

const byId = (id) => document.getElementById(id);

/** Steps and tokens a second in the stretch that is shown. */
export function ratesOf(history, fromUs, toUs) {
  let [numSteps, numTokens, firstUs] = [0, 0, 0];
  for (const { work, at_us: atUs } of history.between(fromUs, toUs)) {
    if (!work || atUs > toUs) continue;
    firstUs ||= work.began_us;
    numSteps += 1;
    numTokens += work.decodes?.length ?? 0;
    for (const [, kind, , , , accepted] of work.pieces ?? []) if (kind === "draft") numTokens += 1 + accepted;
  }
  const seconds = Math.max(1e-6, (toUs - Math.max(fromUs, firstUs)) / 1e6);
  return numSteps ? { steps: numSteps / seconds, tokens: numTokens / seconds } : { steps: 0, tokens: 0 };
}

const NUMBERS = ["Steps a second", "Tokens a second", "Running", "Waiting", "Blocks held", "Blocks cached"];
const FIGURES = [...NUMBERS, "Event loop lag"];

export function showFigures(state, hello, rates) {
  const list = byId("figures");
  if (!list.children.length) {
    list.append(...FIGURES.map((name) => element("div", {}, element("dt", { text: name }), element("dd"))));
    const canvas = element("canvas", { role: "img", "aria-label": "Event loop lag over the last seconds" });
    list.lastChild.append(element("dd", {}, canvas));
  }
  const held = state.holders().size;
  const numBlocks = hello.num_blocks - 1;
  const running = [...state.states.values()].filter((one) => one === "running").length + state.others.running;
  const worst = state.lags.length ? Math.max(...state.lags.slice(-20)) : 0;
  const values = [
    rounded(rates.steps),
    rounded(rates.tokens),
    `${running} of ${hello.max_num_seqs}`,
    String(state.queue.num_waiting),
    `${held} (${Math.round((100 * held) / numBlocks)} %)`,
    String(state.cached.size),
    duration(worst),
  ];
  for (const [index, value] of values.entries()) {
    const shown = list.children[index].children[1];
    if (shown.textContent !== value) shown.textContent = value;
  }
  drawLags(list.querySelector("canvas"), state.lags);
}

function rounded(number) {
  return number < 10 ? number.toFixed(1) : Math.round(number).toLocaleString("en");
}

function drawLags(canvas, lags) {
  const { context, width, height } = cleared(canvas, 26);
  const most = Math.max(2000, ...lags);
  const step = width / 150;
  context.fillStyle = theme().accent;
  for (const [index, lag] of lags.entries()) {
    const size = Math.max(1, Math.sqrt(lag / most) * (height - 2));
    context.fillRect(width - (lags.length - index) * step, height - size, Math.max(1, step - 0.5), size);
  }
}

/** The table of requests. selected: a request's number; select: called with one that was clicked. */
export function showRequests(state, lives, hello, { selected, select }) {
  const body = byId("requests");
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.seq : null;
  const order = { running: 0, swapped: 1, waiting: 2 };
  const open = [...state.cards.values()].sort(
    (a, b) => order[state.states.get(a.seq)] - order[state.states.get(b.seq)] || a.seq - b.seq,
  );
  const shown = open.slice(0, MAX_ROWS).map((card) => [card, cellsOf(card, state)]);
  shown.push(...endedRows(state, lives));
  const kept = new Map([...body.querySelectorAll("tr[data-seq]")].map((one) => [one.dataset.seq, one]));
  const rows = shown.map(([card, cells]) => row(kept.get(String(card.seq)), card, cells, { selected, select }));
  if (open.length > MAX_ROWS) rows.push(only(`and ${open.length - MAX_ROWS} more`));
  const others = Object.entries(OF_OTHERS).filter(([one]) => state.others[one]);
  if (!rows.length) rows.push(only(`Nothing ${others.length ? "of yours " : ""}is asked at this moment.`));
  if (rows.length !== body.children.length || rows.some((one, index) => body.children[index] !== one)) {
    body.replaceChildren(...rows); // else a click would lose what it began at
    if (focused !== null) body.querySelector(`button[data-seq="${focused}"]`)?.focus();
  }
  const { num_waiting: numWaiting, hold } = state.queue;
  const why = hold ? `: ${HOLDS[hold] ?? hold}` : "";
  const waits = `${count(numWaiting, "sequence")} wait${numWaiting === 1 ? "s" : ""}${why}`;
  const numSwapped = [...state.states.values()].filter((one) => one === "swapped").length;
  const ofOthers = others.map(([one, words]) => `${state.others[one]} ${words}`).join(", ");
  const swapped = numSwapped ? `, ${numSwapped} on the host` : "";
  byId("queue").textContent = (numWaiting ? waits : "nobody waits") + swapped + (ofOthers && `; of others ${ofOthers}`);
}

function cellsOf({ seq, num_prompt: numPrompt, max_tokens: maxTokens }, state) {
  const place = state.queue.first.indexOf(seq);
  const one = state.states.get(seq);
  const hit = state.matched.get(seq);
  const prompt = hit?.matched ? `${numPrompt} (${hit.matched} found)` : String(numPrompt);
  const where = one === "waiting" && place >= 0 ? `waits, ${ordinal(place + 1)}` : STATES[one];
  const blocks = (state.tables.get(seq) ?? state.hostTables.get(seq) ?? []).filter((block) => block > 0).length;
  return [where, prompt, `${state.counts.get(seq) ?? 0} / ${maxTokens}`, String(blocks)];
}

function endedRows(state, lives) {
  const ended = [...lives.bySeq.values()].filter(
    ({ endedUs }) => endedUs && endedUs <= state.atUs && endedUs > state.atUs - ENDED_US,
  );
  return ended
    .slice(-MAX_ENDED)
    .map(({ card, numTokens }) => [card, ["ended", String(card.num_prompt), String(numTokens), "0"]]);
}

function row(known, card, cells, { selected, select }) {
  const made = known ?? newRow(card, cells.length, select);
  for (const [index, text] of cells.entries()) {
    const cell = made.children[index + 1];
    if (cell.textContent !== text) cell.textContent = text;
  }
  made.querySelector(".swatch").style.background = colourOf(card.request);
  made.toggleAttribute("data-selected", selected === card.request);
  return made;
}

function newRow(card, numCells, select) {
  const id = element("span", { class: "hint", text: card.id ?? "" });
  const shown = element("span", { class: "name" }, `${nameOfCard(card)} `, id);
  const options = { type: "button", class: "who", data: { seq: card.seq }, on: { click: () => select(card.request) } };
  const who = element("button", options, element("span", { class: "swatch" }), shown);
  const cells = Array.from({ length: numCells }, () => element("td"));
  return element("tr", { data: { seq: card.seq } }, element("td", {}, who), ...cells);
}

function only(text) {
  return element("tr", {}, element("td", { colSpan: 5, class: "hint", text }));
}

function ordinal(number) {
  const last = number % 10;
  const teen = number % 100 > 10 && number % 100 < 14;
  return `${number}${teen ? "th" : (["th", "st", "nd", "rd"][last] ?? "th")}`;
}

/** What has just happened, the latest first. */
export function showLog(state, { beginsUs }) {
  const list = byId("log");
  const latest = state.log.at(-1);
  const mark = latest ? `${latest.number}/${state.log.length}/${state.log[0].number}` : "none";
  if (list.dataset.mark === mark) return;
  list.dataset.mark = mark;
  const items = state.log.toReversed().map(({ atUs, kind, name, words }) =>
    element(
      "li",
      {},
      element("time", { text: duration(Math.max(0, atUs - beginsUs)) }),
      element("span", { class: "name", text: name }),
      element("span", { text: words, data: { kind } }),
    ),
  );
  const nothing = () => element("li", {}, element("span", { class: "hint", text: "Nothing yet." }));
  list.replaceChildren(...(items.length ? items : [nothing()]));
}
