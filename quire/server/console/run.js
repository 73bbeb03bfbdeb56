// One request: what comes in goes into its message, and how fast it came.

import { TokenAligner, tokensOf } from "./tokens.js";
import { changed } from "./tree.js";

export class Run {
  #startedAt = performance.now();
  #firstAt = null;
  #lastAt = null;
  #numAtFirst = 0;
  #usage = null;
  #reason = "";
  #aligner = new TokenAligner();
  /** The server's name for the request; null until it has said something. */
  requestId = null;

  /**
   * @param {import("./tree.js").Message} message What the answer is written to.
   * @param {boolean} keepsTokens Whether probabilities were asked for.
   * @param {{write: (pieces: object[]) => void, update: () => void, meter: (text: string) => void}} on Hears of changes.
   */
  constructor(message, keepsTokens, on) {
    this.message = message;
    this.on = on;
    if (keepsTokens) message.pieces ??= message.text ? [{ text: message.text, tokens: [] }] : [];
    message.running = true;
    changed(message);
    message.error = message.summary = message.warning = message.timing = undefined;
  }

  /** Take in a stream of events until it ends. Never throws: what went wrong is written to the message. */
  async follow(events) {
    try {
      for await (const event of events) this.#take(event);
      this.#finish(this.#reason);
    } catch (error) {
      this.#finish(error.name === "AbortError" ? "stopped" : "", error.name === "AbortError" ? undefined : said(error));
      return error;
    }
    return null;
  }

  #take({ id, choices, usage, warnings, why }) {
    this.requestId = id;
    if (why) this.message.timing = why[0];
    if (usage) this.#count(usage);
    let isChanged = false;
    if (warnings) {
      this.message.warning = warnings.join("\n");
      isChanged = true;
    }
    for (const choice of choices) {
      const delta = choice.delta ?? {};
      const text = choice.text ?? delta.content ?? "";
      const tokens = tokensOf(choice.logprobs);
      if (tokens.length || text) this.#write(this.#aligner.push(text, tokens));
      if (this.#takeOthers(delta)) this.on.write([]);
      this.#reason = choice.finish_reason ?? this.#reason;
    }
    this.on.meter(this.#summary());
    if (isChanged) this.on.update();
  }

  /** Reasoning and tool calls. */
  #takeOthers(delta) {
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
    for (const part of delta.tool_calls ?? []) {
      const calls = (this.message.toolCalls ??= []);
      const call = (calls[part.index ?? calls.length] ??= { name: "", arguments: "" });
      call.id ??= part.id ?? `call_${part.index ?? 0}`;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    return Boolean(reasoning || delta.tool_calls);
  }

  /** Whether the answer ended with calls that are whole. */
  get hasCalls() {
    return Boolean(this.message.toolCalls?.length) && !this.message.error && ["tool_calls", "stop"].includes(this.#reason);
  }

  #write(pieces) {
    for (const piece of pieces) {
      this.message.text += piece.text;
      this.message.pieces?.push(piece);
    }
    if (pieces.length) this.on.write(pieces);
  }

  #count(usage) {
    if (usage.completion_tokens > (this.#usage?.completion_tokens ?? 0)) {
      this.#lastAt = performance.now();
      if (this.#firstAt === null) [this.#firstAt, this.#numAtFirst] = [this.#lastAt, usage.completion_tokens];
    }
    this.#usage = usage;
  }

  #finish(reason, error) {
    this.#write(this.#aligner.end());
    this.message.running = false;
    changed(this.message);
    this.message.summary = [this.#summary(), reason].filter(Boolean).join(" · ");
    this.message.error = error;
    this.on.meter("");
    this.on.update();
  }

  #summary() {
    if (this.#firstAt === null) return "";
    const { prompt_tokens, completion_tokens, prompt_tokens_details } = this.#usage;
    const cached = prompt_tokens_details?.cached_tokens;
    const parts = [`${prompt_tokens}${cached ? ` (${cached} cached)` : ""} → ${completion_tokens} tokens`];
    parts.push(`first after ${(this.#firstAt - this.#startedAt).toFixed(0)} ms`);
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    if (seconds > 0) parts.push(`${((completion_tokens - this.#numAtFirst) / seconds).toFixed(0)} tok/s`);
    return parts.join(" · ");
  }
}

/** An error as the server says it. */
function said(error) {
  const code = [error.status, error.code].filter(Boolean).join(" ");
  const text = error instanceof TypeError ? "The server cannot be reached." : error.message;
  return code ? `${text} (${code})` : text;
}
