// Whether the server is there, and what for: it may be loading, out of reach, asking for a key, or no chat at all.

import { ApiError, inWords, request } from "../shared/api.js";
import { button, element } from "../shared/dom.js";

const EVERY_MS = 1000;
const TASKS = { embed: "embeddings", classify: "probabilities of labels", reward: "scores" };
const EXAMPLES = { embed: "v1/embeddings", classify: "classify", reward: "pooling" };

/** The models, as /v1/models has them, once the server is ready; until then the element says what is the matter. */
export async function readyModels(place) {
  for (;;) {
    try {
      const { data } = await (await request("v1/models")).json();
      place.hidden = true;
      return data;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      place.hidden = false;
      if (error.status === 401) await pressed(place);
      else await told(place, error);
    }
  }
}

async function told(place, error) {
  place.textContent = error.status === 503 ? `The server is not ready: ${await stage()}.` : `${inWords(error).title}.`;
  await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
}

/** What /ready says that the server is doing, such as "the engine is loading: weights 43%". */
async function stage() {
  try {
    await request("ready");
    return "it will be in a moment";
  } catch (error) {
    return error.message;
  }
}

/** The key was not given: it is asked for when the reader says so. */
function pressed(place) {
  return new Promise((resolve) => {
    const ask = button("Enter the key", { kind: "small", on: { click: resolve } });
    place.replaceChildren("This server asks for an API key. ", ask);
  });
}

/** Says that a model that pools has no chat, and what it has. */
export function showNoChat(main, { id, task }) {
  const url = new URL(EXAMPLES[task], document.baseURI);
  const line = `curl ${url} -H 'Content-Type: application/json' -d '{"input": "a text"}'`;
  const code = element("pre", { tabIndex: 0, "aria-label": "A command to try" }, element("code", { text: line }));
  const words = `${id} makes ${TASKS[task]} of texts, and does not write any. Ask it so:`;
  const head = element("h2", { text: "There is no chat here" });
  main.replaceChildren(element("div", { class: "no-chat" }, head, element("p", { text: words }), code));
  for (const part of document.querySelectorAll('[data-opens], #export, #list, #settings')) part.hidden = true;
}
