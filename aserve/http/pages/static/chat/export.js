// A conversation as a file: Markdown for people, JSON for programs; and as the request that it is.

import { element } from "../shared/dom.js";
import { storedKey } from "../shared/key.js";
import { pathTo } from "./conversation.js";
import { bodyOf } from "./settings.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool" };

/** What is shown, as Markdown. */
export function asMarkdown(conversation) {
  const { system } = conversation.settings;
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (system.trim()) parts.push(`## System prompt\n\n${system}`);
  for (const node of pathTo(conversation)) parts.push(`## ${nameOf(node)}\n\n${textOf(node)}`);
  return `${parts.join("\n\n")}\n`;
}

function nameOf(node) {
  return node.role === "tool" ? `${NAMES.tool}: ${node.name}` : NAMES[node.role];
}

function textOf(node) {
  if (node.role === "tool") return fenced(node.content, "json");
  const parts = [];
  if (node.reasoning) parts.push(node.reasoning.replace(/^/gm, "> "));
  if (node.content) parts.push(node.content);
  for (const call of node.calls ?? []) parts.push(`Calls \`${call.name}\`:\n\n${fenced(call.arguments, "json")}`);
  if (node.error) parts.push(`*${node.error.title}: ${node.error.detail}*`);
  return parts.join("\n\n");
}

function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** All that is known of it: the request that it comes to, and the whole tree of messages. */
export function asJson(conversation) {
  const exported = { format: "aserve.chat", version: 1, exported: new Date().toISOString() };
  return `${JSON.stringify({ ...exported, request: bodyOf(conversation), conversation }, null, 2)}\n`;
}

/** The request as a line for a shell. */
export function asCurl(conversation) {
  const url = new URL("v1/chat/completions", document.baseURI);
  const body = JSON.stringify(bodyOf(conversation)).replaceAll("'", "'\\''");
  const key = storedKey() ? '-H "Authorization: Bearer $ASERVE_API_KEY" ' : "";
  return `curl ${url} ${key}-H 'Content-Type: application/json' -d '${body}'`;
}

/** Has the browser keep a text as a file. */
export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A name for the file of a conversation. */
export function fileName(conversation, suffix) {
  const words = conversation.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${words.slice(0, 50) || "conversation"}.${suffix}`;
}
