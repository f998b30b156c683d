"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();

  function themed(chart) {
    const dark = night.matches;
    const ink = dark ? "#e3e8ed" : "#1d2733", faint = dark ? "#9aa7b4" : "#5b6875";
    const rule = dark ? "#2d353e" : "#e4e9ed", card = dark ? "#20262d" : "#ffffff";
    const { data, layout } = structuredClone(chart);
    for (const axis of [layout.xaxis, layout.yaxis]) {
      if (axis.ends) axis.range = axis.ends.map(Math.log10);
      delete axis.ends;
      Object.assign(axis, { gridcolor: rule, linecolor: rule, tickcolor: rule, tickfont: { color: faint, size: 11.5 } });
      axis.title.font = { color: faint, size: 12.5 };
    }
    for (const shape of layout.shapes || []) shape.line.color = faint;
    for (const trace of data) {
      if (trace.line && trace.line.color === "faint") trace.line.color = faint;
      if (trace.error_x) trace.error_x.color = faint;
      if (trace.mode === "markers+text") trace.textfont = { color: faint, size: 12 };
    }
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12.5, family: "system-ui, Segoe UI, Roboto, Noto Sans, sans-serif" },
      hoverlabel: { bgcolor: card, bordercolor: faint, font: { color: ink }, align: "left" },
    });
    return { data, layout };
  }

  function draw(element) {
    const { data, layout } = themed(charts[element.dataset.chart]);
    Plotly.react(element, data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
    drawn.add(element);
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }, { rootMargin: "600px" });
  for (const element of document.querySelectorAll(".chart")) seen.observe(element);
  night.addEventListener("change", () => drawn.forEach(draw));
  window.addEventListener("beforeprint", () => document.querySelectorAll(".chart").forEach(draw));
})();
