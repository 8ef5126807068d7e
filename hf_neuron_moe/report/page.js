"use strict";
// Draws every figure from the JSON beside it. Colours are names of the page's style, so that they follow its scheme.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches; // where dragging scrolls the page

  const BESIDE = 170; // pixels of names and colours beside a heat map
  const LEAST_CELL = 22; // pixels of a cell with text

  function colored(value, key) {
    if (typeof value === "string" && /color/i.test(key) && /^var\(--\w+\)$/.test(value))
      return getComputedStyle(document.documentElement).getPropertyValue(value.slice(4, -1)).trim();
    if (Array.isArray(value)) return value.map((each) => colored(each, key));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, colored(each, name)]));
  }

  const draws = new Map(); // by place of a figure: drawn when it comes near the window, or to be printed
  const near = new IntersectionObserver(
    (entries) => entries.forEach(({ isIntersecting, target }) => isIntersecting && draws.get(target)()),
    { rootMargin: "800px" },
  );
  addEventListener("beforeprint", () => draws.forEach((draw) => draw()));

  for (const figure of document.querySelectorAll("figure")) {
    const { data, layout, frames } = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const pressed = (button) => button.getAttribute("aria-pressed") === "true";
    const on = (tool) => [...figure.querySelectorAll(`[data-tool=${tool}]`)].some(pressed);
    const config = { displayModeBar: false, responsive: true };
    const written = data[0]?.type === "heatmap" && data[0].texttemplate;
    Object.assign(layout, { uirevision: 0, dragmode: touch ? false : "zoom", autosize: true });

    function draw() {
      near.unobserve(plot);
      const shown = [...figure.querySelectorAll(".key")].map(pressed);
      for (const trace of data)
        trace.visible = (shown[+trace.legendgroup] ?? true) && (trace.meta !== "raw" || on("raw"));
      // Values that cells have no room for could not be read: hovering shows them, and the table.
      if (written) data[0].texttemplate = (plot.clientWidth - BESIDE) / data[0].x.length < LEAST_CELL ? "" : written;
      if (figure.querySelector("[data-tool=log]")) layout.yaxis.type = on("log") ? "log" : "linear";
      return Plotly.react(plot, colored(data, ""), colored(layout, ""), config);
    }

    for (const button of figure.querySelectorAll("button"))
      button.addEventListener("click", () => {
        if (button.dataset.tool === "reset" || button.dataset.tool === "log") layout.uirevision += 1;
        if (button.dataset.tool !== "reset") button.setAttribute("aria-pressed", String(!pressed(button)));
        draw();
      });
    figure.querySelector("input")?.addEventListener("input", (event) => {
      const frame = frames[event.target.value];
      figure.querySelector("output").textContent = frame.label;
      data[0].z = frame.z;
      layout.shapes = frame.shapes;
      draw();
    });
    // What dragging and the double click do, for the keyboard: + and - zoom, arrows move, 0 shows all.
    plot.addEventListener("keydown", ({ key }) => {
      if (key === "0") figure.querySelector("[data-tool=reset]").click();
      const [shift, scale] = { "+": [0, 0.5], "=": [0, 0.5], "-": [0, 2], ArrowLeft: [-0.2, 1], ArrowRight: [0.2, 1] }[key] ?? [];
      if (scale === undefined) return;
      const [low, high] = plot.layout.xaxis.range.map(Number);
      const middle = (low + high) / 2 + shift * (high - low);
      Plotly.relayout(plot, { "xaxis.range": [middle - (scale * (high - low)) / 2, middle + (scale * (high - low)) / 2] });
    });
    dark.addEventListener("change", () => plot.data && draw());
    plot.style.minHeight = `${layout.height}px`;
    draws.set(plot, draw);
    near.observe(plot);
  }
})();
