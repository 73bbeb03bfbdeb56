// The conversations that this browser keeps: their list, and what can be done with one.

import { askText, confirmThat, tell } from "./dialogs.js";
import { button, byId, download, el } from "./dom.js";
import { fromJson, toJson, toMarkdown } from "./portable.js";
import { all, forget, isKept, keepMerged, load } from "./store.js";
import { merge, newConversation } from "./tree.js";

/** @typedef {import("./tree.js").Conversation} Conversation */

export class Conversations {
  /** @type {Conversation} The one that is shown. */
  current = newConversation();
  #list = [];
  #isOpen = false;
  #channel = new BroadcastChannel("quire-conversations");

  /**
   * @param {object} on
   * @param {(conversation: Conversation) => void} on.onShow The reader has chosen another conversation.
   * @param {(conversation: Conversation) => void} on.onRefresh Another tab has changed the one that is shown.
   * @param {(conversation: Conversation) => void} on.onDelete
   * @param {() => {conversation: Conversation, message: object}|null} on.running What is being answered.
   * @param {() => object} on.settings
   */
  constructor(on) {
    this.on = on;
    const click = (id, does) => byId(id).addEventListener("click", () => does.call(this));
    click("new", this.startNew);
    click("rename", this.#rename);
    click("export-markdown", () => save(this.current, "md", toMarkdown(this.current), "text/markdown"));
    click("export-json", () => save(this.current, "json", toJson([this.current]), "application/json"));
    click("export-all", async () => save(null, "json", toJson(await all("conversations")), "application/json"));
    click("delete", this.#delete);
    click("delete-all", this.#deleteAll);
    click("import", () => byId("import-file").click());
    byId("import-file").addEventListener("change", () => this.#import());
    this.#channel.addEventListener("message", ({ data }) => this.#changedElsewhere(data));
  }

  /** Read what is kept, and show the conversation that was last used. */
  async open() {
    this.#isOpen = true;
    if (!(await isKept())) unkept("This browser lets pages keep nothing. Conversations last until you close the page.");
    try {
      await this.#readList();
    } catch (error) {
      unkept(`The conversations in this browser could not be read (${error.message}).`);
    }
    if (this.current.messages.length) this.#list = [this.current, ...this.#list.filter(({ id }) => id !== this.current.id)];
    if (this.current.messages.length) this.#draw(); // something was sent before this came: it stays on the screen
    else if (this.#list.length) this.show(this.#list[0]);
    else this.startNew();
  }

  /** Forget what is on the screen; what the browser keeps stays. */
  close() {
    this.#isOpen = false;
    this.#list = [];
    this.current = newConversation();
    byId("conversation-list").replaceChildren();
    byId("title").textContent = "";
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    this.current = conversation;
    this.#draw();
    this.on.onShow(conversation);
  }

  /** Begin an empty conversation. It is kept as soon as it has a message. */
  startNew() {
    this.show(newConversation(this.on.settings()));
  }

  /** Keep a conversation as it is now. One that has been deleted stays deleted. */
  async keep(conversation) {
    const isListed = this.#list.includes(conversation);
    if (conversation.isDeleted || (!conversation.messages.length && !isListed)) return;
    if (this.#isOpen && !isListed) this.#list.unshift(conversation);
    if (this.#isOpen) this.#draw();
    try {
      const { message } = this.on.running() ?? {};
      await keepMerged("conversations", conversation, (kept) => merge(conversation, kept, message));
      this.#channel.postMessage(conversation.id);
    } catch (error) {
      unkept(`This conversation could not be kept (${error.message}). Save it as a file, or delete others.`);
    }
  }

  /** Note that a conversation was used now, which brings it to the top. */
  touch(conversation) {
    conversation.updatedAt = Date.now();
    this.#sort();
  }

  async #readList() {
    this.#list = await all("conversations");
    for (const conversation of this.#list) for (const message of conversation.messages) interrupted(message);
    this.#sort();
    this.#draw();
  }

  #sort() {
    this.#list.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  #draw() {
    byId("title").textContent = this.current.title || "New conversation";
    const isNew = !this.#list.includes(this.current);
    for (const id of ["rename", "export-markdown", "export-json", "delete"]) byId(id).disabled = isNew;
    for (const id of ["export-all", "delete-all"]) byId(id).disabled = !this.#list.length;
    const focused = document.activeElement?.dataset.conversation;
    byId("conversation-list").replaceChildren(...this.#list.map((one) => this.#row(one)));
    if (focused) byId("conversation-list").querySelector(`[data-conversation="${focused}"]`)?.focus();
  }

  #row(conversation) {
    const row = button(conversation.title || "Untitled", () => this.show(conversation));
    row.dataset.conversation = conversation.id;
    row.title = new Date(conversation.updatedAt).toLocaleString();
    if (conversation === this.current) row.setAttribute("aria-current", "true");
    return el("li", {}, row);
  }

  async #rename() {
    const { current } = this;
    const title = await askText("Name of the conversation", current.title, "Rename");
    if (!title) return;
    current.title = title;
    await this.keep(current);
  }

  async #delete() {
    const { current } = this;
    if (!(await confirmThat(`Delete "${current.title || "Untitled"}" with all its versions?`, "Delete"))) return;
    await this.#forget(current);
    if (this.#list.length) this.show(this.#list[0]);
    else this.startNew();
  }

  async #deleteAll() {
    const { length } = this.#list;
    const what = length === 1 ? "the only conversation" : `all ${length} conversations`;
    if (!(await confirmThat(`Delete ${what} in this browser?`, "Delete all"))) return;
    for (const conversation of [...this.#list]) await this.#forget(conversation);
    this.startNew();
  }

  async #forget(conversation) {
    conversation.isDeleted = true;
    this.on.onDelete(conversation);
    this.#list = this.#list.filter((one) => one !== conversation);
    await forget("conversations", conversation.id);
    this.#channel.postMessage(conversation.id);
  }

  async #import() {
    const [file] = byId("import-file").files;
    byId("import-file").value = "";
    if (!file) return;
    try {
      const read = fromJson(await file.text());
      for (const conversation of read) await this.keep(conversation);
      this.#sort();
      if (read.length) this.show(read[0]);
    } catch (error) {
      await tell(error.message);
    }
  }

  /** Another tab has changed a conversation: take over what it kept. What this tab is writing goes on. */
  async #changedElsewhere(id) {
    if (!this.#isOpen) return;
    const fresh = await load("conversations", id);
    const running = this.on.running();
    if (running?.conversation.id === id) {
      if (fresh) merge(running.conversation, fresh, running.message);
      return;
    }
    this.#list = this.#list.filter((one) => one.id !== id);
    if (fresh) this.#list.push(fresh);
    this.#sort();
    if (this.current.id === id && fresh) {
      this.current = fresh;
      this.on.onRefresh(fresh);
    } else if (this.current.id === id) {
      this.startNew();
    }
    this.#draw();
  }
}

function unkept(text) {
  byId("unkept").textContent = text;
  byId("unkept").hidden = false;
}

/** An answer that was being written when the page was closed will not go on. */
function interrupted(message) {
  if (!message.running) return;
  message.running = false;
  message.summary = "interrupted";
}

function save(conversation, ending, text, type) {
  const name = conversation?.title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-+|-+$/g, "") || "conversations";
  download(`${name}.${ending}`, text, type);
}
