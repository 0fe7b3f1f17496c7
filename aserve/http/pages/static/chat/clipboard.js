// Copying text, also on pages that are neither https nor localhost, where there is no navigator.clipboard.

/** Puts a text on the clipboard; whether that could be done. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed: the old way may be
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  area.setAttribute("aria-hidden", "true");
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  return isDone;
}
