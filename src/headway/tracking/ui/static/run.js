// The page of one run: its curves by group, and what the server says of it, again and again while it trains.

import { Chart } from "./charts.js";
import { setCatalogue } from "./metrics.js";
import { askCatalogue, askCurves } from "./server.js";
import { settings, watchTheme } from "./settings.js";

const CURVES_SECONDS = 6, PAGE_SECONDS = 10;
// Groups that are open at first, in their order; the others follow.
const OPEN = ["train", "evaluation", "speed"];

const find = (id) => document.getElementById(id);
const run = document.body.dataset.run;
const charts = new Map();
const seen = new Set();

function report(error) {
  if (error.name === "AbortError") return;
  find("connection").classList.add("lost");
  find("connection").textContent = error instanceof TypeError ? "No connection to headway ui" : error.message;
}

// A chart is asked for when it comes into sight.
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const chart = charts.get(target.dataset.metric);
    if (!isIntersecting) seen.delete(chart);
    else if (!seen.has(chart)) {
      seen.add(chart);
      chart.refresh().catch(report);
    }
  }
}, { rootMargin: "200px" });

/** `system/<machine>/...` is a group for each machine. */
const groupOf = (name) => name.split("/").slice(0, name.startsWith("system/") ? 2 : 1).join("/");

function addChart(metric) {
  const chart = new Chart({ metric, log: false }, {
    changed: (one) => one.refresh().catch(report),
    zoomed: (range) => {
      settings.zoom = range;
      redraw();
    },
    named: () => {},
  }, { isFixed: true });
  chart.root.dataset.metric = metric;
  charts.set(metric, chart);
  const name = groupOf(metric);
  let group = [...find("groups").children].find((one) => one.dataset.group === name);
  if (!group) {
    group = document.createElement("details");
    group.dataset.group = name;
    group.open = OPEN.includes(name);
    const summary = document.createElement("summary");
    summary.textContent = name;
    const grid = document.createElement("div");
    grid.className = "grid";
    group.append(summary, grid);
    find("groups").append(group);
  }
  group.lastElementChild.append(chart.root);
  sight.observe(chart.root);
}

async function findMetrics() {
  const question = { metric: "train/loss", runs: [run], axis: "step", smoothing: 0, points: 10 };
  for await (const found of askCurves(question, undefined)) {
    const place = (name) => (OPEN.indexOf(groupOf(name)) + OPEN.length + 1) % (OPEN.length + 1);
    const names = found[run].metrics.filter((name) => !charts.has(name));
    const isLoss = (name) => name.endsWith("/loss");
    names.sort((one, other) => place(one) - place(other) || isLoss(other) - isLoss(one) || (one < other ? -1 : 1));
    names.forEach(addChart);
  }
  filter();
}

function filter() {
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const [metric, chart] of charts) chart.root.hidden = !words.every((word) => metric.toLowerCase().includes(word));
  for (const group of find("groups").children) {
    group.hidden = ![...group.lastElementChild.children].some((chart) => !chart.hidden);
    if (words.length && !group.hidden) group.open = true;
  }
}

function redraw() {
  find("unzoom").hidden = !settings.zoom;
  for (const chart of seen) chart.refresh().catch(report);
}

const isLive = () => ["busy", "warn"].some((tone) => document.querySelector("#now .state")?.classList.contains(tone));

/** Ask for the page again, and take over what it says; what a visitor has opened stays open. */
async function refreshPage() {
  const answer = await fetch(location.href);
  if (!answer.ok) throw new Error((await answer.text()).trim());
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ["now", "rest"]) {
    const [before, after] = [find(id), page.getElementById(id)];
    const open = [...before.querySelectorAll("details")].map((one) => one.open);
    after.querySelectorAll("details").forEach((one, index) => { one.open = open[index] ?? false; });
    before.replaceWith(document.adoptNode(after));
  }
  find("connection").classList.remove("lost");
  find("connection").textContent = `Updated ${new Date().toLocaleTimeString()}`;
}

/** Do something while the run trains and the page is seen, again after so many seconds or twenty times what it took. */
async function repeat(seconds, work) {
  for (;;) {
    const started = performance.now();
    if (!document.hidden && isLive()) await work().catch(report);
    await new Promise((resolve) => setTimeout(resolve, Math.max(1000 * seconds, 20 * (performance.now() - started))));
  }
}

async function start() {
  settings.runs = [run];
  find("axis").addEventListener("change", () => {
    settings.axis = find("axis").value;
    settings.zoom = null; // positions of another axis
    redraw();
  });
  const smoothing = find("smoothing");
  const show = () => { find("smoothing-value").textContent = settings.smoothing.toFixed(2); };
  smoothing.value = settings.smoothing;
  smoothing.addEventListener("input", () => {
    settings.smoothing = Number(smoothing.value);
    show();
    redraw();
  });
  show();
  find("unzoom").addEventListener("click", () => {
    settings.zoom = null;
    redraw();
  });
  find("filter").addEventListener("input", filter);
  watchTheme(find("theme"), () => charts.forEach((chart) => chart.drawn && chart.draw()));
  await askCatalogue().then(setCatalogue).catch(report);
  await findMetrics().catch(report);
  repeat(CURVES_SECONDS, async () => {
    await findMetrics();
    await Promise.all([...seen].map((chart) => chart.refresh()));
  });
  repeat(PAGE_SECONDS, refreshPage);
}

start();
