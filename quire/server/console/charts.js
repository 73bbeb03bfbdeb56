// A picture on canvas: a line of recent values, with axes.

const AXIS_PX = 34; // room for values at the left
const TIMES_PX = 14; // room for times at the bottom

function prepared(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

/**
 * Draw values (null where there is none) from left to right, the newest at the right edge; 0 is the bottom.
 * @param {HTMLCanvasElement} canvas Its `color` draws the line, its `border-color` the grid, its `caret-color` the text.
 * @param {(number|null)[]} values One for each second.
 * @param {number} capacity Seconds that fit.
 * @param {number|null} marked Which value to mark, counted from the newest.
 */
export function drawChart(canvas, values, capacity, marked = null) {
  const { context, width, height } = prepared(canvas);
  const style = getComputedStyle(canvas);
  const top = ceiling(Math.max(0, ...values.map((value) => value ?? 0)));
  const bottom = height - TIMES_PX;
  const x = (age) => width - 4 - (age * (width - 4 - AXIS_PX)) / (capacity - 1);
  const y = (value) => bottom - (value / top) * (bottom - 8);
  drawAxes(context, style, { top, x, y, capacity });
  context.strokeStyle = context.fillStyle = style.color;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  const at = (index) => x(values.length - 1 - index);
  for (const [first, last] of runsOf(values)) {
    context.beginPath();
    for (let index = first; index <= last; index += 1) context.lineTo(at(index), y(values[index]));
    context.stroke();
    context.lineTo(at(last), bottom);
    context.lineTo(at(first), bottom);
    context.globalAlpha = 0.12;
    context.fill();
    context.globalAlpha = 1;
    if (first === last) dot(context, at(first), y(values[first]), 1.5);
  }
  const shown = values.at(-1 - (marked ?? 0));
  if (shown !== null && shown !== undefined) dot(context, x(marked ?? 0), y(shown), marked === null ? 2.5 : 4);
}

function drawAxes(context, style, { top, x, y, capacity }) {
  context.font = `10px ${style.fontFamily}`;
  context.lineWidth = 1;
  context.fillStyle = style.caretColor;
  context.strokeStyle = style.borderBottomColor;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of [0, top / 2, top]) {
    context.fillText(short(value), AXIS_PX - 5, y(value));
    context.beginPath();
    context.moveTo(x(capacity - 1), y(value));
    context.lineTo(x(0), y(value));
    context.stroke();
  }
  context.textBaseline = "bottom";
  for (const [age, text, align] of [[capacity - 1, "2 min ago", "left"], [(capacity - 1) / 2, "1 min", "center"], [0, "now", "right"]]) {
    context.textAlign = align;
    context.fillText(text, x(age), y(0) + TIMES_PX);
  }
}

/** Which value, counted from the newest, is drawn nearest to a place on the canvas. */
export function ageAt(canvas, clientX, capacity) {
  const { left, width } = canvas.getBoundingClientRect();
  const share = (left + width - 4 - clientX) / (width - 4 - AXIS_PX);
  return Math.max(0, Math.min(capacity - 1, Math.round(share * (capacity - 1))));
}

/** The smallest of 1, 2, 5, 10, 20 ... (and 0.1 ...) that is not below a value. */
export function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= value * 0.999999);
}

/** A number in few characters. */
export function short(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}k`;
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? 1 : 2);
}

/** [first, last] of each run of values without a gap. */
export function runsOf(values) {
  const runs = [];
  values.forEach((value, index) => {
    if (value === null) return;
    if (index > 0 && values[index - 1] !== null) runs.at(-1)[1] = index;
    else runs.push([index, index]);
  });
  return runs;
}

function dot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}
