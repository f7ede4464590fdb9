// The charts of a page, drawn by uPlot from the values that stand beside them (`telemetry/charts.py`).

import { count, precise } from "./format.js";
import { labels, linearRange, logRange, logTicks } from "./scales.js";

const DASHES = { dashed: [7, 4], dotted: [2, 3] };
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The value at a place between knots, both rising. */
function between(place, from, to) {
  let index = 1;
  while (index < from.length - 1 && from[index] < place) index += 1;
  const share = (place - from[index - 1]) / (from[index] - from[index - 1] || 1);
  return to[index - 1] + share * (to[index] - to[index - 1]);
}

function roundTicks(low, high, most) {
  const unit = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((digit) => digit * unit).find((size) => (high - low) / size <= most);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => (first + index) * step);
}

function seriesOf({ series, kind }) {
  const stroke = colour(`--series-${series}`);
  const line = { stroke, spanGaps: true, points: { show: false } };
  if (kind === "faint") return { ...line, width: 1, alpha: 0.3 };
  if (kind === "band") return { ...line, width: 0.7, alpha: 0.3 };
  if (kind === "dots") return { ...line, width: 0, points: { show: true, size: 7, width: 0, fill: stroke, stroke } };
  if (kind === "bars") return { ...line, width: 1, fill: stroke, alpha: 0.85, paths: uPlot.paths.stepped({ align: 1 }) };
  if (kind === "cross") return { ...line, width: 0 };
  return { ...line, width: 2, dash: DASHES[kind] };
}

/** Draw what is no curve, under the curves: ranges that are not finite, marks of attempts, and a level. */
function drawBelow(plot, { marks = [], shades = [], level }) {
  const { ctx, bbox } = plot;
  const x = (step) => plot.valToPos(step, "x", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.lineWidth = devicePixelRatio;
  ctx.globalAlpha = 0.3;
  ctx.fillStyle = colour("--series-7");
  for (const [from, to] of shades) ctx.fillRect(x(from), bbox.top, Math.max(2, x(to) - x(from)), bbox.height);
  ctx.globalAlpha = 1;
  ctx.strokeStyle = ctx.fillStyle = colour("--muted");
  for (const mark of marks) {
    ctx.setLineDash(mark.dotted ? [2, 3] : []);
    line(ctx, x(mark.x), bbox.top, x(mark.x), bbox.top + bbox.height);
    ctx.save();
    ctx.translate(x(mark.x) - 4 * devicePixelRatio, bbox.top + 6);
    ctx.rotate(-Math.PI / 2);
    ctx.textAlign = "right";
    ctx.fillText(mark.text, 0, 0);
    ctx.restore();
  }
  if (level) {
    const y = plot.valToPos(level.y, "y", true);
    ctx.setLineDash([5, 4]);
    line(ctx, bbox.left, y, bbox.left + bbox.width, y);
    ctx.textAlign = "right";
    const above = y - 5 * devicePixelRatio;
    const isCut = above - 11 * devicePixelRatio < bbox.top;
    ctx.fillText(level.text, bbox.left + bbox.width - 4, isCut ? y + 14 * devicePixelRatio : above);
  }
  ctx.restore();
}

function line(ctx, ...ends) {
  ctx.beginPath();
  ctx.moveTo(ends[0], ends[1]);
  ctx.lineTo(ends[2], ends[3]);
  ctx.stroke();
}

/** Draw the ends of runs whose loss is not finite any more. */
function drawCrosses(plot, spec) {
  const { ctx } = plot;
  spec.series.forEach(({ series, kind }, index) => {
    if (kind !== "cross") return;
    const place = spec.data[index + 1].findIndex((value) => value !== null);
    const [x, y] = [plot.valToPos(spec.data[0][place], "x", true), plot.valToPos(spec.data[index + 1][place], "y", true)];
    const size = 5 * devicePixelRatio;
    ctx.strokeStyle = colour(`--series-${series}`);
    ctx.lineWidth = 2 * devicePixelRatio;
    line(ctx, x - size, y - size, x + size, y + size);
    line(ctx, x - size, y + size, x + size, y - size);
  });
}

function axesOf(spec) {
  const common = { stroke: colour("--muted"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false } };
  const named = { ...common, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 20 };
  const log = { splits: (_, __, low, high) => logTicks(low, high), filter: (_, ticks) => ticks };
  const across = (_, ticks) => ticks.map(count);
  const axes = [
    { ...named, label: spec.x, size: 28, space: 64, values: across, ...(spec.log_x ? log : {}) },
    { ...named, label: spec.y || null, labelSize: spec.y ? 22 : 0, size: 58, values: (_, ticks) => labels(ticks),
      ...(spec.log_y ? log : {}) },
  ];
  if (spec.tokens) {
    const [steps, tokens] = spec.tokens;
    const splits = (_, __, low, high) => roundTicks(between(Math.max(0, low), steps, tokens), between(high, steps, tokens), 8)
      .map((amount) => between(amount, tokens, steps));
    axes.push({ ...named, side: 0, scale: "x", label: "tokens", size: 22, grid: { show: false }, splits,
      filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map((step) => count(between(step, steps, tokens))) });
  }
  return axes;
}

function optionsOf(spec, place, told, level) {
  const high = (top) => Math.max(top, level ?? top);
  const range = spec.log_y ? logRange : (_, low, top) => {
    const [from, to] = linearRange(_, low, low === null ? top : high(top));
    return spec.from_zero ? [0, to] : [from, to];
  };
  const bands = spec.series.flatMap(({ series, kind }, index) => (
    kind === "band" && spec.series[index + 1]?.kind === "band" && spec.series[index - 1]?.kind !== "band"
      ? [{ series: [index + 1, index + 2], fill: `color-mix(in srgb, ${colour(`--series-${series}`)} 25%, transparent)` }] : []));
  return {
    width: place.clientWidth || 320,
    height: place.closest(".wide") ? 380 : 240,
    padding: [spec.tokens ? 0 : 10, 24, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
    scales: {
      x: { time: false, distr: spec.log_x ? 3 : 1, range: spec.log_x ? logRange : acrossRange(spec) },
      y: { distr: spec.log_y ? 3 : 1, range },
    },
    axes: axesOf(spec),
    series: [{}, ...spec.series.map(seriesOf)],
    bands,
    hooks: {
      drawAxes: [(plot) => drawBelow(plot, spec)],
      draw: [(plot) => drawCrosses(plot, spec)],
      setCursor: [(plot) => { told.textContent = valuesAt(plot, spec); }],
    },
  };
}

/** All that there is, or what a reader has chosen; a single step is in the middle. */
function acrossRange(spec) {
  return (_, low, high) => {
    if (low === null) return [0, 1];
    const whole = low === spec.data[0][0] && high === spec.data[0].at(-1);
    const to = whole ? Math.max(high, spec.reach ?? high) : high;
    return low === to ? [low - 1, to + 1] : [low, to];
  };
}

/** What the curves say under the cursor, each at its nearest point. */
function valuesAt(plot, spec) {
  if (plot.cursor.left === undefined || plot.cursor.left < 0) return "";
  const at = plot.posToVal(plot.cursor.left, "x");
  const found = spec.series.map(({ name }, index) => {
    if (!name) return "";
    let nearest = null;
    spec.data[index + 1].forEach((value, place) => {
      const away = Math.abs(spec.data[0][place] - at);
      if (value !== null && (nearest === null || away < nearest.away)) nearest = { away, value, x: spec.data[0][place] };
    });
    return nearest && `${name} ${precise(nearest.value)} at ${spec.x} ${count(nearest.x)}`;
  });
  return found.filter(Boolean).join(" · ");
}

function drawFigure(place) {
  const spec = JSON.parse(place.nextElementSibling.textContent);
  const told = document.createElement("p");
  told.className = "at";
  place.after(told);
  const make = () => new uPlot(optionsOf(spec, place, told, spec.level?.y), spec.data, place);
  let plot = make();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    plot.destroy();
    plot = make();
  });
  new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: plot.height })).observe(place);
}

document.querySelectorAll("figure .plot").forEach(drawFigure);
