// Where things are: tabs of the side panel, and drawers for both sides where the window is narrow.

import { byId } from "./dom.js";

/** Let the buttons of a tab list choose which panel is shown; the arrow keys move between them. */
export function connectTabs(list, onShow) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const choose = (chosen) => {
    for (const tab of tabs) {
      const isChosen = tab === chosen;
      tab.setAttribute("aria-selected", isChosen);
      tab.tabIndex = isChosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !isChosen;
    }
    onShow();
  };
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
}

/**
 * A drawer: a panel that a button opens over the page while `query` matches, and that stands beside the rest otherwise.
 * @param {string} id Of the panel.
 * @param {string} opener Of the button.
 * @param {string} query A media query.
 * @param {() => void} onShow
 */
export function connectDrawer(id, opener, query, onShow = () => {}) {
  const [panel, openButton, media] = [byId(id), byId(opener), matchMedia(query)];
  const set = (isOpen, focus = true) => {
    panel.classList.toggle("open", isOpen);
    panel.inert = media.matches && !isOpen;
    openButton.setAttribute("aria-expanded", isOpen);
    byId("shade").hidden = !isOpen;
    if (isOpen) {
      panel.querySelector("button, input")?.focus();
      onShow();
    } else if (focus) {
      openButton.focus();
    }
  };
  const isOpen = () => panel.classList.contains("open");
  openButton.addEventListener("click", () => set(!isOpen()));
  byId("shade").addEventListener("click", () => isOpen() && set(false));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || !isOpen()) return;
    event.preventDefault();
    set(false);
  });
  panel.addEventListener("click", (event) => {
    const closer = event.target.closest("[data-closes]");
    if (closer && isOpen()) set(false, closer.classList.contains("closer"));
  });
  media.addEventListener("change", () => set(false, false));
  set(false, false);
}

/** Let a button give the whole window to the side panel, and take it back. */
export function connectWide(button, page) {
  button.addEventListener("click", () => {
    const isWide = page.classList.toggle("wide-side");
    button.setAttribute("aria-pressed", isWide);
  });
}
