// One-line explanations of figures: shown while the pointer, or the focus, is on what has `data-help`.

import { byId } from "./dom.js";

/** Let everything with `data-help` below `area` explain itself. */
export function explainWithin(area) {
  const popup = byId("help");
  let shown = null;
  const hide = () => {
    popup.hidden = true;
    shown?.removeAttribute("aria-describedby");
    shown = null;
  };
  const show = (event) => {
    const term = event.target.closest?.("[data-help]");
    if (term === shown) return;
    hide();
    if (!term) return;
    shown = term;
    popup.textContent = term.dataset.help;
    popup.hidden = false;
    place(popup, term.getBoundingClientRect());
    term.setAttribute("aria-describedby", popup.id);
  };
  area.addEventListener("pointerover", show);
  area.addEventListener("pointerleave", hide);
  area.addEventListener("focusin", show);
  area.addEventListener("focusout", hide);
  area.addEventListener("scroll", hide);
  onEscape(popup, hide);
}

/** Put a popup above a box, or below it where there is no room. */
export function place(popup, box) {
  const { width, height } = popup.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - width - 8));
  const above = box.top - height - 6;
  popup.style.left = `${left}px`;
  popup.style.top = `${above >= 8 ? above : box.bottom + 6}px`;
}

/** Let Escape hide a popup, wherever the focus is, and do nothing else meanwhile. */
export function onEscape(popup, hide) {
  const listen = (event) => {
    if (event.key !== "Escape" || popup.hidden) return;
    event.preventDefault();
    hide();
  };
  document.addEventListener("keydown", listen, { capture: true });
}
