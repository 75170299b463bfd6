"use strict";
(() => {
  const { tokens, runs } = JSON.parse(document.getElementById("cycles").textContent);
  const viewer = document.getElementById("viewer");
  const shown = runs.filter((run) => run.cycles.length);
  if (!viewer || !shown.length) return;
  const get = (id) => document.getElementById(id);
  const [select, slide, tree] = [get("run"), get("slide"), get("tree")];
  const ROW = 26, COLUMN = 132, BOX = 92, PAD = 10;
  const SVG = "http://www.w3.org/2000/svg";

  const words = (id) => {
    const text = tokens[id] ?? "#" + id;
    return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");
  };
  const short = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);
  const draw = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    tree.appendChild(element);
    return element;
  };

  // A leaf takes the next row, a node stands level with the middle of its children.
  function layout(parents) {
    const children = parents.map(() => []);
    const depth = parents.map(() => 0);
    parents.forEach((parent, node) => {
      if (parent >= 0) { children[parent].push(node); depth[node] = depth[parent] + 1; }
    });
    const row = parents.map(() => 0);
    let next = 0;
    const place = (node) => {
      children[node].forEach(place);
      row[node] = children[node].length
        ? (row[children[node][0]] + row[children[node][children[node].length - 1]]) / 2
        : next++;
    };
    place(0);
    return { depth, row, rows: next };
  }

  function showTree(cycle) {
    tree.replaceChildren();
    const { depth, row, rows } = layout(cycle.parents);
    const on = new Set(cycle.path);
    const x = (node) => PAD + depth[node] * COLUMN;
    const y = (node) => PAD + row[node] * ROW + ROW / 2;
    const last = cycle.path[cycle.path.length - 1];
    const taken = depth.some((d, node) => d === depth[last] + 1 && Math.abs(row[node] - row[last]) < 1);
    const bonusY = taken ? PAD + rows * ROW + ROW / 2 : y(last);
    const width = PAD * 2 + (Math.max(...depth, depth[last] + 1) + 1) * COLUMN;
    const height = PAD * 2 + (rows + (taken ? 1 : 0)) * ROW;
    tree.setAttribute("viewBox", `0 0 ${width} ${height}`);
    tree.setAttribute("width", width);
    tree.setAttribute("height", height);
    const edge = (x1, y1, x2, y2, hit) => {
      const middle = (x1 + x2) / 2;
      draw("path", { class: hit ? "edge hit" : "edge", d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` });
    };
    cycle.parents.forEach((parent, node) => {
      if (parent >= 0) edge(x(parent) + BOX, y(parent), x(node), y(node), on.has(node));
    });
    edge(x(last) + BOX, y(last), x(last) + COLUMN, bonusY, true);
    cycle.tokens.forEach((token, node) => {
      const hit = on.has(node) ? "hit" : "";
      const box = draw("rect", { class: hit, x: x(node), y: y(node) - 10, width: BOX, height: 20, rx: 4 });
      const title = document.createElementNS(SVG, "title");
      title.textContent = `${words(token)} (id ${token}), probability ${cycle.p[node]}`;
      box.appendChild(title);
      draw("text", { class: hit, x: x(node) + 6, y: y(node) + 4 }, short(words(token), node ? 8 : 12));
      if (node) draw("text", { class: hit || "p", x: x(node) + BOX - 4, y: y(node) + 4, "text-anchor": "end" }, cycle.p[node].toFixed(2).replace("0.", "."));
    });
    draw("rect", { class: "bonus", x: x(last) + COLUMN, y: bonusY - 10, width: BOX, height: 20, rx: 4 });
    draw("text", { x: x(last) + COLUMN + 6, y: bonusY + 4 }, short(words(cycle.next), 12));
  }

  function showTimes(ms) {
    const total = ms.reduce((sum, part) => sum + part, 0) || 1;
    get("times").replaceChildren(...["draft", "verify", "host"].map((name, index) => {
      const span = document.createElement("span");
      span.className = name;
      span.style.width = (100 * ms[index]) / total + "%";
      span.title = span.textContent = `${name} ${ms[index].toFixed(2)} ms`;
      return span;
    }));
  }

  function showText(run, index) {
    const emitted = run.cycles.slice(0, index).map((cycle) => [...cycle.path.slice(1).map((node) => cycle.tokens[node]), cycle.next]);
    const plain = (ids) => ids.map((id) => tokens[id] ?? "#" + id).join("");
    const cycle = run.cycles[index];
    const part = (name, text) => { const element = document.createElement(name); element.textContent = text; return element; };
    get("text").replaceChildren(
      part("span", run.prompt),
      part("b", plain([run.cycles[0].tokens[0], ...emitted.flat()])),
      part("mark", plain([...cycle.path.slice(1).map((node) => cycle.tokens[node]), cycle.next])),
    );
    get("text").scrollTop = get("text").scrollHeight;
  }

  function show() {
    const run = shown[select.value];
    slide.max = run.cycles.length - 1;
    const index = Math.min(+slide.value, run.cycles.length - 1);
    const cycle = run.cycles[index];
    get("where").textContent = `cycle ${index + 1} of ${run.cycles.length}, ${cycle.path.length - 1} of ${cycle.tokens.length - 1} accepted`;
    get("prev").disabled = index === 0;
    get("next").disabled = index === run.cycles.length - 1;
    showTimes(cycle.ms);
    showText(run, index);
    showTree(cycle);
  }

  const step = (by) => { slide.value = +slide.value + by; show(); };
  shown.forEach((run, index) => select.add(new Option(`${run.setup} · prompt ${run.prompt_id}`, index)));
  select.onchange = () => { slide.value = 0; show(); };
  slide.oninput = show;
  get("prev").onclick = () => step(-1);
  get("next").onclick = () => step(1);
  viewer.tabIndex = 0;
  viewer.addEventListener("keydown", (event) => {
    if (event.target === slide || event.target === select) return;
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  show();
})();
