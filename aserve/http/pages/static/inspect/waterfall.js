// A request from its arrival to its end: when it waited, what was computed for it and when, and what was said.

import { element } from "../shared/dom.js";
import { cleared, colourOf, duration, hatched, theme } from "./colours.js";
import { count, nameOfCard } from "./state.js";

const ROW = 24;
const LABEL = 128;
const KINDS = { waiting: "waits", running: "runs", swapped: "on the host", recompute: "waits again" };
const WHYS = { stop: "it came to its end", length: "it came to its length" };

/** The lives of a request, by index. */
export function livesOf(lives, request) {
  return [...lives.bySeq.values()].filter((life) => life.card.request === request).sort((a, b) => a.seq - b.seq);
}

/** Fills a panel with the facts of a request's lives, and draws its waterfall. */
export function showWaterfall({ facts, canvas, texts }, found, { nowUs }) {
  const first = found[0];
  const endUs = Math.max(...found.map((life) => life.endedUs || nowUs));
  const beginUs = first.card.arrived_us;
  facts.replaceChildren(...factsOf(found, beginUs, endUs));
  draw(canvas, found, beginUs, Math.max(endUs, beginUs + 1));
  renew(texts, textsOf(found));
}

/** Fills an element; where only texts are new its children stay, and who scrolls in one does not lose his place. */
function renew(place, made) {
  const kept = [...place.children];
  if (kept.length !== made.length || kept.some((one, index) => one.tagName !== made[index].tagName)) {
    place.replaceChildren(...made);
    return;
  }
  for (const [index, one] of kept.entries()) {
    if (one.textContent !== made[index].textContent) one.textContent = made[index].textContent;
  }
}

function factsOf(found, beginUs, endUs) {
  const [{ card }] = found;
  const firstRun = found[0].spans.find((span) => span.kind === "running");
  const hits = found[0].spans.filter((span) => span.matched);
  const spans = found.flatMap((life) => life.spans);
  const numPreempted = spans.filter(({ kind }) => kind === "swapped" || kind === "recompute").length;
  const ended = found.filter((life) => life.endedUs);
  const ends = [...new Set(ended.map((life) => WHYS[life.why] ?? "its text or its reader ended it"))];
  const matched = hits.length ? `, ${hits[0].matched} of them found (${hits[0].source})` : "";
  const pairs = [
    ["id", card.id],
    ["tenant", card.tenant],
    ["prompt", `${count(card.num_prompt, "token")}${matched}`],
    ["answer", `${found.map((life) => life.numTokens).join(" + ")} of at most ${card.max_tokens} tokens`],
    ["waited", firstRun ? duration(firstRun.fromUs - beginUs) : "still"],
    ["took", duration(endUs - beginUs)],
    ["preempted", numPreempted ? count(numPreempted, "time") : ""],
    ["ended", ends.join("; ")],
  ];
  return pairs
    .filter(([, value]) => value)
    .map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
}

function textsOf(found) {
  const [{ card }] = found;
  const answers = found.filter((life) => life.text);
  return [
    element("h3", { text: "Prompt" }),
    said("Prompt", card.prompt),
    answers.length ? element("h3", { text: answers.length > 1 ? "Answers" : "Answer" }) : null,
    ...answers.map((life) => said("Answer", life.text)),
  ].filter(Boolean);
}

function said(name, text) {
  return element("p", { class: "said", text, tabIndex: 0, role: "group", "aria-label": name }); // it scrolls
}

function draw(canvas, found, beginUs, endUs) {
  const rows = found.slice(0, 12);
  const { context, width } = cleared(canvas, rows.length * 2 * ROW + 28);
  const colours = theme();
  const x = (us) => LABEL + ((us - beginUs) / (endUs - beginUs)) * (width - LABEL - 8);
  ruler(context, { width, x, beginUs, endUs, colours, height: rows.length * 2 * ROW });
  for (const [index, life] of rows.entries()) {
    const top = index * 2 * ROW;
    const colour = colourOf(life.card.request);
    context.textAlign = "left";
    context.fillStyle = colours.text;
    context.fillText(found.length > 1 ? nameOfCard(life.card) : "state", 0, top + ROW / 2);
    context.fillStyle = colours.muted;
    context.fillText("computed", 0, top + ROW * 1.5);
    for (const span of life.spans) spanBar(context, span, { x, top, endUs, colour, colours });
    for (const step of life.steps) stepBar(context, step, { x, top: top + ROW, colour });
  }
}

function spanBar(context, span, { x, top, endUs, colour, colours }) {
  const [left, right] = [x(span.fromUs), x(span.toUs || endUs)];
  const width = Math.max(1, right - left);
  context.globalAlpha = 0.35;
  context.fillStyle = span.kind === "running" ? colour : span.kind === "waiting" ? colours["line-strong"] : colours.bad;
  context.fillRect(left, top + 4, width, ROW - 8);
  context.globalAlpha = 1;
  context.strokeStyle = context.fillStyle;
  context.setLineDash(span.kind === "running" ? [] : [3, 2]);
  context.strokeRect(left + 0.5, top + 4.5, Math.max(0.5, width - 1), ROW - 9);
  context.setLineDash([]);
  const words = KINDS[span.kind];
  context.fillStyle = colours.text;
  if (width > context.measureText(words).width + 8) context.fillText(words, left + 4, top + ROW / 2);
}

function stepBar(context, step, { x, top, colour }) {
  const [left, right] = [x(step.fromUs), x(step.toUs)];
  const width = Math.max(1, right - left);
  const isKnown = step.kind === "prefill" || step.kind === "pooled";
  context.fillStyle = isKnown ? hatched(context, colour) : colour;
  if (step.kind === "draft") {
    const share = (1 + step.accepted) / step.numTokens;
    context.fillRect(left, top + 4 + (ROW - 8) * (1 - share), width, (ROW - 8) * share);
  } else context.fillRect(left, top + 4, width, ROW - 8);
  context.strokeStyle = colour;
  context.strokeRect(left + 0.5, top + 4.5, Math.max(0.5, width - 1), ROW - 9);
}

function ruler(context, { width, x, beginUs, endUs, colours, height }) {
  context.strokeStyle = colours.line;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  for (let part = 0; part <= 4; part += 1) {
    const us = beginUs + ((endUs - beginUs) * part) / 4;
    const at = Math.round(x(us)) + 0.5;
    context.beginPath();
    context.moveTo(at, 0);
    context.lineTo(at, height + 4);
    context.stroke();
    context.textAlign = part === 4 ? "right" : part === 0 ? "left" : "center";
    context.fillText(duration(us - beginUs), Math.min(at, width - 2), height + 16);
  }
}
