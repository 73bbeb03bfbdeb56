// Code with its syntax coloured: highlight.js finds the parts, and they become elements here. It is loaded, language by
// language, when there is code to colour.

import { copyButton, el } from "./dom.js";

const LANGUAGES = "bash c cpp css diff go java javascript json python rust sql typescript xml yaml".split(" ");

/** Other names of languages, as they stand behind fences. */
export const ALIASES = {
  sh: "bash", shell: "bash", zsh: "bash", "c++": "cpp", cc: "cpp", h: "c", hpp: "cpp", patch: "diff", golang: "go",
  js: "javascript", jsx: "javascript", mjs: "javascript", py: "python", rs: "rust", ts: "typescript", tsx: "typescript",
  html: "xml", svg: "xml", xhtml: "xml", yml: "yaml", jsonc: "json",
};

/** Languages that are written inside others. */
const INSIDE = { xml: ["css", "javascript"] };
const MAX_COLOURED = 50_000;

let highlighter = null;
const loading = new Map(); // by language

/** Load what colours a language; true when it is one that is known. */
export function loadLanguage(language) {
  if (!LANGUAGES.includes(language)) return Promise.resolve(false);
  if (!loading.has(language)) {
    const loads = fetchLanguage(language);
    loading.set(language, loads);
    loads.catch(() => loading.delete(language)); // the server may be back for the next block
  }
  return loading.get(language);
}

async function fetchLanguage(language) {
  const [core, ...grammars] = await Promise.all(
    ["core", language, ...(INSIDE[language] ?? [])].map((name) => import(`./vendor/highlight/${name}.min.js`)));
  highlighter = core.default;
  [language, ...(INSIDE[language] ?? [])].forEach((name, index) => highlighter.registerLanguage(name, grammars[index].default));
  return true;
}

/**
 * A block of code with its language and a button to copy it. It is coloured at once, or as soon as its language is there.
 * @param {string} text
 * @param {string} info What stands behind the fence; its first word is the language.
 */
export function codeBlock(text, info = "") {
  const name = info.trim().split(/\s+/, 1)[0].toLowerCase();
  const language = ALIASES[name] ?? name;
  const head = el("div", { className: "code-head" }, el("span", {}, name || "text"), copyButton(() => text));
  const code = el("code", {}, text);
  if (text.length <= MAX_COLOURED) colour(code, text, language);
  return el("div", { className: "code" }, head, el("pre", { tabIndex: 0 }, code));
}

function colour(code, text, language) {
  const paint = () => code.replaceChildren(...coloured(text, language));
  if (highlighter?.getLanguage(language)) paint();
  else loadLanguage(language).then((isKnown) => isKnown && paint(), () => {}); // without colours it can be read, too
}

function coloured(text, language) {
  const { _emitter: emitter } = highlighter.highlight(text, { language, ignoreIllegals: true });
  return emitter.rootNode.children.map(partOf);
}

/** A part is text, or a node of parts that may have a scope such as "title.function". */
function partOf(part) {
  if (typeof part === "string") return part;
  const span = el("span", {}, ...part.children.map(partOf));
  if (part.scope && !part.scope.startsWith("language:")) span.className = `hl-${part.scope.split(".")[0]}`;
  return span;
}
