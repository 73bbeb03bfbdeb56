// Markdown as elements, built one by one from the parser's tokens: no text ever becomes markup.

import "./vendor/markdown-it.min.js";

import { codeBlock } from "./code.js";
import { el } from "./dom.js";

const parser = globalThis.markdownit({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

/** Elements that may be made; headings begin at the third level, below those of the page. */
const TAGS = new Set("p h1 h2 h3 h4 h5 h6 ul ol li blockquote table thead tbody tr th td strong em s".split(" "));
const HEADING = /^h([1-6])$/;
const DEFINITION = /^ {0,3}\[[^\]]+\]:/m;

/** The address if it leads to the web, else null. */
function webAddress(text) {
  const url = URL.canParse(text) ? new URL(text) : null;
  return url && ["http:", "https:"].includes(url.protocol) ? url.href : null;
}

function link(address) {
  const href = webAddress(address);
  return href ? el("a", { href, target: "_blank", rel: "noopener noreferrer" }) : el("span");
}

const LEAVES = {
  text: (token) => token.content,
  softbreak: () => el("br"),
  hardbreak: () => el("br"),
  hr: () => el("hr"),
  code_inline: (token) => el("code", {}, token.content),
  code_block: (token) => codeBlock(token.content),
  fence: (token) => codeBlock(token.content, token.info),
  inline: (token) => fragmentOf(token.children),
  image: (token) => {
    const made = link(token.attrGet("src"));
    made.append(`[image: ${token.content || "no description"}]`);
    return made;
  },
};

function elementOf(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (!TAGS.has(token.tag)) return el("span");
  const heading = HEADING.exec(token.tag);
  const made = el(heading ? `h${Math.min(6, Number(heading[1]) + 2)}` : token.tag);
  const align = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (align) made.style.textAlign = align[1];
  const start = token.attrGet("start");
  if (start !== null && token.tag === "ol") made.start = Number(start);
  return made;
}

/** Tokens as nodes. @returns {DocumentFragment} */
function fragmentOf(tokens) {
  const fragment = document.createDocumentFragment();
  const open = [fragment];
  for (const token of tokens) {
    if (token.nesting === 1) {
      const inner = token.hidden ? open.at(-1) : elementOf(token);
      if (!token.hidden) open.at(-1).append(inner.localName === "table" ? el("div", { className: "wide", tabIndex: 0 }, inner) : inner);
      open.push(inner);
    } else if (token.nesting === -1) {
      open.pop();
    } else {
      open.at(-1).append(LEAVES[token.type]?.(token) ?? token.content);
    }
  }
  return fragment;
}

/** A whole text as nodes. @returns {DocumentFragment} */
export const renderMarkdown = (text) => fragmentOf(parser.parse(text, {}));

/**
 * Markdown that grows. Blocks that are complete stay as they are; only the last one is rendered again.
 * The more a block costs to render, the less often it is: see `delay`.
 */
export class MarkdownStream {
  /** Milliseconds to wait before the next rendering, so that rendering takes at most a tenth of the time. */
  delay = 0;
  #settled = ""; // source of the blocks that stay
  #tail = ""; // source of the last block
  #drawn = []; // nodes of the last block

  /** @param {HTMLElement} element Where the nodes go. */
  constructor(element) {
    this.element = element;
  }

  /** Take in more source and show it. */
  append(text) {
    const startedAt = performance.now();
    this.#tail += text.replaceAll("\r", "");
    const tokens = parser.parse(this.#tail, {});
    const starts = tokens.flatMap((token, index) => (token.level === 0 && token.nesting >= 0 && token.map ? [index] : []));
    for (const node of this.#drawn) node.remove();
    const last = starts.at(-1) ?? 0;
    this.element.append(fragmentOf(tokens.slice(0, last)));
    const fragment = fragmentOf(tokens.slice(last));
    this.#drawn = [...fragment.childNodes];
    this.element.append(fragment);
    if (last > 0) this.#settle(tokens[last].map[0]);
    this.delay = (performance.now() - startedAt) * 9;
  }

  /** The source is complete. Definitions of links may have changed earlier blocks: then all is rendered once more. */
  end() {
    const source = this.#settled + this.#tail;
    if (DEFINITION.test(source)) this.element.replaceChildren(renderMarkdown(source));
  }

  #settle(line) {
    let at = 0;
    for (let lines = 0; lines < line; lines += 1) at = this.#tail.indexOf("\n", at) + 1;
    this.#settled += this.#tail.slice(0, at);
    this.#tail = this.#tail.slice(at);
  }
}

/** Cut the thinking that some models write before their answer from the answer. */
export function splitThinking(text) {
  const open = /^\s*<think>/.exec(text);
  if (!open) return { thinking: "", answer: text };
  const end = text.indexOf("</think>");
  if (end === -1) return { thinking: text.slice(open[0].length), answer: "" };
  return { thinking: text.slice(open[0].length, end).trim(), answer: text.slice(end + 8).trimStart() };
}
