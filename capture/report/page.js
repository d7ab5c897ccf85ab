// A light/dark switch, tables that sort by a click on a title; guards and graphs, which are made when somebody looks.
const root = document.documentElement;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const SHOWN = 200; // rows at a time: a model of 24 layers has thousands of guards
for (const part of document.querySelectorAll("details.guards")) {
  const data = JSON.parse(part.querySelector("template.data").content.textContent);
  const rows = part.querySelector(".rows"), input = part.querySelector(".search");
  const texts = data.rows.map(([source, check, at]) => `${source} ${check} ${data.places[at]}`.toLowerCase());
  let shown = SHOWN;
  const cell = (row, text, name) => {
    const made = row.insertCell();
    made.textContent = text;
    made.className = name;
  };
  const draw = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.rows.filter((_, i) => words.every((word) => texts[i].includes(word)));
    found.sort((a, b) => b[4] - a[4]);
    const table = document.createElement("table");
    for (const [source, check, at, count, cost] of found.slice(0, shown)) {
      const row = table.insertRow();
      cell(row, source + (count > 1 ? ` ×${count}` : ""), "mono source");
      cell(row, check, "check");
      cell(row, data.places[at], "place");
      cell(row, cost ? `${cost} ns` : "–", "num");
    }
    const left = found.length - shown;
    rows.replaceChildren(table);
    if (left > 0) {
      const more = document.createElement("button");
      more.textContent = `${left} more`;
      more.addEventListener("click", () => { shown *= 4; draw(); });
      rows.append(more);
    }
  };
  part.addEventListener("toggle", () => part.open && draw());
  input.addEventListener("input", () => { shown = SHOWN; draw(); });
}
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("th").forEach((title, column) => {
    title.tabIndex = 0;
    title.addEventListener("keydown", (event) => event.key === "Enter" && title.click());
    title.addEventListener("click", () => {
      const up = title.dataset.order !== "up";
      table.querySelectorAll("th").forEach((other) => delete other.dataset.order);
      title.dataset.order = up ? "up" : "down";
      const key = (row) => row.cells[column].dataset.sort;
      const number = title.classList.contains("num");
      const rows = [...body.rows].sort((a, b) =>
        number ? (key(a) === "" ? -1 : +key(a)) - (key(b) === "" ? -1 : +key(b)) : key(a).localeCompare(key(b)));
      body.append(...(up ? rows : rows.reverse()));
    });
  });
}

const STEP_X = 132, STEP_Y = 40, BOX_X = 118, BOX_Y = 24;
// Each operator below the lowest that it takes, and no higher than where its phase begins, in the first row that has room;
// along the row near what it takes.
function layout(nodes) {
  const row = [], x = [], rows = [], room = Math.max(8, Math.ceil(Math.sqrt(nodes.length / 2)));
  let lowest = 0, begins = 0, phase = 0;
  nodes.forEach(([, , , now, takes], i) => {
    if (now !== phase) { phase = now; begins = lowest + 1; }
    row[i] = takes.reduce((least, from) => Math.max(least, row[from] + 1), begins);
    while (rows[row[i]]?.size >= room) row[i] += 1;
    lowest = Math.max(lowest, row[i]);
    const taken = (rows[row[i]] ||= new Set());
    const near = takes.length ? Math.round(takes.reduce((sum, from) => sum + x[from], 0) / takes.length) : 0;
    let off = 0;
    while (taken.has(near + off)) off = off > 0 ? -off : 1 - off; // 1, -1, 2, -2: to both sides
    taken.add(near + off);
    x[i] = near + off;
  });
  return { row, x };
}
for (const part of document.querySelectorAll("details.graph")) {
  const canvas = part.querySelector("canvas"), input = part.querySelector(".search"), said = part.querySelector(".said");
  let data, at, pen, zoom = 1, left = 0, top = 0, chosen = -1, found = new Set(), hits = [], waiting = false;
  const middle = (i) => [at.x[i] * STEP_X, at.row[i] * STEP_Y];
  const draw = () => { if (!waiting) { waiting = true; requestAnimationFrame(paint); } };
  const paint = () => {
    waiting = false;
    const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const style = getComputedStyle(canvas), color = (name) => style.getPropertyValue(name);
    const colors = [color("--captured"), color("--accent"), color("--opaque")];
    const ink = color("--ink"), line = color("--soft"), ground = color("--card");
    pen.setTransform(scale * zoom, 0, 0, scale * zoom, scale * left, scale * top);
    pen.font = "12px ui-monospace, monospace";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const near = (i, more) => { const [x, y] = middle(i); const a = x * zoom + left, b = y * zoom + top;
      return a > -more && a < width + more && b > -more && b < height + more; };
    pen.strokeStyle = line;
    pen.lineWidth = 1 / Math.max(zoom, .3);
    pen.beginPath();
    data.nodes.forEach(([, , , , takes], i) => takes.forEach((from) => {
      if (!near(i, 400) && !near(from, 400)) return;
      const [x, y] = middle(i), [u, v] = middle(from);
      pen.moveTo(u, v + BOX_Y / 2);
      pen.bezierCurveTo(u, v + STEP_Y / 2, x, y - STEP_Y / 2, x, y - BOX_Y / 2);
    }));
    pen.globalAlpha = .5;
    pen.stroke();
    pen.globalAlpha = 1;
    data.nodes.forEach(([name, , , phase], i) => {
      if (!near(i, 100)) return;
      const [x, y] = middle(i);
      pen.fillStyle = found.has(i) || i === chosen ? colors[phase] : ground;
      pen.strokeStyle = colors[phase];
      pen.lineWidth = 1.5;
      pen.fillRect(x - BOX_X / 2, y - BOX_Y / 2, BOX_X, BOX_Y);
      pen.strokeRect(x - BOX_X / 2, y - BOX_Y / 2, BOX_X, BOX_Y);
      if (zoom < .35) return;
      pen.fillStyle = found.has(i) || i === chosen ? ground : ink;
      pen.fillText(name.length > 15 ? name.slice(0, 14) + "…" : name, x, y);
    });
  };
  const begin = () => { goTo(0); chosen = -1; said.textContent = ""; zoom = .75; const [x] = middle(0);
    left = canvas.clientWidth / 2 - x * zoom; top = 30; draw(); };
  const fit = () => {
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const least = Math.min(...at.x) * STEP_X - BOX_X, most = Math.max(...at.x) * STEP_X + BOX_X;
    zoom = Math.min(1, width / (most - least), height / ((Math.max(...at.row) + 2) * STEP_Y));
    left = width / 2 - zoom * (least + most) / 2;
    top = STEP_Y * zoom;
    draw();
  };
  const goTo = (i) => {
    chosen = i;
    const [name, own, where, phase, takes] = data.nodes[i], [x, y] = middle(i);
    zoom = Math.max(zoom, .6);
    left = canvas.clientWidth / 2 - x * zoom;
    top = canvas.clientHeight / 2 - y * zoom;
    const of = takes.length ? `, of ${takes.map((from) => data.nodes[from][1]).join(", ")}` : "";
    said.textContent = `${own}: ${name}${of} · ${data.places[where]} · ${data.phases[phase]}`;
    draw();
  };
  const zoomBy = (factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) => {
    const before = zoom;
    zoom = Math.min(4, Math.max(.01, zoom * factor));
    left = x - (x - left) * zoom / before;
    top = y - (y - top) * zoom / before;
    draw();
  };
  const keys = { "+": () => zoomBy(1.25), "=": () => zoomBy(1.25), "-": () => zoomBy(.8), 0: fit,
    ArrowLeft: () => { left += 60; draw(); }, ArrowRight: () => { left -= 60; draw(); },
    ArrowUp: () => { top += 60; draw(); }, ArrowDown: () => { top -= 60; draw(); } };
  canvas.addEventListener("keydown", (event) => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the wheel alone scrolls the page
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY / 300), event.offsetX, event.offsetY);
  }, { passive: false });
  const held = new Map();
  canvas.addEventListener("pointerdown", (event) => { held.set(event.pointerId, event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) return;
    if (held.size === 2) {
      const [other] = [...held.values()].filter((one) => one.pointerId !== event.pointerId);
      const apart = (one) => Math.hypot(one.offsetX - other.offsetX, one.offsetY - other.offsetY) || 1;
      zoomBy(apart(event) / apart(before), (event.offsetX + other.offsetX) / 2, (event.offsetY + other.offsetY) / 2);
    } else {
      left += event.offsetX - before.offsetX;
      top += event.offsetY - before.offsetY;
      draw();
    }
    held.set(event.pointerId, event);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => held.delete(event.pointerId));
  canvas.addEventListener("click", (event) => {
    const x = (event.offsetX - left) / zoom, y = (event.offsetY - top) / zoom;
    const hit = data.nodes.findIndex((_, i) => { const [u, v] = middle(i);
      return Math.abs(u - x) < BOX_X / 2 && Math.abs(v - y) < BOX_Y / 2; });
    if (hit >= 0) goTo(hit);
  });
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = ([name, own, where]) => `${name} ${own} ${data.places[where]}`.toLowerCase();
    hits = words.length ? data.nodes.flatMap((node, i) => words.every((word) => text(node).includes(word)) ? [i] : []) : [];
    found = new Set(hits);
    if (hits.length) goTo(hits[0]); else { chosen = -1; draw(); }
    if (words.length) said.textContent = `${hits.length} found · ${said.textContent}`;
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && hits.length) goTo(hits[(hits.indexOf(chosen) + 1) % hits.length]);
  });
  part.querySelectorAll("[data-phase]").forEach((button) => button.addEventListener("click", () => {
    const first = data.nodes.findIndex(([, , , phase]) => phase === +button.dataset.phase);
    if (first >= 0) goTo(first);
  }));
  part.querySelectorAll("[data-key]").forEach((button) => button.addEventListener("click", () => keys[button.dataset.key]()));
  part.addEventListener("toggle", () => {
    if (!part.open) return;
    if (!data) {
      data = JSON.parse(part.querySelector("template.data").content.textContent);
      at = layout(data.nodes);
      pen = canvas.getContext("2d");
      new ResizeObserver(draw).observe(canvas);
      document.getElementById("theme").addEventListener("click", draw);
    }
    begin();
  });
}
