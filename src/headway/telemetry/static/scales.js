// Ranges, ticks and labels of axes, the same in reports and in `headway ui`.

import { count } from "./format.js";

export function linearRange(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = 0.04 * (high - low) || 0.1 * Math.abs(high) || 1;
  // Amounts that begin at zero or near it are shown from zero.
  return [low >= 0 && low < 0.3 * (high - low) ? 0 : low - room, high + room];
}

export function logRange(_, low, high) {
  return low > 0 && high > 0 ? [low / 1.08, high * 1.08] : [0.1, 1];
}

/** Ticks at 1, 2 and 5 of every decade, or of round numbers where these would be too few or too many. */
export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const digit of high < 1e3 * low ? [1, 2, 5] : [1]) found.push(Number(`${digit}e${power}`));
  }
  const inside = found.filter((tick) => tick >= low && tick <= high);
  if (inside.length >= 3) return inside;
  const unit = 10 ** Math.floor(Math.log10((high - low) / 3));
  const step = [1, 2, 5, 10].map((digit) => digit * unit).find((size) => (high - low) / size <= 6);
  return Array.from({ length: 7 }, (_, index) => (Math.ceil(low / step) + index) * step).filter((tick) => tick <= high);
}

/** Labels of an axis, all with as many digits as tell its ticks apart. */
export function labels(ticks) {
  const known = ticks.filter((tick) => tick !== null);
  const size = Math.max(...known.map(Math.abs));
  if (size >= 1e4) return ticks.map(count);
  const gaps = known.slice(1).map((tick, index) => Math.abs(tick - known[index])).filter(Boolean);
  const gap = gaps.length ? Math.min(...gaps) : size || 1;
  if (gap < 1e-4) return ticks.map((tick) => (tick === 0 ? "0" : tick.toExponential(1)));
  const digits = Math.max(0, Math.min(5, Math.ceil(-Math.log10(gap) - 1e-9)));
  return ticks.map((tick) => (tick === null ? "" : tick.toFixed(digits)));
}
