// A conversation: a tree of messages, of which one path from the root to a leaf is shown. Values in, values out.
//
//   user ─┬─ answer ── user ── answer        regenerated, or several at once: answers beside each other
//         └─ answer                          edited: another message beside the one that was there
//
// A node: { id, parent, next, role, content, reasoning, calls, callId, name, tokens, batch, status, finish, ... }.
// next: the child through which the path went last. batch: of the answers that were asked for together.

/** 16 random characters. (crypto.randomUUID is there on secure origins alone.) */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings) {
  const now = Date.now();
  const places = { forkedFrom: null, nodes: {}, first: null, leaf: null };
  return { id: newId(), title: "", createdMs: now, updatedMs: now, settings: structuredClone(settings), ...places };
}

/** Puts a node under another (null is the root), and the path's end at it. */
export function addNode(conversation, parentId, fields) {
  const node = { id: newId(), parent: parentId, next: null, madeMs: Date.now(), status: "done", ...fields };
  conversation.nodes[node.id] = node;
  moveTo(conversation, node);
  return node;
}

/** The nodes from the root to one; by default to where the conversation is. */
export function pathTo(conversation, id = conversation.leaf) {
  const path = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) path.unshift(node);
  return path;
}

/** A node and those beside it, in the order in which they were made. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent && other.role === node.role);
}

/** The answers that were asked for together with one. */
export function batchOf(conversation, node) {
  return node.batch ? siblings(conversation, node).filter((other) => other.batch === node.batch) : [node];
}

/** Shows the path through a node, down to where it went on last. */
export function choose(conversation, node) {
  let end = node;
  while (conversation.nodes[end.next]) end = conversation.nodes[end.next];
  moveTo(conversation, end);
}

function moveTo(conversation, leaf) {
  conversation.leaf = leaf.id;
  for (let node = leaf; node.parent; node = conversation.nodes[node.parent]) {
    conversation.nodes[node.parent].next = node.id;
  }
}

/** A conversation of its own that has the messages up to a node. The server finds what they share in its cache. */
export function fork(conversation, node) {
  const made = newConversation(conversation.settings);
  for (const { id, ...fields } of pathTo(conversation, node.id)) {
    const { next, parent, batch, ...kept } = structuredClone(fields);
    addNode(made, made.leaf, { ...kept, copyOf: id });
  }
  made.title = conversation.title;
  made.forkedFrom = { id: conversation.id, title: conversation.title, leaf: made.leaf };
  return made;
}

/** A line that a conversation is listed under: its first words. */
export function titleFrom(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length <= 60 ? line : `${line.slice(0, 59).trimEnd()}…`;
}

/** Whether an answer waits for the results of the tools that it calls. */
export function awaitsResults(conversation, node) {
  return node?.id === conversation.leaf && node?.status === "done" && node.calls?.length > 0;
}

/** The messages of a path as /v1/chat/completions takes them. */
export function messagesOf(conversation, id = conversation.leaf) {
  const { system } = conversation.settings;
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const node of pathTo(conversation, id)) messages.push(messageOf(node));
  return messages;
}

function messageOf(node) {
  if (node.role === "user") return { role: "user", content: node.content };
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  const message = { role: "assistant", content: node.content || null };
  if (node.reasoning) message.reasoning = node.reasoning;
  if (node.calls?.length) {
    message.tool_calls = node.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  } else {
    message.content = node.content;
  }
  return message;
}
