// The timeline: what the host and the device did, how many tokens each step had, and a lane for each request that runs.

import { cleared, colourOf, duration, hatched, theme } from "./colours.js";
import { nameOfCard } from "./state.js";

const HOST = 14;
const TOKENS = 44;
const AXIS = 20;
const GAP = 6;
const LABEL = 46;
const MIN_LANE = 4;
const MAX_LANE = 26;
const PHASES = ["plan", "launch", "flight", "wait", "commit", "publish"];

/** Draws what history and lives say of a stretch of time; {locate} finds what is at a point. */
export function drawTimeline(canvas, { history, lives, fromUs, toUs, cursorUs, selected }) {
  const { context, width, height } = cleared(canvas);
  const colours = theme();
  const scale = (width - LABEL) / Math.max(1, toUs - fromUs);
  const x = (us) => LABEL + (us - fromUs) * scale;
  const rows = rowsOf(numLanesIn(lives, fromUs, toUs), height);
  axis(context, { width, height, fromUs, toUs, x, colours, rows, cursorUs });
  context.save();
  context.beginPath();
  context.rect(LABEL, 0, width - LABEL, height);
  context.clip();
  const lanes = new Lanes(context, rows, selected);
  const marks = [];
  let lastLandedUs = 0;
  let mostTokens = 1;
  const steps = [];
  for (const record of history.between(fromUs, toUs)) {
    const { work } = record;
    if (work) {
      const landedUs = work.began_us + work.phases[0] + work.phases[1] + work.phases[2];
      const launchedUs = work.began_us + work.phases[0] + work.phases[1];
      const beganUs = Math.max(launchedUs, lastLandedUs);
      lastLandedUs = landedUs;
      const known = (work.pieces ?? []).reduce((sum, piece) => sum + piece[3], 0);
      const numDecodes = work.decodes?.length ?? 0;
      mostTokens = Math.max(mostTokens, known + numDecodes);
      steps.push({ work, beganUs, landedUs, known, numDecodes });
    }
    for (const [seq, what] of record.moves ?? []) marks.push([seq, what, record.at_us]);
    for (const [seq, matched, source] of record.admitted ?? []) if (matched) marks.push([seq, source, record.at_us]);
  }
  for (const step of steps) {
    drawHost(context, step, x, rows, colours);
    drawTokens(context, step, x, rows, colours, mostTokens);
    drawLanes(lanes, step, x, lives);
  }
  lanes.flush();
  drawMarks(context, marks, x, rows, lives, colours);
  if (cursorUs !== null) line(context, x(cursorUs), height, colours.accent);
  context.restore();
  labels(context, rows, lives, colours, toUs, { mostTokens });
  return {
    locate(px, py) {
      const us = fromUs + (px - LABEL) / scale;
      const step = steps.find((one) => us >= one.beganUs && us <= one.landedUs);
      const lane = Math.floor((py - rows.lanes) / rows.lane);
      return { us, step: step?.work ?? null, life: py >= rows.lanes ? lifeAt(lives, lane, us) : null };
    },
  };
}

function numLanesIn(lives, fromUs, toUs) {
  let numLanes = 1;
  for (const { lane, endedUs, spans } of lives.bySeq.values()) {
    const isSeen = lane !== null && spans[0].fromUs <= toUs && (!endedUs || endedUs >= fromUs);
    if (isSeen) numLanes = Math.max(numLanes, lane + 1);
  }
  return numLanes;
}

function rowsOf(numLanes, height) {
  const host = AXIS;
  const device = host + HOST + 3;
  const tokens = device + HOST + GAP;
  const lanes = tokens + TOKENS + GAP;
  const lane = Math.min(MAX_LANE, Math.max(MIN_LANE, Math.floor((height - lanes - 2) / numLanes)));
  return { host, device, tokens, lanes, lane, numLanes };
}

function axis(context, { width, height, fromUs, toUs, x, colours, rows, cursorUs }) {
  const base = cursorUs ?? toUs;
  const step = niceStep((toUs - fromUs) / (width / 110));
  context.fillStyle = colours.muted;
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.textAlign = "center";
  for (let us = base - Math.floor((base - fromUs) / step) * step; us <= toUs; us += step) {
    const at = Math.round(x(us)) + 0.5;
    context.beginPath();
    context.moveTo(at, AXIS - 4);
    context.lineTo(at, height);
    context.stroke();
    const label = us === base ? "now shown" : `${us < base ? "−" : "+"}${duration(Math.abs(us - base))}`;
    if (at > LABEL + 26 && at < width - 26) context.fillText(label, at, 8);
  }
  context.fillStyle = colours.raised;
  context.fillRect(LABEL, rows.host, width - LABEL, HOST);
  context.fillRect(LABEL, rows.device, width - LABEL, HOST);
}

function niceStep(us) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, us)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= us);
}

function drawHost(context, { work, beganUs, landedUs }, x, rows, colours) {
  const [plan, launch, , , commit, publish] = work.phases;
  const bars = [
    [work.began_us, plan, colours.accent, 1],
    [work.began_us + plan, launch, colours.warn, 1],
    [landedUs, commit, colours.text, 0.75],
    [landedUs + commit, publish, colours.muted, 0.75],
  ];
  for (const [fromUs, us, colour, alpha] of bars) {
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    context.fillRect(x(fromUs), rows.host, Math.max(0.6, x(fromUs + us) - x(fromUs)), HOST);
  }
  context.globalAlpha = 1;
  const [left, right] = [x(beganUs), x(landedUs)];
  context.fillStyle = colours["line-strong"];
  context.fillRect(left, rows.device, Math.max(0.7, right - left - gap(right - left)), HOST);
}

function gap(width) {
  return width > 4 ? 1 : width > 2 ? 0.5 : 0;
}

function drawTokens(context, { beganUs, landedUs, known, numDecodes }, x, rows, colours, most) {
  const heightOf = (tokens) => Math.sqrt(tokens / most) * TOKENS;
  const [left, right] = [x(beganUs), x(landedUs)];
  const width = Math.max(0.7, right - left - gap(right - left));
  const bottom = rows.tokens + TOKENS;
  const whole = heightOf(known + numDecodes);
  const decodes = whole * (numDecodes / Math.max(1, known + numDecodes));
  context.fillStyle = colours["line-strong"];
  context.fillRect(left, bottom - decodes, width, decodes);
  if (!known) return;
  context.fillStyle = width > 3 ? hatched(context, colours.accent) : colours.accent;
  context.fillRect(left, bottom - whole, width, whole - decodes);
}

/** Bars in the lanes; neighbours that cannot be told apart are drawn as one. */
class Lanes {
  constructor(context, rows, selected) {
    this.context = context;
    this.rows = rows;
    this.selected = selected;
    this.open = new Map();
  }

  bar(life, left, right, kind, share = 1) {
    const run = this.open.get(life.lane);
    if (run && run.life === life && run.kind === kind && kind === "decode" && left <= run.right + 1) {
      if (right - run.left < 6 || right - left < 3) {
        run.right = Math.max(run.right, right);
        return;
      }
    }
    if (run) this.#draw(run);
    this.open.set(life.lane, { life, left, right, kind, share });
  }

  flush() {
    for (const run of this.open.values()) this.#draw(run);
  }

  #draw({ life, left, right, kind, share }) {
    const { context, rows } = this;
    const colour = colourOf(life.card.request);
    const top = rows.lanes + life.lane * rows.lane;
    const height = rows.lane > 5 ? rows.lane - 2 : rows.lane - 0.5;
    const width = Math.max(0.8, right - left - gap(right - left));
    const isFaded = this.selected !== null && this.selected !== life.card.request;
    context.globalAlpha = isFaded ? 0.3 : 1;
    context.fillStyle = kind === "prefill" || kind === "pooled" ? hatched(context, colour) : colour;
    if (kind === "draft") {
      context.fillRect(left, top + height * (1 - share), width, height * share);
      context.strokeStyle = colour;
      context.lineWidth = 1;
      context.strokeRect(left + 0.5, top + 0.5, Math.max(0.5, width - 1), height - 1);
    } else context.fillRect(left, top, width, height);
    context.globalAlpha = 1;
  }
}

function drawLanes(lanes, { work, beganUs, landedUs }, x, lives) {
  const [left, right] = [x(beganUs), x(landedUs)];
  for (const seq of work.decodes ?? []) {
    const life = lives.bySeq.get(seq);
    if (life && life.lane !== null) lanes.bar(life, left, right, "decode");
  }
  for (const [seq, kind, , numTokens, drafts, accepted] of work.pieces ?? []) {
    const life = lives.bySeq.get(seq);
    if (life && life.lane !== null) lanes.bar(life, left, right, kind, drafts ? (1 + accepted) / numTokens : 1);
  }
}

const SIGNS = { swap: "⇅", recompute: "↺", ended: "▪", cache: "◆", fork: "Y" };

function drawMarks(context, marks, x, rows, lives, colours) {
  if (rows.lane < 8) return;
  context.textAlign = "center";
  for (const [seq, what, us] of marks) {
    const life = lives.bySeq.get(seq);
    if (!life || life.lane === null) continue;
    const top = rows.lanes + life.lane * rows.lane + rows.lane / 2 - 1;
    context.font = "bold 12px sans-serif";
    context.lineWidth = 3;
    context.strokeStyle = colours.surface;
    context.strokeText(SIGNS[what], x(us), top);
    context.fillStyle = what === "swap" || what === "recompute" ? colours.bad : colours.text;
    context.fillText(SIGNS[what], x(us), top);
  }
}

function line(context, at, height, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(at, AXIS - 6);
  context.lineTo(at, height);
  context.stroke();
}

function labels(context, rows, lives, colours, us, { mostTokens }) {
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "right";
  context.fillStyle = colours.muted;
  context.fillText("host", LABEL - 6, rows.host + HOST / 2);
  context.fillText("device", LABEL - 6, rows.device + HOST / 2);
  context.fillText("tokens", LABEL - 6, rows.tokens + TOKENS - 7);
  context.fillText(`≤ ${mostTokens}`, LABEL - 6, rows.tokens + 7);
  if (rows.lane < 11) return;
  for (let lane = 0; lane < rows.numLanes; lane += 1) {
    const life = lifeAt(lives, lane, us);
    if (life) context.fillText(nameOfCard(life.card), LABEL - 6, rows.lanes + lane * rows.lane + rows.lane / 2 - 1);
  }
}

/** Who had a lane at a moment, or last before it. */
function lifeAt(lives, lane, us) {
  let found = null;
  for (const life of lives.bySeq.values()) {
    if (life.lane !== lane || life.spans[0].fromUs > us) continue;
    if (!life.endedUs || life.endedUs >= us - 3e6) found = life;
  }
  return found;
}

/** A step's phases, by name. */
export function phasesOf(work) {
  return PHASES.map((name, index) => [name, work.phases[index]]);
}
