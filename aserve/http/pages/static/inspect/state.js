// What is there at a moment: a snapshot, changed by the records behind it. The twin of `Held` in observe/records.py.

/** Stands for each sequence of another tenant, where the reader has a key; see observe/others.py. */
export const OTHERS = -1;
const NOBODY = { running: 0, waiting: 0, swapped: 0 };
const MAX_LOG = 60;
const MAX_LAGS = 150;
const MAPS = ["cards", "states", "matched", "counts", "tables", "hostTables"];
const SOURCES = { cache: "in the prefix cache", fork: "shared with one that runs", swap: "back from the host" };
const GIVES_WAY = { swap: "preempted: swapped to the host", recompute: "preempted: to be computed again" };

/** Why the first of those who wait was not admitted, in words. */
export const HOLDS = {
  memory: "no block is free for it",
  rows: "as many run as may",
  budget: "the step computes as many tokens as it may",
  adapters: "no slot is free for its adapter",
  turn: "it is another's turn",
  sibling: "what it shares is being computed",
  swapped: "who is swapped out comes first",
  pace: "newcomers are gathered",
  streams: "those who decode would wait too long",
  flight: "its last step has not landed",
};

export class State {
  constructor() {
    this.number = -1;
    this.atUs = 0;
    this.cards = new Map();
    this.states = new Map();
    this.matched = new Map();
    this.counts = new Map();
    this.queue = { num_waiting: 0, first: [], hold: "" };
    this.tables = new Map();
    this.hostTables = new Map();
    this.cached = new Set();
    this.kept = new Set();
    this.others = NOBODY;
    this.held = new Set(); // by others
    this.hostHeld = new Set();
    this.highest = 0; // block of those that anybody held or that were cached
    this.log = [];
    this.lags = [];
    this.step = null;
    this.stepNumber = -1;
  }

  /** A copy that later records do not change; what is never changed in place is shared. */
  copy() {
    const copy = new State();
    Object.assign(copy, this);
    for (const name of MAPS) copy[name] = new Map(this[name]);
    copy.cached = new Set(this.cached);
    copy.kept = new Set(this.kept);
    copy.held = new Set(this.held);
    copy.hostHeld = new Set(this.hostHeld);
    copy.log = [...this.log];
    copy.lags = [...this.lags];
    return copy;
  }

  begin(snapshot) {
    const { log, lags } = this;
    const { number, at_us: atUs, queue } = snapshot;
    Object.assign(this, new State(), { log, lags, number, atUs, queue });
    for (const card of snapshot.cards) this.cards.set(card.seq, card);
    for (const [seq, state] of snapshot.states) this.states.set(seq, state);
    this.others = snapshot.others ?? NOBODY;
    this.#change(snapshot.blocks);
    if (snapshot.num_lost) this.#note(snapshot.at_us, "lost", null, `${snapshot.num_lost} records were lost`);
  }

  /** The snapshot of this moment, as the server would send it. */
  snapshot() {
    const whole = (tables) => [...tables].map(([seq, blocks]) => [seq, 0, blocks]);
    return {
      type: "snapshot",
      number: this.number,
      at_us: this.atUs,
      num_lost: 0,
      cards: [...this.cards.values()],
      states: [...this.states],
      queue: this.queue,
      blocks: {
        tables: whole(this.tables),
        host_tables: whole(this.hostTables),
        cached: [...this.cached],
        kept: [...this.kept],
        held: [...this.held],
        host_held: [...this.hostHeld],
      },
      others: this.others,
    };
  }

  apply(record) {
    this.number = record.number;
    this.atUs = record.at_us;
    for (const card of record.cards ?? []) {
      this.cards.set(card.seq, card);
      if (!this.states.has(card.seq)) this.states.set(card.seq, "waiting");
    }
    if (record.work) this.#worked(record.work, record.at_us);
    for (const admission of record.admitted ?? []) this.#admit(admission, record.at_us);
    for (const move of record.moves ?? []) this.#move(move, record.at_us);
    if (record.queue) this.queue = record.queue;
    if (record.others) this.others = record.others;
    if (record.blocks) this.#change(record.blocks);
    if (record.lag_us !== undefined) this.lags = [...this.lags.slice(1 - MAX_LAGS), record.lag_us];
    if (record.failed_step !== undefined) {
      this.#note(record.at_us, "failed", null, `step ${record.failed_step} failed and was taken back`);
    }
  }

  #worked(work, atUs) {
    this.step = work;
    this.stepNumber = this.number;
    for (const seq of work.decodes ?? []) this.#count(seq, 1);
    for (const [seq, kind, , , drafts, accepted] of work.pieces ?? []) {
      if (kind === "draft") this.#count(seq, 1 + accepted);
      if (drafts) this.#note(atUs, "drafts", seq, `${accepted} of ${drafts} drafts accepted`);
    }
    this.#noteBlocks(atUs, "copy", work.copies, "copied on write");
    this.#noteBlocks(atUs, "swap", work.swap_outs, "moved to the host");
    this.#noteBlocks(atUs, "swap", work.swap_ins, "came back from the host");
  }

  #count(seq, more) {
    if (this.cards.has(seq)) this.counts.set(seq, (this.counts.get(seq) ?? 0) + more);
  }

  #noteBlocks(atUs, kind, pairs, words) {
    if (!pairs?.length) return;
    const shown = pairs.slice(0, 3).map(([from, to]) => `${from} → ${to}`);
    const more = pairs.length > 3 ? ", …" : "";
    this.#note(atUs, kind, null, `${count(pairs.length, "block")} ${words}: ${shown.join(", ")}${more}`);
  }

  #admit([seq, matched, source], atUs) {
    if (this.cards.has(seq)) {
      this.states.set(seq, "running");
      this.matched.set(seq, { matched, source });
    }
    const from = SOURCES[source];
    if (from) this.#note(atUs, source === "swap" ? "swap" : "hit", seq, `${count(matched, "token")} ${from}`);
    else this.#note(atUs, "admitted", seq, "admitted");
  }

  #move([seq, what, why], atUs) {
    if (what === "ended") {
      this.#note(atUs, "ended", seq, why ? `ended: ${why}` : "ended");
      for (const map of [this.cards, this.states, this.matched, this.counts]) map.delete(seq);
      return;
    }
    this.states.set(seq, what === "swap" ? "swapped" : "waiting");
    this.#note(atUs, "preempted", seq, GIVES_WAY[what] ?? what);
  }

  #note(atUs, kind, seq, words) {
    const noted = { number: this.number, atUs, kind, seq, words, name: this.nameOf(seq) };
    this.log = [...this.log.slice(1 - MAX_LOG), noted];
  }

  #change(change) {
    splice(this.tables, change.tables);
    splice(this.hostTables, change.host_tables);
    for (const [, , blocks] of change.tables ?? []) for (const block of blocks) this.#reach(block);
    for (const block of [...(change.cached ?? []), ...(change.held ?? [])]) this.#reach(block);
    put(this.cached, change.cached, change.uncached);
    put(this.kept, change.kept, change.dropped);
    put(this.held, change.held, change.released);
    put(this.hostHeld, change.host_held, change.host_released);
  }

  #reach(block) {
    if (block > this.highest) this.highest = block;
  }

  /** What a sequence is called: its request's number, and which choice it is where there are several. */
  nameOf(seq) {
    if (seq === null) return "";
    if (seq === OTHERS) return "others";
    const card = this.cards.get(seq);
    return card ? nameOfCard(card) : `#${seq}`;
  }

  /** The sequences that hold each block that is held, by block. */
  holders() {
    return holdersOf(this.tables, this.held, 1); // block 0 is none
  }

  /** The same of blocks on the host. */
  hostHolders() {
    return holdersOf(this.hostTables, this.hostHeld, 0);
  }

  requestOf(seq) {
    return this.cards.get(seq)?.request ?? seq;
  }
}

export function nameOfCard(card) {
  return card.index ? `#${card.request}·${card.index}` : `#${card.request}`;
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function put(blocks, come, gone) {
  for (const block of come ?? []) blocks.add(block);
  for (const block of gone ?? []) blocks.delete(block);
}

function holdersOf(tables, others, first) {
  const holders = new Map([...others].map((block) => [block, [OTHERS]]));
  for (const [seq, blocks] of tables) {
    for (const block of blocks) {
      if (block < first) continue;
      const held = holders.get(block);
      if (held) held.push(seq);
      else holders.set(block, [seq]);
    }
  }
  return holders;
}

function splice(tables, changes) {
  for (const [seq, kept, blocks] of changes ?? []) {
    const table = (tables.get(seq) ?? []).slice(0, kept).concat(blocks);
    if (table.length) tables.set(seq, table);
    else tables.delete(seq);
  }
}
