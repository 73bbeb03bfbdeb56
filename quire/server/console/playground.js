// The playground: sends what is typed, and does what the buttons of messages ask for. One request at a time.

import { stream } from "./api.js";
import { Attachments } from "./attachments.js";
import { Controls } from "./controls.js";
import { Conversations } from "./conversations.js";
import { confirmThat } from "./dialogs.js";
import { byId } from "./dom.js";
import { chatBody, completionBody, roundsOf } from "./request.js";
import { Run } from "./run.js";
import { showCandidatesWithin } from "./tokens.js";
import { MAX_CALLS, MAX_ROUNDS, runTool } from "./tools.js";
import { Transcript } from "./transcript.js";
import { add, changed, choose, pathOf, remove, siblingsOf, subtreeOf } from "./tree.js";

const KEEP_EVERY_MS = 1000;

export class Playground {
  #controls = new Controls(() => this.#settingsChanged());
  #transcript = new Transcript((name, message, detail) => this.#act(name, message, detail));
  #conversations = new Conversations({
    onShow: (conversation) => this.#show(conversation),
    onDelete: (conversation) => this.#running?.conversation === conversation && this.stop(),
    onRefresh: (conversation) => this.#transcript.show(conversation),
    running: () => this.#running,
    settings: () => this.#controls.read(),
  });
  #attachments = new Attachments();
  #running = null; // {conversation, message, abort, run}

  /** @param {{onError: (error: Error) => void}} on Hears of errors that are not about one request: a refused key. */
  constructor({ onError }) {
    this.onError = onError;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#running) this.#submit();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !byId("ask").open) this.stop();
    });
    addEventListener("pagehide", () => this.#running && this.#keep(this.#running.conversation));
    showCandidatesWithin(byId("transcript"), byId("candidates"));
  }

  /** Show what the server can do, and the conversations of this browser. */
  async open(capabilities) {
    await this.#controls.configure(capabilities);
    await this.#conversations.open();
  }

  /** Take everything off the screen. What the browser keeps stays. */
  close() {
    this.stop();
    this.#transcript.clear();
    this.#conversations.close();
    byId("candidates").hidden = true;
    byId("meter").textContent = byId("prompt").value = "";
    this.#attachments.put([]);
  }

  /** Stop what runs: the connection closes, and the server drops the request. */
  stop() {
    this.#running?.abort.abort();
  }

  /** Whether the answer that is being written here is this request's. */
  waitsFor(id) {
    const known = this.#running?.run.requestId;
    return Boolean(known) && known.endsWith(id.split("-")[0]);
  }

  get #current() {
    return this.#conversations.current;
  }

  #show(conversation) {
    if (conversation.messages.length) this.#controls.write(conversation.settings);
    byId("candidates").hidden = true;
    this.#transcript.show(conversation);
    this.#transcript.toEnd();
    byId("prompt").focus();
  }

  #settingsChanged() {
    this.#current.settings = this.#controls.read();
    if (this.#current.messages.length) this.#keep(this.#current);
  }

  #keep(conversation) {
    this.#conversations.keep(conversation);
  }

  #submit() {
    const prompt = byId("prompt").value;
    const chat = this.#controls.isChat;
    if (!prompt && !(chat && this.#attachments.any)) return;
    if (chat) byId("prompt").value = "";
    this.#ask(prompt, this.#current.leaf, chat, chat ? this.#attachments.take() : undefined);
  }

  /** Put a question, or a prompt, below `parent` and have it answered. */
  #ask(text, parent, chat, files) {
    const conversation = this.#current;
    if (!chat) return this.#answer(conversation, add(conversation, { role: "completion", prompt: text }, parent));
    const question = add(conversation, { role: "user", text, ...(files && { files }) }, parent);
    return this.#answer(conversation, add(conversation, { role: "assistant" }, question.id));
  }

  #act(name, message, detail) {
    const conversation = this.#current;
    if (name === "changed") return this.#keep(conversation);
    if (name === "sibling") return this.#showSibling(conversation, message, detail);
    if (name === "delete") return this.#delete(conversation, message);
    if (this.#running) return undefined;
    if (name === "edit") return this.#ask(detail, message.parent, message.role === "user", message.files);
    if (name === "continue") return this.#answer(conversation, message, true);
    const fields = message.role === "completion" ? { role: "completion", prompt: message.prompt } : { role: "assistant" };
    return this.#answer(conversation, add(conversation, fields, message.parent));
  }

  #showSibling(conversation, message, by) {
    const siblings = siblingsOf(conversation, message);
    choose(conversation, siblings[siblings.indexOf(message) + by].id);
    this.#transcript.show(conversation);
    this.#keep(conversation);
  }

  async #delete(conversation, message) {
    const ids = subtreeOf(conversation, message.id);
    if (ids.size > 1 && !(await confirmThat(`Delete this message and the ${ids.size - 1} below it?`, "Delete"))) return;
    if (this.#running?.conversation === conversation && ids.has(this.#running.message.id)) this.stop();
    remove(conversation, message.id);
    if (conversation === this.#current) this.#transcript.show(conversation);
    this.#keep(conversation);
    byId("prompt").focus();
  }

  /** Have a message written by the model: an answer to the path above it, or more of its own text. */
  async #answer(conversation, message, continues = false) {
    const settings = (conversation.settings = this.#controls.read());
    const abort = new AbortController();
    const run = new Run(message, settings.logprobs, this.#listener(conversation, message));
    this.#running = { conversation, message, abort, run };
    if (conversation === this.#current) {
      this.#transcript.show(conversation);
      this.#transcript.viewOf(message.id)?.draw();
      this.#transcript.toEnd();
    }
    this.#setRunning(true);
    this.#conversations.touch(conversation);
    this.#keep(conversation);
    const error = await run.follow(this.#stream(conversation, message, settings, continues, abort.signal));
    this.#running = null;
    if (!error && settings.tools && run.hasCalls && roundsOf(pathOf(conversation, message.parent)) < MAX_ROUNDS) {
      return this.#runCalls(conversation, message);
    }
    this.#setRunning(false);
    this.#keep(conversation);
    if (error && !message.text) this.#giveBack(conversation, message);
    if (error?.status === 401) this.onError(error);
    return undefined;
  }

  /** Run the calls of an answer, and have the model go on with their results. */
  #runCalls(conversation, message) {
    for (const [index, call] of message.toolCalls.entries()) {
      call.result = index < MAX_CALLS ? runTool(call.name, call.arguments) : `error: at most ${MAX_CALLS} calls are run`;
    }
    changed(message);
    this.#transcript.viewOf(message.id)?.update();
    return this.#answer(conversation, add(conversation, { role: "assistant" }, message.id));
  }

  #stream(conversation, message, settings, continues, signal) {
    const model = byId("model").value;
    if (message.role === "completion") {
      return stream("v1/completions", completionBody(model, settings, message.prompt + message.text), signal);
    }
    const path = pathOf(conversation, continues ? message.id : message.parent);
    return stream("v1/chat/completions", chatBody(model, settings, path, continues), signal);
  }

  /** What a run tells goes to the screen if its message is there, and into the browser's store now and then. */
  #listener(conversation, message) {
    const view = () => this.#transcript.viewOf(message.id);
    let keptAt = performance.now();
    return {
      write: (pieces) => {
        view()?.write(pieces);
        if (performance.now() - keptAt < KEEP_EVERY_MS) return;
        keptAt = performance.now();
        this.#keep(conversation);
      },
      update: () => view()?.update(),
      meter: (text) => {
        const where = conversation === this.#current ? "" : `Answering in "${conversation.title}": `;
        byId("meter").textContent = text && where + text;
      },
    };
  }

  /** A question that got no answer can be sent again from where it was typed. */
  #giveBack(conversation, message) {
    const question = conversation.messages.find(({ id }) => id === message.parent);
    if (conversation === this.#current && message.role === "assistant" && question?.role === "user") {
      byId("prompt").value ||= question.text;
      if (question.files && !this.#attachments.any) this.#attachments.put(question.files);
    }
  }

  #setRunning(running) {
    const { activeElement } = document;
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    this.#transcript.busy = running;
    byId("said").textContent = running ? "The model is answering." : "The answer is complete.";
    if (!activeElement || activeElement === document.body || activeElement.closest("#composer, .actions, .edit")) byId("prompt").focus();
  }
}
