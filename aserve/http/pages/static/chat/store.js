// Where conversations are kept: in the browser's IndexedDB and nowhere else; without it, as long as the page is open.

const DATABASE = "aserve";
const TABLE = "conversations";
const LAST_SETTINGS = "aserve.chat.settings";

export class Store {
  /** isLasting: whether conversations outlive the page. */
  static async open() {
    try {
      const opening = indexedDB.open(DATABASE, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
      return new Store(await done(opening));
    } catch {
      return new Store(null);
    }
  }

  constructor(database) {
    this.isLasting = database !== null;
    this.database = database;
    this.memory = new Map();
  }

  /** All conversations, the newest first. */
  async all() {
    const found = this.isLasting ? await done(this.#table("readonly").getAll()) : [...this.memory.values()];
    return found.sort((one, other) => other.updatedMs - one.updatedMs);
  }

  async put(conversation) {
    if (this.isLasting) await done(this.#table("readwrite").put(conversation));
    else this.memory.set(conversation.id, conversation);
  }

  async remove(id) {
    if (this.isLasting) await done(this.#table("readwrite").delete(id));
    else this.memory.delete(id);
  }

  #table(mode) {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

/** The settings that the last conversation had, for the next one. */
export function lastSettings() {
  return fromStorage(LAST_SETTINGS, null);
}

export function keepSettings(settings) {
  toStorage(LAST_SETTINGS, settings);
}

/** A small value that is kept in the browser under a name. */
export function fromStorage(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function toStorage(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // a browser that keeps nothing
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
