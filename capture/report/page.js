// Three small conveniences: a light/dark switch, a filter above the guards, tables that sort by a click on a title.
const root = document.documentElement;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
for (const input of document.querySelectorAll(".filter")) {
  const rows = [...input.nextElementSibling.querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("th").forEach((title, column) => {
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
