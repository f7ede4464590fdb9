// The metrics that can be chosen: those of the catalogue that runs have, and those that only runs know.

let catalogue = {};
const names = new Set();

export const setCatalogue = (found) => { catalogue = found; };

/** Take the names that a run records; returns whether there were new ones. */
export function addNames(found) {
  const before = names.size;
  for (const name of found) names.add(name);
  return names.size > before;
}

/** Unit and meaning of a metric; empty for one that a user's own code records. */
export function about(name) {
  return catalogue[name] ?? catalogue[Object.keys(catalogue).find((known) => {
    const family = known.indexOf("<");
    return family > 0 && name.startsWith(known.slice(0, family));
  })] ?? { unit: "", help: "" };
}

/** Fill a select with the names by their groups. */
export function fillSelect(select, chosen) {
  const groups = new Map();
  for (const name of [...names].sort()) {
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  if (!names.has(chosen)) groups.set("chosen", [chosen]);
  select.replaceChildren(...[...groups].map(([group, members]) => {
    const box = document.createElement("optgroup");
    box.label = group;
    for (const name of members) {
      const option = document.createElement("option");
      option.value = option.textContent = name;
      option.title = about(name).help;
      option.selected = name === chosen;
      box.append(option);
    }
    return box;
  }));
}

/** A metric that no chart shows yet. */
export function nextMetric(shown) {
  const wanted = ["train/grad_norm", "evaluation/loss", "train/learning_rate", "speed/mfu", "memory/peak_gib"];
  return [...wanted, ...[...names].sort()].find((name) => names.has(name) && !shown.includes(name)) ?? "train/loss";
}
