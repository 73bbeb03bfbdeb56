// Where a request's time went: its stages as one bar, to scale, and in words below it.

import { el } from "./dom.js";

/** Stages in their order: the field that has the seconds, a name, and what happens in it. */
const STAGES = [
  ["front_s", "Received", "parsed and tokenised"],
  ["queue_s", "Queued", "waited for room in the batch"],
  ["prefill_s", "Prompt", "until the first token"],
  ["decode_s", "Output", "from the first token on"],
  ["delivery_s", "Delivered", "from the last token to the end of the reply"],
];

/** What a step was bound by, as it reads after "steps". */
export const LIMIT_NAMES = {
  arrivals: "on their way into the batch",
  "kv cache": "too few free KV blocks",
  max_num_seqs: "all places taken (--max-num-seqs)",
  "token budget": "token budget used up (--max-num-batched-tokens)",
};

/** The stages that a record tells about, as [name, seconds, explanation, field]. */
export function stagesOf(record) {
  return STAGES.flatMap(([field, name, help]) => (typeof record[field] === "number" ? [[name, record[field], help, field]] : []));
}

/**
 * The timeline of a request, from a row of the live view or from the `why` of a reply.
 * @param {object} record Seconds by stage, and counts.
 * @param {[string, string][]} more Lines to add.
 * @returns {HTMLElement}
 */
export function timelineOf(record, more = []) {
  const stages = stagesOf(record);
  const bar = el("div", { className: "stages", "aria-hidden": "true" }, ...stages.map(([, seconds, , field]) => segment(field, seconds)));
  const lines = stages.map(([name, seconds, help, field]) => line(el("span", {}, el("i", { className: `swatch ${field}` }), name), duration(seconds), help));
  for (const [name, text] of [...countsOf(record), ...more]) lines.push(line(name, text));
  return el("div", { className: "timeline" }, bar, el("dl", {}, ...lines));
}

function segment(field, seconds) {
  const made = el("i", { className: field });
  made.style.flexGrow = Math.max(seconds, 1e-6).toFixed(6);
  return made;
}

function line(name, text, help = "") {
  return el("div", {}, el("dt", {}, name), el("dd", {}, text, help && el("span", { className: "quiet" }, ` ${help}`)));
}

/** What a record counts, in words. */
function countsOf(record) {
  const lines = [];
  const held = Object.entries(record.queued_steps ?? {}).filter(([, count]) => count > 0);
  for (const [name, count] of held) lines.push(["Held", `${count} ${plural(count, "step")}: ${LIMIT_NAMES[name] ?? name}`]);
  const cached = record.cached_tokens ? `, ${record.cached_tokens} of them from the cache` : "";
  const steps = record.prefill_steps ? `, in ${record.prefill_steps} ${plural(record.prefill_steps, "step")}` : "";
  lines.push(["Prompt tokens", `${record.prompt_tokens}${cached}${steps}`]);
  if (record.preemptions) lines.push(["Preempted", `${record.preemptions} ${plural(record.preemptions, "time")}: its blocks were needed, it was computed again`]);
  if (record.replays) lines.push(["Moved", `${record.replays} ${plural(record.replays, "time")} to another core, because its own had ended`]);
  return lines;
}

/** Seconds as people read them. */
export function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 59.5) return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(Math.round(seconds) / 60)} min ${Math.round(seconds) % 60} s`;
}

const plural = (count, word) => (count === 1 ? word : `${word}s`);
