// Icons as SVG elements, drawn with lines on a grid of 24.

const SVG = "http://www.w3.org/2000/svg";
const SECOND_SLIDER = ["M4 16h3", "M12 16h8", "M12 16a2.5 2.5 0 1 1-5 0a2.5 2.5 0 0 1 5 0"];
const PATHS = {
  add: ["M12 5v14", "M5 12h14"],
  arrowUp: ["M12 19V5", "M6 11l6-6 6 6"],
  check: ["M5 12.5l4.5 4.5L19 7.5"],
  close: ["M6 6l12 12", "M18 6L6 18"],
  copy: ["M9 9h10v11H9z", "M5 15V4h10"],
  download: ["M12 4v11", "M7 11l5 5 5-5", "M5 20h14"],
  upload: ["M12 15V4", "M7 9l5-5 5 5", "M5 20h14"],
  edit: ["M4 20h4L19 9l-4-4L4 16z", "M13 7l4 4"],
  fork: ["M7 4v6a4 4 0 0 0 4 4h6", "M7 4v16", "M14 11l3 3-3 3"],
  left: ["M14 6l-6 6 6 6"],
  menu: ["M4 7h16", "M4 12h16", "M4 17h16"],
  redo: ["M19 12a7 7 0 1 1-2-4.9", "M19 4v4h-4"],
  right: ["M10 6l6 6-6 6"],
  settings: ["M4 8h8", "M17 8h3", "M17 8a2.5 2.5 0 1 1-5 0a2.5 2.5 0 0 1 5 0", ...SECOND_SLIDER],
  stop: ["M7 7h10v10H7z"],
  theme: ["M12 4a8 8 0 1 0 0 16z", "M12 4a8 8 0 0 1 0 16"],
  tokens: ["M4 6h6v5H4z", "M14 6h6v5h-6z", "M4 15h9v4H4z", "M17 15h3v4h-3z"],
  trash: ["M5 7h14", "M10 7V4h4v3", "M7 7l1 13h8l1-13"],
};

/** An icon by its name, hidden from screen readers: what it stands for is said beside it. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const attributes = { viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "aria-hidden": "true" };
  Object.assign(attributes, { "stroke-width": "1.7", "stroke-linecap": "round", "stroke-linejoin": "round" });
  for (const [key, value] of Object.entries(attributes)) svg.setAttribute(key, value);
  for (const d of PATHS[name]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

/** Puts icons into the elements of the page that name one: <button data-icon="menu">. */
export function fillIcons(root = document) {
  for (const place of root.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
}
