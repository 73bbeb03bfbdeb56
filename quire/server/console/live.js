// The engine as it is now, once a second: what /v1/stats says, and the difference to what it said before.

import { get } from "./api.js";
import { ageAt, drawChart, drawPages, short, zoomOf } from "./charts.js";
import { byId, el } from "./dom.js";

const PERIOD_MS = 1000;
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

/** What limits a step, in words. Names that are not here are shown as they are. */
const LIMITS = {
  arrivals: "nothing: all requests are in the batch",
  "kv cache": "KV cache: too few free blocks for the next request",
  max_num_seqs: "--max-num-seqs: no more sequences at once",
  "token budget": "--max-num-batched-tokens: prompts wait for the next step",
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

  constructor({ onState, onError }) {
    this.onState = onState;
    this.onError = onError;
    byId("charts").replaceChildren(...this.#charts.map((chart) => chart.figure));
    new ResizeObserver(() => this.draw()).observe(byId("live"));
  }

  /** Begin to ask. */
  start() {
    if (this.#timer === null) this.#round();
  }

  /** Ask no more. */
  stop() {
    clearTimeout(this.#timer);
    this.#timer = this.#before = null;
  }

  #round() {
    this.#timer = setTimeout(() => this.#round(), PERIOD_MS);
    if (document.hidden) this.#before = null;
    else if (!this.#asking) this.#ask();
  }

  async #ask() {
    this.#asking = true;
    try {
      const status = await get("v1/stats");
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

  #take({ stats, num_restarts: numRestarts }, at) {
    byId("restarts").textContent = whole(numRestarts);
    if (!stats) return;
    const before = this.#before;
    this.#before = { at, stats };
    this.#last = stats;
    const isLater = before !== null && stats.num_steps >= before.stats.num_steps; // a new core counts from zero
    const seconds = isLater ? at - before.at : 0;
    for (const chart of this.#charts) chart.push(isLater ? chart.value(stats, before.stats, seconds) : null);
    byId("running").textContent = whole(stats.num_running);
    byId("waiting").textContent = whole(stats.num_waiting);
    byId("busy").textContent = isLater ? percent(Math.min(1, (stats.step_time_s - before.stats.step_time_s) / seconds)) : "–";
    const limit = isLater && mostOften(stats.constraint_steps, before.stats.constraint_steps);
    byId("constraint").textContent = limit ? LIMITS[limit] ?? limit : "nothing: the engine is idle";
    byId("preemptions").textContent = whole(stats.num_preemptions);
    byId("generated").textContent = whole(stats.num_generation_tokens);
    byId("hits").textContent = stats.prefix_cache_queries ? percent(stats.prefix_cache_hits / stats.prefix_cache_queries) : "–";
    this.draw();
  }

  /** Draw what is known, for example because the theme has changed. */
  draw() {
    if (!byId("live").clientWidth) return; // hidden
    for (const chart of this.#charts) chart.draw();
    if (this.#last) drawMap(this.#last);
  }
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

function drawMap(stats) {
  const { num_total_blocks: total, num_free_blocks: free, num_cached_blocks: cached, num_shared_blocks: shared } = stats;
  const counts = { shared, used: total - free - shared, cached, empty: free - cached };
  const held = total - counts.empty;
  const { blocks, size, perSquare } = zoomOf(held, total);
  const parts = Object.entries(counts).map(([name, count]) => {
    byId(`pages-${name}`).textContent = whole(count);
    return { count, color: getComputedStyle(document.querySelector(`.swatch.${name}`)).backgroundColor };
  });
  parts.at(-1).count = blocks - held; // the map shows the first `blocks` of the whole
  const said = Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ");
  byId("pages").setAttribute("aria-label", `KV cache, ${total} blocks: ${said}`);
  byId("pages-share").textContent = `${whole(total - free)} of ${whole(total)} blocks in use (${percent((total - free) / total)})`;
  const zoom = blocks < total ? `Shows ${whole(blocks)} of ${whole(total)} blocks; the others are empty.` : "Shows all blocks.";
  byId("pages-scale").textContent = `${zoom} One square is ${perSquare === 1 ? "one block" : `${perSquare} blocks`}.`;
  drawPages(byId("pages"), parts, size);
}

const whole = (value) => value.toLocaleString("en");
const percent = (part) => `${Math.round(part * 100)} %`;
