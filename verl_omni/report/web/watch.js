// The live page: asks its server every two seconds what has changed, and draws that. Texts of a run are only ever text.
"use strict";

const POLL = 2000, POLL_HIDDEN = 15000, TILES = innerWidth < 720 ? 8 : 24;
const SORTS = {file: "as in the file", best: "best first", worst: "worst first", better: "most improved", lost: "most lost"};
const at = id => document.getElementById(id);
const page = {
  runs: [], mayAsk: false, chosen: [], docs: new Map(), samples: new Map(), rendered: new Map(),
  step: null, sort: "file", tiles: TILES, trainStep: null, log: "", logOpen: true, asked: new Map(),
};

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, said] of Object.entries(value)) element.style.setProperty(key, said);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

const ask = async (path, query = {}) => {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`);
  const said = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(said.error ?? answer.statusText), {told: true});
  return said;
};

const readable = value => {
  if (value === null || value === undefined) return "–";
  const small = value !== 0 && Math.abs(value) < 0.1;
  return small ? String(Number(value.toPrecision(3))) : value.toFixed(3);
};
const signed = value => (value > 0 ? "+" : "") + readable(value);
const dot = i => h("i", {class: "dot", style: {background: `var(--c${i % 8})`}});
const docs = () => page.chosen.map(name => page.docs.get(name)).filter(Boolean);
const several = () => docs().length > 1;

// Put new content into a section, unless it would be the same as what is there.
function show(id, key, build) {
  const told = JSON.stringify(key);
  if (page.rendered.get(id) === told) return;
  page.rendered.set(id, told);
  at(id).replaceChildren(...[build()].flat().filter(Boolean));
}

// ---- which runs -------------------------------------------------------------------------------------------

function choose(names) {
  page.chosen = names;
  page.step = page.trainStep = null;
  history.replaceState(null, "", "#" + new URLSearchParams(names.map(name => ["run", name])));
  refresh();
}

function list() {
  const rows = page.runs.map(run => run.error ? [run.name, run.error] : [run.name, run.title, run.state.word, run.step, run.state.total, run.score, page.chosen.includes(run.name)]);
  show("list", [rows], () => {
    if (page.runs.length === 0) return h("p", {class: "note"}, "There is no run here yet. It will be shown as soon as one starts.");
    if (page.runs.length === 1) return [];
    const toggle = name => choose(page.chosen.includes(name) ? page.chosen.filter(one => one !== name) : [...page.chosen, name]);
    return h("table", {class: "runs"},
      h("tr", {}, ["", "run", "state", "step", "score"].map((name, i) => h("th", {}, name)), h("th", {class: "wide"}, "what")),
      page.runs.map(run => h("tr", {class: page.chosen.includes(run.name) ? "chosen" : null},
        h("td", {}, h("input", {type: "checkbox", "aria-label": `compare ${run.name}`, checked: page.chosen.includes(run.name), onchange: () => toggle(run.name)})),
        h("td", {}, h("button", {class: "link", onclick: () => choose([run.name])}, run.name)),
        run.error ? h("td", {colspan: 4, class: "down"}, run.error) : [
          h("td", {}, h("span", {class: `badge ${run.state.word}`}, run.state.word)),
          h("td", {class: "number"}, run.state.total ? `${run.step} / ${run.state.total}` : String(run.step)),
          h("td", {class: "number"}, readable(run.score)),
          h("td", {class: "wide"}, run.title)])));
  });
}

// ---- how they are -----------------------------------------------------------------------------------------

async function wish(run, what) {
  if (what === "stop" && !confirm(`Stop ${run}? It finishes its step, saves and ends. The same command goes on from there.`)) return;
  try {
    const answer = await fetch("api/wish", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({run, what})});
    const said = await answer.json();
    page.asked.set(run, answer.ok ? (what === "stop" ? "It will stop after this step." : "It will be saved after this step.") : said.error);
  } catch (error) {
    page.asked.set(run, String(error));
  }
  heads();
}

function heads() {
  const shown = page.chosen.map(name => [page.runs.find(run => run.name === name), page.docs.get(name)]).filter(([run, doc]) => run?.state && doc);
  const key = shown.map(([run, doc]) => [run.state, run.left, doc.facts, doc.changes, page.asked.get(run.name), doc.report]);
  show("heads", [key, page.mayAsk], () => shown.map(([run, doc], i) => {
    const {word, line, step, total} = run.state, done = word === "finished" ? total : Math.max(0, step - 1);
    const buttons = word === "running" && (page.mayAsk
      ? [h("button", {class: "act", onclick: () => wish(run.name, "save")}, "Save now"), h("button", {class: "act stop", onclick: () => wish(run.name, "stop")}, "Stop")]
      : [h("span", {class: "label"}, "to save or stop it, open the address with its token")]);
    return h("div", {class: "head"},
      h("div", {class: "top"}, h("h1", {}, several() && dot(i), several() ? run.name : doc.title), h("span", {class: `badge ${word}`}, word), buttons),
      h("p", {class: "facts"}, [word === "finished" ? null : line, run.left && `about ${run.left} left`, ...doc.facts].filter(Boolean).join(" · "),
        doc.report && [" · ", h("a", {href: `report?${new URLSearchParams({run: run.name})}`, target: "_blank", rel: "noopener"}, "report.html")]),
      page.asked.get(run.name) && h("p", {class: "facts"}, h("b", {}, page.asked.get(run.name))),
      total > 0 && h("div", {class: "bar"}, h("i", {style: {width: `${100 * done / total}%`}})),
      h("div", {class: "cards"}, doc.changes.map(change => {
        const difference = change.after - change.before, trend = difference > 0 ? "up" : difference < 0 ? "down" : "flat";
        return h("div", {class: "card"}, h("div", {class: "label"}, change.label),
          h("div", {class: "value"}, readable(change.before), h("span", {class: "arrow"}, " → "), readable(change.after)),
          h("div", {class: trend}, `${signed(difference)}, step ${change.steps[0]} to ${change.steps[1]}`));
      })));
  }));
}

function warnings() {
  const lines = docs().flatMap(doc => doc.warnings.map(line => several() ? `${doc.name}: ${line}` : line));
  const failed = page.chosen.map(name => page.runs.find(run => run.name === name)).filter(run => run?.error).map(run => `${run.name}: ${run.error}`);
  show("warnings", [...failed, ...lines], () => {
    const all = [...failed, ...lines].slice(-12);
    return all.length ? [h("h2", {}, "Warnings"), ...all.map(line => h("div", {class: "warning"}, line))] : [];
  });
}

// ---- images -----------------------------------------------------------------------------------------------

// The images of a step; asked for once, and again where the validation was done anew.
function samplesOf(doc, kind, step) {
  const key = `${doc.name}\n${kind}\n${step}`;
  if (!page.samples.has(key)) {
    page.samples.set(key, null);
    ask("api/samples", {run: doc.name, kind, step}).then(
      rows => { page.samples.set(key, rows); images(); preferred(); },
      error => { page.samples.set(key, []); console.warn(error.message); });
  }
  return page.samples.get(key);
}

const source = (doc, sample) => `picture?${new URLSearchParams({run: doc.name, file: sample.file})}`;

// What a sample is, so that it can be seen or heard.
function made(doc, sample, alt) {
  const src = source(doc, sample);
  if (sample.kind === "text") return h("blockquote", {}, sample.text);
  if (sample.kind === "sound") return h("audio", {src, controls: true, preload: "none", "aria-label": alt});
  if (sample.file.endsWith(".mp4")) return h("video", {src, controls: true, loop: true, preload: "metadata", "aria-label": alt});
  return h("img", {src, alt, loading: "lazy", decoding: "async"});
}

function shot(doc, sample, label, range, extra = null) {
  if (!sample) return h("div", {class: "shot"}, h("div", {class: "none"}, "not drawn"), h("span", {class: "of"}, label));
  const good = range[1] > range[0] ? (sample.score - range[0]) / (range[1] - range[0]) : 0.5;
  const told = Object.entries(sample.reward_extra_info ?? {}).slice(0, 8);
  return h("div", {class: "shot"},
    made(doc, sample, `${label}: ${sample.prompt}`),
    h("span", {class: "of"}, extra, label, sample.score === null
      ? h("b", {class: "down"}, "its reward failed") : h("i", {class: "score", style: {"--good": good.toFixed(2)}}, readable(sample.score))),
    told.map(([name, value]) => h("span", {class: "more"}, `${name.replaceAll("_", " ")}: `, h("b", {}, short(value)))));
}

const short = value => {
  const text = typeof value === "number" ? String(Number(value.toPrecision(3))) : typeof value === "string" ? value : JSON.stringify(value);
  return text === "" ? "(nothing)" : text.length > 60 ? text.slice(0, 57) + "..." : text;
};

// What one tile shows: of one run its first and the chosen step, of several runs each at that step.
function columns() {
  const shown = docs().filter(doc => doc.validations.length);
  const steps = [...new Set(shown.flatMap(doc => doc.validations.map(one => one.step)))].sort((a, b) => a - b);
  const step = page.step === null || !steps.includes(page.step) ? steps.at(-1) : page.step;
  const near = doc => doc.validations.map(one => one.step).filter(one => one <= step).at(-1) ?? doc.validations[0].step;
  const wanted = several() ? shown.map((doc, i) => ({doc, step: near(doc), mark: i})) : shown.flatMap(doc =>
    doc.validations[0].step < step ? [{doc, step: doc.validations[0].step}, {doc, step}] : [{doc, step}]);
  return {steps, step, columns: wanted.map(one => ({...one, rows: samplesOf(one.doc, "validation", one.step)}))};
}

function images() {
  const {steps, step, columns: found} = columns();
  const key = [page.chosen, steps, step, page.sort, page.tiles, found.map(one => [one.doc.name, one.step, one.rows])];
  show("images", key, () => {
    if (!steps.length) return [];
    const ready = found.filter(one => one.rows), last = ready.at(-1);
    const tools = h("span", {class: "tools"},
      h("input", {type: "range", min: 0, max: steps.length - 1, value: steps.indexOf(step), "aria-label": "step", id: "step", oninput: event => {
        page.step = Number(event.target.value) === steps.length - 1 ? null : steps[event.target.value];
        images();
        at("step").focus();
      }}), h("b", {}, `step ${step}`),
      h("select", {"aria-label": "order", onchange: event => { page.sort = event.target.value; images(); }},
        Object.entries(SORTS).map(([name, words]) => h("option", {value: name, selected: name === page.sort}, words))));
    const heading = h("h2", {}, "The same prompts over time", tools);
    if (!last) return [heading, h("p", {class: "note"}, "Loading images.")];
    const byIndex = ready.map(one => new Map(one.rows.map(row => [row.index, row])));
    const first = byIndex[0], scores = ready.flatMap(one => one.rows.map(row => row.score)).filter(score => score !== null);
    const range = [Math.min(...scores), Math.max(...scores)];
    const gain = row => (row.score ?? 0) - (first.get(row.index)?.score ?? 0);
    const orders = {file: () => 0, best: (a, b) => b.score - a.score, worst: (a, b) => a.score - b.score, better: (a, b) => gain(b) - gain(a), lost: (a, b) => gain(a) - gain(b)};
    const rows = [...last.rows].sort(orders[page.sort]);
    const failed = last.rows.filter(row => row.score === null).length;
    const what = several() ? "Each run's latest validation up to that step." : ready.length > 1 ? `Step ${ready[0].step} (left) and step ${last.step}, with the same seeds.` : `Step ${last.step}.`;
    return [heading,
      h("p", {class: "note"}, what, ` Colours go from the lowest score here (${readable(range[0])}) to the highest (${readable(range[1])}). Click on an image to see it at every step.`,
        failed ? h("b", {class: "down"}, ` The reward of ${failed} of ${rows.length} images failed.`) : null),
      h("div", {class: "pairs"}, rows.slice(0, page.tiles).map(row => h("div", {class: ready.length > 2 ? "pair three" : "pair", onclick: () => film(row)},
        h("div", {class: "prompt"}, row.prompt, row.ground_truth === null || row.ground_truth === "" ? null : [" ", h("b", {}, short(row.ground_truth))]),
        ready.map((one, i) => shot(one.doc, byIndex[i].get(row.index), several() ? one.doc.name : `step ${one.step}`, range, several() ? dot(one.mark) : null))))),
      rows.length > page.tiles ? h("button", {class: "act all", onclick: () => { page.tiles = rows.length; images(); }}, `Show all ${rows.length}`) : null];
  });
}

// One prompt at every step, of every chosen run.
async function film(row) {
  const dialog = at("film");
  dialog.replaceChildren(h("div", {class: "prompt"}, row.prompt), h("p", {class: "note"}, "Loading."));
  dialog.showModal();
  const strips = [];
  for (const [i, doc] of docs().entries()) {
    const steps = doc.validations.map(one => one.step);
    const rows = await Promise.all(steps.map(step => page.samples.get(`${doc.name}\nvalidation\n${step}`) ?? ask("api/samples", {run: doc.name, kind: "validation", step}).catch(() => [])));
    const found = rows.map((all, n) => [steps[n], all.find(one => one.index === row.index)]).filter(([, sample]) => sample);
    const scores = found.map(([, sample]) => sample.score).filter(score => score !== null);
    const range = [Math.min(...scores), Math.max(...scores)];
    if (several()) strips.push(h("h2", {}, dot(i), doc.name));
    strips.push(h("div", {class: "film"}, found.map(([step, sample]) => shot(doc, sample, `step ${step}`, range))));
  }
  dialog.replaceChildren(h("div", {class: "prompt"}, h("b", {}, row.prompt)), ...strips, h("p", {class: "note"}, "Press Esc or click beside it to close."));
}

function preferred() {
  const shown = docs().filter(doc => doc.training.length);
  const steps = [...new Set(shown.flatMap(doc => doc.training))].sort((a, b) => a - b);
  const step = page.trainStep === null || !steps.includes(page.trainStep) ? steps.at(-1) : page.trainStep;
  const found = shown.filter(doc => doc.training.includes(step)).map(doc => [doc, samplesOf(doc, "training", step)]);
  show("preferred", [page.chosen, steps, step, found.map(([doc, rows]) => [doc.name, rows])], () => {
    if (!steps.length) return [];
    const tools = h("span", {class: "tools"}, h("input", {type: "range", min: 0, max: steps.length - 1, value: steps.indexOf(step), id: "trainstep", "aria-label": "training step", oninput: event => {
      page.trainStep = Number(event.target.value) === steps.length - 1 ? null : steps[event.target.value];
      preferred();
      at("trainstep").focus();
    }}), h("b", {}, `step ${step}`));
    return [h("h2", {}, "What the reward prefers", tools), h("p", {class: "note"}, "The best (left) and the worst of one prompt, in that training step."),
      ...found.flatMap(([doc, rows]) => {
        const groups = new Map();
        for (const row of rows ?? []) {
          const [, group, side] = /^(.*)_(best|worst)\.\w+$/.exec(row.file) ?? [];
          if (group !== undefined) groups.set(group, {...groups.get(group), [side]: row});
        }
        const whole = [...groups.values()].filter(sides => sides.best && sides.worst);
        const scores = whole.flatMap(sides => [sides.best.score, sides.worst.score]), range = [Math.min(...scores), Math.max(...scores)];
        return [several() ? h("p", {class: "note"}, doc.name) : null, h("div", {class: "pairs"}, whole.map(sides => h("div", {class: "pair"},
          h("div", {class: "prompt"}, sides.best.prompt), shot(doc, sides.best, "best", range), shot(doc, sides.worst, "worst", range))))];
      }).filter(Boolean)];
  });
}

// ---- curves -----------------------------------------------------------------------------------------------

// Curves of several runs share a chart; bars and lanes stand below each other.
function together(section) {
  const charts = new Map();
  docs().forEach((doc, run) => (doc.charts[section] ?? []).forEach(chart => {
    if (!several()) return charts.set(chart.heading, chart);
    if (chart.kind !== "lines") return charts.set(`${chart.heading}, ${doc.name}`, {...chart, heading: `${chart.heading}, ${doc.name}`});
    const series = chart.series.map((one, i) => ({...one, label: chart.series.length > 1 ? `${doc.name}, ${one.label}` : doc.name, colour: run, dash: i ? [4 + 2 * i, 4] : undefined}));
    const before = charts.get(chart.heading);
    charts.set(chart.heading, {...chart, series: [...(before?.series ?? []), ...series]});
  }));
  return charts;
}

const figures = new Map();  // section and heading -> {figure, told}
const smoothing = Charts.smoothingControl();

function charts() {
  const sections = ["Learning", "Time", "Memory"].map(name => [name, together(name)]).filter(([, found]) => found.size);
  const layout = sections.map(([name, found]) => [name, [...found.keys()]]), told = JSON.stringify(layout);
  if (page.rendered.get("charts") !== told) {
    page.rendered.set("charts", told);
    const keys = new Set(layout.flatMap(([name, headings]) => headings.map(heading => `${name}\n${heading}`)));
    for (const [key, {figure}] of figures) if (!keys.has(key)) Charts.forget(figure), figures.delete(key);
    at("charts").replaceChildren(...sections.flatMap(([name, found], i) => [
      h("h2", {}, name, i === 0 ? smoothing : null),
      h("div", {class: "charts"}, [...found].map(([heading, chart]) => {
        const key = `${name}\n${heading}`;
        if (!figures.has(key)) figures.set(key, {figure: h("figure", {class: chart.wide ? "wide" : null}, h("figcaption", {}, heading)), told: null});
        return figures.get(key).figure;
      })),
    ]));
  }
  for (const [name, found] of sections) {
    for (const [heading, chart] of found) {
      const place = figures.get(`${name}\n${heading}`), told = JSON.stringify(chart);
      if (place.told !== told) Charts.draw(place.figure, chart);
      place.told = told;
    }
  }
}

// ---- the rest ---------------------------------------------------------------------------------------------

function checkpoints() {
  const rows = docs().flatMap(doc => doc.checkpoints.map(one => ({...one, run: doc.name})));
  show("checkpoints", [rows, several()], () => {
    if (!rows.length) return [];
    const best = Math.max(...rows.map(row => row.score ?? -Infinity));
    return [h("h2", {}, "Checkpoints"), h("table", {class: "runs"},
      h("tr", {}, [several() && "run", "step", "validation score", "folder"].filter(Boolean).map(name => h("th", {}, name))),
      [...rows].reverse().map(row => h("tr", {}, several() && h("td", {}, row.run), h("td", {class: "number"}, String(row.step)),
        h("td", {class: "number"}, row.score === null ? h("span", {class: "label"}, "not validated") : readable(row.score), row.score !== null && row.score === best && rows.length > 1 ? h("b", {class: "up"}, " best") : null),
        h("td", {}, h("code", {}, row.folder), row.in_between ? h("span", {class: "label"}, " until the next one") : null))))];
  });
}

async function log() {
  const doc = docs()[0];
  if (!doc) return;
  if (page.logOpen) page.log = (await ask("api/log", {run: doc.name})).text;
  show("log", [doc.name, page.log, page.logOpen], () => [
    h("h2", {}, "The log's last lines", h("span", {class: "tools"}, several() ? doc.name : null,
      h("button", {class: "act", onclick: () => { page.logOpen = !page.logOpen; log(); }}, page.logOpen ? "Hide" : "Show"))),
    page.logOpen ? h("pre", {}, page.log || "There is no run.log yet.") : null]);
  const text = at("log").querySelector("pre");
  if (text && !text.matches(":hover")) text.scrollTop = text.scrollHeight;
}

function about() {
  show("about", docs().map(doc => [doc.name, doc.about, doc.command, doc.config]), () => docs().flatMap(doc => [
    Object.keys(doc.about).length ? h("h2", {}, several() ? `Started with, ${doc.name}` : "Started with") : null,
    h("dl", {class: "about"}, Object.entries(doc.about).flatMap(([name, said]) => [h("dt", {}, name), h("dd", {}, said)])),
    doc.command ? h("pre", {class: "command"}, doc.command) : null,
    doc.config ? h("details", {}, h("summary", {}, "Config"), h("pre", {}, doc.config)) : null]));
}

// ---- the loop ---------------------------------------------------------------------------------------------

async function refresh() {
  const told = await ask("api/runs");
  page.runs = told.runs;
  page.mayAsk = told.may_ask;
  const names = page.runs.map(run => run.name);
  page.chosen = page.chosen.filter(name => names.includes(name));
  if (!page.chosen.length && names.length) page.chosen = [names[0]];
  for (const run of page.runs.filter(one => page.chosen.includes(one.name) && !one.error)) {
    if (page.docs.get(run.name)?.stamp === run.stamp) continue;
    try {
      const doc = await ask("api/run", {run: run.name}), before = page.docs.get(run.name);
      // A run that was started anew has drawn other images for the same steps.
      if (before && JSON.stringify(before.about) !== JSON.stringify(doc.about)) for (const key of [...page.samples.keys()]) if (key.startsWith(`${run.name}\n`)) page.samples.delete(key);
      page.docs.set(run.name, {...doc, stamp: run.stamp});
    } catch (error) {
      if (!error.told) throw error;
      run.error = error.message;
    }
  }
  for (const run of page.runs) if (run.state?.word !== "running") page.asked.delete(run.name);
  document.title = `${docs().map(doc => doc.title).join(", ").slice(0, 60) || "verl-omni"} · watch`;
  for (const part of [list, heads, warnings, images, preferred, charts, checkpoints, about]) part();
  await log();
}

async function follow() {
  try {
    await refresh();
    at("lost").hidden = true;
  } catch (error) {
    console.warn(error);
    at("lost").hidden = Boolean(error.told);
  }
  setTimeout(follow, document.hidden ? POLL_HIDDEN : POLL);
}

at("film").addEventListener("click", event => event.target === at("film") && at("film").close());
page.chosen = new URLSearchParams(location.hash.slice(1)).getAll("run");
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);  // it is in a cookie now
follow();
