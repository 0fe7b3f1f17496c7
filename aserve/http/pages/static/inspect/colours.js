// Colours and canvases: a hue for each request, the theme's colours as a canvas knows them, and hatching.

const NAMES = ["page", "surface", "raised", "line", "line-strong", "text", "muted", "accent", "bad", "warn"];
const GOLDEN = 137.508;
const probe = document.createElement("span");
probe.hidden = true;
let known = null;
let patterns = new Map();
const listeners = [];

/** The theme's colours by name, and isDark. */
export function theme() {
  if (known) return known;
  document.body.append(probe);
  known = {};
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    known[name] = getComputedStyle(probe).color;
  }
  known.isDark = getComputedStyle(document.documentElement).colorScheme === "dark" || prefersDark();
  probe.remove();
  return known;
}

function prefersDark() {
  return document.documentElement.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Calls back when colours have changed. */
export function onTheme(listener) {
  listeners.push(listener);
}

function forget() {
  known = null;
  patterns = new Map();
  for (const listener of listeners) listener();
}

new MutationObserver(forget).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);

/** A request's colour; all of others have one. */
export function colourOf(request) {
  if (request < 0) return theme().muted;
  const hue = (35 + request * GOLDEN) % 360;
  return theme().isDark ? `oklch(0.72 0.12 ${hue.toFixed(1)})` : `oklch(0.66 0.14 ${hue.toFixed(1)})`;
}

/** Hatching in a colour, on the surface. */
export function hatched(context, colour) {
  const found = patterns.get(colour);
  if (found) return found;
  const size = 6;
  const tile = new OffscreenCanvas(size, size);
  const drawing = tile.getContext("2d");
  drawing.fillStyle = theme().surface;
  drawing.fillRect(0, 0, size, size);
  drawing.globalAlpha = 0.25;
  drawing.fillStyle = colour;
  drawing.fillRect(0, 0, size, size);
  drawing.globalAlpha = 1;
  drawing.strokeStyle = colour;
  drawing.lineWidth = 1.6;
  for (const shift of [-size, 0, size]) {
    drawing.beginPath();
    drawing.moveTo(shift - 1, size + 1);
    drawing.lineTo(shift + size + 1, -1);
    drawing.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  patterns.set(colour, pattern);
  if (patterns.size > 600) patterns.delete(patterns.keys().next().value);
  return pattern;
}

/** A canvas made as large as it is shown, and cleared: {context, width, height} in CSS pixels. */
export function cleared(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
  }
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return { context, width, height };
}

/** Microseconds in words: "0.4 ms", "2.1 s". */
export function duration(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${(us / 1000).toFixed(us < 1e4 ? 2 : us < 1e5 ? 1 : 0)} ms`;
  return `${(us / 1e6).toFixed(us < 1e7 ? 2 : 1)} s`;
}
