// The API key, where the server asks for one. It is kept for this tab, and is gone when that is closed.

import { button, element, newId } from "./dom.js";

const STORED = "aserve.key";
let current = null;
let asking = null;

/** The key that was given in this tab; "" is none. */
export function storedKey() {
  if (current === null) {
    try {
      current = sessionStorage.getItem(STORED) ?? "";
    } catch {
      current = ""; // a browser that keeps nothing
    }
  }
  return current;
}

export function forgetKey() {
  remember("");
}

/** Asks for a key, once for all who need one; true if one was given. */
export function askForKey() {
  asking ??= ask(storedKey() !== "").finally(() => {
    asking = null;
  });
  return asking;
}

function remember(key) {
  current = key;
  try {
    if (key === "") sessionStorage.removeItem(STORED);
    else sessionStorage.setItem(STORED, key);
  } catch {
    // it is kept until the page is left
  }
}

function ask(wasRefused) {
  const id = newId("key");
  const input = element("input", { id, class: "input code", type: "password", autocomplete: "off", required: true });
  input.setAttribute("aria-describedby", `${id}-hint`);
  const dialog = element(
    "dialog",
    { "aria-labelledby": `${id}-title` },
    element(
      "form",
      { method: "dialog" },
      element("h2", { id: `${id}-title`, text: "This server asks for an API key" }),
      wasRefused && element("p", { class: "note bad", role: "alert", text: "The key was not accepted." }),
      element(
        "div",
        { class: "field" },
        element("label", { htmlFor: id, text: "API key" }),
        input,
        element("span", { id: `${id}-hint`, class: "hint", text: "Kept in this tab until it is closed." }),
      ),
      element(
        "div",
        { class: "actions" },
        button("Cancel", { kind: "quiet", on: { click: () => dialog.close() } }),
        button("Use this key", { kind: "primary", type: "submit", value: "given" }),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "given" && input.value !== "";
      if (isGiven) remember(input.value.trim());
      dialog.remove();
      resolve(isGiven);
    });
  });
}
