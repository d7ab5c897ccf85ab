// A light/dark switch, tables that sort by a click on a title, and the guards: rows made when somebody looks.
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
