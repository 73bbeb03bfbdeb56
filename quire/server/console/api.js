// The server's API: requests with the reader's key, errors as the server says them, streams as events.

let key = "";

/** Use this API key from now on; it is kept nowhere else. */
export function setKey(value) {
  key = value;
}

/** A reply that is an error: its status, and what the server says about it. */
export class ServerError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = body?.error?.code ?? null;
  }
}

async function send(path, { body, signal, headers: more } = {}) {
  const headers = { ...more, ...(key && { Authorization: `Bearer ${key}` }) };
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const reply = await fetch(path, options);
  if (!reply.ok) throw new ServerError(reply.status, await reply.json().catch(() => null));
  return reply;
}

/** The JSON that the server has at a path, which is relative to this page. */
export async function get(path) {
  return (await send(path, { signal: AbortSignal.timeout(10_000) })).json();
}

/** The events of a streamed reply, decoded; the last one tells where the time went. Throws ServerError, also for an error in the middle of the stream. */
export async function* stream(path, body, signal) {
  const reply = await send(path, { body, signal, headers: { "X-Quire-Why": "1" } });
  for await (const data of dataOf(reply.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(reply.status, event);
    yield event;
  }
  throw new Error("The stream ended before the answer did.");
}

/** The data of server-sent events; comments, which keep a connection alive, are left out. */
async function* dataOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted stream cannot be cancelled any more
  }
}
