// The engine as it is now, once a second: what /v1/stats says, and the difference to what it said before.

import { get } from "./api.js";
import { drawPages, drawSparkline } from "./charts.js";

const PERIOD_MS = 1000;
const CAPACITY = 120;
const byId = (id) => document.getElementById(id);

const CHARTS = [
  { title: "Generated", unit: "tok/s", value: (now, before, seconds) => (now.num_generation_tokens - before.num_generation_tokens) / seconds },
  { title: "Computed", unit: "tok/s", value: (now, before, seconds) => (now.num_computed_tokens - before.num_computed_tokens) / seconds },
  { title: "First token", unit: "ms", value: (now, before) => mean(now, before, "first_token_time_s", "num_first_tokens") },
  { title: "Step", unit: "ms", value: (now, before) => mean(now, before, "step_time_s", "num_steps") },
];

/** Milliseconds for each of what was counted in between; null when there was none. */
function mean(now, before, time, count) {
  const number = now[count] - before[count];
  return number > 0 ? ((now[time] - before[time]) * 1000) / number : null;
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
  #charts = CHARTS.map((chart) => ({ ...chart, values: [], ...chartElements(chart) }));
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
    for (const chart of this.#charts) {
      chart.values.push(isLater ? chart.value(stats, before.stats, seconds) : null);
      if (chart.values.length > CAPACITY) chart.values.shift();
    }
    byId("running").textContent = whole(stats.num_running);
    byId("waiting").textContent = whole(stats.num_waiting);
    byId("busy").textContent = isLater ? percent(Math.min(1, (stats.step_time_s - before.stats.step_time_s) / seconds)) : "–";
    byId("constraint").textContent = (isLater && mostOften(stats.constraint_steps, before.stats.constraint_steps)) || "–";
    byId("preemptions").textContent = whole(stats.num_preemptions);
    byId("hits").textContent = stats.prefix_cache_queries ? percent(stats.prefix_cache_hits / stats.prefix_cache_queries) : "–";
    this.draw();
  }

  /** Draw what is known, for example because the theme has changed. */
  draw() {
    if (!byId("live").clientWidth) return; // hidden
    for (const { canvas, reading, values, unit } of this.#charts) {
      const newest = values.findLast((value) => value !== null);
      reading.textContent = newest === undefined ? "–" : `${short(newest)} ${unit}`;
      drawSparkline(canvas, values, CAPACITY);
    }
    if (this.#last) drawMap(this.#last);
  }
}

function drawMap(stats) {
  const used = stats.num_total_blocks - stats.num_free_blocks;
  const counts = {
    shared: stats.num_shared_blocks,
    used: used - stats.num_shared_blocks,
    cached: stats.num_cached_blocks,
    empty: stats.num_free_blocks - stats.num_cached_blocks,
  };
  const parts = Object.entries(counts).map(([name, count]) => {
    byId(`pages-${name}`).textContent = whole(count);
    return { count, color: getComputedStyle(document.querySelector(`.swatch.${name}`)).backgroundColor };
  });
  const said = Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ");
  byId("pages").setAttribute("aria-label", `KV cache, ${stats.num_total_blocks} blocks: ${said}`);
  drawPages(byId("pages"), parts);
}

function chartElements({ title }) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const reading = document.createElement("span");
  const canvas = document.createElement("canvas");
  canvas.setAttribute("aria-hidden", "true");
  caption.append(title, reading);
  figure.append(caption, canvas);
  return { figure, reading, canvas };
}

const whole = (value) => value.toLocaleString("en");
const percent = (share) => `${Math.round(share * 100)} %`;
const short = (value) => (value >= 100 || value === 0 ? whole(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2));
