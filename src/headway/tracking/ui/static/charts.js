// One chart: a metric of the chosen runs, drawn by uPlot.

import { count, duration, precise } from "./format.js";
import { about, addNames, fillSelect } from "./metrics.js";
import { labels, linearRange, logRange, logTicks } from "./scales.js";
import { askCurves } from "./server.js";
import { lookOf, settings } from "./settings.js";

const HEIGHT = 280;
const DASHES = [[], [7, 4], [2, 3]];
const DASH_NAMES = ["", "dashed", "dotted"];
// Points of all curves of a chart together, and of each.
const ALL_POINTS = 24000, FEWEST_POINTS = 200, MOST_POINTS = 1500;

const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

export class Chart {
  /**
   * `choice` holds metric and log; `changed` is called when the visitor changes them, `zoomed` with the new range. A
   * chart that is fixed keeps its metric and its place.
   */
  constructor(choice, { changed, zoomed, removed, named }, { isFixed = false } = {}) {
    this.choice = choice;
    this.curves = Object.create(null); // by names that are foreign
    this.zoomed = zoomed;
    this.named = named;
    this.root = document.createElement("article");
    this.root.className = "chart";
    this.select = document.createElement("select");
    this.select.setAttribute("aria-label", "Metric");
    this.select.addEventListener("change", () => {
      this.choice.metric = this.select.value;
      this.curves = Object.create(null);
      changed(this);
    });
    this.unit = document.createElement("span");
    this.unit.className = "unit muted";
    const log = document.createElement("input");
    log.type = "checkbox";
    log.checked = choice.log;
    log.addEventListener("change", () => {
      this.choice.log = log.checked;
      changed(this);
    });
    const label = document.createElement("label");
    label.append(log, "log axis");
    const title = document.createElement("h3");
    title.textContent = choice.metric;
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "✕";
    remove.title = "Remove this chart";
    remove.addEventListener("click", () => removed(this));
    const tools = document.createElement("div");
    tools.className = "tools";
    const files = [["CSV", () => saveTable(this.choice.metric)], ["PNG", () => this.savePicture()]].map(([kind, save]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = kind;
      button.title = `Save ${kind === "CSV" ? "every recorded value" : "this picture"} as ${kind}`;
      button.addEventListener("click", save);
      return button;
    });
    if (isFixed) tools.append(title, this.unit, label, ...files);
    else tools.append(this.select, this.unit, label, ...files, remove);
    this.plot = document.createElement("div");
    this.plot.className = "plot";
    this.nothing = document.createElement("p");
    this.nothing.className = "nothing";
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    this.root.append(tools, this.plot, this.legend);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.plot);
    this.fillSelect();
  }

  fillSelect() {
    fillSelect(this.select, this.choice.metric);
  }

  close() {
    this.observer.disconnect();
    this.asking?.abort();
    this.drawn?.destroy();
    this.root.remove();
  }

  /**
   * Ask for the curves of the chosen runs and draw them; a newer call ends an older one. What is known of runs in
   * `ended` is not asked for again.
   */
  async refresh(ended = new Set()) {
    this.asking?.abort();
    const asking = this.asking = new AbortController();
    const runs = settings.runs ?? [];
    const points = Math.round(Math.max(FEWEST_POINTS, Math.min(MOST_POINTS, ALL_POINTS / Math.max(1, runs.length))));
    const { axis, smoothing, zoom } = settings;
    const question = { metric: this.choice.metric, axis, smoothing, zoom, points };
    const asked = JSON.stringify(question);
    question.runs = runs.filter((run) => !(ended.has(run) && this.curves[run]?.asked === asked));
    const { unit, help } = about(this.choice.metric);
    this.unit.textContent = unit;
    this.select.title = this.root.title = help;
    for (const run of Object.keys(this.curves)) if (!runs.includes(run)) delete this.curves[run];
    this.plot.classList.toggle("busy", runs.some((run) => !this.curves[run]));
    try {
      for await (const found of askCurves(question, asking.signal)) {
        if (asking.signal.aborted) return;
        for (const [run, curve] of Object.entries(found)) this.curves[run] = { ...curve, asked };
        if (Object.values(found).map((curve) => addNames(curve.metrics)).some(Boolean)) this.named();
        this.draw();
      }
      if (!runs.length) this.draw();
    } finally {
      if (this.asking === asking) this.plot.classList.remove("busy");
    }
  }

  /** The curves that have points, in the order in which their runs were chosen. */
  shown() {
    return (settings.runs ?? []).filter((run) => this.curves[run]?.x.length).map((run) => [run, this.curves[run]]);
  }

  draw() {
    const shown = this.shown();
    const smooth = settings.smoothing > 0;
    const log = this.choice.log;
    const usable = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = shown.map(([, curve]) => [
      curve.x, ...(smooth ? [usable(curve.value), usable(curve.smooth)] : [usable(curve.value)]),
    ]);
    const data = tables.length ? uPlot.join(tables) : [[]];
    const looks = shown.map(([run]) => lookOf(run));
    // What the chart is made of; while it stays the same only the data are new.
    const form = JSON.stringify([shown.map(([run]) => run), looks, smooth, log, settings.axis, colour("--ground")]);
    if (this.drawn && this.form === form) {
      this.drawn.setData(data, false);
      this.scale();
    } else {
      this.form = form;
      this.drawn?.destroy();
      this.drawn = new uPlot(this.options(looks, smooth), data, this.plot);
      this.watchTouch();
      this.scale();
    }
    this.nothing.textContent = (settings.runs ?? []).length ? "No values here" : "Choose runs in the list";
    if (shown.length) this.nothing.remove();
    else this.plot.append(this.nothing);
    this.fillLegend();
  }

  options(looks, smooth) {
    const [ink, rule] = [colour("--muted"), colour("--rule")];
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1, size: 5 } };
    const series = looks.flatMap(({ variable, dash }) => {
      const line = { stroke: colour(variable), width: 2, dash: DASHES[dash], spanGaps: true, points: { show: false } };
      return smooth ? [{ ...line, width: 1, alpha: 0.2 }, line] : [{ ...line, width: 1.5 }];
    });
    const log = this.choice.log;
    return {
      width: this.plot.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: {
        sync: { key: "curves", setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { show: false },
        bind: { dblclick: () => () => this.zoomed(null) },
      },
      scales: {
        x: { time: false, auto: false },
        y: log ? { distr: 3, range: logRange } : { range: linearRange },
      },
      axes: [
        { ...axis, size: 36, values: (_, ticks) => ticks.map(settings.axis === "time" ? duration : count), space: 64 },
        {
          ...axis, size: 62, values: (_, ticks) => labels(ticks),
          ...(log ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, ticks) => ticks } : {}),
        },
      ],
      series: [{}, ...series],
      hooks: {
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.fillLegend(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)],
      },
    };
  }

  /** Set the range of the axis: what is zoomed to, or all that there is. */
  scale() {
    const ends = this.shown().map(([, { x }]) => [x[0], x.at(-1)]);
    let [min, max] = settings.zoom ?? [Math.min(...ends.map(([a]) => a)), Math.max(...ends.map(([, b]) => b))];
    if (!Number.isFinite(min) || !Number.isFinite(max)) [min, max] = [0, 1];
    if (min === max) [min, max] = [min - 1, max + 1];
    this.drawn.setScale("x", { min, max });
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 8) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoomed(range);
  }

  /** Let a finger that moves sideways choose a range, as a mouse does. */
  watchTouch() {
    const plot = this.drawn;
    const over = plot.over;
    let start = null;
    const at = (event) => Math.max(0, Math.min(over.clientWidth, event.clientX - over.getBoundingClientRect().left));
    over.addEventListener("pointerdown", (event) => { start = event.pointerType === "touch" ? at(event) : null; });
    over.addEventListener("pointercancel", () => { start = null; });
    over.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const now = at(event);
      plot.setCursor({ left: now, top: over.clientHeight / 2 });
      const select = { left: Math.min(start, now), width: Math.abs(now - start), top: 0, height: over.clientHeight };
      plot.setSelect(select, false);
    });
    over.addEventListener("pointerup", () => {
      if (start !== null) this.selected(plot);
      start = null;
    });
  }

  /** Show the value of every run at a position of the axis, or the last ones. */
  fillLegend(position = null) {
    const items = this.shown().map(([run, curve]) => {
      const index = position === null ? curve.x.length - 1 : nearest(curve.x, position);
      const look = lookOf(run);
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.className = DASH_NAMES[look.dash];
      swatch.style.setProperty("--swatch", `var(${look.variable})`);
      const name = document.createElement("span");
      name.textContent = name.title = run;
      const value = document.createElement("b");
      value.textContent = precise(settings.smoothing > 0 ? curve.smooth[index] : curve.value[index]);
      const raw = settings.smoothing > 0 ? `${precise(curve.value[index])} at ` : "";
      const where = document.createElement("span");
      where.className = "at";
      where.textContent = `${raw}step ${curve.step[index].toLocaleString("en")}`
        + (curve.not_finite ? ` (${curve.not_finite} not finite)` : "");
      item.append(swatch, name, value, where);
      return item;
    });
    this.legend.replaceChildren(...items);
  }

  /** Save the chart as it is shown, with its metric and the names of its runs. */
  savePicture() {
    if (!this.drawn) return;
    const from = this.drawn.ctx.canvas;
    const scale = devicePixelRatio;
    const names = this.shown().map(([run]) => run);
    const canvas = document.createElement("canvas");
    canvas.width = from.width;
    canvas.height = from.height + (30 + 18 * names.length) * scale;
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = colour("--ground");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.drawImage(from, 0, 24 * scale);
    ctx.font = `600 ${14 * scale}px system-ui, sans-serif`;
    ctx.fillStyle = colour("--ink");
    ctx.fillText(`${this.choice.metric}${this.unit.textContent && ` (${this.unit.textContent})`}`, 8 * scale, 17 * scale);
    ctx.font = `${12 * scale}px system-ui, sans-serif`;
    names.forEach((run, index) => {
      const y = from.height + (36 + 18 * index) * scale;
      const { variable, dash } = lookOf(run);
      ctx.strokeStyle = colour(variable);
      ctx.lineWidth = 3 * scale;
      ctx.setLineDash(DASHES[dash].map((length) => length * scale));
      ctx.beginPath();
      ctx.moveTo(8 * scale, y - 4 * scale);
      ctx.lineTo(32 * scale, y - 4 * scale);
      ctx.stroke();
      ctx.fillText(run, 40 * scale, y);
    });
    canvas.toBlob((content) => saveFile(`${this.choice.metric.replaceAll("/", "-")}.png`, content));
  }

  fit() {
    if (this.drawn && this.plot.clientWidth) this.drawn.setSize({ width: this.plot.clientWidth, height: HEIGHT });
  }
}

/** Save every recorded value of a metric of the chosen runs. */
function saveTable(metric) {
  const query = new URLSearchParams({ metric });
  for (const run of settings.runs ?? []) query.append("run", run);
  const link = document.createElement("a");
  link.href = `/api/table.csv?${query}`;
  link.download = `${metric.replaceAll("/", "-")}.csv`;
  link.click();
}

/** Let the visitor keep what the page has made. */
export function saveFile(name, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The index of the value of a rising list that is nearest. */
function nearest(values, wanted) {
  let [low, high] = [0, values.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle;
  }
  return wanted - values[low] <= values[high] - wanted ? low : high;
}
