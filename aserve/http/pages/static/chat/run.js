// An answer on its way: one request, whose stream grows one node, or several side by side.

import { ApiError, events, inWords, request } from "../shared/api.js";
import { addNode, newId } from "./conversation.js";
import { bodyOf } from "./settings.js";

const PATH = "v1/chat/completions";
const MAX_ANSWERS = 128; // more are refused by the server

/** Asks for the answer to a conversation's last message, and shows it as it comes; onChange: something has come. */
export class Run {
  /** Adds the nodes that the answer goes to; begun: or goes on with this one. Throws SettingError before either. */
  constructor(conversation, onChange, begun = null) {
    const body = bodyOf(conversation);
    if (begun) Object.assign(body, { n: 1, add_generation_prompt: false, continue_final_message: true });
    this.body = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    this.conversation = conversation;
    this.nodes = begun ? [Object.assign(begun, { status: "running", finish: null })] : this.#newNodes(body.n);
    this.controller = new AbortController();
    this.onChange = onChange;
    this.isReduced = false; // to one answer, which says for all why there is none
  }

  #newNodes(n) {
    const { conversation } = this;
    const parent = conversation.leaf;
    const batch = newId();
    const answer = () => ({ role: "assistant", content: "", reasoning: "", calls: [], status: "running", batch });
    const count = Number.isInteger(n) ? Math.min(Math.max(n, 1), MAX_ANSWERS) : 1;
    const nodes = Array.from({ length: count }, () => addNode(conversation, parent, answer()));
    conversation.nodes[parent].next = nodes[0].id;
    conversation.leaf = nodes[0].id;
    return nodes;
  }

  /** Goes on to the end. Errors are kept in the nodes that they ended. */
  async finish() {
    const startMs = performance.now();
    const times = { firstMs: null, totalMs: null };
    for (const node of this.nodes) node.times = times;
    try {
      const response = await request(PATH, { body: this.body, signal: this.controller.signal });
      for await (const event of events(response)) {
        times.firstMs ??= performance.now() - startMs;
        times.totalMs = performance.now() - startMs;
        this.#take(event);
        this.onChange(this);
      }
      for (const node of this.nodes) if (node.status === "running") node.status = "done";
    } catch (error) {
      this.#end(error);
    }
    this.onChange(this);
  }

  stop() {
    this.controller.abort();
  }

  #end(error) {
    const isStopped = error.name === "AbortError";
    const told = isStopped ? null : { ...inWords(error), field: error.param ?? null, retryAfterS: null };
    if (error instanceof ApiError) told.retryAfterS = error.retryAfterS;
    for (const node of this.nodes) {
      if (node.status !== "running") continue;
      node.status = isStopped ? "stopped" : "failed";
      node.error = told;
    }
    const isEmpty = this.nodes.every(({ status, content, reasoning }) => status !== "done" && !content && !reasoning);
    if (isEmpty) for (const node of this.nodes.splice(1)) delete this.conversation.nodes[node.id];
    this.isReduced = isEmpty;
  }

  #take({ choices, usage }) {
    for (const choice of choices) addTo(this.nodes[choice.index], choice);
    if (!usage) return;
    const told = {
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
      generated: usage.completion_tokens,
      thought: usage.completion_tokens_details?.reasoning_tokens ?? null,
    };
    for (const node of this.nodes) node.usage = told;
  }
}

function addTo(node, { delta, logprobs, finish_reason: finish, stop_reason: stop }) {
  node.content += delta.content ?? "";
  node.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) addCall(node.calls, part);
  if (logprobs?.content) (node.tokens ??= []).push(...logprobs.content.map(tokenOf));
  if (finish) Object.assign(node, { finish, stopReason: stop ?? null, status: "done" });
}

function addCall(calls, { index, id, function: part = {} }) {
  const call = (calls[index] ??= { id: "", name: "", arguments: "" });
  call.id = id ?? call.id;
  call.name += part.name ?? "";
  call.arguments += part.arguments ?? "";
}

function tokenOf({ token, logprob, top_logprobs: top }) {
  return { text: token, logprob, top: (top ?? []).map((other) => ({ text: other.token, logprob: other.logprob })) };
}
