// The links from page to page, as far as the server has them (ui/pages.json).

import { element } from "./dom.js";

const FILE = new URL("../pages.json", import.meta.url);

/** Fills <nav> elements with a link to each page, the one that is open marked; returns aserve's version. */
export async function fillNavigation(nav) {
  const { version, pages } = await (await fetch(FILE)).json();
  const here = location.pathname.replace(/\/$/, "");
  if (pages.length < 2) return version;
  for (const { path, title } of pages) {
    const url = new URL(path, new URL("../", FILE));
    const isOpen = url.pathname.replace(/\/$/, "") === here;
    nav.append(element("a", { href: url.href, "aria-current": isOpen ? "page" : null, text: title }));
  }
  return version;
}
