"use strict";
// Texts are set as text, never as HTML: a model may write anything.
const byId = (id) => document.getElementById(id);
let model = null;
let turns = [];
let running = null;

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

function show(kind, text) {
  const turn = document.createElement("div");
  turn.className = "turn " + kind;
  turn.textContent = text;
  byId("turns").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body && body.error ? body.error.message : "HTTP " + response.status);
}

async function findModel() {
  if (model === null) {
    const response = await checked(await fetch("v1/models", { headers: headers() }));
    model = (await response.json()).data[0];
    byId("model").textContent = model.id;
  }
  return model;
}

function question(found, message) {
  const temperature = Number(byId("temperature").value);
  const common = { model: found.id, stream: true, temperature, max_tokens: Number(byId("tokens").value) };
  if (byId("seed").value !== "") common.seed = Number(byId("seed").value);
  if (found.has_chat) {
    return ["v1/chat/completions", { ...common, messages: [...turns, { role: "user", content: message }] }];
  }
  // Without a chat template the model continues the text that both have written.
  const before = turns.map((turn) => turn.content);
  return ["v1/completions", { ...common, prompt: [...before, message].join("\n") }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(message) {
  running = new AbortController();
  byId("send").textContent = "Stop";
  show("user", message);
  const shown = show("assistant", "");
  let said = "";
  try {
    const [path, body] = question(await findModel(), message);
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
    const response = await checked(await fetch(path, options));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (!choice) continue;
      said += (choice.delta ? choice.delta.content : choice.text) || "";
      shown.textContent = said;
      shown.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    if (said) turns.push({ role: "user", content: message }, { role: "assistant", content: said });
    running = null;
    byId("send").textContent = "Send";
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running !== null) {
    running.abort();
    return;
  }
  const message = byId("message").value;
  byId("message").value = "";
  answer(message);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("reset").addEventListener("click", () => {
  turns = [];
  byId("turns").replaceChildren();
});
findModel().catch((error) => show("error", error.message));
