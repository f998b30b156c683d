"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();
  let printing = false;

  const dark = () => night.matches && !printing;

  function themed(layout) {
    const ink = dark() ? "#e3e8ed" : "#1d2733", faint = dark() ? "#9aa7b4" : "#5b6875";
    const rule = dark() ? "#2d353e" : "#e4e9ed", card = dark() ? "#20262d" : "#ffffff";
    const narrow = window.innerWidth < 620;
    const axis = { gridcolor: rule, linecolor: rule, tickcolor: rule, tickfont: { color: faint }, zerolinecolor: rule };
    const copy = structuredClone(layout);
    for (const name of ["xaxis", "yaxis"]) {
      Object.assign(copy[name], axis);
      copy[name].title.font = { color: faint, size: narrow ? 12 : 13 };
    }
    for (const shape of copy.shapes || []) shape.line.color = rule;
    copy.paper_bgcolor = copy.plot_bgcolor = "rgba(0,0,0,0)";
    copy.font = { color: ink, size: narrow ? 11 : 13, family: "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, sans-serif" };
    copy.hoverlabel = { bgcolor: card, bordercolor: faint, font: { color: ink }, align: "left" };
    copy.legend.font = { color: ink };
    if (narrow) copy.height = Math.min(copy.height, 420);
    return copy;
  }

  function coloured(data) {
    const ground = dark() ? "#14181d" : "#ffffff";
    return data.map((trace) => {
      if (trace.type === "bar") return { ...trace, marker: { ...trace.marker, line: { ...trace.marker.line, color: ground } } };
      if (trace.type === "heatmap" && dark())
        return { ...trace, colorscale: [[0, "#1c232a"], [0.01, "#203241"], [0.5, "#3d85ad"], [1, "#b5def5"]] };
      if (trace.error_x) return { ...trace, error_x: { ...trace.error_x, color: dark() ? "#9aa7b4" : "#5b6875" } };
      return trace;
    });
  }

  function draw(element) {
    const { data, layout } = charts[element.dataset.chart];
    const config = {
      responsive: true, displaylogo: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
      toImageButtonOptions: { filename: element.dataset.chart, scale: 2 },
    };
    Plotly.react(element, coloured(data), themed(layout), config);
    drawn.set(element, true);
  }

  function redraw() { for (const element of drawn.keys()) draw(element); }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }, { rootMargin: "600px" });
  for (const element of document.querySelectorAll(".chart")) seen.observe(element);

  for (const parts of document.querySelectorAll(".parts")) {
    const buttons = [...parts.querySelectorAll("button")];
    const choose = (chosen) => {
      for (const button of buttons) {
        const on = button === chosen;
        button.setAttribute("aria-selected", String(on));
        button.tabIndex = on ? 0 : -1;
        document.getElementById(button.getAttribute("aria-controls")).hidden = !on;
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
  window.addEventListener("beforeprint", () => {
    printing = true;
    document.documentElement.classList.add("print");
    for (const element of document.querySelectorAll(".chart")) if (element.offsetParent) draw(element);
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    document.documentElement.classList.remove("print");
    redraw();
  });
})();
