// The conversations that this browser keeps: their list, and what can be done with one.

import { askText, confirmThat, tell } from "./dialogs.js";
import { button, byId, download, el } from "./dom.js";
import { fromJson, toJson, toMarkdown } from "./portable.js";
import { all, forget, isKept, keep, load } from "./store.js";
import { newConversation } from "./tree.js";

/** @typedef {import("./tree.js").Conversation} Conversation */

export class Conversations {
  /** @type {Conversation} The one that is shown. */
  current = newConversation();
  #list = [];
  #channel = new BroadcastChannel("quire-conversations");

  /**
   * @param {{onShow: (conversation: Conversation) => void, onDelete: (conversation: Conversation) => void,
   *   isBusy: (id: string) => boolean, settings: () => object}} on
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
    click("import", () => byId("import-file").click());
    byId("import-file").addEventListener("change", () => this.#import());
    this.#channel.addEventListener("message", ({ data }) => this.#changedElsewhere(data));
  }

  /** Read what is kept, and show the conversation that was last used. */
  async open() {
    byId("unkept").hidden = await isKept();
    await this.#readList();
    if (this.#list.length) this.show(this.#list[0]);
    else this.startNew();
  }

  /** Forget what is on the screen; what the browser keeps stays. */
  close() {
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
    if (conversation.isDeleted || (!conversation.messages.length && !this.#list.includes(conversation))) return;
    if (!this.#list.includes(conversation)) this.#list.unshift(conversation);
    this.#draw();
    await keep("conversations", conversation);
    this.#channel.postMessage(conversation.id);
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
    byId("export-all").disabled = !this.#list.length;
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
    current.isDeleted = true;
    this.on.onDelete(current);
    this.#list = this.#list.filter((one) => one !== current);
    await forget("conversations", current.id);
    this.#channel.postMessage(current.id);
    if (this.#list.length) this.show(this.#list[0]);
    else this.startNew();
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

  /** Another tab has changed a conversation: take over what it kept, unless this tab is writing to it. */
  async #changedElsewhere(id) {
    if (this.on.isBusy(id) || byId("console").hidden) return;
    const fresh = await load("conversations", id);
    this.#list = this.#list.filter((one) => one.id !== id);
    if (fresh) this.#list.push(fresh);
    this.#sort();
    if (this.current.id !== id) this.#draw();
    else if (fresh) this.show(fresh);
    else this.startNew();
  }
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
