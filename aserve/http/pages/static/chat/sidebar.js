// The list of conversations.

import { button, element } from "../shared/dom.js";
import { icon } from "../shared/icons.js";

const DAY_MS = 86_400_000;

/** Shows the conversations, the newest first; acts: open, rename and remove, of one each. */
export function showConversations(root, conversations, openId, acts) {
  const groups = Map.groupBy(conversations, (conversation) => ageOf(conversation.updatedMs));
  const parts = [...groups].map(([age, members]) => {
    const list = element("ul", {}, ...members.map((each) => row(each, each.id === openId, acts)));
    return element("section", { "aria-label": age }, element("h2", { class: "hint", text: age }), list);
  });
  root.replaceChildren(...parts);
}

function row(conversation, isOpen, acts) {
  const title = conversation.title || "New conversation";
  const small = { shown: false, kind: "quiet small" };
  const fork = conversation.forkedFrom && icon("fork");
  const open = element(
    "button",
    {
      class: "conversation",
      type: "button",
      "aria-current": isOpen ? "true" : null,
      on: { click: () => acts.open(conversation.id), dblclick: () => acts.rename(conversation) },
    },
    fork,
    element("span", { text: title }),
  );
  return element(
    "li",
    { class: isOpen ? "is-open" : "" },
    open,
    button(`Rename ${title}`, { ...small, icon: icon("edit"), on: { click: () => acts.rename(conversation) } }),
    button(`Delete ${title}`, { ...small, icon: icon("trash"), on: { click: () => acts.remove(conversation) } }),
  );
}

function ageOf(updatedMs) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (updatedMs >= midnight) return "Today";
  if (updatedMs >= midnight - DAY_MS) return "Yesterday";
  return updatedMs >= midnight - 7 * DAY_MS ? "This week" : "Earlier";
}
