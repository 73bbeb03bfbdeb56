// The KV cache: a bar of all blocks, and a map of those in use, which fill it however small a part of the cache they are.

import { byId, el } from "./dom.js";

const GAP_PX = 1.5;
const LABEL_PX = { width: 44, height: 18 };
const LEAST_SHARE = 0.004; // a smaller area could not be pointed at

/**
 * Rectangles that fill a box, in the order of their weights: a squarified treemap (Bruls, Huizing, van Wijk 2000), not
 * sorted, so that areas stay where they are while their weights change.
 * @param {number[]} weights
 * @returns {{x: number, y: number, width: number, height: number}[]} One for each weight above 0; null for others.
 */
export function areasOf(weights, width, height) {
  const areas = weights.map(() => null);
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  let left = weights.map((weight, index) => ({ index, area: (weight * width * height) / total })).filter(({ area }) => area > 0);
  let box = { x: 0, y: 0, width, height };
  while (left.length) {
    const side = Math.min(box.width, box.height);
    let count = 1;
    while (count < left.length && worstRatio(left.slice(0, count + 1), side) <= worstRatio(left.slice(0, count), side)) count += 1;
    box = place(left.slice(0, count), box, areas);
    left = left.slice(count);
  }
  return areas;
}

/** How far the least square rectangle of a row along `side` is from a square: 1 for a square. */
function worstRatio(row, side) {
  const depth = row.reduce((sum, { area }) => sum + area, 0) / side;
  return Math.max(...row.map(({ area }) => Math.max(area / depth / depth, (depth * depth) / area)));
}

/** Put a row along the shorter side of a box. @returns What is left of the box. */
function place(row, { x, y, width, height }, areas) {
  const isWide = width >= height;
  const depth = row.reduce((sum, { area }) => sum + area, 0) / (isWide ? height : width);
  let at = isWide ? y : x;
  for (const { index, area } of row) {
    const length = area / depth;
    areas[index] = isWide ? { x, y: at, width: depth, height: length } : { x: at, y, width: length, height: depth };
    at += length;
  }
  return isWide ? { x: x + depth, y, width: width - depth, height } : { x, y: y + depth, width, height: height - depth };
}

/**
 * The blocks in use, as parts {key, kind, blocks, label, help, request}; small ones are one part.
 * @param {object} counts Of the whole cache: shared, used.
 * @param {{id: string, name: string, own: number}[]} sequences Those that are known one by one.
 */
export function partsOf(counts, sequences) {
  const held = counts.shared + counts.used;
  const large = sequences.filter(({ own }) => own > 0 && own >= held * LEAST_SHARE);
  const rest = counts.used - large.reduce((sum, { own }) => sum + own, 0);
  const parts = [{ key: "shared", kind: "shared", blocks: counts.shared, label: "shared", help: "several sequences use them at once" }];
  for (const { id, name, own } of large) {
    parts.push({ key: name, kind: "used", blocks: own, label: name, request: id, help: `sequence ${name} alone uses them` });
  }
  parts.push({ key: "rest", kind: "used", blocks: Math.max(0, rest), label: "others", help: "other sequences use them" });
  return parts.filter(({ blocks }) => blocks > 0);
}

/** The map on the page; `onChoose` gets the id of a request whose area was clicked. */
export class KvMap {
  #area = byId("pages");
  #tiles = new Map();

  constructor(onChoose) {
    this.#area.addEventListener("click", (event) => {
      const { request } = event.target.closest(".tile")?.dataset ?? {};
      if (request) onChoose(request);
    });
  }

  /** Draw {total, counts, sequences}. */
  draw({ total, counts, sequences }) {
    const parts = partsOf(counts, sequences);
    const { clientWidth: width, clientHeight: height } = this.#area;
    const areas = areasOf(parts.map(({ blocks }) => blocks), width, height);
    const tiles = new Map(parts.map((part, index) => [part.key, this.#tile(part, areas[index])]));
    for (const [key, tile] of this.#tiles) if (!tiles.has(key)) tile.remove();
    this.#area.append(...[...tiles.values()].filter((tile) => !tile.isConnected));
    this.#tiles = tiles;
    this.#area.classList.toggle("nothing", parts.length === 0);
    const said = Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ");
    this.#area.setAttribute("aria-label", `KV cache, ${total} blocks: ${said}`);
    byId("capacity").replaceChildren(...Object.entries(counts).map(([kind, count]) => share(kind, count / total)));
  }

  #tile({ key, kind, blocks, label, help, request }, { x, y, width, height }) {
    const tile = this.#tiles.get(key) ?? el("div");
    tile.className = `tile ${kind}`;
    const size = { left: x, top: y, width: Math.max(1, width - GAP_PX), height: Math.max(1, height - GAP_PX) };
    for (const [name, value] of Object.entries(size)) tile.style[name] = `${value.toFixed(1)}px`;
    tile.textContent = width >= LABEL_PX.width && height >= LABEL_PX.height ? label : "";
    tile.dataset.help = `${blocks.toLocaleString("en")} ${blocks === 1 ? "block" : "blocks"}: ${help}.`;
    if (request) tile.dataset.request = request;
    return tile;
  }
}

function share(kind, part) {
  const made = el("i", { className: kind });
  made.style.flexGrow = part.toFixed(5);
  return made;
}
