// Short questions to the reader, in the page's own dialog: it keeps the focus, and Escape cancels.

import { byId } from "./dom.js";

/**
 * Ask for a line of text. @returns {Promise<string|null>} null when the reader cancels
 * @param {string} question
 * @param {string} value What stands there to begin with.
 * @param {string} accept The text of the button that accepts.
 */
export async function askText(question, value = "", accept = "OK") {
  byId("ask-label").hidden = false;
  byId("ask-text").value = value;
  return (await ask(question, accept)) ? byId("ask-text").value.trim() || null : null;
}

/** Ask whether to go on. @returns {Promise<boolean>} */
export async function confirmThat(question, accept) {
  byId("ask-label").hidden = true;
  return ask(question, accept);
}

/** Tell something that went wrong. */
export const tell = (text) => confirmThat(text, "OK");

function ask(question, accept) {
  const dialog = byId("ask");
  byId("ask-question").textContent = question;
  byId("ask-accept").textContent = accept;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "accept"), { once: true });
  });
}

byId("ask-cancel").addEventListener("click", () => byId("ask").close(""));
