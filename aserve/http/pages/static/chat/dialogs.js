// Small questions in front of the page.

import { button, element, newId } from "../shared/dom.js";

/** Asks; true where the reader agrees. */
export async function confirmed(question, detail, agree) {
  return (await ask(question, element("p", { text: detail }), agree)) !== null;
}

/** Asks for a line of text; null where the reader thinks better of it. */
export async function lineOf(question, label, value) {
  const id = newId("line");
  const input = element("input", { id, class: "input", value, required: true, maxLength: 200 });
  const field = element("div", { class: "field" }, element("label", { htmlFor: id, text: label }), input);
  return (await ask(question, field, "Save")) === null ? null : input.value.trim();
}

/** Shows a list of things to do, each a button; choices: by words, what they do. */
export function chooseFrom(question, choices) {
  const close = () => dialog.close();
  const buttons = Object.entries(choices).map(([words, act]) =>
    button(words, {
      on: {
        click: () => {
          close();
          act();
        },
      },
    }),
  );
  const dialog = dialogOf(question, element("div", { class: "choices" }, ...buttons), [
    button("Cancel", { kind: "quiet", on: { click: close } }),
  ]);
  opened(dialog);
}

/** Shows the keys. rows: of a key and what it does. */
export function showKeys(rows) {
  const list = rows.map(([key, words]) =>
    element("div", {}, element("dt", {}, element("kbd", { text: key })), element("dd", { text: words })),
  );
  const close = button("Close", { on: { click: () => dialog.close() } });
  const dialog = dialogOf("Keys", element("dl", { class: "keys" }, ...list), [close]);
  opened(dialog);
}

async function ask(question, content, agree) {
  const dialog = dialogOf(question, content, [
    button("Cancel", { kind: "quiet", on: { click: () => dialog.close() } }),
    button(agree, { kind: "primary", type: "submit", value: "agreed" }),
  ]);
  return (await opened(dialog)) === "agreed" ? true : null;
}

function dialogOf(title, content, buttons) {
  const id = newId("dialog");
  const head = element("h2", { id, text: title });
  const form = element("form", { method: "dialog" }, head, content, element("div", { class: "actions" }, ...buttons));
  return element("dialog", { "aria-labelledby": id }, form);
}

/** What the dialog was closed with. */
function opened(dialog) {
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}
