// A conversation as a tree of messages: an edited or regenerated message is a sibling of the one before.
// The shown path runs from the root to `leaf`. Nothing here knows the page.

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string|null} parent
 * @property {"user"|"assistant"|"completion"} role `completion`: a prompt and the text that goes on from it.
 * @property {string} text
 * @property {string} [prompt] Of a completion.
 * @property {import("./files.js").TextFile[]} [files] Of a question.
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string, result?: string}[]} [toolCalls]
 * @property {{text: string, tokens: object[]}[]} [pieces] The text cut into tokens, where probabilities were asked for.
 * @property {string} [summary] How it went: tokens, times, why it ended.
 * @property {object} [timing] Where the time went, as the server says it (`why`).
 * @property {string} [error]
 * @property {string} [warning]
 * @property {string} [view] "markdown" or "tokens", where the reader has chosen.
 * @property {boolean} [running]
 * @property {number} [revision] Of several states of the message, the one with the highest counts.
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title Empty until the first message, or the reader, names it.
 * @property {number} updatedAt Milliseconds since 1970.
 * @property {Message[]} messages In the order in which they were made.
 * @property {string|null} leaf
 * @property {string[]} [gone] Ids of deleted messages: another tab may still have them.
 * @property {object} settings The fields of the settings form.
 */

const MAX_TITLE = 60;

/** An id that nothing else has. (`crypto.randomUUID` exists only on secure pages.) */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @returns {Conversation} */
export function newConversation(settings = {}) {
  return { id: newId(), title: "", updatedAt: Date.now(), messages: [], leaf: null, settings };
}

/** @returns {Message|undefined} */
export const find = (conversation, id) => conversation.messages.find((message) => message.id === id);

/** The messages that are shown, from the first to the last. @returns {Message[]} */
export function pathOf(conversation, id = conversation.leaf) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const path = [];
  for (let at = byId.get(id); at; at = byId.get(at.parent)) path.unshift(at);
  return path;
}

/** A message and its alternatives, the oldest first. @returns {Message[]} */
export function siblingsOf(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent);
}

/** Append a message below `parent` and show it. @returns {Message} */
export function add(conversation, fields, parent = conversation.leaf) {
  const message = { id: newId(), parent, text: "", ...fields };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.title ||= titleFrom((message.prompt ?? message.text) || (message.files?.[0].name ?? ""));
  return message;
}

/** Show a message, and below it what came last. */
export function choose(conversation, id) {
  let leaf = id;
  for (;;) {
    const child = conversation.messages.findLast((message) => message.parent === leaf);
    if (!child) break;
    leaf = child.id;
  }
  conversation.leaf = leaf;
}

/** The ids of a message and of all below it. @returns {Set<string>} */
export function subtreeOf(conversation, id) {
  const ids = new Set([id]);
  for (const message of conversation.messages) if (ids.has(message.parent)) ids.add(message.id); // parents come first
  return ids;
}

/** Delete a message and all below it; a sibling, or its parent, is shown instead. */
export function remove(conversation, id) {
  const message = find(conversation, id);
  const gone = subtreeOf(conversation, id);
  const siblings = siblingsOf(conversation, message);
  const at = siblings.indexOf(message);
  const next = siblings[at - 1] ?? siblings[at + 1];
  conversation.messages = conversation.messages.filter((other) => !gone.has(other.id));
  conversation.gone = [...(conversation.gone ?? []), ...gone];
  if (!gone.has(conversation.leaf)) return;
  if (next) choose(conversation, next.id);
  else conversation.leaf = message.parent;
}

/**
 * Take over what another tab has made of the same conversation: its new messages, newer states of others, and what it
 * has deleted. The message that is being written here stays as it is.
 */
export function merge(conversation, other, writing = null) {
  const gone = new Set([...(conversation.gone ?? []), ...(other.gone ?? [])]);
  for (const message of other.messages) {
    const own = find(conversation, message.id);
    if (!own) conversation.messages.push(message);
    else if (own !== writing && isNewer(message, own)) Object.assign(own, message);
  }
  conversation.messages = conversation.messages.filter((message) => !gone.has(message.id));
  conversation.gone = [...gone];
  if (gone.has(conversation.leaf)) conversation.leaf = conversation.messages.at(-1)?.id ?? null;
}

/** Note that a message has changed, so that its state replaces those that other tabs have kept. */
export function changed(message) {
  message.revision = (message.revision ?? 0) + 1;
}

function isNewer(message, than) {
  const [revision, other] = [message.revision ?? 0, than.revision ?? 0];
  return revision > other || (revision === other && message.text.length > than.text.length);
}

function titleFrom(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}
