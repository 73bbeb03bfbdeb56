// From settings and messages to the body of a request. Nothing here knows the page.

import { withFiles } from "./files.js";
import { DEFINITIONS, isObject, MAX_ROUNDS } from "./tools.js";

/** Fields of a request that are numbers: name and label. */
export const NUMBERS = [
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

const NUM_CANDIDATES = 5;

/** The body of a chat request. `path` ends with the answer to go on from where `continues` is set. */
export function chatBody(model, settings, path, continues = false) {
  const said = answered(path).flatMap((message) => withCalls(message, continues && message === path.at(-1)));
  if (settings.system) said.unshift({ role: "system", content: settings.system });
  const body = { ...common(model, settings), messages: said };
  if (settings.tools) Object.assign(body, { tools: DEFINITIONS, tool_choice: roundsOf(path) < MAX_ROUNDS ? "auto" : "none" });
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_CANDIDATES });
  return body;
}

/** A message as a request has it; behind one whose calls were run stand their results. */
function withCalls(message, isOpen) {
  const said = { role: message.role, content: withFiles(message.text, message.files) };
  if (isOpen || !wasRun(message)) return [said];
  const calls = message.toolCalls.map(({ id, name, arguments: text }) => ({
    id, type: "function", function: { name, arguments: isObject(text) ? text : "{}" },
  }));
  const results = message.toolCalls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
  return [{ ...said, tool_calls: calls }, ...results];
}

const wasRun = (message) => Boolean(message.toolCalls?.length) && message.toolCalls.every(({ result }) => result !== undefined);

/** How often the last question of a path was answered with calls. */
export function roundsOf(path) {
  return path.length - 1 - path.findLastIndex(({ role }) => role === "user");
}

/** The messages that count: completions, and questions that got no answer, are left out. */
function answered(path) {
  const chat = path.filter((message) => message.role !== "completion");
  const isEmpty = (message) => message?.role === "assistant" && !message.text && !wasRun(message);
  return chat.filter((message, index) => !isEmpty(message) && !(message.role === "user" && isEmpty(chat[index + 1])));
}

/** The body of a completion request. */
export function completionBody(model, settings, prompt) {
  const body = { ...common(model, settings), prompt };
  if (settings.logprobs) body.logprobs = NUM_CANDIDATES;
  return body;
}

function common(model, settings) {
  const body = { model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const [name] of NUMBERS) {
    const text = (settings[name] ?? "").trim();
    if (text) body[name] = Number.isFinite(Number(text)) ? Number(text) : text; // what is no number is the server's to refuse
  }
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
  return body;
}
