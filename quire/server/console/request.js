// From settings and messages to the body of a request. Nothing here knows the page.

import { withFiles } from "./files.js";

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
  const said = answered(path).map((message) => ({ role: message.role, content: withFiles(message.text, message.files) }));
  if (settings.system) said.unshift({ role: "system", content: settings.system });
  const body = { ...common(model, settings), messages: said };
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_CANDIDATES });
  return body;
}

/** The messages that count: completions, and questions that got no answer, are left out. */
function answered(path) {
  const chat = path.filter((message) => message.role !== "completion");
  const isEmpty = (message) => message?.role === "assistant" && !message.text;
  return chat.filter((message, index) => !isEmpty(message) && !isEmpty(chat[index + 1]));
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
