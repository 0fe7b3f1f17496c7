// The prefix tree: sequences side by side, sorted so that equal beginnings are neighbours, whose common blocks are
// drawn as one. What was found in the cache is hatched.

import { cleared, colourOf, hatched, theme } from "./colours.js";

const ROW = 22;
const MAX_ROWS = 24;
const LABEL = 112;

/** Draws the tables of those who hold blocks; {locate} finds a sequence at a point; numRows of numAll are drawn. */
export function drawPrefixes(canvas, { state, hello, selected }) {
  const chains = chainsOf(state, hello.num_groups);
  const rows = chains.slice(0, MAX_ROWS);
  const { context, width } = cleared(canvas, Math.max(1, rows.length) * ROW + 4);
  const longest = Math.max(8, ...rows.map(({ blocks }) => blocks.length));
  const step = Math.min(26, (width - LABEL - 4) / longest);
  const colours = theme();
  for (const node of nodesOf(rows)) {
    const left = LABEL + node.from * step;
    const top = node.first * ROW + 2;
    const nodeWidth = (node.to - node.from) * step - 1.5;
    const nodeHeight = (node.last - node.first + 1) * ROW - 3;
    const isShared = node.last > node.first;
    const request = state.requestOf(rows[node.first].seq);
    const members = rows.slice(node.first, node.last + 1);
    const isFaded = selected !== null && !members.some(({ seq }) => state.requestOf(seq) === selected);
    context.globalAlpha = isFaded ? 0.3 : 1;
    context.fillStyle = isShared ? colours.raised : colourOf(request);
    context.fillRect(left, top, Math.max(1, nodeWidth), nodeHeight);
    if (isShared) {
      context.strokeStyle = colours["line-strong"];
      context.lineWidth = 1.5;
      context.strokeRect(left + 0.75, top + 0.75, Math.max(1, nodeWidth - 1.5), nodeHeight - 1.5);
    }
    context.globalAlpha = 1;
    if (isShared && nodeWidth > 26) {
      context.fillStyle = colours.text;
      context.textAlign = "center";
      const words = nodeWidth > 120 ? `shared by ${node.last - node.first + 1}` : `× ${node.last - node.first + 1}`;
      context.fillText(words, left + nodeWidth / 2, top + nodeHeight / 2);
    }
  }
  drawHits(context, rows, state, hello, step, colours);
  return {
    numRows: rows.length,
    numAll: chains.length,
    locate: (px, py) => rows[Math.floor(py / ROW)]?.seq ?? null,
  };
}

function drawHits(context, rows, state, hello, step, colours) {
  for (const [index, { seq }] of rows.entries()) {
    const top = index * ROW + 2;
    const hit = state.matched.get(seq);
    const matched = hit?.matched ?? 0;
    if (matched) {
      const right = LABEL + (matched / hello.block_size) * step - 1.5;
      context.fillStyle = hatched(context, colours.accent);
      context.fillRect(LABEL, top + ROW - 8, Math.max(2, right - LABEL), 4);
    }
    context.fillStyle = colours.text;
    context.textAlign = "left";
    context.fillText(state.nameOf(seq), 14, top + ROW / 2 - 1);
    context.fillStyle = colourOf(state.requestOf(seq));
    context.fillRect(2, top + 5, 8, 8);
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    if (matched) context.fillText(`${matched} found`, LABEL - 8, top + ROW / 2 - 1);
  }
}

/** Each table's first blocks of spans, in the order of the tree. */
function chainsOf(state, numGroups) {
  const chains = [];
  for (const [seq, blocks] of state.tables) {
    chains.push({ seq, blocks: numGroups === 1 ? blocks : blocks.filter((_, index) => index % numGroups === 0) });
  }
  return chains.sort((a, b) => compare(a.blocks, b.blocks) || a.seq - b.seq);
}

function compare(a, b) {
  const end = Math.min(a.length, b.length);
  for (let i = 0; i < end; i += 1) if (a[i] !== b[i]) return a[i] - b[i];
  return a.length - b.length;
}

/** Runs of columns in which the same rows have the same blocks. */
function* nodesOf(rows) {
  const open = [{ first: 0, last: rows.length - 1, from: 0 }];
  while (open.length) {
    const { first, last, from } = open.pop();
    let to = from;
    const block = (row, column) => rows[row].blocks[column];
    while (isSame(block, first, last, to)) to += 1;
    if (to > from) yield { first, last, from, to };
    let start = null;
    for (let row = first; row <= last + 1; row += 1) {
      const here = row <= last ? block(row, to) : undefined;
      if (start !== null && (here === undefined || here === 0 || here !== block(start, to))) {
        open.push({ first: start, last: row - 1, from: to });
        start = null;
      }
      if (start === null && row <= last && here !== undefined) {
        if (here === 0) open.push({ first: row, last: row, from: to + 1 });
        else start = row;
      }
    }
  }
}

function isSame(block, first, last, column) {
  const one = first <= last ? block(first, column) : undefined;
  if (!one) return false;
  for (let row = first + 1; row <= last; row += 1) if (block(row, column) !== one) return false;
  return true;
}
