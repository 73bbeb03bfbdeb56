// The engine as it is now, once a second: what /v1/stats says, and the difference to what it said before.

import { get } from "./api.js";
import { BatchView, rowsOf } from "./batch.js";
import { ageAt, drawChart, short } from "./charts.js";
import { byId, el } from "./dom.js";
import { KvMap } from "./kvmap.js";

const PERIOD_MS = 1000;
const MIN_PERIOD_S = 0.5;
const CAPACITY = 120;

/** `value` gets two readings and the seconds between them; null where there is nothing to tell. */
const CHARTS = [
  { title: "Generated", unit: "tok/s", help: "Tokens that the engine has written, per second, for all requests together.",
    value: (now, before, seconds) => (now.num_generation_tokens - before.num_generation_tokens) / seconds },
  { title: "Computed", unit: "tok/s", help: "Tokens that went through the model, per second: prompts and answers.",
    value: (now, before, seconds) => (now.num_computed_tokens - before.num_computed_tokens) / seconds },
  { title: "First token", unit: "ms", help: "From a request's arrival to its first token, on average.",
    value: (now, before) => mean(now, before, "first_token_time_s", "num_first_tokens") },
  { title: "Step", unit: "ms", help: "Time of one step, on average. In a step each running sequence gets a token or a part of its prompt.",
    value: (now, before) => mean(now, before, "step_time_s", "num_steps") },
  { title: "Queue", unit: "requests", help: "Requests that wait in the engine's queue.", value: (now) => now.num_waiting },
  { title: "Cache hits", unit: "%", help: "Prompt tokens of new requests that were found in the cache.",
    value: (now, before) => share(now, before, "prefix_cache_hits", "prefix_cache_queries") },
];

/** What limits a step, in words; {seqs}, {tokens} and {waiting} are numbers. Names that are not here are shown as they are. */
const LIMITS = {
  arrivals: "Nothing: every request is in the batch.",
  "kv cache": "KV cache: the next request needs more free blocks than there are. Waiting: {waiting}.",
  max_num_seqs: "Places: all {seqs} of --max-num-seqs are taken. Waiting: {waiting}.",
  "token budget": "Tokens in a step: --max-num-batched-tokens ({tokens}) is used up, so prompts are computed in several steps.",
};

/** Milliseconds for each of what was counted in between; null when there was none. */
function mean(now, before, time, count) {
  const number = now[count] - before[count];
  return number > 0 ? ((now[time] - before[time]) * 1000) / number : null;
}

/** Percent of what was counted in between; null when there was none. */
function share(now, before, part, whole) {
  const number = now[whole] - before[whole];
  return number > 0 ? ((now[part] - before[part]) * 100) / number : null;
}

/** What has grown most in between; null when nothing has. */
function mostOften(now, before) {
  const grown = Object.entries(now).map(([name, count]) => [count - (before[name] ?? 0), name]);
  const [count, name] = grown.reduce((most, one) => (one[0] > most[0] ? one : most), [0, null]);
  return count > 0 ? name : null;
}

/** The view of the engine. Tells `onState` the engine's state, or "unreachable", and `onError` what a request met. */
export class LiveView {
  #before = null;
  #charts = CHARTS.map((chart) => new Chart(chart));
  #timer = null;
  #asking = false;
  #last = null;
  #activity = null;
  #limits = {};
  #batch;
  #map = new KvMap((id) => this.#batch.open(id));

  constructor({ onState, onError, isOwn }) {
    this.onState = onState;
    this.onError = onError;
    this.#batch = new BatchView(isOwn);
    byId("charts").replaceChildren(...this.#charts.map((chart) => chart.figure));
    new ResizeObserver(() => this.draw()).observe(byId("live"));
  }

  /** Begin to ask. */
  start({ max_num_seqs: seqs, max_num_batched_tokens: tokens }) {
    this.#limits = { seqs: whole(seqs), tokens: whole(tokens) };
    if (this.#timer === null) this.#round();
  }

  /** Ask no more, and forget what other keys may not see. */
  stop() {
    clearTimeout(this.#timer);
    this.#timer = this.#before = this.#activity = this.#last = null;
    this.#batch.clear();
  }

  /** Ask now, for example because the view has been opened. */
  refresh() {
    this.draw();
    if (this.#timer !== null && !this.#asking) this.#ask(true); // a drawer may still be on its way
  }

  #round() {
    this.#timer = setTimeout(() => this.#round(), PERIOD_MS);
    if (document.hidden) this.#before = null;
    else if (!this.#asking) this.#ask();
  }

  async #ask(isWatched = isShown()) {
    this.#asking = true;
    try {
      const status = await get(isWatched ? "v1/stats?activity=true" : "v1/stats");
      if (this.#timer === null) return;
      this.onState(status.state);
      this.#take(status, performance.now() / 1000);
    } catch (error) {
      this.#before = null;
      if (error.status === undefined) this.onState("unreachable");
      else this.onError(error);
    } finally {
      this.#asking = false;
    }
  }

  #take({ stats, activity, num_restarts: numRestarts }, at) {
    byId("restarts").textContent = whole(numRestarts);
    if (activity) {
      this.#activity = activity;
      this.#batch.show(activity);
    }
    if (!stats) return;
    const before = this.#before;
    if (before && at - before.at < MIN_PERIOD_S) return this.draw(); // asked because the view was opened
    this.#before = { at, stats };
    this.#last = stats;
    const isLater = before !== null && stats.num_steps >= before.stats.num_steps; // a new core counts from zero
    const seconds = isLater ? at - before.at : 0;
    for (const chart of this.#charts) chart.push(isLater ? chart.value(stats, before.stats, seconds) : null);
    byId("running").textContent = whole(stats.num_running);
    byId("places").textContent = `of ${this.#limits.seqs}`;
    byId("waiting").textContent = whole(stats.num_waiting);
    byId("busy").textContent = isLater ? percent(Math.min(1, (stats.step_time_s - before.stats.step_time_s) / seconds)) : "–";
    const limit = isLater && mostOften(stats.constraint_steps, before.stats.constraint_steps);
    const words = limit ? inWords(limit, { ...this.#limits, waiting: whole(stats.num_waiting) }) : "Nothing: the engine is idle.";
    byId("constraint").textContent = isLater ? words : "–";
    byId("constraint").dataset.limit = limit || "idle";
    byId("preemptions").textContent = whole(stats.num_preemptions);
    byId("generated").textContent = whole(stats.num_generation_tokens);
    byId("hits").textContent = stats.prefix_cache_queries ? percent(stats.prefix_cache_hits / stats.prefix_cache_queries) : "–";
    this.draw();
  }

  /** Draw what is known, for example because the theme has changed. */
  draw() {
    if (!isShown()) return;
    for (const chart of this.#charts) chart.draw();
    if (!this.#last) return;
    byId("share").textContent = shareOf(this.#activity, this.#last);
    this.#drawMap(this.#last, rowsOf(this.#activity?.requests ?? []));
  }

  #drawMap({ num_total_blocks: total, num_free_blocks: free, num_cached_blocks: cached, num_shared_blocks: shared }, rows) {
    const counts = { shared, used: total - free - shared, cached, empty: free - cached };
    for (const [kind, count] of Object.entries(counts)) byId(`pages-${kind}`).textContent = whole(count);
    byId("pages-share").textContent = `${whole(total - free)} of ${whole(total)} blocks in use (${percent((total - free) / total)})`;
    this.#map.draw({ total, counts, sequences: rows.map(({ name, request, sequence }) => ({ id: request.id, name, own: sequence.own_blocks })) });
  }
}

/** False for the other tab, and in a closed drawer. */
const isShown = () => byId("live").checkVisibility({ checkVisibilityCSS: true });

function inWords(limit, numbers) {
  return (LIMITS[limit] ?? limit).replace(/\{(\w+)\}/g, (_, name) => numbers[name]);
}

/** What the asking key has of the engine, where others have something, too. */
function shareOf(activity, stats) {
  if (!activity || (activity.num_keys < 2 && activity.num_running >= stats.num_running)) return "";
  const own = `Your key has ${whole(activity.num_running)} of ${whole(stats.num_running)} running`;
  const queued = stats.num_waiting ? ` and ${whole(activity.num_waiting)} of ${whole(stats.num_waiting)} waiting` : "";
  const keys = activity.num_keys > 1 ? ` ${activity.num_keys} keys share the engine evenly.` : "";
  return `${own}${queued}.${keys} Requests of other keys are not listed.`;
}

/** One chart: its values, and the value under the pointer. */
class Chart {
  #values = [];
  #marked = null;
  #reading = el("span");
  #canvas = el("canvas", { role: "img" });

  constructor({ title, unit, help, value }) {
    Object.assign(this, { title, unit, value });
    const term = el("button", { type: "button", className: "term" }, title);
    term.dataset.help = help;
    this.figure = el("figure", {}, el("figcaption", {}, term, this.#reading), this.#canvas);
    this.#canvas.addEventListener("pointermove", (event) => this.#mark(ageAt(this.#canvas, event.clientX, CAPACITY)));
    this.#canvas.addEventListener("pointerleave", () => this.#mark(null));
  }

  push(value) {
    this.#values.push(value);
    if (this.#values.length > CAPACITY) this.#values.shift();
  }

  draw() {
    const said = this.#said();
    this.#reading.textContent = said;
    this.#canvas.setAttribute("aria-label", `${this.title}, last two minutes: ${said}, at most ${this.#text(Math.max(0, ...this.#values))}`);
    drawChart(this.#canvas, this.#values, CAPACITY, this.#marked);
  }

  #mark(age) {
    this.#marked = age;
    this.draw();
  }

  #said() {
    if (this.#marked === null) return this.#text(this.#values.findLast((value) => value !== null));
    return `${this.#marked} s ago: ${this.#text(this.#values.at(-1 - this.#marked))}`;
  }

  #text(value) {
    return value === undefined || value === null ? "–" : `${short(value)} ${this.unit}`;
  }
}

const whole = (value) => value.toLocaleString("en");
const percent = (part) => `${Math.round(part * 100)} %`;
