// Calls of tools: what the model asks for, and a form in which the reader answers in the tools' place.

import { button, element, newId } from "../shared/dom.js";
import { icon } from "../shared/icons.js";

/** A call as a card: the tool's name and its arguments. */
export function callCard(call) {
  return element(
    "div",
    { class: "call" },
    element("div", { class: "call-name" }, element("span", { class: "hint", text: "calls" }), " ", codeOf(call.name)),
    argumentsOf(call.arguments),
  );
}

/** A result that was given. */
export function resultCard(node) {
  const head = element("span", { class: "hint", text: "result of " });
  return element(
    "div",
    { class: "call result" },
    element("div", { class: "call-name" }, head, codeOf(node.name)),
    element("pre", { tabIndex: 0, "aria-label": `Result of ${node.name}`, text: node.content }),
  );
}

/** Asks for the result of each call; send: takes them, a text each. */
export function resultsForm(calls, send) {
  const fields = calls.map((call) => resultField(call, calls.length));
  const form = element(
    "form",
    {
      class: "results",
      "aria-label": "Results of the tools",
      on: {
        submit: (event) => {
          event.preventDefault();
          send(fields.map(({ input }) => input.value));
        },
      },
    },
    ...fields.map(({ field }) => field),
    element("div", { class: "actions" }, button("Send to the model", { kind: "primary", type: "submit" })),
  );
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return form;
}

function resultField(call, count) {
  const id = newId("result");
  const input = element("textarea", { id, class: "input code", rows: 3, required: true, spellcheck: false });
  input.placeholder = "What the tool gives back: JSON, or any text";
  const words = count > 1 && call.arguments ? `${call.name}(${call.arguments})` : call.name;
  const label = element("label", { htmlFor: id }, "Result of ", codeOf(words));
  return { input, field: element("div", { class: "field" }, label, input) };
}

function argumentsOf(text) {
  const values = objectOf(text);
  if (values === null) return element("pre", { tabIndex: 0, "aria-label": "Arguments", text });
  const rows = Object.entries(values).map(([name, value]) =>
    element("div", {}, element("dt", { text: name }), element("dd", { text: shown(value) })),
  );
  return rows.length ? element("dl", {}, ...rows) : element("p", { class: "hint", text: "without arguments" });
}

function objectOf(text) {
  try {
    const value = JSON.parse(text || "{}");
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null; // cut on its way, or still coming
  }
}

function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

function codeOf(text) {
  return element("code", { text });
}

/** The list of a conversation's tools in the settings, each to be switched, changed and removed. */
export function toolList(tools, { onSwitch, onEdit, onRemove }) {
  return element("ul", { class: "tool-list" }, ...tools.map((tool) => toolRow(tool, { onSwitch, onEdit, onRemove })));
}

function toolRow(tool, { onSwitch, onEdit, onRemove }) {
  const id = newId("tool");
  const box = element("input", { id, type: "checkbox", checked: tool.isOn, on: { change: () => onSwitch(tool) } });
  const small = { shown: false, kind: "quiet small" };
  return element(
    "li",
    {},
    box,
    element("label", { htmlFor: id }, codeOf(tool.name)),
    button(`Change ${tool.name}`, { ...small, icon: icon("edit"), on: { click: () => onEdit(tool) } }),
    button(`Remove ${tool.name}`, { ...small, icon: icon("trash"), on: { click: () => onRemove(tool) } }),
  );
}
