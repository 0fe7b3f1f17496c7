// The last minutes: records as they came, in chunks of text, with a state now and then from which any moment is
// reached. What is kept is bounded in bytes: parsed are only the chunks that are looked at.

import { State } from "./state.js";

export const MAX_BYTES = 24 * 1024 * 1024;
const CHUNKS_A_KEYFRAME = 32;
const MAX_PARSED = 240;

export class History {
  constructor(hello, { maxBytes = MAX_BYTES, words = [] } = {}) {
    this.hello = hello;
    this.head = new State();
    this.numSteps = 0;
    this.numBytes = 0;
    this.#maxBytes = maxBytes;
    this.#words = new Map(words);
  }

  #maxBytes;
  #words; // the texts of tokens, by their ids, as far as they were told
  #chunks = [];
  #parsed = new Map();
  #listeners = [];

  /** Calls listener(record, head) for each record that comes, and listener(null, head) for a snapshot. */
  onRecord(listener) {
    this.#listeners.push(listener);
  }

  get isEmpty() {
    return this.#chunks.length === 0;
  }

  get beginsUs() {
    return this.isEmpty ? 0 : this.#chunks[0].beginsUs;
  }

  get endsUs() {
    return this.head.atUs;
  }

  get numChunks() {
    return this.#chunks.length;
  }

  /** Takes a snapshot, or a list of records; text: the same as JSON. */
  take(event, text = JSON.stringify(event.type === "snapshot" ? event : event.records)) {
    const isSnapshot = event.type === "snapshot";
    if (!isSnapshot && !event.records.length) return;
    const records = isSnapshot ? [] : atLength(event.records, this.#words);
    const isKey = isSnapshot || this.#sinceKey >= CHUNKS_A_KEYFRAME;
    if (isSnapshot) {
      this.head.begin(event);
      for (const listener of this.#listeners) listener(null, this.head);
    }
    const chunk = {
      text,
      isSnapshot,
      first: isSnapshot ? event.number + 1 : records[0].number,
      last: isSnapshot ? event.number : records.at(-1).number,
      beginsUs: isSnapshot ? event.at_us : startOf(records[0]),
      endsUs: isSnapshot ? event.at_us : records.at(-1).at_us,
      keyframe: isKey ? this.head.copy() : null,
    };
    this.#sinceKey = isKey ? 0 : this.#sinceKey + 1;
    this.#chunks.push(chunk);
    this.numBytes += chunk.text.length;
    this.#remember(chunk, records);
    for (const record of records) {
      this.head.apply(record);
      if (record.work) this.numSteps += 1;
      for (const listener of this.#listeners) listener(record, this.head);
    }
    this.#forgetOldest();
  }

  #sinceKey = CHUNKS_A_KEYFRAME;

  /** Drops the oldest, up to the next state that is kept. */
  #forgetOldest() {
    while (this.numBytes > this.#maxBytes) {
      const next = this.#chunks.findIndex((chunk, index) => index > 0 && chunk.keyframe);
      if (next < 0) return;
      for (const chunk of this.#chunks.splice(0, next)) {
        this.numBytes -= chunk.text.length;
        this.#parsed.delete(chunk);
      }
    }
  }

  #remember(chunk, records) {
    this.#parsed.set(chunk, records);
    if (this.#parsed.size > MAX_PARSED) this.#parsed.delete(this.#parsed.keys().next().value);
  }

  #records(chunk) {
    const known = this.#parsed.get(chunk);
    if (known) return known;
    const records = chunk.isSnapshot ? [] : atLength(JSON.parse(chunk.text), this.#words);
    this.#remember(chunk, records);
    return records;
  }

  /** Of the chunks, the index of the first for which `isBehind` holds; it holds for all behind that. */
  #find(isBehind) {
    let low = 0;
    let high = this.#chunks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isBehind(this.#chunks[middle])) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The state after the last record that is not behind that moment, or after the first there is. */
  at(us) {
    const index = Math.max(0, this.#find((chunk) => chunk.beginsUs > us) - 1);
    return this.#replay(index, (record) => record.at_us <= us);
  }

  /** The state after the record of that number, as far as it is kept. */
  after(number) {
    const index = Math.max(0, this.#find((chunk) => chunk.first > number) - 1);
    return this.#replay(index, (record) => record.number <= number);
  }

  #replay(index, isWanted) {
    let start = index;
    while (start > 0 && !this.#chunks[start].keyframe) start -= 1;
    const state = this.#chunks[start].keyframe.copy();
    for (let i = start; i <= index; i += 1) {
      for (const record of this.#records(this.#chunks[i])) {
        if (!isWanted(record)) return state;
        state.apply(record);
      }
    }
    return state;
  }

  /** The number of the record of a step before the one of that number, or behind it; null where there is none. */
  stepBeside(number, direction) {
    let index = Math.max(0, this.#find((chunk) => chunk.first > number) - 1);
    for (; index >= 0 && index < this.#chunks.length; index += direction) {
      const records = this.#records(this.#chunks[index]).filter((record) => record.work);
      const found =
        direction < 0
          ? records.findLast((record) => record.number < number)
          : records.find((record) => record.number > number);
      if (found) return found.number;
    }
    return null;
  }

  /** The records that have to do with a stretch of time, in their order. */
  *between(fromUs, toUs) {
    const first = Math.max(0, this.#find((chunk) => chunk.endsUs >= fromUs) - 1);
    for (let index = first; index < this.#chunks.length; index += 1) {
      const chunk = this.#chunks[index];
      if (chunk.beginsUs > toUs) return;
      for (const record of this.#records(chunk)) {
        if (record.at_us >= fromUs && startOf(record) <= toUs) yield record;
      }
    }
  }

  /** All that is kept as a recording: parts of a text, to be put together by a Blob. */
  *parts(about = {}) {
    const words = [...this.#words];
    const head = { type: "recording", version: this.hello.version, ...about, hello: this.hello, words };
    const [first, ...others] = this.#chunks;
    yield `${JSON.stringify(head).slice(0, -1)},"snapshot":${JSON.stringify(first.keyframe.snapshot())},"chunks":[`;
    yield first.isSnapshot ? "[]" : first.text;
    for (const { text } of others) yield `,\n${text}`;
    yield "\n]}\n";
  }
}

/** Records, also of runs: steps of the same sequences, which are told in short. words: gets the texts that are new. */
function atLength(told, words) {
  const spelled = (said) => said.map((token) => (typeof token === "number" ? words.get(token) : token));
  return told.flatMap((one) => {
    for (const [id, text] of one.words ?? []) words.set(id, text);
    if (!one.steps) return one.said ? { ...one, said: spelled(one.said) } : one;
    const blocks = new Map(one.blocks);
    return one.steps.map(([step, at_us, began_us, ...phases], place) => ({
      number: one.number + place,
      at_us,
      work: { step, began_us, phases, decodes: one.decodes },
      said: spelled(one.said[place]),
      ...(blocks.has(place) && { blocks: blocks.get(place) }),
    }));
  });
}

/** When what a record tells of began. */
function startOf(record) {
  return record.work ? Math.min(record.work.began_us, record.at_us) : record.at_us;
}
