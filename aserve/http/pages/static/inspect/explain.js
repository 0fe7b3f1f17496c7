// Where a request's time went: what GET v1/requests/{id} says of one that asked for it, or is still there.

import { inWords, request } from "../shared/api.js";
import { element } from "../shared/dom.js";
import { HOLDS, count } from "./state.js";

const WHYS = {
  off: "there is no prefix cache",
  scored: "its prompt is scored, which needs all of it computed",
  evicted: "it was cached, and is no more",
  in_flight: "another request was computing the same",
  salt: "it is cached without its cache_salt",
  adapter: "it is cached for another adapter",
  other_tokens: "the nearest request has other tokens there",
  not_seen: "nothing like it is known to be cached",
};

const HOW = 'Send the request with "x_aserve": {"explain": true} to be told where its time goes.';

/** The list in which it is told. */
export class Explanation {
  #list;
  #shown = "";
  #asking = new AbortController();

  constructor(list) {
    this.#list = list;
  }

  /** Asks for that of a request's lives, once while it is open and once when it has ended. Nothing is known of none. */
  show(lives) {
    const card = lives[0]?.card;
    const hasEnded = lives.every((life) => life.endedUs);
    const shown = card ? `${card.id} ${hasEnded}` : "";
    if (shown === this.#shown) return;
    this.#stop();
    if (!this.#shown.startsWith(`${card?.id} `)) this.#tell([]);
    this.#shown = shown;
    if (shown && hasEnded && !card.explains) this.#tell([["explanation", HOW]]);
    else if (shown) this.#ask(card.id, this.#asking.signal);
  }

  /** It is asked for anew when it is shown next. */
  clear() {
    this.#stop();
    this.#shown = "";
    this.#tell([]);
  }

  #stop() {
    this.#asking.abort();
    this.#asking = new AbortController();
  }

  async #ask(id, signal) {
    try {
      const answer = await request(`v1/requests/${encodeURIComponent(id)}`, { signal });
      const told = await answer.json();
      if (!signal.aborted) this.#tell(pairsOf(told));
    } catch (error) {
      if (!signal.aborted) this.#tell([["explanation", inWords(error).detail]]);
    }
  }

  #tell(pairs) {
    this.#list.replaceChildren(...pairs.map(([name, value]) => pair(name, value)));
  }
}

function pair(name, value) {
  return element("div", {}, element("dt", { text: name }), element("dd", { text: value }));
}

function pairsOf({ explained, phases_ms: phases, total_ms: total, queue, steps, choices }) {
  const spent = Object.entries(phases).filter(([, value]) => value > 0);
  const pairs = [["time", `${spent.map(([name, value]) => `${name}\u00a0${ms(value)}`).join(" + ")} = ${ms(total)}`]];
  if (queue) pairs.push(["queued behind", `${queue.ahead} ahead, ${queue.running} running${holdsOf(queue.holds)}`]);
  if (steps) {
    const failed = steps.failed ? `, ${steps.failed} failed` : "";
    const share = `${ms(steps.share_ms)} of ${ms(steps.total_ms)}`;
    pairs.push(["share of steps", `${share} in ${count(steps.num, "step")}${failed}`]);
  }
  for (const course of choices) pairs.push(...courseOf(course, choices.length > 1 ? ` ${course.index}` : ""));
  if (!explained) pairs.push(["explanation", HOW]);
  return pairs;
}

function holdsOf(holds) {
  return holds
    .filter((hold) => hold.plans)
    .map((hold) => `; ${ms(hold.ms)}: ${HOLDS[hold.reason] ?? hold.reason}`)
    .join("");
}

function courseOf({ prefix, num_chunks: numChunks, num_preemptions: numLost, preemptions }, which) {
  const pairs = [];
  if (prefix) {
    const { differs } = prefix;
    const why = differs ? `; from position ${differs.position} on not: ${WHYS[differs.reason] ?? differs.reason}` : "";
    pairs.push([`cached${which}`, `${prefix.cached_tokens} of ${count(prefix.cacheable_tokens, "token")}${why}`]);
  }
  if (numChunks > 1) pairs.push([`chunks${which}`, String(numChunks)]);
  if (preemptions.length) {
    const lost = preemptions.reduce((sum, one) => sum + one.lost_ms, 0);
    pairs.push([`preempted${which}`, `${count(numLost, "time")}, which cost ${ms(lost)}`]);
  }
  return pairs;
}

function ms(value) {
  return `${value < 10 ? value.toFixed(2) : value.toFixed(1)}\u00a0ms`; // a line never ends within
}
