// A conversation from a file that export.js has made. The file may be anybody's: nothing in it is taken unseen.

import { newConversation } from "./conversation.js";
import { completed, DEFAULTS, NUMBERS, SettingError } from "./settings.js";

const VERSION = 1;
const MAX_FILE_BYTES = 50 * 1024 * 1024;
const ID = /^[0-9a-f]{16}$/;

const isText = (value) => typeof value === "string";
const isFlag = (value) => typeof value === "boolean";
const isId = (value) => isText(value) && ID.test(value);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const maybe = (is) => (value) => value === undefined || value === null || is(value);
const oneOf = (...words) => (value) => words.includes(value);
const listOf = (is) => (value) => Array.isArray(value) && value.every(is);
const having = (fields) => (value) => isObject(value) && misfit(value, fields) === undefined;

const CALL = { id: isText, name: isText, arguments: isText };
const LIKELY = { text: isText, logprob: Number.isFinite };
const TOOL = { name: isText, description: isText, parameters: isObject, isOn: isFlag, strict: maybe(isFlag) };
const NODE = {
  parent: maybe(isId),
  next: maybe(isId),
  role: oneOf("user", "assistant", "tool"),
  content: isText,
  status: oneOf("done", "running", "stopped", "failed"),
  madeMs: maybe(Number.isFinite),
  reasoning: maybe(isText),
  calls: maybe(listOf(having(CALL))),
  callId: maybe(isText),
  name: maybe(isText),
  batch: maybe(isText),
  finish: maybe(isText),
  stopReason: maybe((value) => isText(value) || Number.isFinite(value)),
  error: maybe(having({ title: isText, detail: maybe(isText), field: maybe(isText) })),
  tokens: maybe(listOf(having({ ...LIKELY, top: listOf(having(LIKELY)) }))),
  usage: maybe(having({ prompt: Number.isFinite, cached: Number.isFinite, generated: Number.isFinite })),
  times: maybe(having({ firstMs: maybe(Number.isFinite), totalMs: maybe(Number.isFinite) })),
  isEdited: maybe(isFlag),
  showsText: maybe(isFlag),
};
/** What those of one kind must have besides. */
const OF_ROLE = {
  user: {},
  assistant: { calls: listOf(having(CALL)), reasoning: isText },
  tool: { name: isText, callId: isText },
};
const FAILED = { error: isObject };
const SETTINGS = {
  numbers: having(Object.fromEntries(NUMBERS.map(({ name }) => [name, maybe(Number.isFinite)]))),
  tools: listOf(having(TOOL)),
  format: oneOf("text", "json_object", "json_schema"),
};

/** The conversation of a file, as one that is new here. Throws SettingError that says what is wrong with the file. */
export async function read(file) {
  if (file.size > MAX_FILE_BYTES) throw refusal(`it is larger than ${MAX_FILE_BYTES / 2 ** 20} MiB`);
  let raw;
  try {
    raw = JSON.parse(await file.text());
  } catch {
    throw refusal("it is not JSON; export the conversation as JSON");
  }
  if (raw?.format !== "aserve.chat") throw refusal("no chat page of aserve has made it");
  if (raw.version !== VERSION) throw refusal(`it is of version ${raw.version}, and this page reads ${VERSION}`);
  return conversationOf(raw.conversation);
}

function conversationOf(raw) {
  check("The conversation", raw, { title: isText, nodes: isObject, leaf: isId, settings: isObject });
  const made = newConversation(settingsOf(raw.settings));
  for (const [id, node] of Object.entries(raw.nodes)) made.nodes[id] = { id, ...nodeOf(id, node) };
  checkTree(made.nodes, raw.leaf);
  return Object.assign(made, { title: raw.title, leaf: raw.leaf });
}

function settingsOf(raw) {
  const known = Object.entries(DEFAULTS).filter(([name]) => Object.hasOwn(raw, name));
  const likeUsual = (usual) => (value) => typeof value === typeof usual;
  const types = known.map(([name, usual]) => [name, SETTINGS[name] ?? likeUsual(usual)]);
  check("The settings", raw, Object.fromEntries(types));
  return completed(Object.fromEntries(known.map(([name]) => [name, raw[name]])));
}

function nodeOf(id, raw) {
  const where = `The message ${id}`;
  if (!isId(id)) throw refusal(`${where} has no number of 16 hexadecimal digits`);
  check(where, raw, NODE);
  check(where, raw, { ...OF_ROLE[raw.role], ...(raw.status === "failed" && FAILED) });
  const known = Object.keys(NODE).filter((name) => Object.hasOwn(raw, name));
  return { parent: null, next: null, ...Object.fromEntries(known.map((name) => [name, raw[name]])) };
}

/** Each message must come to the first by those before it, and go on with one of those after it. */
function checkTree(nodes, leaf) {
  if (!Object.hasOwn(nodes, leaf)) throw refusal("its last message is not there");
  const rooted = new Set([null]);
  for (const { id, next } of Object.values(nodes)) {
    const path = new Set();
    for (let at = id; !rooted.has(at); at = nodes[at].parent) {
      if (!Object.hasOwn(nodes, at)) throw refusal(`The message ${at} is not there`);
      if (path.has(at)) throw refusal(`The message ${at} comes before itself`);
      path.add(at);
    }
    for (const at of path) rooted.add(at);
    if (next !== null && nodes[next]?.parent !== id) throw refusal(`The message ${id} goes on with none of its own`);
  }
}

function check(where, value, fields) {
  if (!isObject(value)) throw refusal(`${where} is no object`);
  const name = misfit(value, fields);
  if (name !== undefined) throw refusal(`${where}: “${name}” is missing, or not what it has to be`);
}

/** The first field that is not as it has to be. */
function misfit(value, fields) {
  return Object.keys(fields).find((name) => !fields[name](value[name]));
}

function refusal(why) {
  return new SettingError("file", `The file cannot be imported. ${why[0].toUpperCase()}${why.slice(1)}.`);
}
