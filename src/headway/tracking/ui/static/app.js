// The page: it asks for the runs every few seconds, and shows curves of those that are chosen.

import { Chart } from "./charts.js";
import { nextMetric, setCatalogue } from "./metrics.js";
import { fillChoices, makeHead, saveList, showRuns } from "./runs.js";
import { askCatalogue, askRuns } from "./server.js";
import { loadSettings, saveSettings, settings, watchTheme } from "./settings.js";

const RUNS_SECONDS = 3;
const CURVES_SECONDS = 6;
// Runs that are chosen at the first visit.
const FIRST_RUNS = 4;

const find = (id) => document.getElementById(id);
let answer = null;
let charts = [];

function changed() {
  saveSettings();
  if (answer) showRuns(answer, chosen);
  find("unzoom").hidden = !settings.zoom;
  find("hint").textContent = "Drag across a chart to zoom, double-click to go back. Values are those under the cursor"
    + (settings.smoothing > 0 ? ": smoothed, then as recorded." : ".");
}

function chosen() {
  changed();
  refreshCharts();
}

/** Ask for the curves of all chosen runs, or of those alone that may have grown. */
async function refreshCharts(ended = new Set()) {
  await Promise.all(charts.map((chart) => chart.refresh(ended).catch(report)));
}

// A run that has ended is asked for once more after its end.
let endedBefore = new Set();

async function followRuns() {
  const ended = new Set((answer?.runs ?? []).filter((run) => !run.live).map((run) => run.name));
  await refreshCharts(new Set([...ended].filter((name) => endedBefore.has(name))));
  endedBefore = ended;
}

function report(error) {
  if (error.name === "AbortError") return;
  const place = find("connection");
  place.classList.add("lost");
  place.textContent = error instanceof TypeError ? "No connection to headway ui" : error.message;
}

function addChart(choice) {
  const chart = new Chart(choice, {
    changed: (one) => {
      changed();
      one.refresh().catch(report);
    },
    zoomed: (range) => {
      settings.zoom = range;
      chosen();
    },
    removed: (one) => {
      one.close();
      charts = charts.filter((other) => other !== one);
      settings.charts = charts.map((other) => other.choice);
      changed();
    },
    named: () => charts.forEach((one) => one.fillSelect()),
  });
  charts.push(chart);
  find("charts").append(chart.root);
  settings.charts = charts.map((other) => other.choice);
  return chart;
}

async function refreshRuns() {
  answer = await askRuns([...settings.columns, ...(["", "state", "tag"].includes(settings.group) ? [] : [settings.group])]);
  fillChoices(answer, () => {
    makeHead(changed);
    changed();
    refreshRuns().catch(report);
  });
  find("folder").textContent = answer.folder;
  if (settings.runs === null && answer.runs.length) {
    settings.runs = answer.runs.slice(0, FIRST_RUNS).map((run) => run.name);
    chosen();
  }
  showRuns(answer, chosen);
  const place = find("connection");
  place.classList.remove("lost");
  place.textContent = `Updated ${new Date().toLocaleTimeString()}`;
}

/** Do something again and again while the page is seen, with so many seconds or four times what it took in between. */
async function repeat(seconds, work) {
  for (;;) {
    const started = performance.now();
    if (!document.hidden) await work().catch(report);
    await new Promise((resolve) => setTimeout(resolve, Math.max(1000 * seconds, 4 * (performance.now() - started))));
  }
}

async function start() {
  loadSettings();
  makeHead(changed);
  find("filter").value = settings.filter;
  find("filter").addEventListener("input", () => {
    settings.filter = find("filter").value;
    changed();
  });
  find("csv").addEventListener("click", () => answer && saveList(answer));
  find("none").addEventListener("click", () => {
    settings.runs = [];
    chosen();
  });
  find("axis").value = settings.axis;
  find("axis").addEventListener("change", () => {
    settings.axis = find("axis").value;
    settings.zoom = null; // positions of another axis
    chosen();
  });
  const smoothing = find("smoothing");
  smoothing.value = settings.smoothing;
  find("smoothing-value").textContent = settings.smoothing.toFixed(2);
  smoothing.addEventListener("input", () => {
    settings.smoothing = Number(smoothing.value);
    find("smoothing-value").textContent = settings.smoothing.toFixed(2);
    chosen();
  });
  find("unzoom").addEventListener("click", () => {
    settings.zoom = null;
    chosen();
  });
  settings.charts.map(addChart);
  find("add").addEventListener("click", () => {
    addChart({ metric: nextMetric(charts.map((chart) => chart.choice.metric)), log: false }).refresh().catch(report);
    changed();
  });
  watchTheme(find("theme"), () => charts.forEach((chart) => chart.drawn && chart.draw()));
  addEventListener("hashchange", () => location.reload()); // a link was put into the address of this page
  changed();
  await askCatalogue().then(setCatalogue).catch(report);
  repeat(RUNS_SECONDS, refreshRuns);
  repeat(CURVES_SECONDS, followRuns);
}

start();
