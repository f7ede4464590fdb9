// The list of runs, and what their alerts say. Names are foreign: they are put in as text, never as markup.

import { saveFile } from "./charts.js";
import { lookOf, settings } from "./settings.js";

const TONES = { running: "busy", finished: "good", failed: "bad", died: "bad" };
const MOST_ROWS = 300;

// As in 2026-11-28 19:16, which sorts.
const day = (moment) => (moment === null ? "" : new Date(1000 * moment).toLocaleString("sv").slice(0, 16));

// `text` names the cell of `headway top` that is shown; `words` makes the text itself.
const COLUMNS = [
  { name: "Run", kind: "name", key: (run) => run.name },
  { name: "State", kind: "state-cell", key: (run) => run.state },
  { name: "Step", kind: "number", key: (run) => run.step },
  { name: "Loss", kind: "number", key: (run) => run.loss, text: "loss" },
  { name: "Recent loss", kind: "recent" },
  { name: "Speed", kind: "number", key: (run) => run.items_per_second, text: "speed" },
  { name: "MFU", kind: "number", key: (run) => run.mfu, text: "mfu" },
  { name: "Last step", kind: "number", key: (run) => run.last_step, text: "last_step" },
  { name: "Started", kind: "number", key: (run) => run.started, words: (run) => day(run.started) },
  { name: "Time", kind: "number", key: (run) => run.running_seconds, text: "time" },
  { name: "ETA", kind: "number", key: (run) => run.eta_seconds, text: "eta" },
  { name: "Spent", kind: "number", key: (run) => run.spent_usd, text: "spent" },
  { name: "Saved", kind: "number", key: (run) => run.saved, text: "saved" },
  { name: "Tags", kind: "words", key: (run) => run.tags.join(", ") || null, words: (run) => run.tags.join(", ") },
  { name: "Note", kind: "words", key: (run) => run.note || null, words: (run) => run.note },
  { name: "Alerts", kind: "alerts", key: (run) => run.alerts.length, text: "alerts" },
];
// Shown where a run has one.
const SELDOM = {
  MFU: (run) => run.mfu !== null,
  ETA: (run) => run.eta_seconds !== null,
  Spent: (run) => run.spent_usd !== null,
  Tags: (run) => run.tags.length,
  Note: (run) => run.note,
};

const rows = new Map();
let columns = COLUMNS;
let head = null;

/** Numbers are sorted as numbers. */
const comparable = (text) => (text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text));

function columnsOf(answer) {
  const usual = COLUMNS.filter(({ name }) => !SELDOM[name] || answer.runs.some(SELDOM[name]));
  const chosen = settings.columns.map((key) => ({
    name: key, kind: "words", key: (run) => comparable(run.config[key] ?? ""), words: (run) => run.config[key] ?? "",
  }));
  return [...usual.slice(0, -1), ...chosen, usual.at(-1)];
}

/** Fill the head of the table. */
export function makeHead(changed) {
  head = () => document.querySelector("#runs thead tr").replaceChildren(...columns.map((column) => {
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
      settings.sort = at !== column.name ? [column.name, 1] : way === 1 ? [column.name, -1] : null;
      changed();
    });
    cell.append(button);
    return cell;
  }));
  head();
}

let known = "";

/** Offer the keys in which the configs of the runs differ, as columns and as groups. */
export function fillChoices({ keys }, changed) {
  const asked = JSON.stringify(keys);
  if (known === asked) return;
  known = asked;
  const group = document.querySelector("#group");
  const choices = [["", "nothing"], ["state", "state"], ["tag", "tag"], ...keys.map((key) => [key, key])];
  group.replaceChildren(...choices.map(([value, text]) => new Option(text, value, false, value === settings.group)));
  group.onchange = () => {
    settings.group = group.value;
    changed();
  };
  document.querySelector("#columns").hidden = !keys.length;
  document.querySelector("#columns div").replaceChildren(...keys.map((key) => {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = settings.columns.includes(key);
    box.addEventListener("change", () => {
      settings.columns = box.checked ? [...settings.columns, key] : settings.columns.filter((other) => other !== key);
      changed();
    });
    const label = document.createElement("label");
    label.append(box, key);
    return label;
  }));
}

/** The groups of runs by what they are grouped by, in the order of the list; a run with two tags is in both. */
function grouped(runs) {
  if (!settings.group) return [[null, runs]];
  const groups = new Map();
  for (const run of runs) {
    const names = settings.group === "state" ? [run.state]
      : settings.group === "tag" ? (run.tags.length ? run.tags : ["no tag"]) : [run.config[settings.group] || "not given"];
    for (const name of names) groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  return [...groups];
}

function groupRow(name, runs, changed) {
  const losses = runs.map((run) => run.loss).filter((loss) => typeof loss === "number").sort((one, other) => one - other);
  const row = document.createElement("tr");
  row.className = "group";
  const cell = row.insertCell();
  cell.colSpan = columns.length;
  const title = document.createElement("b");
  title.textContent = `${settings.group}: ${name}`;
  const what = document.createElement("span");
  what.className = "muted";
  what.textContent = ` ${runs.length} ${runs.length === 1 ? "run" : "runs"}`
    + (losses.length ? `, loss ${losses[0].toFixed(4)} to ${losses.at(-1).toFixed(4)}` : "");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Show only these";
  button.addEventListener("click", () => {
    settings.runs = runs.map((run) => run.name);
    changed();
  });
  cell.append(title, what, button);
  return row;
}

/** Save the list as it is shown, with numbers as numbers. */
export function saveList(answer) {
  const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const shown = columns.filter((column) => column.key);
  const value = (column, run) => (column.name === "Started" && run.started !== null
    ? new Date(1000 * run.started).toISOString() : column.key(run));
  const lines = [shown.map((column) => quoted(column.name)),
    ...matching(answer.runs).map((run) => shown.map((column) => quoted(value(column, run))))];
  saveFile("runs.csv", new Blob([lines.map((line) => line.join(",")).join("\n") + "\n"], { type: "text/csv" }));
}

function matching(runs) {
  const words = settings.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter((run) => {
    const text = [run.name, run.state, run.machine, run.job, ...run.tags, run.note, ...run.alerts.map((alert) => alert.short)]
      .join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  if (!settings.sort) return found;
  const [name, way] = settings.sort;
  const key = columns.find((column) => column.name === name)?.key ?? (() => null);
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
  const wantedColumns = columnsOf(answer);
  if (wantedColumns.map(({ name }) => name).join() !== columns.map(({ name }) => name).join()) {
    rows.clear();
    columns = wantedColumns;
    head();
  }
  const found = matching(answer.runs);
  const shown = found.slice(0, MOST_ROWS);
  const body = document.querySelector("#runs tbody");
  const before = new Map(rows);
  rows.clear();
  const rowOf = (run, group) => {
    const key = JSON.stringify([group, run.name]); // a run with two tags has two rows
    const row = before.get(key) ?? makeRow(run.name, changed);
    rows.set(key, row);
    fillRow(row, run);
    return row;
  };
  const filled = grouped(shown).flatMap(([name, runs]) => [
    ...(name === null ? [] : [groupRow(name, runs, changed)]), ...runs.map((run) => rowOf(run, name)),
  ]);
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
  cell.colSpan = columns.length;
  cell.className = "empty";
  cell.textContent = text;
  return row;
}

function makeRow(name, changed) {
  const row = document.createElement("tr");
  for (const column of columns) {
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
  const link = document.createElement("a");
  link.href = `/run?${new URLSearchParams({ run: name })}`;
  link.textContent = "open";
  link.title = "The page of this run";
  row.cells[0].append(label, link);
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
  columns.forEach((column, index) => {
    if (!column.text && !column.words) return;
    const text = column.words ? column.words(run) : run.texts[column.text];
    if (row.cells[index].textContent !== text) row.cells[index].textContent = text;
  });
  for (const [name, moment] of [["Last step", run.last_step], ["Saved", run.saved]]) {
    const cell = row.cells[columns.findIndex((column) => column.name === name)];
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
