// Draws what verl_omni/report/charts.py describes: curves, stacked bars and lanes of time, with uPlot.
// Drag to zoom, double-click to see all again; the legend has the values under the pointer.
"use strict";

const Charts = (() => {
  const COLOURS = 8, HEIGHT = 230, FEW_POINTS = 30;
  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = i => css(`--c${i % COLOURS}`);
  const drawn = new Map();  // figure -> {plot, chart, resize}
  let smoothing = 0;

  function number(value, percent = false) {
    if (value === null || value === undefined) return "";
    const shown = percent ? value * 100 : value;
    return Number(shown.toPrecision(4)) + (percent ? "%" : "");
  }

  // An average in which each step counts less than the one after it; the first ones are not pulled to zero.
  function smooth(values, weight) {
    let sum = 0, mass = 0;
    return values.map(value => {
      if (value === null || value === undefined) return null;
      sum = weight * sum + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  }

  const columns = series => {
    const xs = [...new Set(series.flatMap(one => one.points.map(point => point[0])))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const ys = series.map(one => {
      const column = Array(xs.length).fill(null);
      for (const [x, y] of one.points) column[place.get(x)] = y;
      return column;
    });
    return [xs, ys];
  };

  const xRange = pad => (plot, low, high) => low === null ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low - pad, high + pad];

  function axes(percent, unit = "") {
    const ink = css("--soft"), line = {stroke: css("--line"), width: 1};
    const common = {stroke: ink, grid: line, ticks: {show: false}, font: "11px system-ui, sans-serif"};
    return [
      {...common, grid: {show: false}, incrs: STEPS, space: 44, size: 30},
      {...common, size: 54, values: (plot, ticks) => ticks.map(tick => number(tick, percent) + (unit && ` ${unit}`))},
    ];
  }

  function lines(chart) {
    const [xs, raw] = columns(chart.series);
    const data = [xs], series = [{label: "step", value: (plot, v) => number(v)}];
    chart.series.forEach((one, i) => {
      const ink = one.colour === undefined ? colour(i) : colour(one.colour);
      const soft = smoothing > 0 && one.points.length > 2 && !one.markers;
      const value = (plot, v, s, at) => number(at === null || at === undefined ? v : raw[i][at], chart.percent);
      if (soft) {
        data.push(raw[i]);
        series.push({label: "", stroke: ink + "55", width: 1, spanGaps: true, points: {show: false}, class: "faint"});
      }
      data.push(soft ? smooth(raw[i], smoothing) : raw[i]);
      series.push({
        label: one.label, stroke: ink, width: 2, spanGaps: true, value, dash: one.dash,
        points: {show: Boolean(one.markers) || one.points.length < FEW_POINTS, size: one.markers ? 7 : 4, fill: ink, stroke: ink},
      });
    });
    const y = chart.percent ? {range: (plot, low, high) => [0, high > 0 ? high * 1.05 : 1]} : {};
    return {data, options: {series, scales: {x: {time: false, range: xRange(0)}, y}, axes: axes(chart.percent)}};
  }

  function bars(chart) {
    const [xs, parts] = columns(chart.series);
    const sums = [], total = Array(xs.length).fill(0);
    for (const part of parts) sums.push(part.map((value, i) => (total[i] += value ?? 0)));
    const series = chart.series.map((one, i) => ({
      label: one.label, stroke: colour(i), fill: colour(i), width: 0, points: {show: false},
      paths: uPlot.paths.bars({size: [0.8, 48]}),
      value: (plot, v, s, at) => at === null || at === undefined ? "" : `${number(parts[i][at])} ${chart.unit}`,
    }));
    // The highest sum first: each lower one is drawn over it.
    return {
      data: [xs, ...sums.reverse()],
      options: {
        series: [{label: "step", value: (plot, v) => number(v)}, ...series.reverse()],
        scales: {x: {time: false, range: xRange(0.6)}, y: {range: (plot, low, high) => [0, high * 1.05 || 1]}},
        axes: axes(false, chart.unit),
      },
    };
  }

  function lanes(chart, figure) {
    const rows = chart.rows, kinds = [...new Set(rows.flatMap(row => row.spans.map(span => span[0])))];
    const last = Math.max(...rows.flatMap(row => row.spans.map(span => span[2])));
    const told = note(figure), rest = () => told.textContent = "Seconds. Point at a bar to see what it is.";
    rest();
    const [x, y] = axes(false);
    return {
      data: [[0, last], [0, rows.length]],
      options: {
        height: 60 + 28 * rows.length,
        series: [{}, {stroke: "transparent", points: {show: false}}],
        scales: {x: {time: false, range: xRange(0)}, y: {range: () => [0, rows.length]}},
        axes: [{...x, incrs: undefined}, {...y, grid: {show: false}, size: 76, splits: () => rows.map((row, i) => rows.length - i - 0.5), values: () => rows.map(row => row.who)}],
        legend: {show: false},
        hooks: {
          draw: [plot => {
            const {ctx, bbox} = plot, height = bbox.height / rows.length;
            ctx.save();
            ctx.beginPath();
            ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
            ctx.clip();
            rows.forEach((row, i) => row.spans.forEach(([what, start, end]) => {
              const left = plot.valToPos(start, "x", true), right = plot.valToPos(end, "x", true);
              ctx.fillStyle = colour(kinds.indexOf(what));
              ctx.fillRect(left, bbox.top + i * height + 0.12 * height, Math.max(right - left, 1), 0.76 * height);
            }));
            ctx.restore();
          }],
          setCursor: [plot => {
            const {left, top} = plot.cursor;
            if (left < 0) return rest();
            const row = rows[Math.floor(top / plot.over.clientHeight * rows.length)], at = plot.posToVal(left, "x");
            const span = row?.spans.findLast(([, start, end]) => start <= at && at <= end);
            told.textContent = span ? `${row.who}: ${span[0]}, ${span[1].toFixed(1)} s to ${span[2].toFixed(1)} s` : `${row?.who ?? ""}: waits, ${at.toFixed(1)} s`;
          }],
        },
      },
      kinds,
    };
  }

  function note(figure) {
    let told = figure.querySelector(".told");
    if (!told) {
      told = document.createElement("div");
      told.className = "told note";
      figure.append(told);
    }
    return told;
  }

  function colours(figure, kinds) {
    const legend = document.createElement("div");
    legend.className = "legend";
    kinds.forEach((kind, i) => {
      const entry = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = colour(i);
      entry.append(mark, kind);
      legend.append(entry);
    });
    figure.append(legend);
  }

  // Draw in a figure, or draw anew what has changed; a zoom stays as it is.
  function draw(figure, chart) {
    const before = drawn.get(figure);
    const zoom = before?.zoomed ? {...before.plot.scales.x} : null;
    const hidden = before ? before.plot.series.filter(one => one.show === false).map(one => one.label) : [];
    before?.plot.destroy();
    before?.resize.disconnect();
    figure.querySelectorAll(".legend, .told").forEach(one => one.remove());
    const {data, options, kinds} = {lines, bars, lanes}[chart.kind](chart, figure);
    const entry = {chart, zoomed: Boolean(zoom)};
    const plot = new uPlot({
      width: Math.max(figure.clientWidth - 28, 120), height: HEIGHT,
      cursor: {drag: {x: true, y: false, setScale: true}, points: {size: 6}, ...(chart.kind === "lanes" ? {y: false} : {sync: {key: "step"}, y: false})},
      legend: {markers: {width: 0, fill: (plot, i) => plot.series[i].stroke()}},
      ...options,
      hooks: {...options.hooks, setSelect: [u => entry.zoomed = u.select.width > 0], ready: [u => u.over.addEventListener("dblclick", () => entry.zoomed = false)]},
    }, data, figure);
    if (chart.kind === "bars") plot.root.classList.add("fixed");
    for (const [i, one] of plot.series.entries()) if (i && hidden.includes(one.label)) plot.setSeries(i, {show: false});
    if (zoom) plot.setScale("x", {min: zoom.min, max: zoom.max});
    if (kinds) colours(figure, kinds);
    entry.plot = plot;
    entry.resize = new ResizeObserver(() => {
      const width = Math.max(figure.clientWidth - 28, 120);
      if (Math.abs(width - plot.width) > 1) plot.setSize({width, height: options.height ?? HEIGHT});
    });
    entry.resize.observe(figure);
    drawn.set(figure, entry);
  }

  function forget(figure) {
    const entry = drawn.get(figure);
    if (!entry) return;
    entry.plot.destroy();
    entry.resize.disconnect();
    drawn.delete(figure);
  }

  const redraw = () => drawn.forEach((entry, figure) => draw(figure, entry.chart));

  // A slider for all curves of the page.
  function smoothingControl() {
    const label = document.createElement("label"), slider = document.createElement("input"), told = document.createElement("output");
    label.className = "smoothing";
    Object.assign(slider, {type: "range", min: 0, max: 0.98, step: 0.02, value: smoothing});
    slider.addEventListener("input", () => {
      smoothing = Number(slider.value);
      told.textContent = smoothing ? smoothing.toFixed(2) : "off";
      redraw();
    });
    told.textContent = "off";
    label.append("smoothing", slider, told);
    return label;
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // In a report the charts lie in the page itself.
  const inPage = document.getElementById("chart-data");
  if (inPage) {
    const charts = JSON.parse(inPage.textContent), figures = [...document.querySelectorAll("figure[data-chart]")];
    figures.forEach(figure => draw(figure, charts[figure.dataset.chart]));
    const curves = figures.find(figure => charts[figure.dataset.chart].kind === "lines");
    curves?.closest("section")?.querySelector("h2").append(smoothingControl());
  }
  return {draw, forget, smoothingControl, number};
})();
