// Markdown within a line: code, emphasis, links. Nodes come out, so that text is text whatever it looks like.

import { element } from "../shared/dom.js";

const MAX_DEPTH = 6;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const ESCAPABLE = "\\`*_{}[]()#+-.!|<>~";
const BARE_URL = /https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]}*_]/y;
const WORD = /[\p{L}\p{N}]/u;

/** The nodes of a text. */
export function inline(text, depth = 0) {
  return new Line(text, depth).nodes();
}

class Line {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = "";
    this.made = [];
    this.unclosed = new Set(); // marks of which no second one follows: each is looked for once
  }

  nodes() {
    while (this.at < this.text.length) {
      const part = this.#part();
      if (part) {
        this.#flush();
        this.made.push(part);
      } else {
        this.plain += this.text[this.at];
        this.at += 1;
      }
    }
    this.#flush();
    return this.made;
  }

  /** The element that begins here, behind which the line goes on; null where there is none. */
  #part() {
    const char = this.text[this.at];
    if (char === "\\" && ESCAPABLE.includes(this.text[this.at + 1] ?? " ")) {
      this.at += 1; // the next character is plain, by the caller
      return null;
    }
    if (char === "\n") return this.#lineBreak();
    if (char === "`") return this.#code();
    if (char === "h") return this.#bareUrl();
    if (this.depth >= MAX_DEPTH) return null;
    if (char === "[" || char === "!") return this.#link();
    if (char === "*" || char === "_" || char === "~") return this.#marked();
    return null;
  }

  #lineBreak() {
    this.at += 1;
    this.plain = this.plain.trimEnd();
    return element("br");
  }

  #code() {
    let width = 1;
    while (this.text[this.at + width] === "`") width += 1;
    const fence = "`".repeat(width);
    const end = this.#closing(fence, this.at + width);
    if (end < 0) {
      this.plain += fence.slice(1); // and the last of them, by the caller
      this.at += width - 1;
      return null;
    }
    const inner = this.text.slice(this.at + width, end);
    this.at = end + width;
    return element("code", { text: inner.length > 2 ? inner.replace(/^ (.*) $/s, "$1") : inner });
  }

  #bareUrl() {
    BARE_URL.lastIndex = this.at;
    const found = WORD.test(this.text[this.at - 1] ?? " ") ? null : BARE_URL.exec(this.text);
    if (!found) return null;
    this.at += found[0].length;
    return anchor(found[0], [found[0]]);
  }

  /** [words](address), of which an image shows the words alone: nothing is fetched from elsewhere. */
  #link() {
    const begin = this.text[this.at] === "!" ? this.at + 1 : this.at;
    if (this.text[begin] !== "[") return null;
    const middle = this.#closing("](", begin + 1);
    const end = middle < 0 ? -1 : this.text.indexOf(")", middle + 2);
    if (end < 0) return null;
    const words = this.text.slice(begin + 1, middle);
    const address = this.text.slice(middle + 2, end).trim().split(/\s/, 1)[0];
    if (words.includes("\n\n") || words.length > 2000) return null;
    this.at = end + 1;
    return anchor(address, inline(words, this.depth + 1));
  }

  #marked() {
    const twice = this.text.slice(this.at, this.at + 2);
    const mark = twice in MARKS ? twice : this.text[this.at];
    if (!(mark in MARKS)) return null;
    const begin = this.at + mark.length;
    const isInWord = mark.startsWith("_") && WORD.test(this.text[this.at - 1] ?? " ");
    if (isInWord || /\s/.test(this.text[begin] ?? " ")) return null;
    const end = this.#closing(mark, begin);
    if (end <= begin || /\s/.test(this.text[end - 1])) return null;
    if (mark.startsWith("_") && WORD.test(this.text[end + mark.length] ?? " ")) return null;
    this.at = end + mark.length;
    return element(MARKS[mark], {}, ...inline(this.text.slice(begin, end), this.depth + 1));
  }

  #closing(mark, from) {
    if (this.unclosed.has(mark)) return -1;
    const end = this.text.indexOf(mark, from);
    if (end < 0) this.unclosed.add(mark);
    return end;
  }

  #flush() {
    if (this.plain) this.made.push(document.createTextNode(this.plain));
    this.plain = "";
  }
}

/** A link that opens elsewhere and tells nothing of this page; without an address that may be followed, its words. */
function anchor(address, words) {
  if (!SCHEMES.has(URL.canParse(address) ? new URL(address).protocol : "")) return element("span", {}, ...words);
  const options = { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address };
  return element("a", options, ...words);
}
