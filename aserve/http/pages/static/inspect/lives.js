// What became of each request, gathered as records come: lanes for the timeline, phases for the waterfall.
// Kept are those who are there, and the latest that have ended.

const MAX_ENDED = 400;
const MAX_SPANS = 400;
const MAX_TEXT = 6000;

export class Lives {
  constructor() {
    this.bySeq = new Map();
  }

  #lanes = [];
  #ended = [];

  get numLanes() {
    return this.#lanes.length;
  }

  /** A listener for History.onRecord. */
  take(record, head) {
    if (record === null) {
      for (const life of this.bySeq.values()) if (!life.endedUs) this.#end(life, head.atUs, "");
      for (const card of head.cards.values()) this.#meet(card, head);
      for (const [seq, state] of head.states) if (state === "running") this.#run(this.bySeq.get(seq), head.atUs, 0, "");
      return;
    }
    for (const card of record.cards ?? []) this.#meet(card, head);
    for (const [seq, matched, source] of record.admitted ?? []) {
      const life = this.bySeq.get(seq);
      if (life && !life.endedUs) this.#run(life, record.work?.began_us ?? record.at_us, matched, source);
    }
    if (record.work) this.#work(record.work, record);
    for (const [index, text] of (record.said ?? []).entries()) if (text) this.#say(record.work.decodes[index], text);
    for (const [seq, text] of record.texts ?? []) this.#say(seq, text);
    for (const [seq, what, why] of record.moves ?? []) {
      const life = this.bySeq.get(seq);
      if (!life) continue;
      if (what === "ended") this.#end(life, record.at_us, why ?? "");
      else this.#stop(life, record.at_us, what);
    }
  }

  #meet(card, head) {
    const known = this.bySeq.get(card.seq);
    if (known && !known.endedUs) return;
    const metUs = card.arrived_us;
    const life = { seq: card.seq, card, lane: null, spans: [], steps: [], text: "", numTokens: 0, endedUs: 0, why: "" };
    life.spans.push({ kind: "waiting", fromUs: Math.min(metUs, head.atUs), toUs: 0 });
    this.bySeq.set(card.seq, life);
  }

  #run(life, us, matched, source) {
    this.#close(life, us);
    if (life.lane === null) {
      const free = this.#lanes.indexOf(null);
      life.lane = free < 0 ? this.#lanes.length : free;
      this.#lanes[life.lane] = life;
    }
    this.#open(life, { kind: "running", fromUs: us, toUs: 0, matched, source });
  }

  #stop(life, us, what) {
    this.#close(life, us);
    this.#open(life, { kind: what === "swap" ? "swapped" : "recompute", fromUs: us, toUs: 0 });
  }

  #end(life, us, why) {
    this.#close(life, us);
    life.endedUs = us;
    life.why = why;
    if (life.lane !== null && this.#lanes[life.lane] === life) this.#lanes[life.lane] = null;
    while (this.#lanes.length && this.#lanes.at(-1) === null) this.#lanes.pop();
    this.#ended.push(life);
    if (this.#ended.length > MAX_ENDED) {
      const oldest = this.#ended.shift();
      if (this.bySeq.get(oldest.seq) === oldest) this.bySeq.delete(oldest.seq);
    }
  }

  #close(life, us) {
    const last = life.spans.at(-1);
    if (last && !last.toUs) last.toUs = Math.max(us, last.fromUs);
  }

  #open(life, span) {
    if (life.spans.length < MAX_SPANS) life.spans.push(span);
  }

  #work(work, record) {
    const [plan, launch, flight] = work.phases;
    const fromUs = work.began_us + plan + launch;
    const toUs = fromUs + flight;
    for (const seq of work.decodes ?? []) {
      const life = this.bySeq.get(seq);
      if (!life) continue;
      life.numTokens += 1;
      const last = life.steps.at(-1);
      if (last?.kind === "decode" && last.toUs >= record.at_us - 2e6) {
        last.toUs = toUs; // a run of steps, one bar
        last.numTokens += 1;
      } else this.#step(life, { kind: "decode", fromUs, toUs, numTokens: 1 });
    }
    for (const [seq, kind, start, numTokens, drafts, accepted] of work.pieces ?? []) {
      const life = this.bySeq.get(seq);
      if (!life) continue;
      if (kind === "draft") life.numTokens += 1 + accepted;
      else if (start + numTokens >= life.card.num_prompt && !life.numTokens) life.numTokens = 1;
      this.#step(life, { kind, fromUs, toUs, start, numTokens, drafts, accepted });
    }
  }

  #step(life, step) {
    if (life.steps.length < MAX_SPANS) life.steps.push(step);
  }

  #say(seq, text) {
    const life = this.bySeq.get(seq);
    if (life && life.text.length < MAX_TEXT) life.text += text;
  }
}
