// Conversations as files: Markdown for people, JSON to take them elsewhere and back. Nothing here knows the page.

import { fenced, withFiles } from "./files.js";
import { newConversation, newId, pathOf } from "./tree.js";

const FORMAT = "quire-conversations";
const ROLES = new Set(["user", "assistant", "completion"]);
const TEXTS = ["prompt", "reasoning", "summary", "error", "warning", "view"];
const HEADINGS = { user: "You", assistant: "Answer", completion: "Completion" };

/** The shown path as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.settings?.system) parts.push(`## System prompt\n\n${conversation.settings.system}`);
  for (const message of pathOf(conversation)) {
    parts.push(`## ${HEADINGS[message.role]}`, withFiles((message.prompt ?? "") + message.text, message.files));
    for (const call of message.toolCalls ?? []) {
      parts.push(`Tool call: \`${call.name}\`\n\n${fenced(call.arguments, "json")}`);
      if (call.result !== undefined) parts.push(`Result:\n\n${fenced(call.result, "")}`);
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** Conversations with all their branches. */
export function toJson(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1)}\n`;
}

/**
 * The conversations in a file that `toJson` made, under new ids. Fields that are not known are dropped.
 * @throws {Error} that says what is wrong with the file
 */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file holds no conversations that this console has exported.");
  }
  return file.conversations.map(readConversation);
}

function readConversation(raw, index) {
  const wrong = (what) => new Error(`Conversation ${index + 1} cannot be read: ${what}.`);
  if (!Array.isArray(raw?.messages)) throw wrong("it has no messages");
  const ids = new Map([[null, null]]);
  const conversation = newConversation(textsOf(raw.settings));
  conversation.messages = raw.messages.map((message) => {
    if (!ROLES.has(message?.role) || typeof message.text !== "string") throw wrong("a message has no role or no text");
    if (!ids.has(message.parent)) throw wrong("a message comes before the one that it answers");
    const id = newId();
    const read = { id, parent: ids.get(message.parent), role: message.role, text: message.text };
    ids.set(message.id, id);
    return Object.assign(read, optional(message));
  });
  conversation.leaf = ids.get(raw.leaf) ?? conversation.messages.at(-1)?.id ?? null;
  conversation.title = typeof raw.title === "string" ? raw.title : "";
  if (Number.isFinite(raw.updatedAt)) conversation.updatedAt = raw.updatedAt;
  return conversation;
}

function optional(message) {
  const fields = {};
  for (const name of TEXTS) if (typeof message[name] === "string") fields[name] = message[name];
  if (isListOf(message.files, isFile)) fields.files = message.files;
  if (isListOf(message.toolCalls, isCall)) fields.toolCalls = message.toolCalls;
  if (isListOf(message.pieces, isPiece)) fields.pieces = message.pieces;
  return fields;
}

const textsOf = (raw) => Object.fromEntries(Object.entries(raw ?? {}).filter(([, value]) => ["string", "boolean"].includes(typeof value)));
const isListOf = (value, is) => Array.isArray(value) && value.every(is);
const isFile = (file) => typeof file?.name === "string" && typeof file.text === "string";
const isCall = (call) => typeof call?.name === "string" && typeof call.arguments === "string" && ["string", "undefined"].includes(typeof call.result);
const isPiece = (piece) => typeof piece?.text === "string" && isListOf(piece.tokens, isToken);
const isToken = (token) => isCandidate(token) && isListOf(token.candidates, isCandidate);
const isCandidate = (one) => typeof one?.text === "string" && (one.logprob === null || typeof one.logprob === "number");
