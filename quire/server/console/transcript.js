// The messages on the screen: the path of one conversation, scrolled along while it grows.

import { byId } from "./dom.js";
import { MessageView } from "./message.js";
import { pathOf, siblingsOf } from "./tree.js";

const NEAR_END_PX = 48;

export class Transcript {
  #area = byId("transcript");
  #views = new Map();
  #follows = true;

  /** @param {(name: string, message: object, detail?: any) => void} act */
  constructor(act) {
    this.act = act;
    this.#area.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.#area;
      this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    });
  }

  /** Show the path of a conversation. Messages that are on the screen already stay as they are. */
  show(conversation) {
    const views = pathOf(conversation).map((message) => {
      const siblings = siblingsOf(conversation, message);
      const place = { at: siblings.indexOf(message), of: siblings.length };
      const known = this.#views.get(message.id);
      if (known?.message !== message) return new MessageView(message, place, this.act, () => this.#scroll());
      known.place(place);
      return known;
    });
    this.#views = new Map(views.map((view) => [view.message.id, view]));
    this.#area.replaceChildren(byId("hint"), ...views.map((view) => view.element));
  }

  /** The view of a message, if it is on the screen. */
  viewOf(id) {
    return this.#views.get(id);
  }

  /** Go to the end, and stay there while the text grows. */
  toEnd() {
    this.#follows = true;
    this.#scroll();
  }

  /** Forget what is on the screen. */
  clear() {
    this.#views = new Map();
    this.#area.replaceChildren(byId("hint"));
  }

  set busy(is) {
    this.#area.setAttribute("aria-busy", is);
  }

  #scroll() {
    if (this.#follows) this.#area.scrollTop = this.#area.scrollHeight;
  }
}
