// The grid of KV blocks: who holds each, which are shared, cached, free, and what is on the host.
// Each kind has a form of its own besides the colour.

import { cleared, colourOf, theme } from "./colours.js";

const MAX_CELL = 22;
const MIN_CELL = 5;
const MAX_DRAWN = 40_000;
const FEWEST = 200;
const HEAD = 18;

/**
 * Draws the blocks, somewhat beyond the highest that was ever held, for the lowest are given out first.
 * {locate} finds the block at a point: {place: "device" | "host", block, seqs, isCached}.
 */
export function drawBlocks(canvas, { state, hello, selected }) {
  const numDevice = Math.min(hello.num_blocks - 1, MAX_DRAWN, 2 ** Math.ceil(Math.log2(state.highest + FEWEST)));
  const numHost = Math.min(hello.num_host_blocks, MAX_DRAWN);
  const width = canvas.clientWidth;
  const cell = cellOf(width, numDevice + numHost);
  const columns = Math.max(1, Math.floor(width / cell));
  const deviceRows = Math.ceil(numDevice / columns);
  const hostTop = deviceRows * cell + HEAD;
  const height = numHost ? hostTop + Math.ceil(numHost / columns) * cell : deviceRows * cell;
  const { context } = cleared(canvas, Math.max(cell, height) + 2);
  const painter = new Painter(context, cell, state, selected);
  const holders = state.holders();
  for (let block = 1; block <= numDevice; block += 1) {
    const [x, y] = [((block - 1) % columns) * cell, Math.floor((block - 1) / columns) * cell];
    painter.cell(x, y, holders.get(block), state.cached.has(block));
  }
  const hostHolders = state.hostHolders();
  if (numHost) {
    context.fillStyle = theme().muted;
    context.textAlign = "left";
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.fillText("on the host", 0, hostTop - HEAD / 2);
  }
  for (let block = 0; block < numHost; block += 1) {
    const [x, y] = [(block % columns) * cell, hostTop + Math.floor(block / columns) * cell];
    painter.cell(x, y, hostHolders.get(block), state.kept.has(block), true);
  }
  return {
    numNotDrawn: hello.num_blocks - 1 - numDevice,
    locate(px, py) {
      const column = Math.floor(px / cell);
      if (column < 0 || column >= columns) return null;
      if (py < deviceRows * cell) {
        const block = Math.floor(py / cell) * columns + column + 1;
        if (block < 1 || block > numDevice) return null;
        return { place: "device", block, seqs: holders.get(block) ?? [], isCached: state.cached.has(block) };
      }
      const block = Math.floor((py - hostTop) / cell) * columns + column;
      if (!numHost || py < hostTop || block >= numHost) return null;
      return { place: "host", block, seqs: hostHolders.get(block) ?? [], isCached: state.kept.has(block) };
    },
    beside(block, dx, dy) {
      const next = block + dx + dy * columns;
      return next >= 1 && next <= numDevice ? next : block;
    },
    at(block) {
      return { place: "device", block, seqs: holders.get(block) ?? [], isCached: state.cached.has(block) };
    },
  };
}

function cellOf(width, number) {
  const area = width * 300;
  return Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(Math.sqrt(area / Math.max(1, number)))));
}

class Painter {
  constructor(context, cell, state, selected) {
    this.context = context;
    this.cell_ = cell;
    this.state = state;
    this.selected = selected;
    this.colours = theme();
    this.inset = cell > 9 ? 1.5 : cell > 6 ? 1 : 0.5;
  }

  cell(x, y, seqs, isCached, isHost = false) {
    const { context, inset, cell_: cell } = this;
    const [left, top, size] = [x + inset, y + inset, cell - 2 * inset];
    if (seqs) this.#held(left, top, size, seqs, isHost);
    else if (isCached) this.#cached(left, top, size);
    else {
      context.fillStyle = this.colours["line-strong"];
      const dot = Math.max(1, size * 0.14);
      context.fillRect(left + (size - dot) / 2, top + (size - dot) / 2, dot, dot);
    }
    if (seqs && isCached && size > 7) {
      context.fillStyle = this.colours.surface;
      context.beginPath();
      context.moveTo(left + size, top);
      context.lineTo(left + size - size * 0.42, top);
      context.lineTo(left + size, top + size * 0.42);
      context.fill();
    }
  }

  #held(left, top, size, seqs, isHost) {
    const { context } = this;
    const requests = [...new Set(seqs.map((seq) => this.state.requestOf(seq)))];
    const isFaded = this.selected !== null && !requests.includes(this.selected);
    context.globalAlpha = isFaded ? 0.25 : 1;
    const height = size / Math.min(requests.length, 4);
    for (const [index, request] of requests.slice(0, 4).entries()) {
      context.fillStyle = colourOf(request);
      context.fillRect(left, top + index * height, size, height);
    }
    if (seqs.length > 1) this.#number(left, top, size, seqs.length);
    context.globalAlpha = 1;
    if (isHost) {
      context.strokeStyle = this.colours.text;
      context.lineWidth = 1;
      context.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
    }
  }

  /** How many share it: a disc, with the number where there is room. */
  #number(left, top, size, number) {
    const { context, colours } = this;
    context.fillStyle = colours.surface;
    context.beginPath();
    context.arc(left + size / 2, top + size / 2, size * (size > 11 ? 0.36 : 0.22), 0, 7);
    context.fill();
    if (size <= 11) return;
    context.fillStyle = colours.text;
    context.textAlign = "center";
    context.font = `600 ${Math.floor(size * 0.5)}px sans-serif`;
    context.fillText(number > 9 ? "+" : String(number), left + size / 2, top + size / 2 + 0.5);
  }

  #cached(left, top, size) {
    const { context, colours } = this;
    context.strokeStyle = colours["line-strong"];
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
    context.beginPath();
    context.moveTo(left + 1, top + size - 1);
    context.lineTo(left + size - 1, top + 1);
    context.stroke();
  }
}

/** Draws a kind of block as the legend shows it. */
export function drawSample(canvas, kind) {
  const { context, width } = cleared(canvas, canvas.clientHeight);
  const state = { requestOf: (seq) => seq };
  const painter = new Painter(context, width, state, null);
  if (kind === "held") painter.cell(0, 0, [1], false);
  if (kind === "held-cached") painter.cell(0, 0, [1], true);
  if (kind === "shared") painter.cell(0, 0, [1, 2], false);
  if (kind === "cached") painter.cell(0, 0, undefined, true);
  if (kind === "free") painter.cell(0, 0, undefined, false);
  if (kind === "host") painter.cell(0, 0, [1], false, true);
}

/** A block in words. */
export function blockInWords(found, state) {
  const where = found.place === "host" ? `host block ${found.block}` : `block ${found.block}`;
  const names = found.seqs.map((seq) => state.nameOf(seq));
  const several = `${names.slice(0, 6).join(", ")}${names.length > 6 ? ", …" : ""}`;
  const held = names.length ? `held by ${several}` : "held by nobody";
  const shared = names.length > 1 ? `, shared by ${names.length}` : "";
  return `${where}: ${held}${shared}${found.isCached ? ", in the prefix cache" : names.length ? "" : ", free"}`;
}
