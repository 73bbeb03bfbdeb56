// Two small pictures on canvas: a line of recent values, and a page map.

function prepared(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

/** Draw values (null where there is none) from left to right, the newest at the right edge; 0 is the bottom. */
export function drawSparkline(canvas, values, capacity) {
  const { context, width, height } = prepared(canvas);
  const top = Math.max(...values.map((value) => value ?? 0)) || 1;
  const x = (index) => width - 3 - ((values.length - 1 - index) * (width - 6)) / (capacity - 1);
  const y = (value) => height - 2 - (value / top) * (height - 6);
  context.strokeStyle = context.fillStyle = getComputedStyle(canvas).color;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  for (const [first, last] of runsOf(values)) {
    context.beginPath();
    for (let index = first; index <= last; index += 1) context.lineTo(x(index), y(values[index]));
    context.stroke();
    context.lineTo(x(last), height);
    context.lineTo(x(first), height);
    context.globalAlpha = 0.12;
    context.fill();
    context.globalAlpha = 1;
    if (first === last) dot(context, x(first), y(values[first]), 1.5);
  }
  const newest = values.at(-1);
  if (newest !== null && newest !== undefined) dot(context, x(values.length - 1), y(newest), 2.5);
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

const CELL = 9;

/** Draw parts of a whole, each {count, color}, as squares of equal size. */
export function drawPages(canvas, parts) {
  const { context, width, height } = prepared(canvas);
  const columns = Math.max(1, Math.round(width / CELL));
  const rows = Math.max(1, Math.round(height / CELL));
  const [across, down] = [width / columns, height / rows];
  sharesOf(parts.map((part) => part.count), columns * rows).forEach((part, index) => {
    context.fillStyle = parts[part].color;
    context.beginPath();
    context.roundRect((index % columns) * across, Math.floor(index / columns) * down, across - 1.5, down - 1.5, 1.5);
    context.fill();
  });
}

/** Which part each of `size` squares belongs to. What exists at all gets a square. */
export function sharesOf(counts, size) {
  const total = counts.reduce((sum, count) => sum + count, 0) || 1;
  const squares = counts.map((count) => (count > 0 ? Math.max(1, Math.round((count / total) * size)) : 0));
  const largest = squares.indexOf(Math.max(...squares));
  squares[largest] += size - squares.reduce((sum, count) => sum + count, 0);
  return squares.flatMap((count, part) => Array(count).fill(part));
}
