// The console's start: find out whether a key is needed, then show the playground and the engine.

import { get, setKey } from "./api.js";
import { byId } from "./dom.js";
import { explainWithin } from "./help.js";
import { LiveView } from "./live.js";
import { connectDrawer, connectTabs, connectWide } from "./panels.js";
import { Playground } from "./playground.js";

const RETRY_MS = 1000;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

const onError = (error) => error.status === 401 && lock(error.message);
connectDrawer("conversations", "open-conversations", "(max-width: 820px)"); // before others: Escape closes, then stops
connectDrawer("side", "open-side", "(max-width: 1120px)", () => live.refresh());
connectWide(byId("widen"), byId("console"));
const playground = new Playground({ onError });
const live = new LiveView({ onState: showState, onError, isOwn: (id) => playground.waitsFor(id) });
connectTabs(byId("tabs"), () => live.refresh());
explainWithin(byId("live"));

/** Ask the server what it serves; until it is able to say so, show why and ask again. */
async function open() {
  try {
    const [models, capabilities] = await Promise.all([get("v1/models"), get("v1/capabilities")]);
    await unlock(models.data, capabilities);
  } catch (error) {
    if (error.status === 401) return lock(byId("key").value ? error.message : "");
    showState(error.status === 503 ? "starting" : "unreachable");
    setTimeout(open, RETRY_MS);
  }
}

async function unlock(models, capabilities) {
  byId("model").replaceChildren(...models.map(({ id }) => new Option(id)));
  byId("context").textContent = `${capabilities.max_model_len.toLocaleString("en")} tokens of context`;
  byId("gate").hidden = true;
  byId("console").hidden = false;
  byId("forget").hidden = !byId("key").value;
  await playground.open(capabilities);
  byId("open-conversations").disabled = byId("open-side").disabled = false;
  live.start(capabilities);
}

/** Show nothing but the question for a key. */
function lock(reason) {
  setKey("");
  live.stop();
  playground.close();
  byId("key").value = "";
  byId("model").replaceChildren();
  byId("context").textContent = "";
  byId("console").hidden = byId("forget").hidden = true;
  byId("open-conversations").disabled = byId("open-side").disabled = true;
  byId("gate").hidden = false;
  byId("refusal").textContent = reason;
  byId("refusal").hidden = !reason;
  showState("locked");
  byId("key").focus();
}

function showState(state) {
  if (byId("state").textContent !== state) byId("state").textContent = state;
  byId("state").dataset.state = state;
}

byId("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  open();
});
byId("forget").addEventListener("click", () => lock(""));
byId("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const shown = dataset.theme ?? (prefersDark.matches ? "dark" : "light");
  dataset.theme = shown === "dark" ? "light" : "dark";
  live.draw();
});
prefersDark.addEventListener("change", () => live.draw());

open();
