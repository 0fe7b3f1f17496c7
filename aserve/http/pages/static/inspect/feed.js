// The live feed: the server's events, parsed and as text, one after the other; opened again when it breaks off.

import { ApiError, request } from "../shared/api.js";

const PATH = "v1/inspect/events";
const AGAIN_MS = [500, 1000, 2000, 5000];

/**
 * Follows the feed until `signal`. take(event, text): for each event.
 * told(state, error): "connecting", "live", or "lost" with what went wrong, after which it tries again.
 */
export async function follow({ take, told, signal }) {
  let numFailures = 0;
  while (!signal.aborted) {
    told("connecting");
    try {
      const response = await request(PATH, { signal });
      numFailures = 0;
      told("live");
      await read(response.body, take);
      throw new ApiError(0, { message: "the server ended the stream" });
    } catch (error) {
      if (signal.aborted) return;
      told("lost", error);
      if (!(error instanceof ApiError)) reportError(error); // a mistake of this page's
      if (error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429) return;
    }
    await pause(AGAIN_MS[Math.min(numFailures, AGAIN_MS.length - 1)], signal);
    numFailures += 1;
  }
}

async function read(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { value, done } = await reader.read().catch(brokenOff);
    if (done) return;
    const pieces = value.split("\n\n");
    parts.push(pieces[0]);
    for (const piece of pieces.slice(1)) {
      one(parts.join(""), take);
      parts = [piece];
    }
  }
}

function brokenOff(error) {
  throw error.name === "AbortError" ? error : new ApiError(0, { message: error.message });
}

function one(lines, take) {
  if (!lines.startsWith("data: ")) return; // a comment that keeps the connection
  const text = lines.slice(6);
  const event = JSON.parse(text);
  if (event.error) throw new ApiError(500, event.error);
  const prefix = '{"type":"records","records":';
  take(event, event.type === "records" && text.startsWith(prefix) ? text.slice(prefix.length, -1) : undefined);
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
