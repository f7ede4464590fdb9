// What a visitor has chosen. It is in the address, so that a reload or a link shows the same.

const DEFAULT_CHARTS = [
  { metric: "train/loss", log: false },
  { metric: "speed/tokens_per_second", log: false },
];

export const settings = {
  runs: null, // names in the order in which they were chosen; null: nothing was chosen yet
  charts: DEFAULT_CHARTS,
  axis: "step",
  smoothing: 0.6,
  filter: "",
  columns: [], // keys of the config in the list
  group: "", // nothing, "state", "tag" or a key of the config
  sort: null, // [column, -1 or 1]
  zoom: null, // [from, to] on the axis
};

export function loadSettings() {
  const known = new URLSearchParams(location.hash.slice(1));
  if (known.has("run") || known.has("none")) settings.runs = known.getAll("run");
  if (known.has("chart")) {
    settings.charts = known.getAll("chart").map((text) => ({
      metric: text.replace(/^log:/, ""), log: text.startsWith("log:"),
    }));
  }
  if (["step", "time", "tokens"].includes(known.get("axis"))) settings.axis = known.get("axis");
  const smoothing = Number.parseFloat(known.get("smoothing"));
  if (smoothing >= 0 && smoothing <= 0.99) settings.smoothing = smoothing;
  settings.filter = known.get("filter") ?? "";
  settings.columns = known.getAll("column");
  settings.group = known.get("group") ?? "";
  const zoom = known.getAll("zoom").map(Number.parseFloat);
  if (zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1]) settings.zoom = zoom;
}

export function saveSettings() {
  const known = new URLSearchParams();
  for (const run of settings.runs ?? []) known.append("run", run);
  if (settings.runs && !settings.runs.length) known.set("none", "");
  for (const { metric, log } of settings.charts) known.append("chart", `${log ? "log:" : ""}${metric}`);
  known.set("axis", settings.axis);
  known.set("smoothing", settings.smoothing);
  if (settings.filter) known.set("filter", settings.filter);
  for (const key of settings.columns) known.append("column", key);
  if (settings.group) known.set("group", settings.group);
  for (const end of settings.zoom ?? []) known.append("zoom", end);
  history.replaceState(null, "", `#${known}`);
}

const THEMES = ["system", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

/** Show the chosen theme; `changed` is called when the colours are others. */
export function watchTheme(button, changed) {
  let theme = THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system";
  const show = () => {
    document.documentElement.dataset.theme = theme === "system" ? (systemDark.matches ? "dark" : "light") : theme;
    button.textContent = `Colours: ${theme}`;
    changed();
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("theme", theme);
    show();
  });
  systemDark.addEventListener("change", show);
  show();
}

// Colours of runs, by the order in which they were chosen. Beyond eight the lines are dashed, then dotted.
const COLOURS = 8;
const slots = new Map();

/** The place of a run among the colours; it keeps its place while it is chosen. */
export function lookOf(run) {
  for (const name of slots.keys()) if (!settings.runs?.includes(name)) slots.delete(name);
  if (!slots.has(run)) {
    const taken = new Set(slots.values());
    let free = 0;
    while (taken.has(free)) free += 1;
    slots.set(run, free);
  }
  const slot = slots.get(run);
  return { variable: `--series-${slot % COLOURS}`, dash: Math.min(2, Math.floor(slot / COLOURS)) };
}
