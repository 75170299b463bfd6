// The chat page. Text of the model is only ever put into the page as text (textContent); the history stays in this tab.
"use strict";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const SHOWN_CYCLES = 48;
const RUNNERS_UP = 4;
const state = { model: null, messages: [], running: null, seed: null, asked: null };  // asked: the request that the last answer answers

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
    for (const element of document.querySelectorAll(".chat-only")) element.hidden = true;
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
  if (answer) item.append(...answerParts(message, index));
  else item.append(make("div", bodyClass(), message.content));
  if (message.figures) item.append(metaLine(message.figures));
  if (message.stopped) item.append(make("p", "meta", "stopped"));
  if (!state.running) item.append(actions(message, index, item));
  return item;
}

const bodyClass = () => (state.model?.meta.chat ? "body" : "body raw");

// Thinking, text and calls of an answer. With the tokens shown, the text has all of them, tags and arguments too.
function answerParts(message, index) {
  const parts = [];
  if (message.reasoning) {
    const folded = make("details", "thinking");
    folded.open = Boolean(message.unfolded);
    folded.addEventListener("toggle", () => {
      message.unfolded = folded.open;
    });
    folded.append(make("summary", "", "Thinking"), make("div", "body", message.reasoning));
    parts.push(folded);
  }
  const shown = $("show-tokens").checked && message.tokens.length > 0;
  const body = make("div", bodyClass());
  if (shown || (message.tokens.length && !takenApart(message))) {
    message.tokens.forEach((token, place) => body.append(tokenSpan(token, place)));
  } else body.textContent = message.content;
  if (shown) {
    body.classList.add("shown");
    body.tabIndex = 0;
    body.setAttribute("role", "group");
    body.setAttribute("aria-label", "Tokens of the answer; arrow keys go from one to the next");
  }
  body.hidden = !body.textContent && takenApart(message);
  parts.push(body);
  if (message.calls?.length) parts.push(callCards(message, index));
  return parts;
}

const takenApart = (message) => Boolean(message.reasoning || message.calls?.length);

// ---- Calls of tools: a card each, and a place for the result, which the user writes

function callCards(message, index) {
  const form = make("form", "calls");
  const open = !state.running && index === state.messages.length - 1 && message.calls.some((one) => parsed(one.arguments));
  message.calls.forEach((one, place) => {
    const card = make("section", "card");
    card.setAttribute("aria-label", `Call of ${one.name}`);
    const title = make("h2", "", one.name);
    const given = parsed(one.arguments);
    card.append(title, make("pre", "arguments", given ? JSON.stringify(given.value, null, 2) : one.arguments));
    if (open && given) {
      const box = make("textarea", "code");
      box.id = `result-${index}-${place}`;
      box.rows = 2;
      box.value = one.result ?? "";
      box.addEventListener("input", () => {
        one.result = box.value;
      });
      const label = make("label", "", "Result");
      label.htmlFor = box.id;
      card.append(label, box);
    } else if (one.result !== undefined) card.append(make("p", "label", "Result"), make("pre", "result", one.result));
    else if (!given && !state.running) card.append(make("p", "label", "The call was cut off."));
    form.append(card);
  });
  if (open) form.append(make("button", "primary", message.calls.length > 1 ? "Send results" : "Send result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    for (const one of message.calls) one.result ??= "";
    answer();
  });
  return form;
}

// The value of a JSON text in an object; null for a text that is not JSON.
function parsed(text) {
  try {
    return { value: JSON.parse(text) };
  } catch {
    return null;
  }
}

// A message of the page as the server's API has it: with calls, followed by their results.
function sentMessages(message) {
  if (message.role === "user") return [{ role: "user", content: message.content }];
  const calls = (message.calls ?? []).filter((one) => parsed(one.arguments));
  const said = { role: "assistant", content: message.content || (calls.length ? null : "") };
  if (message.reasoning) said.reasoning_content = message.reasoning;
  if (!calls.length) return [said];
  said.tool_calls = calls.map((one) => ({
    id: one.id, type: "function", function: { name: one.name, arguments: one.arguments },
  }));
  return [said, ...calls.map((one) => ({ role: "tool", tool_call_id: one.id, name: one.name, content: one.result ?? "" }))];
}

function tokenSpan(token, index) {
  const span = make("span", token.drafted ? "t d" : "t o", token.text);
  span.dataset.index = index;
  return span;
}

function metaLine(figures) {
  const line = make("p", "meta");
  const parts = [
    `${figures.rate.toFixed(0)} tokens/s`, `tau ${figures.tau.toFixed(2)}`,
    ...(figures.vanilla ? [againstVanilla(figures)] : []), `${figures.tokens} tokens`,
    `first after ${figures.ttft.toFixed(0)} ms`, `${figures.cached} of ${figures.prompt} prompt tokens cached`,
    `seed ${figures.seed}`,
  ];
  for (const part of parts) line.append(make("span", "", part));
  return line;
}

function againstVanilla({ rate, vanilla }) {
  const text = vanilla.same ? "the same text" : "another text";
  return `${(rate / vanilla.rate).toFixed(2)} times vanilla (${vanilla.rate.toFixed(0)} tokens/s, ${text})`;
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
  if (index === state.messages.length - 1) {
    add("Retry", () => {
      if (message.role === "assistant") state.messages.pop();
      answer();
    });
    if (message.figures && state.asked) add("Compare with vanilla", () => compare(message));
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
    state.asked = null;
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
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: fromJson(schema, "the schema") } };
  if (chat) {
    const system = $("system").value.trim();
    const before = system ? [{ role: "system", content: system }] : [];
    body.messages = [...before, ...state.messages.flatMap(sentMessages)];
    const tools = $("tools").value.trim();
    if (tools) {
      body.tools = toolList(fromJson(tools, "the list of tools"));
      body.tool_choice = $("tool_choice").value;
    }
    body.logprobs = true;
    body.top_logprobs = RUNNERS_UP;
  } else {
    body.prompt = state.messages.map(({ content }) => content).join("");
    body.logprobs = RUNNERS_UP;
    body.max_tokens ??= Math.min(256, state.model.meta.max_tokens);
  }
  return body;
}

function fromJson(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

// One tool or several, in OpenAI's form or its inner part alone: {"name", "description", "parameters"}.
function toolList(given) {
  return [given].flat().map((one) => (one?.name ? { type: "function", function: one } : one));
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
  const message = { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], figures: null };
  const cycles = [];
  state.asked = null;
  state.running = new AbortController();
  state.messages.push(message);
  busy(true);
  render();
  const item = $("messages").lastElementChild;
  item.setAttribute("aria-busy", "true");
  item.classList.add("waiting");
  try {
    const path = state.model.meta.chat ? "/v1/chat/completions" : "/v1/completions";
    const response = await call(path, body, state.running.signal);
    for await (const event of serverEvents(response.body)) {
      if (event.comment !== undefined) $("status").textContent = event.comment;
      else takeChunk(event.data, message, item, cycles);
    }
    state.asked = body;
    $("status").textContent = "Answered.";
    $("spoken").textContent = [message.content, ...message.calls.map((one) => `Call of ${one.name}`)].join("\n");
  } catch (error) {
    message.stopped = true;
    $("status").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showError(error.message);
    if (!message.content && !takenApart(message)) state.messages.pop();
  } finally {
    finished();
    const used = message.figures ? message.figures.prompt + message.figures.tokens : $("context").value;
    showMemory(used);
    call("/v1/models").then((models) => models.json()).then((models) => {
      state.model = models.data[0];
      showMemory(used);
    }).catch(() => {});
  }
}

function finished() {
  state.running = null;
  busy(false);
  render();
  if (document.activeElement === document.body) $("input").focus();
}

// Answer the last message again without drafts, from the same seed: how long it takes, and that the text is the same.
async function compare(message) {
  state.running = new AbortController();
  busy(true);
  render();
  $("status").textContent = "Answering again without drafts.";
  try {
    const { stream_options, ...asked } = state.asked;
    const body = { ...asked, stream: false, seed: message.figures.seed, eagle: { method: "vanilla", trace: true } };
    const path = state.model.meta.chat ? "/v1/chat/completions" : "/v1/completions";
    const { timings, eagle } = await (await call(path, body, state.running.signal)).json();
    const same = eagle.tokens.map((token) => token.text).join("") === message.tokens.map((token) => token.text).join("");
    message.figures.vanilla = { rate: timings.predicted_per_second, same };
    $("status").textContent = againstVanilla(message.figures);
  } catch (error) {
    $("status").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showError(error.message);
  } finally {
    finished();
  }
}

function takeChunk(chunk, message, item, cycles) {
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices[0];
  if (choice) {
    const delta = choice.delta ?? { content: choice.text };
    const text = delta.content ?? "";
    const tokens = tokensOf(chunk, choice);
    $("status").textContent = "";
    message.content += text;
    message.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) takeCall(message, part);
    const body = item.querySelector(":scope > .body");
    for (const token of tokens) {
      body.append(tokenSpan(token, message.tokens.length));
      message.tokens.push(token);
    }
    if (takenApart(message)) showParts(item, message);
    else if (!tokens.length && text) body.append(text);
    else body.classList.toggle("shown", $("show-tokens").checked);
    if (tokens.length) {
      cycles.push(tokens.filter((token) => token.drafted).length);
      drawGraph(cycles, message.tokens.length);
    }
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

function takeCall(message, part) {
  const one = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
  one.id = part.id ?? one.id;
  one.name += part.function.name ?? "";
  one.arguments += part.function.arguments ?? "";
}

function showParts(item, message) {
  while (item.children.length > 1) item.lastElementChild.remove();
  item.append(...answerParts(message, state.messages.length - 1));
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
  state.asked = null;
  $("graph").replaceChildren();
  showError("");
  render();
  $("input").focus();
});
$("same-seed").addEventListener("click", () => {
  $("seed").value = state.seed;
});
$("theme").addEventListener("change", () => {
  document.documentElement.dataset.theme = $("theme").value;
  sessionStorage.setItem("theme", $("theme").value);
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("show-tokens").addEventListener("change", () => {
  $("legend").hidden = !$("show-tokens").checked;
  sessionStorage.setItem("tokens", $("show-tokens").checked ? "1" : "");
  if (state.running) {
    const item = $("messages").lastElementChild;
    if (state.messages.at(-1).role === "assistant") showParts(item, state.messages.at(-1));
  } else render();
});

function togglePanel(open) {
  $("panel").classList.toggle("open", open);
  $("open-panel").setAttribute("aria-expanded", String(open));
  $("open-panel").textContent = open ? "Close" : "Settings";
}
$("open-panel").addEventListener("click", () => togglePanel(!$("panel").classList.contains("open")));

document.documentElement.dataset.theme = $("theme").value = sessionStorage.getItem("theme") ?? "";
$("show-tokens").checked = Boolean(sessionStorage.getItem("tokens"));
$("legend").hidden = !$("show-tokens").checked;
try {
  state.messages = JSON.parse(sessionStorage.getItem("messages") ?? "[]");
} catch {
  state.messages = [];
}
loadModel();
