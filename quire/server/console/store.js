// What the console keeps in this browser: conversations and presets, in IndexedDB. Never the API key.

const NAME = "quire";
const VERSION = 1;
const KEYS = { conversations: "id", presets: "name" };

/** Where nothing can be kept (some private windows), this page's memory stands in. */
const memory = { conversations: new Map(), presets: new Map() };
let database;

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

function open() {
  database ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, VERSION);
    } catch {
      return resolve(null);
    }
    request.onupgradeneeded = () => {
      for (const [store, keyPath] of Object.entries(KEYS)) request.result.createObjectStore(store, { keyPath });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return database;
}

async function within(store, mode, use) {
  const opened = await open();
  return opened && done(use(opened.transaction(store, mode).objectStore(store)));
}

/** Whether what is kept outlives this page. */
export const isKept = async () => (await open()) !== null;

/** Everything in a store. @param {"conversations"|"presets"} store */
export const all = async (store) => (await within(store, "readonly", (at) => at.getAll())) ?? [...memory[store].values()];

/** One value, or undefined. */
export const load = async (store, key) => (await open()) ? within(store, "readonly", (at) => at.get(key)) : memory[store].get(key);

/** Keep a value; it replaces one of the same key. */
export async function keep(store, value) {
  if (await open()) await within(store, "readwrite", (at) => at.put(value));
  else memory[store].set(value[KEYS[store]], value);
}

/**
 * Keep a value together with what is kept under its key, in one transaction: two tabs never overwrite each other.
 * @param {(kept: object) => void} merge Takes what is kept into the value.
 */
export async function keepMerged(store, value, merge) {
  const opened = await open();
  if (!opened) return keep(store, value);
  const at = opened.transaction(store, "readwrite").objectStore(store);
  return new Promise((resolve, reject) => {
    const reading = at.get(value[KEYS[store]]);
    reading.onerror = () => reject(reading.error);
    reading.onsuccess = () => {
      try {
        if (reading.result) merge(reading.result);
        done(at.put(value)).then(resolve, reject);
      } catch (error) {
        reject(error);
      }
    };
  });
}

/** Forget a value. */
export async function forget(store, key) {
  if (await open()) await within(store, "readwrite", (at) => at.delete(key));
  else memory[store].delete(key);
}
