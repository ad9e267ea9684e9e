// What the live page does: reads server-sent events and shows them. Words from elsewhere become text, never markup.
"use strict";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
/// Points of a curve, one a second.
const KEPT = 240;
/// Seconds that percentiles are of.
const WINDOW = 60;
const EVENTS = 200;

const page = { token: "", states: [], samples: new Map(), curves: { tokens: [], p50: [], p99: [], cache: [], memory: [] } };

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit + 1 < units.length) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, unit === 0 || value >= 100 ? 0 : 1)} ${units[unit]}`;
}

function span(ms) {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${number(ms / 1000, ms < 10000 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

const millis = (ms) => (ms < 1 ? `${number(ms * 1000)} µs` : ms < 1000 ? `${number(ms, ms < 10 ? 1 : 0)} ms` : `${number(ms / 1000, 1)} s`);
const clock = (ms) => new Date(ms).toISOString().slice(11, 19);

function text(node, value) {
  const said = String(value);
  if (node.textContent !== said) node.textContent = said;
}

// Rows are kept by their key, and none is moved without need: who stands in one with the keyboard stays there.
function table(id, items, key, cells) {
  const body = $(id).tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = items.map((item) => [String(key(item)), cells(item)]);
  const names = new Set(wanted.map(([name]) => name));
  known.forEach((row, name) => names.has(name) || row.remove());
  wanted.forEach(([name, values], at) => {
    const row = known.get(name) || made(name, values);
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] || null);
    values.forEach((value, column) => fill(row.cells[column], value));
  });
}

function made(name, values) {
  const row = document.createElement("tr");
  row.dataset.key = name;
  values.forEach((value, column) => {
    const cell = document.createElement(column === 0 ? "th" : "td");
    if (column === 0) cell.scope = "row";
    if (value && value.press) {
      const button = document.createElement("button");
      button.type = "button";
      button.addEventListener("click", () => value.press(name));
      cell.append(button);
    }
    row.append(cell);
  });
  return row;
}

function fill(cell, value) {
  if (value && value.press) {
    text(cell.firstChild, value.button);
    cell.firstChild.setAttribute("aria-label", value.label);
  } else if (value && value.said !== undefined) {
    text(cell, value.said);
    cell.className = value.kind;
  } else {
    text(cell, value);
    cell.className = "";
  }
}

function curve(id, label, lines, least = 0) {
  const plot = $(id);
  const most = Math.max(least, ...lines.flatMap((line) => line.values)) || 1;
  lines.forEach((line, place) => {
    let drawn = plot.children[place];
    if (!drawn) {
      drawn = document.createElementNS(SVG, "polyline");
      drawn.setAttribute("class", line.kind);
      plot.append(drawn);
    }
    const points = line.values.map((value, at) => {
      const x = 240 - (line.values.length - 1 - at) * (240 / (KEPT - 1));
      return `${x.toFixed(1)},${(62 - (60 * value) / most).toFixed(1)}`;
    });
    drawn.setAttribute("points", points.join(" "));
  });
  plot.setAttribute("aria-label", label);
}

function push(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

// The value below which this share lies, by buckets that count up: as Prometheus' histogram_quantile.
function quantile(bounds, counts, share) {
  const all = counts[counts.length - 1];
  if (!all) return null;
  const rank = share * all;
  const at = counts.findIndex((count) => count >= rank);
  if (at >= bounds.length) return bounds[bounds.length - 1];
  const below = at > 0 ? counts[at - 1] : 0;
  const from = at > 0 ? bounds[at - 1] : 0;
  const inside = counts[at] - below;
  return from + (bounds[at] - from) * (inside > 0 ? (rank - below) / inside : 1);
}

// All models' histograms of this name together, less what they were at the beginning of the window.
function histogram(now, then, name) {
  let bounds = [];
  const sum = [];
  for (const [state, sign] of [[now, 1], [then, -1]]) {
    for (const model of state ? state.models : []) {
      bounds = model[name].bounds;
      model[name].counts.forEach((count, at) => { sum[at] = (sum[at] || 0) + sign * count; });
    }
  }
  return { bounds, counts: sum.map((count) => Math.max(0, count)) };
}

function percentiles(name) {
  const now = page.states[page.states.length - 1];
  let of = histogram(now, page.states.length > 1 ? page.states[0] : null, name);
  if (!of.counts[of.counts.length - 1]) of = histogram(now, null, name);
  const told = [0.5, 0.99].map((share) => quantile(of.bounds, of.counts, share));
  return told[0] === null ? "–" : told.map((seconds) => millis(seconds * 1000)).join(" / ");
}

function ended(model) {
  const all = Object.entries(model.ended).sort();
  return all.length ? all.map(([how, count]) => `${how} ${number(count)}`).join(", ") : "–";
}

const total = (items, of) => items.reduce((sum, item) => sum + of(item), 0);

function state(now) {
  const before = page.states[page.states.length - 1];
  page.states.push(now);
  while (page.states.length > WINDOW + 1) page.states.shift();
  const generated = (of) => total(of.models, (model) => model.generated_tokens);
  const seconds = before ? (now.time_ms - before.time_ms) / 1000 : 0;
  // A scheduler that began anew counts from 0.
  const rate = seconds > 0 ? Math.max(0, (generated(now) - generated(before)) / seconds) : 0;
  push(page.curves.tokens, rate);
  const caches = now.workers.flatMap((worker) => worker.caches);
  const blocks = total(caches, (cache) => cache.blocks);
  push(page.curves.cache, blocks ? (100 * total(caches, (cache) => cache.used)) / blocks : 0);
  push(page.curves.memory, total(now.workers, (worker) => worker.resident_bytes));
  const ready = now.workers.filter((worker) => worker.state === "ready").length;
  text($("host"), `${now.serving ? "serving" : "not serving"} · ${ready} of ${now.workers.length} workers ready · up for ${span(now.uptime_ms)} · version ${now.version}`);
  $("host").className = now.serving ? "good" : "bad";
  text($("n-tokens"), number(rate, rate < 10 ? 1 : 0));
  text($("n-inside"), number(now.inside));
  text($("n-first"), percentiles("first_token"));
  text($("n-between"), percentiles("between"));
  text($("n-whole"), percentiles("whole"));
  text($("n-continued"), number(total(now.models, (model) => model.continuations)));
  const last = (values) => values[values.length - 1] || 0;
  const { tokens, cache, memory } = page.curves;
  curve("p-tokens", `Tokens per second: now ${number(last(tokens))}, at most ${number(Math.max(...tokens))}`, [{ kind: "one", values: tokens }]);
  curve("p-cache", `Cache in use: now ${number(last(cache), 1)} percent`, [{ kind: "three", values: cache }], 100);
  curve("p-memory", `Memory of the workers' processes: now ${bytes(last(memory))}`, [{ kind: "two", values: memory }]);
  workers(now);
  requests(now);
  table("models", now.models, (model) => model.name, (model) => [
    model.name,
    model.problem ? { said: `${model.state}: ${model.problem}`, kind: "bad" } : model.state,
    model.workers.join(", ") || "–", number(model.running), number(model.waiting), number(model.generated_tokens), ended(model), number(model.continuations),
  ]);
  table("devices", now.devices, (device) => device.id, (device) => [
    device.id, device.backend, device.description, device.path || "–", device.memory_bytes ? bytes(device.memory_bytes) : "–",
    device.problem ? { said: device.problem, kind: "bad" } : "–",
  ]);
  crashes(now.crashes);
}

function workers(now) {
  table("workers", now.workers, (worker) => worker.id, (worker) => {
    const sample = page.samples.get(worker.id);
    const seen = sample && sample.epoch === worker.epoch ? sample : null;
    const blocks = total(worker.caches, (cache) => cache.blocks);
    const used = total(worker.caches, (cache) => cache.used);
    const parts = worker.memory.filter((part) => part.bytes > 0).map((part) => `${part.kind} ${bytes(part.bytes)}`);
    const share = (part) => (seen && seen.span_ms > 0 ? `${number((100 * part) / seen.span_ms)} %` : "–");
    return [
      worker.id,
      { said: worker.state, kind: worker.state === "ready" ? "good" : "bad" },
      worker.device || "–", span(worker.uptime_ms), worker.epoch,
      worker.deaths ? `${worker.deaths}, the last time: ${worker.last_exit}` : "0",
      seen ? seen.doing : "–",
      seen && seen.span_ms > 0 ? number((1000 * seen.steps.count) / seen.span_ms, 1) : "–",
      seen ? share(seen.steps.computing_ms) : "–",
      blocks ? `${number((100 * used) / blocks, 1)} %` : "–",
      [bytes(worker.resident_bytes), ...parts].join(", "),
      seen && seen.nodes.length ? `${seen.nodes[0].name || seen.nodes[0].op} ${number((100 * seen.nodes[0].seen) / Math.max(1, seen.looks))} %` : "–",
      { button: "Trace 1 s", label: `Trace ${worker.id} for one second`, press: trace },
    ];
  });
}

function requests(now) {
  const alive = new Set(now.workers.map((worker) => worker.id));
  const all = [...page.samples.values()].filter((sample) => alive.has(sample.worker))
    .flatMap((sample) => sample.requests.map((request) => ({ ...request, worker: sample.worker })));
  table("requests", all, (request) => `${request.worker} ${request.id}`, (request) => [
    request.id || "an embedding", request.worker, request.model, request.state,
    `${number(request.tokens)}, ${number(request.prompt_tokens)} of them the prompt`, span(request.age_ms),
  ]);
  $("no-requests").hidden = all.length > 0;
}

const place = (crash) => (crash.op ? `${crash.node} ${crash.op}` : "–");

function crashes(all) {
  table("crashes", all, (crash) => crash.id, (crash) => [
    crash.id, clock(crash.time_ms), crash.reason,
    [crash.doing, crash.model].filter(Boolean).join(" ") || "–", place(crash),
    crash.requests.map((request) => `${request.id}: ${request.outcome || "waits"}`).join("; ")
      || crash.running.map((one) => `${one.id} ran`).join("; ") || "none",
    { button: "Open", label: `Open the report ${crash.id}`, press: open },
  ]);
  $("no-crashes").hidden = all.length > 0;
}

async function call(path, method) {
  const headers = page.token ? { authorization: `Bearer ${page.token}` } : {};
  const answer = await fetch(path, { method, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  let why = `HTTP ${answer.status}`;
  try {
    const said = await answer.json();
    why = (said.error && said.error.message) || why;
  } catch { /* It said nothing that can be read. */ }
  const error = new Error(why);
  error.status = answer.status;
  throw error;
}

async function open(id) {
  let said;
  try {
    const crash = await (await call(`/live/crashes/${encodeURIComponent(id)}`, "GET")).json();
    const lines = [
      `${crash.worker} (epoch ${crash.epoch}) on ${crash.device}: ${crash.reason}`,
      `lived ${span(crash.uptime_ms)}; models: ${crash.models.join(", ") || "none"}`,
      `was ${crash.doing || "unknown"}${crash.model ? ` with ${crash.model}` : ""}, after ${number(crash.steps)} steps, at node ${place(crash)}; at most ${bytes(crash.peak_bytes)}`,
      ...crash.running.map((one) => `ran: ${one.id}, ${number(one.tokens)} tokens`),
      ...crash.requests.map((request) => `${request.id}: ${number(request.generated)} tokens; ${request.outcome || "waits"}`),
    ];
    if (crash.error) lines.push(`its last error: ${crash.error}`);
    if (crash.blackbox_problem) lines.push(`its black box cannot be read: ${crash.blackbox_problem}`);
    if (crash.signal) lines.push(`${crash.signal.name} (code ${crash.signal.code}) at ${crash.signal.address}`, ...crash.signal.frames.map((frame) => `  ${frame}`));
    if (crash.log.length) lines.push("", ...crash.log);
    said = lines.join("\n");
  } catch (error) {
    said = error.message;
  }
  text($("c-title"), `Report ${id}`);
  text($("c-text"), said);
  $("crash").hidden = false;
  $("c-title").focus();
}

async function trace(worker) {
  $("timeline").hidden = false;
  text($("h-timeline"), `Timeline of ${worker}`);
  text($("t-said"), "tracing …");
  $("h-timeline").focus();
  try {
    timeline(await (await call(`/live/trace/${encodeURIComponent(worker)}/1000`, "POST")).json());
  } catch (error) {
    text($("t-said"), error.message);
  }
}

function timeline(traced) {
  const lanes = { steps: [4, "one"], device: [54, "two"], requests: [104, "three"] };
  const spans = traced.spans.filter((one) => lanes[one.track]);
  const end = Math.max(1, ...spans.map((one) => one.begin + one.took));
  const steps = spans.filter((one) => one.track === "steps");
  const took = total(steps, (one) => one.took);
  const device = total(spans.filter((one) => one.track === "device"), (one) => one.took);
  const said = steps.length
    ? `${number(steps.length)} steps in ${millis(end / 1000)}, ${millis(took / steps.length / 1000)} each; the device computed ${number((100 * device) / took)} % of them`
    : "no step: nothing was asked of it";
  const lost = traced.left_out + traced.missed_steps;
  text($("t-said"), lost ? `${said}; ${number(lost)} spans were left out` : said);
  const plot = $("t-plot");
  plot.setAttribute("aria-label", said);
  const drawn = spans.map((one) => {
    const [top, kind] = lanes[one.track];
    const rect = document.createElementNS(SVG, "rect");
    const attributes = { x: (1000 * one.begin) / end, y: top, width: Math.max(0.5, (1000 * one.took) / end), height: 42, class: kind };
    Object.entries(attributes).forEach(([name, value]) => rect.setAttribute(name, value));
    const title = document.createElementNS(SVG, "title");
    title.textContent = `${one.track} ${one.name} ${millis(one.took / 1000)}`;
    rect.append(title);
    return rect;
  });
  plot.replaceChildren(...drawn);
  const all = total(traced.nodes, (one) => one.took);
  table("t-nodes", traced.nodes, (one) => one.name, (one) => [one.name, number(one.times), millis(one.took / 1000), `${number((100 * one.took) / Math.max(all, 1e-9))} %`]);
  const longest = [...steps].sort((a, b) => b.took - a.took).slice(0, 20);
  table("t-steps", longest, (one) => one.begin, (one) => [millis(one.begin / 1000), millis(one.took / 1000), number(one.rows), number(one.drawn)]);
}

function sample(one) {
  page.samples.set(one.worker, one);
  // One of all workers: the slowest.
  const all = [...page.samples.values()];
  const most = (of) => Math.max(0, ...all.map(of));
  push(page.curves.p50, most((each) => each.steps.p50_ms));
  push(page.curves.p99, most((each) => each.steps.p99_ms));
  const { p50, p99 } = page.curves;
  curve("p-step", `Time of a step: p50 ${millis(p50[p50.length - 1])}, p99 ${millis(p99[p99.length - 1])}`, [{ kind: "one", values: p50 }, { kind: "two", values: p99 }]);
  const now = page.states[page.states.length - 1];
  if (now) {
    workers(now);
    requests(now);
  }
}

function happened(event) {
  const line = document.createElement("li");
  const words = event.kind.replaceAll("_", " ");
  line.textContent = [clock(event.time_ms), words, event.worker && `${event.worker} (epoch ${event.epoch})`, event.model, event.message].filter(Boolean).join(" · ");
  if (/died|quarantined/.test(event.kind)) line.className = "bad";
  $("events").prepend(line);
  while ($("events").children.length > EVENTS) $("events").lastChild.remove();
}

const takes = { state, sample, event: happened };

// Server-sent events by fetch, since EventSource can send no token.
async function read() {
  const answer = await call("/live/events", "GET");
  $("key").hidden = true;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const one of events) {
      const lines = one.split("\n");
      const field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      const take = takes[field("event")];
      if (take) take(JSON.parse(field("data")));
    }
  }
}

async function follow() {
  for (let pause = 500; ; pause = Math.min(5000, pause * 2)) {
    let why = "the connection ended";
    try {
      await read();
      pause = 500;
    } catch (error) {
      why = error.message;
      if (error.status === 401 || error.status === 403) {
        $("key").hidden = false;
        text($("why"), why);
        text($("host"), "not let in");
        $("token").focus();
        return;
      }
    }
    text($("host"), `${why}; trying again`);
    $("host").className = "bad";
    await new Promise((done) => setTimeout(done, pause));
  }
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  page.token = $("token").value;
  $("token").value = "";
  follow();
});
follow();
