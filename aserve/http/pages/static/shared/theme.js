// Light or dark: as the system says, or as the reader chose. No module, so that it runs before anything is painted.
// A button with the attribute data-theme-switch goes from one to the next.
(() => {
  const STORED = "aserve.theme";
  const NAMES = { system: "as the system", light: "light", dark: "dark" };
  const NEXT = { system: "light", light: "dark", dark: "system" };

  function chosen() {
    try {
      const name = localStorage.getItem(STORED);
      return name in NAMES ? name : "system";
    } catch {
      return "system"; // a browser that keeps nothing
    }
  }

  function apply(name) {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    for (const button of document.querySelectorAll("[data-theme-switch]")) {
      const words = `Colours: ${NAMES[name]}. Change`;
      button.setAttribute("aria-label", words);
      button.title = words;
    }
  }

  function change() {
    const name = NEXT[chosen()];
    try {
      localStorage.setItem(STORED, name);
    } catch {
      // it holds for this page, then
    }
    apply(name);
  }

  apply(chosen());
  document.addEventListener("DOMContentLoaded", () => {
    apply(chosen());
    for (const button of document.querySelectorAll("[data-theme-switch]")) button.addEventListener("click", change);
  });
})();
