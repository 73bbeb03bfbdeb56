// The files beside the message that is being written: chosen or dropped, shown as chips, taken when it is sent.

import { button, byId, el } from "./dom.js";
import { readFiles } from "./files.js";

export class Attachments {
  #files = [];

  constructor() {
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", () => {
      this.#add([...byId("attach-file").files]);
      byId("attach-file").value = "";
    });
    const area = byId("playground");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    area.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      area.classList.add("drop");
    });
    area.addEventListener("dragleave", (event) => area.contains(event.relatedTarget) || area.classList.remove("drop"));
    area.addEventListener("drop", (event) => {
      area.classList.remove("drop");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
  }

  /** Whether there are any. */
  get any() {
    return this.#files.length > 0;
  }

  /** The files, for a message that is sent now; undefined where there are none. */
  take() {
    const taken = this.#files;
    this.put([]);
    return taken.length ? taken : undefined;
  }

  /** Show these files instead. */
  put(files) {
    this.#files = files;
    byId("refused-files").textContent = "";
    this.#draw();
  }

  async #add(files) {
    const { read, refused } = await readFiles(files, this.#files.length);
    this.#files = [...this.#files, ...read];
    byId("refused-files").textContent = refused.join(" ");
    this.#draw();
    byId("prompt").focus();
  }

  #draw() {
    byId("files").replaceChildren(...this.#files.map((file) => {
      const remove = button("×", () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#draw();
        byId("prompt").focus();
      }, { "aria-label": `Remove ${file.name}` });
      return chipOf(file, remove);
    }));
  }
}

/** A file as a chip; its first lines are its tooltip. */
export function chipOf({ name, text }, ...more) {
  const size = text.length < 1024 ? `${text.length} B` : `${Math.round(text.length / 1024)} KB`;
  return el("li", { className: "chip", title: text.slice(0, 400) }, name, el("span", { className: "quiet" }, ` ${size}`), ...more);
}
