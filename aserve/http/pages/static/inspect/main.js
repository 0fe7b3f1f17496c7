// The inspector page: what it is made of, and who is told of what.

import { inWords } from "../shared/api.js";
import { fillIcons } from "../shared/icons.js";
import { fillNavigation } from "../shared/navigation.js";
import { blockInWords, drawBlocks, drawSample } from "./blocks.js";
import { cleared, colourOf, duration, hatched, onTheme, theme } from "./colours.js";
import { Explanation } from "./explain.js";
import { follow } from "./feed.js";
import { History } from "./history.js";
import { Lives } from "./lives.js";
import { ratesOf, showFigures, showLog, showRequests } from "./panels.js";
import { Player } from "./player.js";
import { drawPrefixes } from "./prefixes.js";
import { read, save } from "./recording.js";
import { OTHERS, count } from "./state.js";
import { drawTimeline, phasesOf } from "./timeline.js";
import { Tour } from "./tour.js";
import { livesOf, showWaterfall } from "./waterfall.js";

const byId = (id) => document.getElementById(id);
const MIN_WINDOW_US = 5e3;
const MAX_WINDOW_US = 20e6;
const WORDS_EVERY_MS = 200;

const player = new Player(() => needDraw());
const explanation = new Explanation(byId("explanation"));
let windowUs = 3e6;
let selected = null;
let source = "live";
let live = null;
let drawn = {};
let focusedBlock = null;
let wordsMs = 0;
let isDue = false;
let isSliding = false;

// Where events come from.

async function connect() {
  await follow({
    signal: new AbortController().signal,
    take(event, text) {
      if (event.type === "hello") begin(event);
      else live.history.take(event, text);
      if (source !== "live") return;
      if (player.mode === "live") player.state = live.history.head;
      if (player.mode === "live" || player.history !== live.history) needDraw();
      else if (player.mode === "stopped") showMoment();
    },
    told(state, error) {
      sign(state, error);
    },
  });
}

function begin(hello) {
  const isSame = live !== null && JSON.stringify(sizes(live.history.hello)) === JSON.stringify(sizes(hello));
  if (isSame) return; // the connection broke off, and goes on with a snapshot
  live = { history: new History(hello), lives: new Lives() };
  live.history.onRecord((record, head) => live.lives.take(record, head));
  if (source === "live") player.use(live.history, live.lives);
}

function sizes({ now_us: _now, unix_s: _unix, ...rest }) {
  return rest;
}

let feedState = "connecting";
function sign(state, error) {
  feedState = state;
  if (error && source === "live" && state === "lost") note(inWords(error));
  else if (state === "live") note(null);
  showSign();
}

function showSign() {
  const words = { connecting: "connecting", live: "live", lost: "not connected" };
  const what = source !== "live" ? "recording" : player.mode !== "live" && feedState === "live" ? "paused" : feedState;
  byId("sign").dataset.state = what;
  const shown = words[what] ?? what;
  if (byId("sign").textContent !== shown) byId("sign").textContent = shown;
}

function note(error) {
  const place = byId("note");
  place.hidden = !error;
  place.className = "note bad";
  place.textContent = error ? `${error.title}. ${error.detail ?? ""}` : "";
}

function showRecording(history, lives, { isTour = false } = {}) {
  source = isTour ? "tour" : "recording";
  selected = null;
  byId("requests").replaceChildren();
  player.use(history, lives, { fromBeginning: true });
  const length = history.endsUs - history.beginsUs;
  windowUs = clamp(isTour ? length * 1.15 : Math.min(windowUs, length), MIN_WINDOW_US, MAX_WINDOW_US);
  byId("live").hidden = false;
  byId("scene").hidden = !isTour;
  note(null);
}

function backToLive() {
  source = "live";
  selected = null;
  byId("requests").replaceChildren();
  byId("live").hidden = true;
  byId("scene").hidden = true;
  if (live) player.use(live.history, live.lives);
  else player.use(null, null);
  player.speed = Number(byId("speed").value);
  note(null);
}

// Drawing.

function needDraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (!document.hidden) draw();
  });
}

function draw() {
  showSign();
  const { history, lives, state, mode } = player;
  byId("pause").setAttribute("aria-pressed", String(mode === "stopped"));
  byId("play").setAttribute("aria-pressed", String(mode === "playing"));
  if (!history || history.isEmpty) return;
  const { hello } = history;
  const { fromUs, toUs } = stretch();
  const cursorUs = mode === "live" ? null : state.atUs;
  drawn.timeline = drawTimeline(byId("timeline"), { history, lives, fromUs, toUs, cursorUs, selected });
  drawn.blocks = drawBlocks(byId("blocks"), { state, hello, selected });
  drawn.prefixes = drawPrefixes(byId("prefixes"), { state, hello, selected });
  showMoment();
  if (mode !== "stopped" && performance.now() - wordsMs < WORDS_EVERY_MS) {
    setTimeout(needDraw, WORDS_EVERY_MS);
    return;
  }
  wordsMs = performance.now();
  showWords(history, lives, state, fromUs);
}

function showWords(history, lives, state, fromUs) {
  const { hello } = history;
  showFigures(state, hello, ratesOf(history, Math.max(fromUs, state.atUs - 2e6), state.atUs));
  showRequests(state, lives, hello, { selected, select });
  showLog(state, history);
  showPhases(state.step);
  byId("host-key").hidden = !hello.num_host_blocks;
  const { numNotDrawn } = drawn.blocks;
  const sum = `${count(hello.num_blocks - 1, "block")} of ${count(hello.block_size, "position")}`;
  const rest = numNotDrawn > 0 ? `; the last ${numNotDrawn.toLocaleString("en")} are not drawn` : "";
  byId("blocks-sum").textContent = sum + rest;
  const { numRows, numAll } = drawn.prefixes;
  byId("prefixes-sum").textContent = `${numAll > numRows ? `${numRows} of ` : ""}${count(numAll, "sequence")}`;
  if (focusedBlock !== null) byId("block").textContent = blockInWords(drawn.blocks.at(focusedBlock), state);
  if (byId("request").open) drawRequest();
}

/** The stretch of time in the timeline: the newest, or what is around the moment that is shown. */
function stretch() {
  const { history, state, mode } = player;
  if (mode === "live") return { fromUs: state.atUs - windowUs, toUs: state.atUs };
  if (source === "tour") {
    const middle = (history.beginsUs + history.endsUs) / 2;
    const isWhole = windowUs >= history.endsUs - history.beginsUs;
    if (isWhole) return { fromUs: middle - windowUs / 2, toUs: middle + windowUs / 2 };
  }
  return { fromUs: state.atUs - windowUs * 0.7, toUs: state.atUs + windowUs * 0.3 };
}

function showMoment() {
  const { history, state, mode } = player;
  const slider = byId("moment");
  const length = Math.max(0, Math.round((history.endsUs - history.beginsUs) / 1000));
  const at = Math.round((state.atUs - history.beginsUs) / 1000);
  slider.max = String(length);
  if (!isSliding) slider.value = String(mode === "live" ? length : Math.max(0, at));
  const behind = history.endsUs - state.atUs;
  const step = state.step ? `step ${state.step.step}` : "no step yet";
  const words = mode === "live" ? `${step}, now` : `${step}, ${duration(behind)} before the end`;
  slider.setAttribute("aria-valuetext", words);
  byId("when").textContent = words;
}

function showPhases(work) {
  if (!work) return;
  const known = (work.pieces ?? []).reduce((sum, piece) => sum + piece[3], 0);
  const tokens = known + (work.decodes?.length ?? 0);
  const phases = phasesOf(work).map(([name, us]) => `${name} ${duration(us)}`);
  byId("phases").textContent = `Step ${work.step}: ${count(tokens, "token")}. ${phases.join(" · ")}`;
}

function select(request) {
  selected = request;
  const dialog = byId("request");
  if (!dialog.open) dialog.showModal();
  drawRequest();
  needDraw();
}

function forget() {
  selected = null;
  explanation.clear();
  byId("texts").replaceChildren();
  needDraw();
}

function drawRequest() {
  const found = livesOf(player.lives, selected);
  if (!found.length) return;
  byId("request-title").textContent = `Request #${selected}`;
  const places = { facts: byId("facts"), canvas: byId("waterfall"), texts: byId("texts") };
  showWaterfall(places, found, { nowUs: player.history.endsUs });
  explanation.show(source === "live" ? found : []); // of a recording's the server knows nothing
}

function drawSamples() {
  for (const canvas of document.querySelectorAll(".sample")) {
    const { kind } = canvas.dataset;
    if (["held", "held-cached", "shared", "cached", "free", "host"].includes(kind)) drawSample(canvas, kind);
    else sampleBar(canvas, kind);
  }
}

function sampleBar(canvas, kind) {
  const { context, width, height } = cleared(canvas, canvas.clientHeight);
  const colour = kind === "hit" ? theme().accent : colourOf(1);
  context.fillStyle = kind === "prefill" || kind === "hit" ? hatched(context, colour) : colour;
  const [top, tall] = kind === "hit" ? [height / 2 - 2, 4] : [2, height - 4];
  if (kind === "draft") {
    context.fillRect(1, top + tall * 0.5, width - 2, tall * 0.5);
    context.strokeStyle = colour;
    context.strokeRect(1.5, top + 0.5, width - 3, tall - 1);
  } else context.fillRect(1, top, width - 2, tall);
}

// What the reader does.

function clamp(value, least, most) {
  return Math.min(most, Math.max(least, value));
}

function zoom(factor) {
  windowUs = clamp(windowUs * factor, MIN_WINDOW_US, MAX_WINDOW_US);
  needDraw();
}

function togglePause() {
  if (player.mode === "stopped" && source === "live") player.follow();
  else player.stop();
}

function listen(id, event, listener) {
  byId(id).addEventListener(event, listener);
}

function pointOf(event) {
  const box = event.target.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function listenToButtons() {
  listen("pause", "click", togglePause);
  listen("back", "click", () => player.step(-1));
  listen("forward", "click", () => player.step(1));
  listen("play", "click", () => (player.mode === "playing" ? player.stop() : player.play()));
  listen("speed", "change", (event) => (player.speed = Number(event.target.value)));
  listen("live", "click", backToLive);
  listen("closer", "click", () => zoom(0.5));
  listen("wider", "click", () => zoom(2));
  listen("close", "click", () => byId("request").close());
  listen("request", "close", forget);
  listen("save", "click", () => player.history && !player.history.isEmpty && save(player.history));
  listen("open", "click", () => byId("file").click());
  listen("file", "change", openFile);
  listen("moment", "input", (event) => {
    isSliding = true;
    player.show(player.history.beginsUs + Number(event.target.value) * 1000);
  });
  listen("moment", "change", () => (isSliding = false));
}

async function openFile({ target }) {
  const [file] = target.files;
  target.value = "";
  if (!file) return;
  try {
    const lives = new Lives();
    const recording = await read(file);
    const history = recording.load((made) => made.onRecord((record, head) => lives.take(record, head)));
    showRecording(history, lives);
  } catch (error) {
    note({ title: "The recording cannot be shown", detail: error.message });
  }
}

function listenToDrawings() {
  listen("timeline", "click", (event) => {
    const found = drawn.timeline?.locate(...pointOf(event));
    if (found?.life) select(found.life.card.request);
    else if (found) player.show(found.us);
  });
  listen("timeline", "wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8);
  });
  listen("timeline", "keydown", (event) => {
    const keys = { ArrowLeft: () => player.step(-1), ArrowRight: () => player.step(1), " ": togglePause };
    const all = { ...keys, "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2) };
    if (!all[event.key]) return;
    event.preventDefault();
    all[event.key]();
  });
  listen("blocks", "pointermove", (event) => {
    const found = drawn.blocks?.locate(...pointOf(event));
    if (found) byId("block").textContent = blockInWords(found, player.state);
    focusedBlock = found?.place === "device" ? found.block : null;
  });
  listen("blocks", "pointerleave", () => {
    focusedBlock = null;
    byId("block").textContent = "";
  });
  listen("blocks", "click", (event) => open(drawn.blocks?.locate(...pointOf(event))));
  listen("blocks", "keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Enter" && focusedBlock !== null) open(drawn.blocks.at(focusedBlock));
    if (!moves[event.key] || !drawn.blocks) return;
    event.preventDefault();
    focusedBlock = focusedBlock === null ? 1 : drawn.blocks.beside(focusedBlock, ...moves[event.key]);
    byId("block").textContent = blockInWords(drawn.blocks.at(focusedBlock), player.state);
  });
  listen("prefixes", "click", (event) => {
    const seq = drawn.prefixes?.locate(...pointOf(event));
    if (seq !== null && seq !== undefined) select(player.state.requestOf(seq));
  });
}

function open(found) {
  const seq = found?.seqs.find((one) => one !== OTHERS);
  if (seq !== undefined) select(player.state.requestOf(seq));
}

function listenToTour() {
  const tour = new Tour(player, {
    show: (history, lives) => showRecording(history, lives, { isTour: true }),
    told: ({ title, place, caption, isFirst, isLast }) => {
      byId("scene-title").textContent = title;
      byId("scene-place").textContent = place;
      byId("caption").textContent = caption;
      byId("before").disabled = isFirst;
      byId("next").disabled = isLast;
    },
  });
  const failed = (error) => note({ title: "The tour cannot go on", detail: error.message });
  const attempt = (action) => () => action().catch(failed);
  listen("tour", "click", attempt(() => tour.begin()));
  listen("next", "click", attempt(() => tour.next()));
  listen("before", "click", attempt(() => tour.before()));
  listen("leave", "click", backToLive);
  if (location.hash === "#tour") attempt(() => tour.begin())();
}

fillIcons();
fillNavigation(document.querySelector(".pages"));
listenToButtons();
listenToDrawings();
listenToTour();
onTheme(() => (drawSamples(), needDraw()));
addEventListener("resize", needDraw);
document.addEventListener("visibilitychange", needDraw);
drawSamples();
/** For tests: what the page keeps. */
window.inspector = {
  get numSteps() {
    return player.history?.numSteps ?? 0;
  },
  get numBytes() {
    return player.history?.numBytes ?? 0;
  },
  get state() {
    return player.state;
  },
  get mode() {
    return player.mode;
  },
  get lives() {
    return player.lives;
  },
};
connect();
