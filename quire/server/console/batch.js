// The batch and the queue: one row for each sequence, with its progress; a row opens to the timeline of its request.

import { byId, el } from "./dom.js";
import { duration, timelineOf } from "./timeline.js";

const MAX_ENDED = 6;
const MAX_AGE_S = 1.5;
const STATES = {
  queued: "queued", preempted: "preempted", prompt: "reading", output: "writing", ended: "ended",
};

/** Sequences of a report, each with its request: what the rows are made of. */
export function rowsOf(requests) {
  return requests.flatMap((request) =>
    request.sequences.map((sequence) => ({ key: `${request.id}/${sequence.branch}`, name: nameOf(request, sequence), request, sequence })));
}

/** A few characters that tell sequences apart. */
function nameOf({ id, n }, { branch }) {
  const [request, prompt] = id.split("-");
  return request.slice(0, 5) + (prompt && prompt !== "0" ? `-${prompt}` : "") + (n > 1 ? `.${branch + 1}` : "");
}

export class BatchView {
  #rows = new Map(); // by key
  #ended = [];

  /** @param {(id: string) => boolean} isOwn Whether this page waits for the request. */
  constructor(isOwn) {
    this.isOwn = isOwn;
  }

  /** Show a report; without one, nothing. A row that has the focus keeps it wherever it moves. */
  show(activity) {
    const focused = document.activeElement;
    this.#show(activity);
    if (focused !== document.activeElement && focused.isConnected && focused.closest(".rows")) focused.focus({ preventScroll: true });
  }

  #show(activity) {
    const all = activity ? rowsOf(activity.requests) : [];
    const isWaiting = ({ sequence }) => sequence.state === "queued" || sequence.state === "preempted";
    const [waiting, running] = [all.filter(isWaiting), all.filter((row) => !isWaiting(row))];
    this.#noteEnds(new Set(all.map(({ key }) => key)));
    for (const row of all) this.#rowOf(row.key).draw(row, this.isOwn(row.request.id));
    const elements = (rows) => rows.map(({ key }) => this.#rows.get(key).element);
    setChildren(byId("batch"), elements(running));
    setChildren(byId("queue"), elements(waiting));
    setChildren(byId("ended"), this.#ended.map((row) => row.element));
    byId("queue-part").hidden = !waiting.length;
    byId("ended-part").hidden = !this.#ended.length;
    byId("batch-empty").hidden = running.length > 0;
    byId("batch-more").textContent = activity ? beyond(activity, running.length, waiting.length) : "";
  }

  /** Forget all rows. */
  clear() {
    this.#rows.clear();
    this.#ended = [];
    this.show(null);
  }

  /** Open the first row of a request. */
  open(id) {
    const row = [...this.#rows.values()].find((one) => one.id === id);
    row?.toggle(true);
    row?.head.focus();
  }

  #rowOf(key) {
    if (!this.#rows.has(key)) this.#rows.set(key, new Row());
    return this.#rows.get(key);
  }

  /** Rows that are not in the report any more have ended; the latest of them stay for a while. */
  #noteEnds(present) {
    for (const [key, row] of this.#rows) {
      if (present.has(key)) continue;
      this.#rows.delete(key);
      row.end();
      this.#ended.unshift(row);
    }
    this.#ended.length = Math.min(this.#ended.length, MAX_ENDED);
  }
}

/** What else there is to say about a report: sequences that it counts but does not list, and its age. */
function beyond({ num_running: running, num_waiting: waiting, age_s: age }, shownRunning, shownWaiting) {
  const parts = age > MAX_AGE_S ? [`${duration(age)} ago: the engine is in a long step`] : [];
  if (running > shownRunning) parts.push(`${running - shownRunning} more running`);
  if (waiting > shownWaiting) parts.push(`${waiting - shownWaiting} more waiting`);
  return parts.join(", ");
}

/** Put elements into a list, moving only those that are not in their place: focus and selection stay. */
function setChildren(list, elements) {
  elements.forEach((element, index) => {
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
  });
  while (list.children.length > elements.length) list.lastElementChild.remove();
}

class Row {
  #name = el("span", { className: "name" });
  #state = el("span", { className: "state-name" });
  #prompt = new Bar("prompt");
  #output = new Bar("output");
  #details = el("div", { className: "details", hidden: true });
  #row = null;

  constructor() {
    this.head = el("button", { type: "button", className: "sequence", "aria-expanded": "false" },
      this.#name, this.#state, this.#prompt.element, this.#output.element);
    this.head.addEventListener("click", () => this.toggle());
    this.element = el("li", {}, this.head, this.#details);
  }

  get id() {
    return this.#row.request.id;
  }

  /** Show how far a sequence is. */
  draw(row, isOwn) {
    this.#row = row;
    const { request, sequence } = row;
    this.element.dataset.state = sequence.state;
    this.#name.textContent = row.name;
    this.#name.classList.toggle("own", isOwn);
    if (isOwn) this.#name.title = "The answer on this page";
    this.#state.textContent = STATES[sequence.state] ?? sequence.state;
    const computed = Math.min(sequence.computed_tokens, request.prompt_tokens);
    this.#prompt.draw(computed, request.prompt_tokens, Math.min(request.cached_tokens ?? 0, computed));
    this.#output.draw(sequence.output_tokens, request.max_tokens);
    this.#drawDetails();
  }

  /** It is in no report any more. */
  end() {
    this.element.dataset.state = "ended";
    this.#state.textContent = STATES.ended;
    this.#output.end(); // a report came before the end, so there may have been more
  }

  /** Open or close the timeline. */
  toggle(open = this.#details.hidden) {
    this.#details.hidden = !open;
    this.head.setAttribute("aria-expanded", open);
    this.#drawDetails();
  }

  #drawDetails() {
    if (this.#details.hidden) return;
    const { request, sequence } = this.#row;
    const speed = request.decode_s && sequence.output_tokens > 1 ? `, ${((sequence.output_tokens - 1) / request.decode_s).toFixed(1)} a second` : "";
    const shared = sequence.blocks - sequence.own_blocks;
    this.#details.replaceChildren(timelineOf(request, [
      ["Output tokens", `${sequence.output_tokens} of at most ${request.max_tokens.toLocaleString("en")}${speed}`],
      ["KV blocks", `${sequence.blocks}${shared ? `, ${shared} of them shared` : ""}`],
      ["Request", request.id],
    ]));
  }
}

/** How much of something is done, with its numbers. */
class Bar {
  #done = el("i", { className: "done" });
  #cached = el("i", { className: "cached" });
  #text = el("span", { className: "count" });

  constructor(kind) {
    const track = el("span", { className: "track", "aria-hidden": "true" }, this.#cached, this.#done);
    this.element = el("span", { className: `progress of-${kind}` }, track, this.#text);
    this.kind = kind;
  }

  /** What is shown is the least that was done. */
  end() {
    this.#text.textContent = `at least ${this.#text.textContent}`;
  }

  draw(done, whole, cached = 0) {
    this.#cached.style.width = `${((cached / whole) * 100).toFixed(2)}%`;
    this.#done.style.width = `${(((done - cached) / whole) * 100).toFixed(2)}%`;
    const counts = `${done.toLocaleString("en")} / ${whole.toLocaleString("en")}`;
    this.#text.textContent = this.kind === "prompt" ? `${counts} prompt` : `${counts} output`;
  }
}
