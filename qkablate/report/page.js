"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("specs").textContent),
    (sign) => sign.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const {config, panels} = await new Response(unpacked).json();
  const root = document.documentElement;
  const linear = document.getElementById("linear");

  // Charts. A hidden panel has no width yet and is drawn once it is shown.
  const straight = (spec) => JSON.parse(JSON.stringify(spec), (key, value) =>
    value && value.type === "log" ? {...value, type: "linear", zero: false}
      : key === "title" && typeof value === "string" ? value.replace(/ \(log\)$/, "") : value);
  async function draw(place) {
    if (place.dataset.drawn === String(linear.checked) || place.closest("[hidden]")) return;
    place.dataset.drawn = String(linear.checked);
    const spec = panels[Number(place.dataset.spec)];
    try {
      await vegaEmbed(place, linear.checked ? straight(spec) : spec,
        {config, actions: false, renderer: "svg", ast: true});
    } catch (error) {
      place.textContent = `This chart could not be drawn: ${error.message}`;
      console.error(error);
    }
  }
  async function drawAll() {
    delete root.dataset.ready;
    for (const place of document.querySelectorAll(".vega")) await draw(place);
    root.dataset.ready = "1";
  }
  linear.addEventListener("change", drawAll);
  for (const pick of document.querySelectorAll("[data-pick]")) {
    const all = pick.closest("figure").querySelectorAll(".panel");
    pick.addEventListener("change", () => {
      all.forEach((panel, i) => { panel.hidden = i !== Number(pick.value); });
      drawAll();
    });
  }

  // Light and dark: charts use CSS variables of the page and follow its theme.
  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || themes[0]) + 1) % themes.length];
    if (next === themes[0]) delete root.dataset.theme; else root.dataset.theme = next;
    button.textContent = `theme: ${next}`;
  });

  // Tables.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = [...body.rows].map((row) => {
        const cell = row.cells[column];
        const key = "key" in cell.dataset ? Number(cell.dataset.key) : cell.textContent;
        return {row, key, missing: cell.textContent === "–"};
      });
      keyed.sort((a, b) => {
        if (a.missing || b.missing) return a.missing - b.missing;
        const order = typeof a.key === "number" && typeof b.key === "number"
          ? a.key - b.key : String(a.key).localeCompare(String(b.key));
        return up ? order : -order;
      });
      body.append(...keyed.map(({row}) => row));
    }));
  }
  for (const input of document.querySelectorAll("[data-filter]")) {
    const id = input.dataset.filter;
    const word = document.querySelector(`[data-verdict="${id}"]`);
    const count = document.querySelector(`[data-count="${id}"]`);
    const rows = [...document.getElementById(id).tBodies[0].rows];
    const apply = () => {
      const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !(wanted.every((part) => text.includes(part)) &&
          (!word.value || row.dataset.word === word.value));
        shown += !row.hidden;
      }
      const all = `${rows.length} arm${rows.length === 1 ? "" : "s"}`;
      count.textContent = shown === rows.length ? all : `${shown} of ${all}`;
    };
    input.addEventListener("input", apply);
    word.addEventListener("change", apply);
  }
  drawAll();
})();
