// Requests to the server that the page is from, and its errors in words.

import { askForKey, storedKey } from "./key.js";

const ROOT = new URL("../../", import.meta.url);

/** A request that failed. status: 0 where the server was not reached. param: the field that is at fault, or null. */
export class ApiError extends Error {
  constructor(status, { message = "", code = null, param = null } = {}, retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfterS = retryAfterS;
  }
}

/**
 * The Response to a request for a path such as "v1/models"; with a body it is a POST of JSON. Asks for a key where the
 * server does. Throws ApiError, or AbortError after signal.
 */
export async function request(path, { body, method, signal } = {}) {
  for (;;) {
    const key = storedKey();
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    const options = { method: method ?? (body ? "POST" : "GET"), headers, signal, cache: "no-store" };
    if (body) options.body = JSON.stringify(body);
    const response = await reached(() => fetch(new URL(path, ROOT), options));
    if (response.ok) return response;
    if (response.status === 401 && (key !== storedKey() || (await askForKey()))) continue;
    throw await refusal(response);
  }
}

async function reached(attempt) {
  try {
    return await attempt();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: error.message });
  }
}

async function refusal(response) {
  const after = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  let error = {};
  try {
    error = (await response.json()).error;
  } catch {
    // a proxy's answer, which has no such thing: the status has to do
  }
  return new ApiError(response.status, error, Number.isNaN(after) ? null : after);
}

/**
 * The events of a stream of server-sent events, parsed as JSON, up to [DONE]. Throws ApiError for one that tells of an
 * error, and for a stream that ends before its end.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(() => reader.read());
    if (done) throw new ApiError(0, { message: "the answer broke off" });
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const text = line.slice(5).trim();
      if (text === "[DONE]") return;
      const event = JSON.parse(text);
      if (event.error) throw new ApiError(500, event.error);
      yield event;
    }
  }
}

/** An error in words: what is wrong, in a line, and what the server says of it. */
export function inWords(error) {
  if (!(error instanceof ApiError)) return { title: "Something went wrong on this page", detail: String(error) };
  return { title: titleOf(error), detail: error.message };
}

function titleOf({ status, code, param, retryAfterS }) {
  const again = retryAfterS === null ? "Try again in a while." : `Try again in ${seconds(retryAfterS)}.`;
  if (status === 0) return "The server cannot be reached";
  if (code === "context_length_exceeded") return "The conversation is too long for the model";
  if (status === 400 && param) return `The server does not take this ${param}`;
  if (status === 400) return "The server does not take this request";
  if (status === 401) return "The server asks for an API key";
  if (status === 404) return "The server does not know this model";
  if (status === 413) return "The conversation is larger than the server takes";
  if (status === 429 && code === "rate_limit_exceeded") return `The limit of this key is reached. ${again}`;
  if (status === 429) return `The server has more to do than it can take. ${again}`;
  if (status === 503) return `The server is not ready, or is short of memory. ${again}`;
  return "The server failed at this request";
}

function seconds(count) {
  return count === 1 ? "a second" : count < 120 ? `${count} seconds` : `${Math.ceil(count / 60)} minutes`;
}
