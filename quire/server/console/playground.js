// The playground: one conversation, or one completion after the other, streamed, measured and stoppable.

import { stream } from "./api.js";
import { TokenAligner, showCandidatesWithin, tokenElement, tokensOf } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const NUM_CANDIDATES = 5;

/** Fields of a request that are numbers: name, label, and the default where the server does not tell it. */
const NUMBERS = [
  ["max_tokens", "Max tokens"],
  ["temperature", "Temperature"],
  ["top_p", "Top p"],
  ["top_k", "Top k"],
  ["min_p", "Min p"],
  ["presence_penalty", "Presence penalty"],
  ["frequency_penalty", "Frequency penalty"],
  ["repetition_penalty", "Repetition penalty"],
  ["seed", "Seed"],
];

export class Playground {
  #controls = byId("controls");
  #transcript = byId("transcript");
  #messages = [];
  #abort = null;

  /** `onError` hears of errors that are not about one request, such as a key that is refused. */
  constructor({ onError }) {
    this.onError = onError;
    byId("sampling").replaceChildren(...NUMBERS.map(numberField));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#abort) this.#submit();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    this.#controls.addEventListener("submit", (event) => event.preventDefault());
    this.#controls.addEventListener("reset", () => setTimeout(() => this.#setMode()));
    for (const radio of this.#controls.elements.mode) {
      radio.addEventListener("change", () => {
        this.clear();
        this.#setMode();
      });
    }
    showCandidatesWithin(this.#transcript, byId("candidates"));
  }

  /** Show what the server can do and what it does when it is not told. */
  configure({ chat, sampling_defaults: defaults }) {
    for (const [name, value] of Object.entries(defaults)) this.#controls.elements[name].placeholder = value;
    this.#controls.elements.seed.placeholder = "random";
    const [chatChoice, completionChoice] = this.#controls.elements.mode;
    chatChoice.disabled = !chat;
    if (!chat) completionChoice.checked = true;
    this.#setMode();
  }

  /** Stop what runs: the connection closes, and the server drops the request. */
  stop() {
    this.#abort?.abort();
  }

  /** Forget the conversation. */
  clear() {
    this.stop();
    this.#messages = [];
    this.#transcript.replaceChildren(byId("hint"));
    byId("candidates").hidden = true;
    byId("meter").textContent = "";
  }

  get #isChat() {
    return this.#controls.elements.mode.value === "chat";
  }

  #setMode() {
    const chat = this.#isChat;
    document.body.dataset.mode = chat ? "chat" : "completion";
    this.#controls.elements.max_tokens.placeholder = chat ? "all that fits" : "16";
    byId("composer-label").textContent = chat ? "Message" : "Prompt";
    byId("prompt").placeholder = chat ? "Ask something" : "Text to go on from";
    byId("hint").textContent = chat
      ? "A conversation with the model. Enter sends, Shift+Enter breaks the line."
      : "The model goes on from your text. Enter sends, Shift+Enter breaks the line.";
  }

  async #submit() {
    const prompt = byId("prompt").value;
    if (!prompt) return;
    const chat = this.#isChat;
    const messages = this.#messages; // clear() begins another conversation, perhaps while this request runs
    const entry = new Entry(this.#transcript, chat ? "model" : "completion");
    if (chat) {
      entry.before(prompt);
      messages.push({ role: "user", content: prompt });
      byId("prompt").value = "";
    } else {
      entry.quote(prompt);
    }
    this.#abort = new AbortController();
    this.#setRunning(true);
    const run = new Run(entry);
    try {
      const path = chat ? "v1/chat/completions" : "v1/completions";
      await run.follow(stream(path, this.#body(prompt), this.#abort.signal));
    } catch (error) {
      if (error.name === "AbortError") run.finish("stopped");
      else run.fail(error);
      if (error.status === 401) this.onError(error);
    }
    if (chat) remember(messages, run);
    if (chat && run.failed && !run.text) byId("prompt").value ||= prompt;
    this.#abort = null;
    this.#setRunning(false);
  }

  #setRunning(running) {
    byId("send").disabled = running;
    byId("stop").disabled = !running;
    this.#transcript.setAttribute("aria-busy", running);
    byId("prompt").focus();
  }

  #body(prompt) {
    const fields = this.#controls.elements;
    const chat = this.#isChat;
    const body = { model: byId("model").value, stream: true };
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
    if (chat) {
      const system = fields.system.value;
      body.messages = system ? [{ role: "system", content: system }, ...this.#messages] : this.#messages;
    } else {
      body.prompt = prompt;
    }
    for (const [name] of NUMBERS) {
      const text = fields[name].value.trim();
      if (text) body[name] = Number.isFinite(Number(text)) ? Number(text) : text; // what is no number is the server's to refuse
    }
    const stops = fields.stop.value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
    if (fields.logprobs.checked) {
      Object.assign(body, chat ? { logprobs: true, top_logprobs: NUM_CANDIDATES } : { logprobs: NUM_CANDIDATES });
    }
    return body;
  }
}

/** What was said becomes part of the conversation; a message that got no answer does not. */
function remember(messages, run) {
  if (run.text) messages.push({ role: "assistant", content: run.text });
  else messages.pop();
}

/** One request: its text, and how fast it came. */
class Run {
  text = "";
  failed = false;
  #startedAt = performance.now();
  #firstAt = null;
  #lastAt = null;
  #numAtFirst = 0;
  #usage = null;
  #reason = "";
  #aligner = new TokenAligner();

  constructor(entry) {
    this.entry = entry;
  }

  async follow(events) {
    for await (const event of events) this.#take(event);
    this.finish(this.#reason);
  }

  #take({ choices, usage, warnings }) {
    if (warnings) this.entry.note(warnings.join("\n"));
    if (usage) this.#count(usage);
    for (const choice of choices) {
      const text = choice.text ?? choice.delta?.content ?? "";
      const tokens = tokensOf(choice.logprobs);
      this.text += text;
      if (tokens.length) this.entry.write(this.#aligner.push(text, tokens));
      else if (text) this.entry.write(this.#aligner.push(text, []));
      this.#reason = choice.finish_reason ?? this.#reason;
    }
    byId("meter").textContent = this.#summary();
  }

  #count(usage) {
    if (usage.completion_tokens > (this.#usage?.completion_tokens ?? 0)) {
      this.#lastAt = performance.now();
      if (this.#firstAt === null) [this.#firstAt, this.#numAtFirst] = [this.#lastAt, usage.completion_tokens];
    }
    this.#usage = usage;
  }

  finish(reason) {
    this.entry.write(this.#aligner.end());
    byId("meter").textContent = "";
    this.entry.close([this.#summary(), reason].filter(Boolean).join(" · "));
  }

  fail(error) {
    this.failed = true;
    this.finish("");
    const code = [error.status, error.code].filter(Boolean).join(" ");
    const text = error instanceof TypeError ? "The server cannot be reached." : error.message;
    this.entry.error(code ? `${text} (${code})` : text);
  }

  #summary() {
    if (this.#firstAt === null) return "";
    const { prompt_tokens, completion_tokens, prompt_tokens_details } = this.#usage;
    const cached = prompt_tokens_details?.cached_tokens;
    const parts = [`${prompt_tokens} → ${completion_tokens} tokens`];
    if (cached) parts[0] = `${prompt_tokens} (${cached} cached) → ${completion_tokens} tokens`;
    parts.push(`first after ${(this.#firstAt - this.#startedAt).toFixed(0)} ms`);
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    if (seconds > 0) parts.push(`${((completion_tokens - this.#numAtFirst) / seconds).toFixed(0)} tok/s`);
    return parts.join(" · ");
  }
}

/** A request's place in the transcript. All that models and servers say goes in as text. */
class Entry {
  #pending = [];
  #frame = 0;

  constructor(transcript, kind) {
    this.transcript = transcript;
    this.element = document.createElement("article");
    this.element.className = kind;
    this.output = document.createElement("div");
    this.output.className = "output";
    this.element.append(this.output);
    transcript.append(this.element);
    this.#scroll(true);
  }

  /** The reader's own message, before the answer. */
  before(text) {
    const message = document.createElement("article");
    message.className = "user";
    message.textContent = text;
    this.element.before(message);
    this.#scroll(true);
  }

  /** The prompt that the output goes on from. */
  quote(text) {
    const quote = document.createElement("span");
    quote.className = "quote";
    quote.textContent = text;
    this.output.append(quote);
  }

  /** Add pieces of text, with the next frame of the screen. */
  write(pieces) {
    this.#pending.push(...pieces);
    if (pieces.length && !this.#frame) this.#frame = requestAnimationFrame(() => this.#flush());
  }

  /** Say under the output how it went. */
  close(summary) {
    this.#flush();
    if (summary) this.#line("p", "quiet summary", summary);
    if (!this.output.hasChildNodes()) this.output.remove();
  }

  error(text) {
    this.#line("p", "error", text).setAttribute("role", "alert");
  }

  note(text) {
    this.#line("p", "quiet warning", text);
  }

  #line(tag, className, text) {
    const line = document.createElement(tag);
    line.className = className;
    line.textContent = text;
    this.element.append(line);
    this.#scroll();
    return line;
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const follows = this.#isAtEnd();
    for (const piece of this.#pending) {
      const last = this.output.lastChild;
      if (piece.tokens.length) this.output.append(tokenElement(piece));
      else if (last?.nodeType === Node.TEXT_NODE) last.appendData(piece.text);
      else this.output.append(piece.text);
    }
    this.#pending = [];
    this.#scroll(follows);
  }

  #isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.transcript;
    return scrollHeight - scrollTop - clientHeight < 48;
  }

  #scroll(follows = this.#isAtEnd()) {
    if (follows) this.transcript.scrollTop = this.transcript.scrollHeight;
  }
}

function numberField([name, title]) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  Object.assign(input, { name, inputMode: "decimal", autocomplete: "off", spellcheck: false });
  label.append(title, input);
  return label;
}
