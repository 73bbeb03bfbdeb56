// The settings form: what a request is made with, and named sets of it (presets).

import { askText, confirmThat } from "./dialogs.js";
import { byId, el } from "./dom.js";
import { NUMBERS } from "./request.js";
import { all, forget, keep } from "./store.js";

/** Settings that a preset holds; the rest (chat or completion, colours) is the reader's choice of view. */
const PRESET_FIELDS = ["system", "stop", ...NUMBERS.map(([name]) => name)];

export class Controls {
  #form = byId("controls");
  #presets = [];

  /** @param {() => void} onChange Hears when the reader has changed a setting. */
  constructor(onChange) {
    byId("sampling").replaceChildren(...NUMBERS.map(numberField));
    this.onChange = onChange;
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("input", () => this.#changed());
    this.#form.addEventListener("reset", () => setTimeout(() => this.#changed()));
    byId("preset").addEventListener("change", () => this.#usePreset(byId("preset").value));
    byId("preset-save").addEventListener("click", () => this.#savePreset());
    byId("preset-delete").addEventListener("click", () => this.#deletePreset());
  }

  /** Show what the server does when it is not told. */
  async configure({ chat, tools, sampling_defaults: defaults }) {
    for (const [name, value] of Object.entries(defaults)) this.#form.elements[name].placeholder = value;
    this.#form.elements.seed.placeholder = "random";
    this.#form.elements.mode[0].disabled = !chat;
    this.#form.elements.tools.disabled = !tools; // the model is shown none, or its calls cannot be read
    this.#showMode();
    await this.#readPresets();
  }

  get isChat() {
    return this.#form.elements.mode.value === "chat";
  }

  /** Every field by its name; numbers as they were typed. */
  read() {
    const fields = this.#form.elements;
    const texts = Object.fromEntries(PRESET_FIELDS.map((name) => [name, fields[name].value]));
    return { ...texts, mode: fields.mode.value, logprobs: fields.logprobs.checked, tools: fields.tools.checked && !fields.tools.disabled };
  }

  /** Fill the form, for example with a conversation's settings. */
  write(settings) {
    const fields = this.#form.elements;
    for (const name of PRESET_FIELDS) fields[name].value = settings[name] ?? "";
    const radio = [...fields.mode].find((one) => one.value === settings.mode);
    if (radio && !radio.disabled) radio.checked = true;
    fields.logprobs.checked = settings.logprobs === true;
    fields.tools.checked = settings.tools === true;
    this.#showMode();
  }

  #changed() {
    this.#showMode();
    this.onChange();
  }

  #showMode() {
    const [chatChoice, completionChoice] = this.#form.elements.mode;
    if (chatChoice.disabled) completionChoice.checked = true; // this model has no chat template
    const chat = this.isChat;
    document.body.dataset.mode = chat ? "chat" : "completion";
    this.#form.elements.max_tokens.placeholder = chat ? "all that fits" : "16";
    byId("composer-label").textContent = chat ? "Message" : "Prompt";
    byId("prompt").placeholder = chat ? "Ask something" : "Text to go on from";
    byId("hint-title").textContent = chat ? "What would you like to ask?" : "The model goes on from your text.";
    byId("hint-text").textContent = `Enter sends, Shift+Enter breaks the line.${chat ? " Text files can be dropped here." : ""}`;
  }

  async #readPresets(chosen = "") {
    this.#presets = await all("presets").catch(() => []); // the list of conversations says what is wrong
    const options = this.#presets.map(({ name }) => new Option(name, name, false, name === chosen));
    byId("preset").replaceChildren(new Option("Choose a preset", ""), ...options);
    byId("preset-delete").disabled = !chosen;
  }

  #usePreset(name) {
    const preset = this.#presets.find((one) => one.name === name);
    byId("preset-delete").disabled = !preset;
    if (!preset) return;
    this.write({ ...this.read(), ...preset.settings });
    this.onChange();
  }

  async #savePreset() {
    const name = await askText("Name of the preset. It keeps the system prompt, the sampling and the stop strings.", byId("preset").value, "Save");
    if (!name) return;
    const settings = this.read();
    await keep("presets", { name, settings: Object.fromEntries(PRESET_FIELDS.map((field) => [field, settings[field]])) });
    await this.#readPresets(name);
  }

  async #deletePreset() {
    const name = byId("preset").value;
    if (!name || !(await confirmThat(`Delete the preset "${name}"?`, "Delete"))) return;
    await forget("presets", name);
    await this.#readPresets();
  }
}

function numberField([name, title]) {
  const input = el("input", { name, inputMode: "decimal", autocomplete: "off", spellcheck: false });
  return el("label", {}, title, input);
}
