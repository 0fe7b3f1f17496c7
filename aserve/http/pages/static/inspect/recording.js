// Recordings as files: what the page has seen, to be looked at again, here or elsewhere.

import { History } from "./history.js";

const VERSIONS = [1, 2]; // in the first, runs said texts
const MAX_FILE_BYTES = 200 * 1024 * 1024;

/** Has the browser save a history. */
export function save(history) {
  const blob = new Blob([...history.parts()], { type: "application/json" });
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = `aserve-recording-${new Date().toISOString().replaceAll(":", "-").slice(0, 19)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** The recording in a file. Throws an Error whose message says what is wrong with it. */
export async function read(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error("The file is larger than 200 MB.");
  let raw;
  try {
    raw = JSON.parse(await file.text());
  } catch {
    throw new Error("The file is not JSON, so it is no recording of this page.");
  }
  return opened(raw);
}

/** The same of what is in such a file: {history, title, captions}. */
export function opened(raw) {
  if (raw?.type !== "recording" || !raw.hello || raw.snapshot?.type !== "snapshot" || !Array.isArray(raw.chunks)) {
    throw new Error("The file is no recording of this page.");
  }
  if (!VERSIONS.includes(raw.version)) {
    throw new Error(`The recording has version ${raw.version}, and this page reads versions ${VERSIONS.join(", ")}.`);
  }
  const captions = raw.captions ?? [];
  return { title: raw.title ?? "", captions, load: (watch) => fill(raw, watch) };
}

function fill(raw, watch) {
  const history = new History(raw.hello, { maxBytes: Number.POSITIVE_INFINITY, words: raw.words });
  watch(history);
  try {
    history.take(raw.snapshot);
    for (const one of raw.chunks) history.take(Array.isArray(one) ? { type: "records", records: one } : one);
  } catch {
    throw new Error("The recording is damaged.");
  }
  return history;
}
