// The demonstration's tools, which run in this page: the same as `quire chat --tools demo` has. Nothing here knows the page.

const MAX_ARGUMENT = 200; // characters
/** Calls of one message that are run, and rounds of calls for one question. */
export const MAX_CALLS = 8;
export const MAX_ROUNDS = 4;

const TOOLS = {
  calculate: { description: "Compute an arithmetic expression.", parameter: "expression", run: evaluate },
  get_time: { description: "The time in a time zone.", parameter: "timezone", run: timeIn },
};

/** The tools as a request offers them. */
export const DEFINITIONS = Object.entries(TOOLS).map(([name, { description, parameter }]) => {
  const parameters = { type: "object", properties: { [parameter]: { type: "string" } }, required: [parameter] };
  return { type: "function", function: { name, description, parameters } };
});

/** What a call of the model gives; mistakes are told to the model as text that begins with `error:`. */
export function runTool(name, args) {
  const tool = Object.hasOwn(TOOLS, name) && TOOLS[name];
  if (!tool) return `error: there is no tool ${name}; there are ${Object.keys(TOOLS).join(", ")}`;
  try {
    return tool.run(argument(tool.parameter, args));
  } catch (error) {
    return `error: ${error.message}`;
  }
}

/** Whether arguments are a JSON object; servers refuse a history in which they are not. */
export function isObject(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

function argument(name, args) {
  const fields = isObject(args) ? JSON.parse(args) : {};
  if (Object.keys(fields).join() !== name) throw new Error(`the arguments must look like {"${name}": "..."}`);
  const text = typeof fields[name] === "string" ? fields[name] : JSON.stringify(fields[name]);
  if (text.length > MAX_ARGUMENT) throw new Error(`${name} has ${text.length} characters, ${MAX_ARGUMENT} are allowed`);
  return text;
}

/** The time in a zone of the IANA database. */
function timeIn(zone, now = new Date()) {
  const shown = { timeZone: zone, hourCycle: "h23", weekday: "long" };
  for (const name of ["hour", "minute", "month", "day"]) shown[name] = "2-digit";
  let format;
  try {
    format = new Intl.DateTimeFormat("en-GB", { ...shown, year: "numeric" });
  } catch {
    throw new Error(`there is no time zone ${zone}; names look like Europe/Paris`);
  }
  const at = Object.fromEntries(format.formatToParts(now).map(({ type, value }) => [type, value]));
  return `${at.hour}:${at.minute} on ${at.weekday} ${at.year}-${at.month}-${at.day}`;
}

/** The value of numbers, parentheses and + - * / // % **, which mean what they mean in Python. */
function evaluate(expression) {
  const tokens = expression.match(/\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+|\*\*|\/\/|[-+*/%()]|\S/gi) ?? [];
  const value = sum(tokens);
  if (tokens.length) throw new Error("this is no arithmetic expression");
  if (Number.isNaN(value)) throw new Error("the result is no real number");
  if (!Number.isFinite(value)) throw new Error("the result is too large");
  return String(Number.isSafeInteger(value) ? value : Number(value.toPrecision(12)));
}

/** Each of these takes what it reads from the front of `tokens`. */
function sum(tokens) {
  let value = product(tokens);
  while (tokens[0] === "+" || tokens[0] === "-") value = tokens.shift() === "+" ? value + product(tokens) : value - product(tokens);
  return value;
}

function product(tokens) {
  let value = signed(tokens);
  while (["*", "/", "//", "%"].includes(tokens[0])) {
    const sign = tokens.shift();
    const other = signed(tokens);
    if (sign !== "*" && other === 0) throw new Error("division by zero");
    if (sign === "*") value *= other;
    else if (sign === "/") value /= other;
    else value = sign === "//" ? Math.floor(value / other) : value - other * Math.floor(value / other);
  }
  return value;
}

function signed(tokens) {
  if (tokens[0] === "-" || tokens[0] === "+") return tokens.shift() === "-" ? -signed(tokens) : signed(tokens);
  const base = atom(tokens);
  if (tokens[0] !== "**") return base;
  tokens.shift();
  const exponent = signed(tokens);
  if (base === 0 && exponent < 0) throw new Error("division by zero");
  return base ** exponent;
}

function atom(tokens) {
  const token = tokens.shift() ?? "";
  if (token === "(") {
    const value = sum(tokens);
    if (tokens.shift() === ")") return value;
  } else if (/^[\d.]/.test(token) && Number.isFinite(Number(token))) {
    return Number(token);
  }
  throw new Error(/^[\p{L}\p{S}_]/u.test(token) ? "only numbers, parentheses and + - * / // % ** are allowed" : "this is no arithmetic expression");
}
