// Elements made of values. Text stays text: nothing here takes HTML.

/**
 * An element with properties, attributes and children.
 * options: `class`, `text`, `on` (listeners by event), `data` (dataset); names with a dash, and role, are attributes;
 * all others are properties. children: nodes, strings, and null or false for none.
 * element("button", { class: "button", type: "button", on: { click: send } }, "Send")
 */
export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "on") listen(made, value);
    else if (name.includes("-") || name === "role") made.setAttribute(name, String(value));
    else made[name] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function listen(made, listeners) {
  for (const [event, listener] of Object.entries(listeners)) made.addEventListener(event, listener);
}

/** A button. icon: a name of icons.js, or null; words: what it says, or, without `shown`, what a screen reader says. */
export function button(words, { icon: drawing = null, shown = true, kind = "", ...options } = {}) {
  const classes = ["button", kind, shown ? "" : "icon"].filter(Boolean).join(" ");
  const names = shown ? {} : { "aria-label": words, title: words };
  return element("button", { type: "button", class: classes, ...names, ...options }, drawing, shown ? words : null);
}

/** A counter that gives ids to labels and the fields that they are for. */
let numIds = 0;
export function newId(prefix = "id") {
  numIds += 1;
  return `${prefix}-${numIds}`;
}
