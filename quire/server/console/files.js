// Text files that go along with a message: their text becomes part of it. Nothing here knows the page.

const MAX_FILES = 8;
const MAX_BYTES = 256 << 10;

/** @typedef {{name: string, text: string}} TextFile */

/**
 * Read files that the reader has chosen or dropped, if they are text and few.
 * @param {File[]} files
 * @param {number} present How many the message has already.
 * @returns {Promise<{read: TextFile[], refused: string[]}>} Sentences say why others were refused.
 */
export async function readFiles(files, present) {
  const room = Math.max(0, MAX_FILES - present);
  const refused = files.length > room ? [`A message takes ${MAX_FILES} files; ${files.length - room} were left out.`] : [];
  const read = [];
  for (const file of files.slice(0, room)) {
    try {
      read.push({ name: file.name, text: await textOf(file) });
    } catch (error) {
      refused.push(error.message);
    }
  }
  return { read, refused };
}

async function textOf(file) {
  if (file.size > MAX_BYTES) {
    throw new Error(`${file.name} has ${Math.ceil(file.size / 1024)} KiB; at most ${MAX_BYTES >> 10} can be attached.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // no text in UTF-8, or a folder
  }
  throw new Error(`${file.name} is not a text file in UTF-8, so it cannot be attached.`);
}

/** What a model reads: the message, then each file under its name. @param {TextFile[]} files */
export function withFiles(text, files = []) {
  return [text, ...files.map((file) => `${file.name}:\n${fenced(file.text, extensionOf(file.name))}`)].filter(Boolean).join("\n\n");
}

/** Text as a Markdown block that it cannot end. */
export function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

const extensionOf = (name) => /\.(\w{1,10})$/.exec(name)?.[1] ?? "";
