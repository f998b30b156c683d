"use strict";
(() => {
  const [charts, themes] = ["charts", "themes"].map((id) => JSON.parse(document.getElementById(id).textContent));
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const visible = new Set();
  let printing = false;

  function rows(columns) {
    const names = Object.keys(columns);
    return (columns[names[0]] || []).map((_, at) => Object.fromEntries(names.map((name) => [name, columns[name][at]])));
  }

  function draw(element) {
    visible.add(element);
    const theme = themes[night.matches && !printing ? "dark" : "light"];
    const chart = charts[element.dataset.chart];
    const datasets = Object.fromEntries(Object.entries(chart.datasets).map(([name, columns]) => [name, rows(columns)]));
    const spec = { ...chart, datasets, width: "container", autosize: { type: "fit-x", contains: "padding" } };
    return vegaEmbed(element, spec, {
      config: { ...theme, legend: { ...theme.legend, disable: Boolean(element.closest(".grid")) } }, // there it is HTML
      actions: { export: true, source: false, compiled: false, editor: false },
      renderer: "canvas",
      ast: true, // interprets expressions: no `unsafe-eval`
      downloadFileName: element.dataset.chart,
      scaleFactor: 2,
    });
  }

  const redraw = () => visible.forEach(draw);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !visible.has(entry.target)) draw(entry.target);
  }, { rootMargin: "600px" });
  document.querySelectorAll(".chart").forEach((element) => seen.observe(element));

  for (const parts of document.querySelectorAll(".parts")) {
    const buttons = [...parts.querySelectorAll("button")];
    const choose = (chosen) => {
      for (const button of buttons) {
        button.setAttribute("aria-selected", String(button === chosen));
        button.tabIndex = button === chosen ? 0 : -1;
        document.getElementById(button.getAttribute("aria-controls")).hidden = button !== chosen;
      }
    };
    parts.addEventListener("click", (event) => { if (buttons.includes(event.target)) choose(event.target); });
    parts.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
      choose(next);
      next.focus();
      event.preventDefault();
    });
  }

  night.addEventListener("change", redraw);
  for (const [event, on] of [["beforeprint", true], ["afterprint", false]])
    window.addEventListener(event, () => {
      printing = on;
      document.documentElement.classList.toggle("print", on);
      for (const element of document.querySelectorAll(".chart")) if (element.offsetParent) visible.add(element);
      redraw();
    });
})();
