// Markdown to elements: headings, lists, quotes, tables, code, and what inline.js knows. HTML in it stays text.
//
// A text that grows is rendered anew only from the first block that has changed on.

import { element } from "../shared/dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;

/** Shows a text in an element, which it has to itself. codeTools: makes what stands above a block of code. */
export class MarkdownView {
  constructor(root, codeTools = () => null) {
    this.root = root;
    this.codeTools = codeTools;
    this.sources = [];
  }

  show(text) {
    const blocks = ranked(blocksOf(text.split(/\r?\n/)));
    const sources = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map((block) => this.#render(block, 0)));
    this.sources = sources;
  }

  /** Shows a text that is code as a whole. */
  showCode(language, text) {
    this.root.replaceChildren(this.#code({ language, text }));
    this.sources = [];
  }

  #render(block, depth) {
    switch (block.kind) {
      case "code":
        return this.#code(block);
      case "heading":
        return headingElement(block);
      case "rule":
        return element("hr");
      case "quote":
        return element("blockquote", {}, ...this.#inner(block.lines, depth));
      case "list":
        return this.#list(block, depth);
      case "table":
        return tableOf(block);
      default:
        return element("p", {}, ...inline(block.text));
    }
  }

  #inner(lines, depth) {
    if (depth >= MAX_DEPTH) return [element("p", {}, lines.join("\n"))];
    return blocksOf(lines).map((block) => this.#render(block, depth + 1));
  }

  #list({ isOrdered, start, items }, depth) {
    const made = isOrdered ? element("ol", { start }) : element("ul");
    for (const { lines, isTight } of items) {
      const parts = this.#inner(lines, depth);
      const isPlain = isTight && parts[0]?.tagName === "P";
      const first = isPlain ? [...parts[0].childNodes] : parts.slice(0, 1);
      made.append(element("li", {}, ...first, ...parts.slice(1)));
    }
    return made;
  }

  #code({ language, text }) {
    const code = element("code", { text });
    const head = element("div", { class: "code-head" }, element("span", { text: language }), this.codeTools(text));
    const body = element("pre", { tabIndex: 0, role: "region", "aria-label": "Code" }, code);
    return element("div", { class: "code" }, head, body);
  }
}

/** Headings with the rank that they have among each other: beneath a message's own heading none is left out. */
function ranked(blocks) {
  const levels = [];
  for (const block of blocks.filter(({ kind }) => kind === "heading")) {
    while (levels.at(-1) >= block.level) levels.pop();
    levels.push(block.level);
    block.rank = levels.length;
  }
  return blocks;
}

/** Within quotes and lists a heading has no rank, and is no more than strong words. */
function headingElement({ rank, text }) {
  if (rank) return element(`h${Math.min(rank + 2, 6)}`, {}, ...inline(text));
  return element("p", {}, element("strong", {}, ...inline(text)));
}

function tableOf({ head, rows }) {
  const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, ...inline(cell))));
  const filled = rows.map((cells) => head.map((_, column) => cells[column] ?? ""));
  const body = element("tbody", {}, ...filled.map((cells) => row(cells, "td")));
  const table = element("table", {}, element("thead", {}, row(head, "th")), body);
  return element("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
}

/** The blocks of lines, as values. */
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const [block, next] = blockAt(lines, at);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [headingOf(heading), at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return quoteAt(lines, at);
  if (ITEM.test(line)) return listAt(lines, at);
  if (isTableAt(lines, at)) return tableAt(lines, at);
  return paragraphAt(lines, at);
}

function headingOf([, marks, text]) {
  return { kind: "heading", level: marks.length, text: text.trim().replace(/#+$/, "").trim() };
}

function codeAt(lines, at, [, fence, language]) {
  const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return [{ kind: "code", language, text: lines.slice(at + 1, end).join("\n") }, end + 1];
}

function quoteAt(lines, at) {
  const inner = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at += 1) inner.push(QUOTE.exec(lines[at])[1]);
  return [{ kind: "quote", lines: inner }, at];
}

function isTableAt(lines, at) {
  const below = lines[at + 1]?.trim() ?? "";
  return lines[at].includes("|") && below.length < 1000 && TABLE_RULE.test(below);
}

function tableAt(lines, at) {
  const head = cellsOf(lines[at]);
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) rows.push(cellsOf(lines[end]));
  return [{ kind: "table", head, rows }, end];
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraphAt(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n") }, end];
}

/** Whether a line ends the paragraph above it. A number that happens to begin a line does not, but for a first item. */
function interrupts(lines, at) {
  const item = ITEM.exec(lines[at]);
  if (item) return Boolean(item[3]?.trim()) && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1);
  return [FENCE, HEADING, RULE, QUOTE].some((begin) => begin.test(lines[at])) || isTableAt(lines, at);
}

/** A list's items: lines that are indented belong to the one above them. */
function listAt(lines, at) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(marker);
  const items = [];
  let hadBlank = false;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const found = ITEM.exec(line);
    const isNew = found && found[1].length <= indent.length + 1 && !RULE.test(line);
    if (isNew && /\d/.test(found[2]) !== isOrdered) break;
    if (isNew) {
      if (hadBlank && items.length) items.at(-1).isTight = false;
      const width = line.length - line.trimStart().length + found[2].length + 1;
      items.push({ lines: [found[3] ?? ""], width, isTight: true });
    } else if (!line.trim()) {
      items.at(-1).lines.push("");
    } else if (/^\s/.test(line) || !hadBlank) {
      items.at(-1).lines.push(dedented(line, items.at(-1).width));
    } else {
      break;
    }
    hadBlank = !line.trim();
  }
  return [{ kind: "list", isOrdered, start: isOrdered ? Number.parseInt(marker, 10) : 1, items }, at];
}

function dedented(line, width) {
  const indent = line.length - line.trimStart().length;
  return line.slice(Math.min(indent, width));
}
