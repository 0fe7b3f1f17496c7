// What a conversation is asked with: its settings, and the fields of a request that they become.

import { messagesOf } from "./conversation.js";

/** The numbers of a request. Left empty, the server's own default holds: that of generation_config.json, as a rule. */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", hint: "0 to 2; 0 always takes the likeliest token", step: 0.05 },
  { name: "top_p", label: "Top-p", hint: "tokens that make up this share", step: 0.01 },
  { name: "top_k", label: "Top-k", hint: "so many of the likeliest", step: 1 },
  { name: "min_p", label: "Min-p", hint: "relative to the likeliest", step: 0.01 },
  { name: "max_completion_tokens", label: "Longest answer", hint: "in tokens", step: 1 },
  { name: "seed", label: "Seed", hint: "the same seed, the same answer", step: 1 },
  { name: "presence_penalty", label: "Presence penalty", hint: "-2 to 2", step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "-2 to 2", step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "above 1, less is repeated", step: 0.05 },
  { name: "thinking_token_budget", label: "Thinking budget", hint: "in tokens, for models that think", step: 1 },
];

export const DEFAULTS = {
  model: "",
  system: "",
  numbers: {},
  stop: "",
  n: 1,
  logprobs: false,
  topLogprobs: 5,
  effort: "",
  format: "text",
  schema: "",
  tools: [],
  toolChoice: "auto",
  extra: "",
};

/** A setting that cannot be sent. field: the name of the request's field, as errors of the server have it. */
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Settings as they were kept, by whichever version of the page, with all that there is today. */
export function completed(settings) {
  return { ...structuredClone(DEFAULTS), ...settings };
}

/** The body of the request that a conversation is answered by. Throws SettingError. */
export function bodyOf(conversation, id = conversation.leaf) {
  const { settings } = conversation;
  const body = { messages: messagesOf(conversation, id), ...samplingOf(settings) };
  if (settings.model) body.model = settings.model;
  if (settings.effort) body.reasoning_effort = settings.effort;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: settings.topLogprobs });
  const format = formatOf(settings);
  if (format) body.response_format = format;
  const tools = settings.tools.filter((tool) => tool.isOn);
  if (tools.length) Object.assign(body, { tools: tools.map(toolOf), tool_choice: choiceOf(settings, tools) });
  return { ...body, ...extraOf(settings) };
}

function samplingOf({ numbers, stop, n }) {
  const fields = {};
  for (const { name } of NUMBERS) if (typeof numbers[name] === "number") fields[name] = numbers[name];
  const stops = stop.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
  if (n !== 1) fields.n = n;
  return fields;
}

function formatOf({ format, schema }) {
  if (format === "text") return null;
  if (format === "json_object") return { type: "json_object" };
  const parsed = parsedJson(schema, "response_format", "The JSON schema");
  return { type: "json_schema", json_schema: { name: "answer", schema: parsed, strict: true } };
}

function toolOf({ name, description, parameters, strict }) {
  const told = description.trim() ? { description } : {};
  return { type: "function", function: { name, ...told, parameters, ...(strict && { strict }) } };
}

function choiceOf({ toolChoice }, tools) {
  if (["auto", "none", "required"].includes(toolChoice)) return toolChoice;
  const isThere = tools.some((tool) => tool.name === toolChoice);
  return isThere ? { type: "function", function: { name: toolChoice } } : "auto";
}

function extraOf({ extra }) {
  if (!extra.trim()) return {};
  const fields = parsedJson(extra, "extra", "Other fields");
  if (fields === null || typeof fields !== "object" || Array.isArray(fields)) {
    throw new SettingError("extra", "Other fields must be a JSON object, such as {\"min_tokens\": 5}.");
  }
  return fields;
}

/** The value of a JSON text. Throws SettingError that names what the text is. */
export function parsedJson(text, field, what) {
  if (!text.trim()) throw new SettingError(field, `${what}: nothing has been written yet.`);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(field, `${what}: not valid JSON. ${error.message}`);
  }
}

/** What is not as usual, in a few words each, with the field to show for it. */
export function summary(settings) {
  const words = [];
  const say = (field, text) => words.push({ field, text });
  if (settings.system.trim()) say("system", "system prompt");
  if (settings.n > 1) say("n", `${settings.n} answers`);
  for (const { name, label } of NUMBERS) {
    if (typeof settings.numbers[name] === "number") say(name, `${label.toLowerCase()} ${settings.numbers[name]}`);
  }
  if (settings.stop) say("stop", "stop strings");
  if (settings.logprobs) say("logprobs", "probabilities");
  if (settings.effort) say("reasoning_effort", `effort ${settings.effort}`);
  if (settings.format !== "text") say("response_format", settings.format === "json_object" ? "JSON" : "JSON schema");
  const numTools = settings.tools.filter((tool) => tool.isOn).length;
  if (numTools) say("tools", numTools === 1 ? "1 tool" : `${numTools} tools`);
  if (settings.extra.trim()) say("extra", "other fields");
  return words;
}
