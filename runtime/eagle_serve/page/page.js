// The chat page. Text of the model is only ever put into the page as text (textContent); the history stays in this tab.
"use strict";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const SHOWN_CYCLES = 48;
const RUNNERS_UP = 4;
const state = { model: null, messages: [], running: null, seed: null };

// The key comes in the address after "#key=", which no browser sends anywhere; it is kept for reloads of this tab.
const given = new URLSearchParams(location.hash.slice(1)).get("key");
if (given) {
  sessionStorage.setItem("key", given);
  history.replaceState(null, "", location.pathname);
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

async function call(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const key = sessionStorage.getItem("key");
  if (key) headers.authorization = `Bearer ${key}`;
  const options = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
  const answer = await fetch(path, options);
  if (!answer.ok) {
    const data = await answer.json().catch(() => null);
    throw new Error(data?.error?.message ?? `the server answered ${answer.status}`);
  }
  return answer;
}

// ---- The model

async function loadModel() {
  for (;;) {
    try {
      const models = await (await call("/v1/models")).json();
      showModel(models.data[0]);
      showError("");
      return;
    } catch (error) {
      showError(`${error.message}${sessionStorage.getItem("key") ? "" : " (a key is taken from the address: #key=...)"}`);
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
}

function showModel(model) {
  state.model = model;
  const meta = model.meta;
  document.title = `${model.id} - eagle-serve`;
  $("name").textContent = model.id;
  const precision = [...new Set(Object.values(meta.precision))].join(" / ");
  $("badges").replaceChildren(...[precision, meta.backend, `${meta.context} tokens of context`].map((text) => make("span", "badge", text)));
  for (const name of SETTINGS) {
    const value = name === "max_tokens" ? meta.max_tokens : meta.sampling[name];
    if (value !== undefined && name !== "seed") $(name).placeholder = String(value);
  }
  if (!meta.chat) {
    $("notice").textContent = "This model has no chat template, so it does not answer: it continues the text that you write.";
    $("notice").hidden = false;
    $("system").disabled = true;
    $("input").placeholder = "Begin a text";
  }
  showMemory(0);
  render();
}

function showMemory(used) {
  const meta = state.model.meta;
  $("context").max = meta.context;
  $("context").value = used;
  $("context-text").textContent = `${used} / ${meta.context}`;
  const size = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);
  $("kv").max = meta.kv_budget || Math.max(meta.kv_bytes, 1);
  $("kv").value = meta.kv_bytes;
  $("kv-text").textContent = meta.kv_budget ? `${size(meta.kv_bytes)} / ${size(meta.kv_budget)}` : size(meta.kv_bytes);
}

// ---- Messages

function render() {
  const list = $("messages");
  const items = state.messages.map((message, index) => messageItem(message, index));
  list.replaceChildren(...items);
  if (!items.length) {
    const text = state.model?.meta.chat ? "Ask something." : "Begin a text, for example: def fibonacci(n):";
    list.append(make("li", "empty", text));
  }
  scrollDown(true);
  keep("messages", JSON.stringify(state.messages));
}

function keep(name, text) {
  try {
    sessionStorage.setItem(name, text);
  } catch {
    // The tab's storage is full: a reload will not show the newest messages.
  }
}

function messageItem(message, index) {
  const answer = message.role === "assistant";
  const item = make("li", answer ? "answer" : "user");
  item.append(make("p", "role", answer ? "Model" : "You"));
  const body = make("div", state.model?.meta.chat ? "body" : "body raw");
  item.append(body);
  message.body = undefined;
  if (answer) fillAnswer(body, message);
  else body.textContent = message.content;
  if (message.figures) item.append(metaLine(message.figures));
  if (message.stopped) item.append(make("p", "meta", "stopped"));
  if (!state.running) item.append(actions(message, index, item));
  return item;
}

function fillAnswer(body, message) {
  body.classList.toggle("shown", $("show-tokens").checked && message.tokens.length > 0);
  body.replaceChildren();
  if (!message.tokens.length) {
    body.textContent = message.content;
    return;
  }
  message.tokens.forEach((token, index) => body.append(tokenSpan(token, index)));
  if ($("show-tokens").checked) {
    body.tabIndex = 0;
    body.setAttribute("aria-label", "Tokens of the answer; arrow keys go from one to the next");
  }
}

function tokenSpan(token, index) {
  const span = make("span", token.drafted ? "t d" : "t o", token.text);
  span.dataset.index = index;
  return span;
}

function metaLine(figures) {
  const line = make("p", "meta");
  const parts = [
    `${figures.tokens} tokens`, `${figures.rate.toFixed(0)} tokens/s`, `tau ${figures.tau.toFixed(2)}`,
    `first after ${figures.ttft.toFixed(0)} ms`, `${figures.cached} of ${figures.prompt} prompt tokens cached`,
    `seed ${figures.seed}`,
  ];
  for (const part of parts) line.append(make("span", "", part));
  return line;
}

function actions(message, index, item) {
  const row = make("div", "actions");
  const add = (name, act) => {
    const button = make("button", "", name);
    button.type = "button";
    button.addEventListener("click", act);
    row.append(button);
  };
  add("Edit", () => edit(message, index, item));
  if (message.role === "assistant" && index === state.messages.length - 1) {
    add("Regenerate", () => {
      state.messages.pop();
      answer();
    });
  }
  add("Copy", () => navigator.clipboard?.writeText(message.content));
  return row;
}

function edit(message, index, item) {
  const form = make("form", "edit");
  const box = make("textarea");
  box.value = message.content;
  box.rows = Math.min(12, message.content.split("\n").length + 1);
  box.setAttribute("aria-label", "Text of the message");
  const row = make("div", "actions");
  const own = message.role === "user";
  const save = make("button", "", own ? "Send again" : "Save");
  const leave = make("button", "", "Cancel");
  leave.type = "button";
  leave.addEventListener("click", render);
  row.append(save, leave);
  form.append(box, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    message.content = box.value;
    message.tokens = [];
    message.figures = null;
    if (own) {
      state.messages.length = index + 1;
      answer();
    } else render();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") render();
  });
  item.replaceChildren(form);
  box.focus();
}

function scrollDown(always) {
  const list = $("messages");
  if (always || list.scrollHeight - list.scrollTop - list.clientHeight < 80) list.scrollTop = list.scrollHeight;
}

// ---- An answer

function requestBody() {
  const chat = state.model.meta.chat;
  const body = { model: state.model.id, stream: true, stream_options: { include_usage: true }, eagle: { trace: true } };
  for (const name of SETTINGS) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  if ($("method").value) body.eagle.method = $("method").value;
  const schema = $("schema").value.trim();
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsedSchema(schema) } };
  if (chat) {
    const system = $("system").value.trim();
    const before = system ? [{ role: "system", content: system }] : [];
    body.messages = [...before, ...state.messages.map(({ role, content }) => ({ role, content }))];
    body.logprobs = true;
    body.top_logprobs = RUNNERS_UP;
  } else {
    body.prompt = state.messages.map(({ content }) => content).join("");
    body.logprobs = RUNNERS_UP;
    body.max_tokens ??= Math.min(256, state.model.meta.max_tokens);
  }
  return body;
}

function parsedSchema(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the schema is not JSON: ${error.message}`);
  }
}

async function answer() {
  showError("");
  let body;
  try {
    body = requestBody();
  } catch (error) {
    showError(error.message);
    return;
  }
  const message = { role: "assistant", content: "", tokens: [], figures: null };
  const cycles = [];
  state.running = new AbortController();
  state.messages.push(message);
  busy(true);
  render();
  const element = $("messages").lastElementChild.querySelector(".body");
  element.classList.add("waiting");
  try {
    const path = state.model.meta.chat ? "/v1/chat/completions" : "/v1/completions";
    const response = await call(path, body, state.running.signal);
    for await (const event of serverEvents(response.body)) {
      if (event.comment !== undefined) $("status").textContent = event.comment;
      else takeChunk(event.data, message, element, cycles);
    }
    $("status").textContent = "";
  } catch (error) {
    message.stopped = true;
    $("status").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showError(error.message);
    if (!message.content) state.messages.pop();
  } finally {
    state.running = null;
    busy(false);
    render();
    $("input").focus();
    const used = message.figures ? message.figures.prompt + message.figures.tokens : $("context").value;
    showMemory(used);
    call("/v1/models").then((models) => models.json()).then((models) => {
      state.model = models.data[0];
      showMemory(used);
    }).catch(() => {});
  }
}

function takeChunk(chunk, message, element, cycles) {
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices[0];
  if (choice) {
    const text = choice.delta ? choice.delta.content ?? "" : choice.text;
    const tokens = tokensOf(chunk, choice);
    $("status").textContent = "";
    message.content += text;
    if (tokens.length) {
      for (const token of tokens) {
        element.append(tokenSpan(token, message.tokens.length));
        message.tokens.push(token);
      }
      element.classList.toggle("shown", $("show-tokens").checked);
      cycles.push(tokens.filter((token) => token.drafted).length);
      drawGraph(cycles, message.tokens.length);
    } else if (text) element.append(text);
    scrollDown(false);
  }
  if (chunk.timings) {
    const { eagle, timings } = chunk;
    state.seed = eagle.seed;
    $("same-seed").disabled = false;
    message.figures = {
      tokens: timings.predicted_n, rate: timings.predicted_per_second, tau: eagle.tau, ttft: eagle.ttft_ms,
      cached: timings.cache_n, prompt: timings.cache_n + timings.prompt_n, seed: eagle.seed,
    };
    const highest = Math.max(0, ...cycles);
    $("graph-text").textContent = `${eagle.target_passes} forward passes of the target for ${timings.predicted_n} tokens, tau ${eagle.tau.toFixed(2)}; at most ${highest} drafts at once.`;
  }
}

function tokensOf(chunk, choice) {
  const traced = chunk.eagle?.tokens ?? [];
  return traced.map((token, index) => ({ text: token.text, drafted: token.drafted, ...logprobOf(choice.logprobs, index) }));
}

function logprobOf(logprobs, index) {
  if (!logprobs) return {};
  if (logprobs.content) {
    const { logprob, top_logprobs: top } = logprobs.content[index];
    return { logprob, top: top.map((other) => [other.token, other.logprob]) };
  }
  return { logprob: logprobs.token_logprobs[index], top: Object.entries(logprobs.top_logprobs[index]) };
}

async function* serverEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let finished = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const block = held.slice(0, end);
      held = held.slice(end + 2);
      if (block.startsWith(":")) yield { comment: block.slice(1).trim() };
      else if (block === "data: [DONE]") finished = true;
      else if (block.startsWith("data: ")) yield { data: JSON.parse(block.slice(6)) };
    }
  }
  if (!finished) throw new Error("the connection ended before the answer did");
}

function busy(running) {
  $("send").hidden = running;
  $("stop").hidden = !running;
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

// ---- The graph: a bar per cycle, and tau so far

function drawGraph(cycles, tokens) {
  const from = Math.max(0, cycles.length - SHOWN_CYCLES);
  const shown = cycles.slice(from);
  const top = Math.max(4, ...cycles) + 1;
  const svg = svgElement("svg", { viewBox: `0 0 ${SHOWN_CYCLES} ${top}`, preserveAspectRatio: "none" });
  for (let level = 1; level < top; level += Math.ceil(top / 6)) {
    svg.append(svgElement("line", { class: "grid", x1: 0, x2: SHOWN_CYCLES, y1: top - level, y2: top - level }));
  }
  shown.forEach((accepted, index) => {
    svg.append(svgElement("rect", { class: "bar", x: index + 0.1, y: top - accepted, width: 0.8, height: accepted }));
  });
  let sum = cycles.slice(0, from).reduce((all, accepted) => all + accepted, 0);
  const points = shown.map((accepted, index) => {
    sum += accepted;
    return `${index + 0.5},${top - sum / (from + index + 1) - 1}`;
  });
  svg.append(svgElement("polyline", { class: "curve", points: points.join(" ") }));
  $("graph").replaceChildren(svg);
  const tau = tokens / cycles.length;
  $("graph").setAttribute("aria-label", `${cycles.length} cycles, the last with ${cycles.at(-1)} accepted drafts, tau ${tau.toFixed(2)}`);
}

function svgElement(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// ---- What is known of a token

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(none)";
const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 0.1 ? `${share.toFixed(1)} %` : "under 0.1 %";
};

function showTip(span) {
  const message = messageOf(span);
  const token = message?.tokens[span.dataset.index];
  if (!token || !span.parentElement.classList.contains("shown")) return hideTip();
  const tip = $("tip");
  tip.replaceChildren(make("p", "", token.drafted ? "drafted, and accepted by the target" : "the target's own sample"));
  if (token.logprob !== undefined) {
    tip.append(make("p", "", `log-probability ${token.logprob.toFixed(3)}, ${percent(token.logprob)}`));
    const table = make("table");
    for (const [text, logprob] of token.top) {
      const row = make("tr", text === token.text ? "chosen" : "");
      row.append(make("td", "text", visible(text)), make("td", "", percent(logprob)));
      table.append(row);
    }
    tip.append(table);
  }
  tip.hidden = false;
  const place = span.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const below = place.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(6, Math.min(place.left, innerWidth - size.width - 6))}px`;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(6, place.top - size.height - 6)}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

function messageOf(element) {
  const item = element.closest("li");
  return state.messages[[...$("messages").children].indexOf(item)];
}

$("messages").addEventListener("mouseover", (event) => {
  if (event.target.classList.contains("t")) showTip(event.target);
  else hideTip();
});
$("messages").addEventListener("mouseleave", hideTip);
$("messages").addEventListener("scroll", hideTip);
$("messages").addEventListener("keydown", (event) => {
  const body = event.target;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !body.classList.contains("shown")) return;
  event.preventDefault();
  const tokens = [...body.children];
  const now = tokens.findIndex((token) => token.classList.contains("at"));
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, now < 0 ? 0 : now + step))];
  if (now >= 0) tokens[now].classList.remove("at");
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest" });
  showTip(next);
});
$("messages").addEventListener("focusout", (event) => {
  hideTip();
  for (const token of event.target.querySelectorAll?.(".at") ?? []) token.classList.remove("at");
});

// ---- Controls

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value;
  if (!text.trim() || state.running || !state.model) return;
  $("input").value = "";
  state.messages.push({ role: "user", content: text });
  answer();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideTip();
  if (state.running) state.running.abort();
  else togglePanel(false);
});
$("stop").addEventListener("click", () => state.running?.abort());
$("new-chat").addEventListener("click", () => {
  state.running?.abort();
  state.messages = [];
  $("graph").replaceChildren();
  showError("");
  render();
  $("input").focus();
});
$("same-seed").addEventListener("click", () => {
  $("seed").value = state.seed;
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("show-tokens").addEventListener("change", () => {
  $("legend").hidden = !$("show-tokens").checked;
  sessionStorage.setItem("tokens", $("show-tokens").checked ? "1" : "");
  if (state.running) {
    const last = $("messages").lastElementChild.querySelector(".body");
    last.classList.toggle("shown", $("show-tokens").checked);
  } else render();
});

function togglePanel(open) {
  $("panel").classList.toggle("open", open);
  $("open-panel").setAttribute("aria-expanded", String(open));
  $("open-panel").textContent = open ? "Close" : "Settings";
}
$("open-panel").addEventListener("click", () => togglePanel(!$("panel").classList.contains("open")));

$("show-tokens").checked = Boolean(sessionStorage.getItem("tokens"));
$("legend").hidden = !$("show-tokens").checked;
try {
  state.messages = JSON.parse(sessionStorage.getItem("messages") ?? "[]");
} catch {
  state.messages = [];
}
loadModel();
