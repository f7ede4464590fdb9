// The list of runs, and what their alerts say. Names are foreign: they are put in as text, never as markup.

import { lookOf, settings } from "./settings.js";

const TONES = { running: "busy", finished: "good", failed: "bad", died: "bad" };
const MOST_ROWS = 300;

// `text` names the cell of `headway top` that is shown.
const COLUMNS = [
  { name: "Run", kind: "name", key: (run) => run.name },
  { name: "State", kind: "state-cell", key: (run) => run.state },
  { name: "Step", kind: "number", key: (run) => run.step },
  { name: "Loss", kind: "number", key: (run) => run.loss, text: "loss" },
  { name: "Recent loss", kind: "recent" },
  { name: "Speed", kind: "number", key: (run) => run.items_per_second, text: "speed" },
  { name: "MFU", kind: "number", key: (run) => run.mfu, text: "mfu" },
  { name: "Last step", kind: "number", key: (run) => run.last_step, text: "last_step" },
  { name: "Time", kind: "number", key: (run) => run.running_seconds, text: "time" },
  { name: "ETA", kind: "number", key: (run) => run.eta_seconds, text: "eta" },
  { name: "Spent", kind: "number", key: (run) => run.spent_usd, text: "spent" },
  { name: "Saved", kind: "number", key: (run) => run.saved, text: "saved" },
  { name: "Alerts", kind: "alerts", key: (run) => run.alerts.length, text: "alerts" },
];

const rows = new Map();

/** Fill the head of the table. */
export function makeHead(changed) {
  document.querySelector("#runs thead tr").replaceChildren(...COLUMNS.map((column, index) => {
    const cell = document.createElement("th");
    cell.className = column.kind;
    if (!column.key) {
      cell.textContent = column.name;
      return cell;
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = column.name;
    button.addEventListener("click", () => {
      const [at, way] = settings.sort ?? [null, 0];
      settings.sort = at !== index ? [index, 1] : way === 1 ? [index, -1] : null;
      changed();
    });
    cell.append(button);
    return cell;
  }));
}

function matching(runs) {
  const words = settings.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter((run) => {
    const text = [run.name, run.state, run.machine, run.job, ...run.alerts.map((alert) => alert.short)]
      .join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  if (!settings.sort) return found;
  const [index, way] = settings.sort;
  const key = COLUMNS[index].key;
  return found.sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === b) return 0;
    if (a === null) return 1; // what is unknown comes last, either way
    if (b === null) return -1;
    return (a < b ? -1 : 1) * way;
  });
}

/** Show the runs of an answer. */
export function showRuns(answer, changed) {
  const found = matching(answer.runs);
  const shown = found.slice(0, MOST_ROWS);
  const body = document.querySelector("#runs tbody");
  const wanted = new Set(shown.map((run) => run.name));
  for (const name of rows.keys()) if (!wanted.has(name)) rows.delete(name);
  const filled = shown.map((run) => {
    const row = rows.get(run.name) ?? makeRow(run.name, changed);
    rows.set(run.name, row);
    fillRow(row, run);
    return row;
  });
  if (!shown.length) filled.push(emptyRow(answer.runs.length ? "No run matches the filter." : "No runs yet."));
  // A row that is put in again loses the keyboard's focus.
  const asBefore = filled.length === body.children.length && filled.every((row, index) => row === body.children[index]);
  if (!asBefore) body.replaceChildren(...filled);
  const states = new Map();
  for (const run of answer.runs) states.set(run.state, (states.get(run.state) ?? 0) + 1);
  document.querySelector("#counts").textContent = [...states].map(([state, number]) => `${number} ${state}`).join(", ");
  const more = document.querySelector("#more");
  const hidden = found.length - shown.length;
  more.hidden = !hidden && !answer.left_out;
  more.textContent = (hidden ? `${hidden} more; the filter finds them. ` : "")
    + (answer.left_out ? `${answer.left_out} of the oldest runs are left out.` : "");
  showAlerts(found);
}

function emptyRow(text) {
  const row = document.createElement("tr");
  const cell = row.insertCell();
  cell.colSpan = COLUMNS.length;
  cell.className = "empty";
  cell.textContent = text;
  return row;
}

function makeRow(name, changed) {
  const row = document.createElement("tr");
  for (const column of COLUMNS) {
    const cell = row.insertCell();
    cell.className = column.kind;
    cell.dataset.label = column.name;
  }
  const label = document.createElement("label");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.addEventListener("change", () => {
    const others = (settings.runs ?? []).filter((other) => other !== name);
    settings.runs = box.checked ? [...others, name] : others;
    changed();
  });
  const text = document.createElement("span");
  text.textContent = text.title = name;
  label.append(box, text);
  row.cells[0].append(label);
  return row;
}

function fillRow(row, run) {
  const box = row.querySelector("input");
  box.checked = settings.runs?.includes(run.name) ?? false;
  box.style.setProperty("--swatch", box.checked ? `var(${lookOf(run.name).variable})` : "");
  const state = document.createElement("span");
  state.className = `state ${TONES[run.state] ?? "warn"}`;
  state.textContent = run.state;
  state.title = run.outcome;
  row.cells[1].replaceChildren(state);
  fillStep(row.cells[2], run);
  row.cells[4].replaceChildren(...sparkline(run.losses));
  COLUMNS.forEach((column, index) => {
    if (!column.text) return;
    const text = run.texts[column.text];
    if (row.cells[index].textContent !== text) row.cells[index].textContent = text;
  });
  for (const [name, moment] of [["Last step", run.last_step], ["Saved", run.saved]]) {
    const cell = row.cells[COLUMNS.findIndex((column) => column.name === name)];
    cell.title = moment === null ? "" : new Date(1000 * moment).toLocaleString();
  }
}

function fillStep(cell, run) {
  cell.textContent = run.texts.step;
  if (run.live && run.total_steps) {
    const bar = document.createElement("progress");
    bar.max = run.total_steps;
    bar.value = run.step ?? 0;
    cell.append(bar);
  }
}

const SVG = "http://www.w3.org/2000/svg";

function sparkline(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return [];
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 90 22");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "polyline");
  const points = values.map((value, index) => value === null ? "" :
    `${(1 + 88 * index / (values.length - 1)).toFixed(1)},${(20 - 18 * (value - low) / (high - low || 1)).toFixed(1)}`);
  line.setAttribute("points", points.filter(Boolean).join(" "));
  svg.append(line);
  return [svg];
}

function showAlerts(runs) {
  const items = runs.flatMap((run) => run.alerts.map((alert) => {
    const item = document.createElement("li");
    item.className = alert.severity;
    const name = document.createElement("b");
    name.textContent = run.name;
    const fix = document.createElement("p");
    fix.textContent = alert.fix;
    item.append(name, `: ${alert.short}${alert.text && ` (${alert.text})`}`, fix);
    return item;
  }));
  const section = document.querySelector("#alerts");
  section.hidden = !items.length;
  section.querySelector("ul").replaceChildren(...items);
}
