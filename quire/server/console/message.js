// One message of the transcript: its text as Markdown or as tokens, what belongs to it, and what can be done with it.

import { chipOf } from "./attachments.js";
import { button, copyButton, el } from "./dom.js";
import { codeBlock } from "./code.js";
import { MarkdownStream, splitThinking } from "./markdown.js";
import { timelineOf } from "./timeline.js";
import { tokenElement } from "./tokens.js";
import { changed } from "./tree.js";

/** @typedef {import("./tree.js").Message} Message */

const NAMES = { user: "You", assistant: "Answer", completion: "Completion" };

/** Buttons that ask for another answer; they are out of sight while one is being written. */
const IDLE = { className: "idle" };

/** How a message is shown where the reader has not chosen: an answer as Markdown, unless it has tokens to tell about. */
export function viewOf(message) {
  return message.view ?? (message.role === "completion" || message.pieces ? "tokens" : "markdown");
}

export class MessageView {
  #pending = []; // pieces that are not on the screen yet
  #timer = 0;
  #drawnAt = 0;
  #stream = null;
  #reasoning = null; // its elements, once there is some
  #answerLength = 0; // characters of the answer that the Markdown stream has

  /**
   * @param {Message} message
   * @param {{at: number, of: number}} place Among its alternatives.
   * @param {(name: string, message: Message, detail?: any) => void} act What a button asks for.
   * @param {() => void} grown Called when the message has become longer on the screen.
   */
  constructor(message, place, act, grown) {
    this.message = message;
    this.act = act;
    this.grown = grown;
    this.extras = el("div", { className: "extras" });
    this.output = el("div", { className: "output" });
    this.calls = el("div", { className: "calls" });
    this.notes = el("div", { className: "notes" });
    this.actions = el("div", { className: "actions", role: "group", "aria-label": "Actions" });
    this.element = el("article", { className: message.role, "aria-label": NAMES[message.role] });
    this.element.append(this.extras, this.output, this.calls, this.notes, this.actions);
    this.place(place);
    this.draw();
  }

  /** Draw everything from the message. */
  draw() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#pending = [];
    this.output.replaceChildren();
    if (this.message.role === "user") {
      this.output.textContent = this.message.text;
      this.output.hidden = !this.message.text;
    } else if (viewOf(this.message) === "markdown") {
      this.#startMarkdown();
      this.#growMarkdown();
      if (!this.message.running) this.#stream.end();
    } else {
      this.#drawTokens();
    }
    this.#drawExtras();
    this.#drawNotes();
    this.#drawActions();
  }

  /** Say which of several alternatives this is. */
  place({ at, of }) {
    this.alternatives = { at, of };
    this.#drawActions();
  }

  /** Show more pieces {text, tokens} of the text, and more reasoning; the message has them already. */
  write(pieces) {
    this.#pending.push(...pieces);
    if (this.#timer) return;
    const wait = Math.max(16, (this.#stream?.delay ?? 0) - (performance.now() - this.#drawnAt));
    this.#timer = setTimeout(() => this.#flush(), wait);
  }

  /** Show what changed besides the text: a warning, the end. */
  update() {
    this.#flush();
    if (!this.message.running && viewOf(this.message) === "markdown") this.#stream?.end();
    this.#drawExtras();
    this.#drawNotes();
    this.#drawActions();
    this.grown();
  }

  #flush() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#drawnAt = performance.now();
    const pieces = this.#pending.splice(0);
    if (pieces.length && viewOf(this.message) === "markdown") this.#growMarkdown();
    else this.#appendPieces(pieces);
    if (this.message.reasoning || this.message.toolCalls || /^\s*<think>/.test(this.message.text.slice(0, 32))) this.#drawExtras();
    this.grown();
  }

  #startMarkdown() {
    this.output.className = "output markdown";
    this.output.replaceChildren();
    if (this.message.prompt) this.#quote();
    const body = el("div");
    this.output.append(body);
    this.#stream = new MarkdownStream(body);
    this.#answerLength = 0;
  }

  #growMarkdown() {
    const { answer } = splitThinking(this.message.text);
    if (answer.length < this.#answerLength) this.#startMarkdown(); // what looked like an answer was "<think>"
    this.#stream.append(answer.slice(this.#answerLength));
    this.#answerLength = answer.length;
  }

  #drawTokens() {
    this.#stream = null;
    this.output.className = "output plain-text";
    if (this.message.prompt) this.#quote();
    this.#appendPieces(this.message.pieces ?? [{ text: this.message.text, tokens: [] }]);
  }

  #quote() {
    this.output.append(el("span", { className: "quote" }, this.message.prompt));
  }

  #appendPieces(pieces) {
    for (const piece of pieces) {
      const last = this.output.lastChild;
      if (piece.tokens.length) this.output.append(tokenElement(piece));
      else if (last?.nodeType === Node.TEXT_NODE) last.appendData(piece.text);
      else this.output.append(piece.text);
    }
  }

  #drawExtras() {
    const { message } = this;
    if (message.files) {
      this.extras.replaceChildren(el("ul", { className: "chips", "aria-label": "Files" }, ...message.files.map((file) => chipOf(file))));
      return;
    }
    const { thinking, answer } = splitThinking(message.text);
    const isShown = viewOf(message) === "markdown"; // tokens show all of the text, thinking included
    this.#drawReasoning([message.reasoning, isShown && thinking].filter(Boolean).join("\n\n"), message.running && !answer);
    const calls = (message.toolCalls ?? []).map((call) =>
      el("section", { className: "tool", "aria-label": "Tool call" },
        el("p", {}, "Calls ", el("code", {}, call.name || "a tool")), codeBlock(spaced(call.arguments), "json"),
        ...(call.result === undefined ? [] : [el("p", { className: "result" }, "Result ", el("code", {}, call.result))])));
    this.calls.replaceChildren(...calls);
  }

  #drawReasoning(text, isThinking) {
    if (!text) {
      this.#reasoning?.details.remove();
      this.#reasoning = null;
      return;
    }
    if (!this.#reasoning) {
      const [title, body] = [el("summary"), document.createTextNode("")];
      const made = el("details", { className: "reasoning", open: isThinking }, title, el("p", {}, body));
      this.extras.prepend(made);
      this.#reasoning = { details: made, title, body, isThinking };
    }
    const { details, title, body, isThinking: wasThinking } = this.#reasoning;
    if (wasThinking && !isThinking) details.open = false; // the answer begins: it is what the reader waits for
    this.#reasoning.isThinking = isThinking;
    title.textContent = isThinking ? "Reasoning …" : "Reasoning";
    if (text.startsWith(body.data)) body.appendData(text.slice(body.length));
    else body.data = text;
  }

  #drawNotes() {
    const { warning, summary, timing, error } = this.message;
    const lines = [];
    if (warning) lines.push(el("p", { className: "quiet warning" }, warning));
    if (summary && timing) lines.push(el("details", { className: "quiet summary" }, el("summary", {}, summary), timelineOf(timing)));
    else if (summary) lines.push(el("p", { className: "quiet summary" }, summary));
    if (error) lines.push(el("p", { className: "error", role: "alert" }, error));
    this.notes.replaceChildren(...lines);
  }

  #drawActions() {
    const { message } = this;
    const does = (name) => () => this.act(name, message);
    const parts = this.#alternativeButtons();
    if (!message.running) {
      parts.push(copyButton(() => message.text));
      if (message.role !== "assistant") parts.push(button("Edit", () => this.#edit(), IDLE));
      if (message.role !== "user") parts.push(button("Regenerate", does("regenerate"), IDLE));
      if (message.role !== "user" && message.text && !message.toolCalls) parts.push(button("Continue", does("continue"), IDLE));
      parts.push(button("Delete", does("delete")));
    }
    if (message.role !== "user") parts.push(this.#viewButton());
    this.actions.replaceChildren(...parts);
  }

  #viewButton() {
    const isMarkdown = viewOf(this.message) === "markdown";
    return button(this.message.pieces ? "Tokens" : "Plain text", () => {
      this.message.view = isMarkdown ? "tokens" : "markdown";
      changed(this.message);
      this.draw();
      this.actions.lastElementChild.focus();
      this.act("changed", this.message);
    }, { "aria-pressed": !isMarkdown });
  }

  #alternativeButtons() {
    const { at, of } = this.alternatives;
    if (of < 2) return [];
    const step = (by, text, label) =>
      button(text, () => this.act("sibling", this.message, by), { "aria-label": label, disabled: !(at + by >= 0 && at + by < of) });
    const where = el("span", { className: "where" }, `${at + 1}/${of}`);
    return [step(-1, "<", "Previous version"), where, step(1, ">", "Next version")];
  }

  #edit() {
    const { message } = this;
    const field = el("textarea", { value: message.prompt ?? message.text, rows: 4, "aria-label": "Edit the message" });
    const end = () => {
      form.remove();
      this.output.hidden = message.role === "user" && !message.text;
      this.actions.hidden = false;
      this.actions.querySelector("button")?.focus();
    };
    const form = el("form", { className: "edit" }, field, el("div", { className: "row" },
      el("button", { type: "submit", className: "main" }, "Send"), button("Cancel", end)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value || message.files) this.act("edit", message, field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.output.hidden = this.actions.hidden = true;
    this.output.after(form);
    field.focus();
  }
}

/** JSON with line breaks; what is not JSON, such as half of it, stays as it is. */
function spaced(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
