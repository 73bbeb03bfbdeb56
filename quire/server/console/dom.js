// Building elements. Whatever comes from models, servers and people goes in as text, never as markup.

/**
 * An element.
 * @param {string} tag
 * @param {Record<string, any>} props Properties; those with a dash, and `role`, are set as attributes.
 * @param {...(Node|string)} children
 * @returns {HTMLElement}
 */
export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A button that does something when it is pressed. */
export function button(text, onClick, props = {}) {
  const made = el("button", { type: "button", ...props }, text);
  made.addEventListener("click", onClick);
  return made;
}

/** @param {string} id @returns {any} The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** Put text on the clipboard. Pages over plain HTTP have no clipboard API, so they copy from a hidden field. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = el("textarea", { value: text, className: "unseen" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(text, props = {}) {
  const made = button("Copy", async () => {
    await copyText(text());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, props);
  return made;
}

/** Let the reader save a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
