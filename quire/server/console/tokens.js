// Tokens with their probabilities: cutting streamed text into them, colouring them, showing their alternatives.

import { onEscape, place } from "./help.js";

/** The tokens of a streamed choice with their candidates, from either of the two forms of logprobs. */
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token,
      logprob,
      candidates: top_logprobs.map((one) => ({ text: one.token, logprob: one.logprob })),
    }));
  }
  return logprobs.tokens.map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    candidates: Object.entries(logprobs.top_logprobs[index] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

/**
 * Cuts text where its tokens end. The text is always the server's: a token may be spelled differently (half a character,
 * a special token), and then the pieces of text are longer than one token.
 */
export class TokenAligner {
  #text = "";
  #tokens = [];

  /** Take in what came; gives the pieces {text, tokens} that are complete. */
  push(text, tokens) {
    this.#text += text;
    this.#tokens.push(...tokens);
    const pieces = [];
    while (this.#text && this.#tokens.length) {
      const spelled = this.#tokens[0].text;
      if (spelled && this.#text.startsWith(spelled)) {
        pieces.push({ text: spelled, tokens: [this.#tokens.shift()] });
        this.#text = this.#text.slice(spelled.length);
      } else if (spelled.startsWith(this.#text)) {
        return pieces; // the rest of this token is held back: it may begin a stop string
      } else {
        break;
      }
    }
    return this.#text ? [...pieces, ...this.end()] : pieces;
  }

  /** All that is left, as one piece. */
  end() {
    const piece = { text: this.#text, tokens: this.#tokens };
    [this.#text, this.#tokens] = ["", []];
    return piece.text ? [piece] : [];
  }
}

/** A piece of text, coloured by how unlikely its tokens were. */
export function tokenElement({ text, tokens }) {
  const element = document.createElement("span");
  element.textContent = text;
  if (!tokens.length) return element;
  const logprob = Math.min(...tokens.map((token) => token.logprob ?? 0));
  element.className = "token";
  element.tabIndex = -1;
  element.style.setProperty("--surprise", `${Math.round(surprise(logprob) * 100)}%`);
  candidatesOf.set(element, tokens);
  return element;
}

/** 0 for a certain token, 1 for one of a probability of 0.2 % or less. */
export function surprise(logprob) {
  return Math.min(1, -logprob / 6);
}

const candidatesOf = new WeakMap();

/** Let the pointer, and the arrow keys, show the alternatives of tokens within an element. */
export function showCandidatesWithin(area, popup) {
  const show = (element) => {
    const tokens = candidatesOf.get(element);
    if (!tokens) return hide();
    popup.replaceChildren(...tokens.slice(0, 4).map(candidateTable));
    popup.hidden = false;
    place(popup, element.getClientRects()[0] ?? element.getBoundingClientRect());
    element.setAttribute("aria-describedby", popup.id);
  };
  const hide = () => {
    popup.hidden = true;
    area.querySelector("[aria-describedby]")?.removeAttribute("aria-describedby");
  };
  area.addEventListener("pointerover", (event) => show(event.target));
  area.addEventListener("pointerleave", hide);
  area.addEventListener("scroll", hide);
  area.addEventListener("focusin", (event) => show(event.target));
  area.addEventListener("focusout", hide);
  onEscape(popup, hide);
  area.addEventListener("keydown", (event) => {
    if (event.target.closest("button, textarea, pre, summary")) return; // they use the keys themselves
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tokens = [...area.querySelectorAll(".token")];
    if (!step || !tokens.length) return;
    const at = tokens.indexOf(document.activeElement);
    const next = at === -1 ? (step === 1 ? 0 : tokens.length - 1) : at + step;
    tokens[next]?.focus();
    event.preventDefault();
  });
}

function candidateTable(token) {
  const table = document.createElement("table");
  const chosen = { text: token.text, logprob: token.logprob };
  const others = token.candidates.filter((other) => other.text !== token.text);
  const rows = [chosen, ...others].sort((a, b) => b.logprob - a.logprob).slice(0, 6);
  for (const row of rows) {
    const line = table.insertRow();
    line.className = row === chosen ? "chosen" : "";
    line.insertCell().textContent = visible(row.text);
    const probability = Math.exp(row.logprob);
    const bar = document.createElement("i");
    bar.style.setProperty("--share", `${(probability * 100).toFixed(1)}%`);
    line.insertCell().append(bar);
    line.insertCell().textContent = `${(probability * 100).toFixed(probability < 0.001 ? 3 : 1)} %`;
  }
  return table;
}

/** A token as people can see it. */
export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(empty)";
}
