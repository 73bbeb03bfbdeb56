// Code with its syntax coloured: highlight.js finds the parts, and they become elements here.

import highlighter from "./vendor/highlight/core.min.js";
import bash from "./vendor/highlight/bash.min.js";
import c from "./vendor/highlight/c.min.js";
import cpp from "./vendor/highlight/cpp.min.js";
import css from "./vendor/highlight/css.min.js";
import diff from "./vendor/highlight/diff.min.js";
import go from "./vendor/highlight/go.min.js";
import java from "./vendor/highlight/java.min.js";
import javascript from "./vendor/highlight/javascript.min.js";
import json from "./vendor/highlight/json.min.js";
import python from "./vendor/highlight/python.min.js";
import rust from "./vendor/highlight/rust.min.js";
import sql from "./vendor/highlight/sql.min.js";
import typescript from "./vendor/highlight/typescript.min.js";
import xml from "./vendor/highlight/xml.min.js";
import yaml from "./vendor/highlight/yaml.min.js";

import { copyButton, el } from "./dom.js";

const LANGUAGES = { bash, c, cpp, css, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
const MAX_COLOURED = 50_000;

for (const [name, grammar] of Object.entries(LANGUAGES)) highlighter.registerLanguage(name, grammar);

/**
 * A block of code with its language and a button to copy it.
 * @param {string} text
 * @param {string} info What stands behind the fence; its first word is the language.
 */
export function codeBlock(text, info = "") {
  const language = info.trim().split(/\s+/, 1)[0].toLowerCase();
  const head = el("div", { className: "code-head" }, el("span", {}, language || "text"), copyButton(() => text));
  const code = el("code", {}, ...coloured(text, language));
  return el("div", { className: "code" }, head, el("pre", { tabIndex: 0 }, code));
}

function coloured(text, language) {
  if (!highlighter.getLanguage(language) || text.length > MAX_COLOURED) return [text];
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
