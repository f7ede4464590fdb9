// Numbers as people read them.

export function count(value) {
  if (value === null || value === undefined) return "";
  for (const [size, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= (size === 1e3 ? 1e4 : size)) return `${trim(value / size, 1)}${suffix}`;
  }
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) >= 100 ? 0 : 2 });
}

const trim = (value, digits) => value.toFixed(digits).replace(/\.0+$/, "");

export function precise(value) {
  if (typeof value !== "number") return value ?? "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-3) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e5 ? 6 : 5 });
}

/** Like 2 h 14 m. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [size, unit] = parts[first];
  const whole = Math.floor(seconds / size);
  if (first === parts.length - 1) return `${whole} ${unit}`;
  const [next, nextUnit] = parts[first + 1];
  const rest = Math.floor((seconds - whole * size) / next);
  return rest ? `${whole} ${unit} ${rest} ${nextUnit}` : `${whole} ${unit}`;
}
