// What the server is asked. An answer that is no answer is an Error with words for people.

async function ask(path, signal) {
  const answer = await fetch(path, { signal, headers: { Accept: "application/json" } });
  if (!answer.ok) {
    const words = (await answer.text()).trim() || `the server answers ${answer.status}`;
    throw Object.assign(new Error(words), { status: answer.status });
  }
  return answer.json();
}

export const askRuns = (columns) => ask(`/api/runs?${new URLSearchParams(columns.map((key) => ["column", key]))}`);
export const askCatalogue = () => ask("/api/catalogue");

// Runs in one question. Histories are read at the first question about a run, so that many runs appear bit by bit.
const RUNS_AT_ONCE = 8;

/** Yield curves by run, some runs at a time; runs that are no longer there have none. */
export async function* askCurves({ metric, runs, axis, smoothing, zoom, points }, signal) {
  for (let start = 0; start < runs.length; start += RUNS_AT_ONCE) {
    const query = new URLSearchParams({ metric, axis, smoothing, points });
    for (const run of runs.slice(start, start + RUNS_AT_ONCE)) query.append("run", run);
    if (zoom) {
      query.set("from", zoom[0]);
      query.set("to", zoom[1]);
    }
    try {
      yield (await ask(`/api/curves?${query}`, signal)).runs;
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }
}
