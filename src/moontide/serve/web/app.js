"use strict";
// The page of a stream. All text goes into the document as text, never as HTML.

const SHOWN = 60; // rows of the table of predictions
const KEPT = 4000; // samples that shares over time are made of
const BINS = 40;
const MARKS = "ABCDEFGH";
const CHUNK = 16; // samples pushed at once
const PACE = 350; // milliseconds between two pushes of the sample set

const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const count = (n, thing, things = `${thing}s`) => `${n} ${n === 1 ? thing : things}`;

const page = {
  info: null, // what the server can do
  stream: null, // its description
  beginnings: 0, // how often the page forgot what was before
  from: 0, // number of the first sample in its state
  rows: new Map(), // sample number -> prediction
  again: new Map(), // sample number -> prediction with the state as it was when asked again
  truth: new Map(), // sample number -> true class, of samples that this page pushed
  orders: new Set(), // in which this page fed samples whose class it knows
  pictures: new Map(), // sample number -> thumbnail, as a data address
  samples: null, // the sample set, once fetched
  feeding: false,
  pending: null, // the part of the sample set that is on its way
  paused: false,
  listening: null, // ends the event stream
  drawing: false,
  marks: new Map(), // class -> place of its letter
  mapping: false,
  stale: false, // whether the map should be drawn again
};

// Requests

function say(text, error = false) {
  $("status").textContent = text;
  $("status").className = error ? "error" : "";
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem("moontide-token");
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) $("login").hidden = false;
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    const error = new Error(body.detail || `${response.status} ${response.statusText}`);
    error.status = response.status;
    error.wait = Number(response.headers.get("Retry-After")) || 0;
    throw error;
  }
  return response;
}

const getJson = async (path) => (await ask(path)).json();
const postJson = async (path, value) =>
  (await ask(path, {
    method: "POST",
    headers: value === undefined ? {} : { "Content-Type": "application/json" },
    body: value === undefined ? undefined : JSON.stringify(value),
  })).json();
const at = (path) => `streams/${page.stream.name}${path}`;
const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// Elements

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle", "text", "g", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const named = (label) => page.stream.class_names[label];

// The stream

async function open(name) {
  page.stream = await getJson(`streams/${encodeURIComponent(name)}`);
  forget();
  recall();
  location.hash = name;
  $("choose").hidden = true;
  $("stream").hidden = false;
  $("title").textContent = name;
  const { method, source, class_names: names } = page.stream;
  const what = { simulated: "simulated embeddings, not images", prototypes: "embeddings" }[source] || `images by ${source}`;
  $("about").textContent = `${method}, ${count(names.length, "class", "classes")}, ${what}`;
  $("drop").hidden = !page.info.encoder || source !== page.info.encoder;
  $("play").hidden = !(source === "simulated" || (!$("drop").hidden && page.info.sample_images > 0));
  await catchUp();
  listen();
  if (page.pending) feedPart(page.pending.start, page.pending.size, page.pending.key).catch((error) => say(error.message, true));
}

// Take over a description; if the stream was reset, forget everything from before.
function begin(stream) {
  if (stream.seen < page.stream.seen) forget();
  page.stream = stream;
  page.from = stream.total - stream.seen;
}

function forget() {
  page.beginnings += 1; // so that answers on their way are known to be from before
  for (const each of [page.rows, page.again, page.truth, page.orders, page.pictures]) each.clear();
  page.pending = null;
  remember();
}

// Fetch the predictions that the page does not have yet, of the last KEPT samples.
async function catchUp() {
  const asked = page.beginnings, stream = await getJson(at(""));
  if (asked !== page.beginnings) return catchUp();
  begin(stream);
  const begun = page.beginnings;
  let next = Math.max(page.from, page.stream.total - KEPT, ...[...page.rows.keys()].map((number) => number + 1));
  while (next < page.stream.total) {
    const part = await getJson(at(`/predictions?first=${next}&size=1000`));
    if (begun !== page.beginnings) return catchUp(); // it was reset meanwhile
    if (!part.size) break;
    add(part);
    next = part.first + part.size;
  }
  draw();
}

function add(part) {
  for (let i = 0; i < part.size; i++) {
    page.rows.set(part.first + i, {
      label: part.labels[i], sure: part.confidence[i],
      before: part.zero_shot_labels[i], beforeSure: part.zero_shot_confidence[i], known: part.known[i],
    });
  }
  for (const number of page.rows.keys()) { // in the order of their coming, so the oldest first
    if (page.rows.size <= KEPT) break;
    page.rows.delete(number);
  }
}

// Follow the stream: server-sent events, read by hand because EventSource sends no token.
async function listen() {
  page.listening?.abort();
  const ending = (page.listening = new AbortController());
  while (!ending.signal.aborted) {
    try {
      const response = await ask(at("/events"), { signal: ending.signal });
      await catchUp(); // what came before the first event
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part; !(part = await reader.read()).done;) {
        text += part.value;
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events) take(event);
      }
    } catch (error) {
      if (ending.signal.aborted) return;
      if (error.status === 404) return say("The stream no longer exists.", true);
    }
    await sleep(1000);
  }
}

function take(event) {
  const data = event.split("\n").find((line) => line.startsWith("data: "));
  if (!data) return;
  const sent = JSON.parse(data.slice(6));
  if (event.includes("event: known")) return takeKnown(sent);
  if (sent.first < page.from) return; // from before a reset
  begin({ ...page.stream, seen: sent.seen, total: sent.total, beta: sent.beta });
  add(sent);
  draw();
}

// Buttons

const quote = (text) => `"${String(text).replaceAll('"', '""')}"`;

function save(content, name, type) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function downloadPredictions() {
  const lines = ["sample,label,class_name,confidence,zero_shot_label,zero_shot_class_name,zero_shot_confidence,known_class_name"];
  for (let next = 0, part; (part = await getJson(at(`/predictions?first=${next}&size=10000`))).size; next = part.first + part.size) {
    for (let i = 0; i < part.size; i++) {
      lines.push([part.first + i, part.labels[i], quote(part.class_names[i]), part.confidence[i], part.zero_shot_labels[i],
        quote(part.zero_shot_class_names[i]), part.zero_shot_confidence[i],
        part.known[i] === null ? "" : quote(named(part.known[i]))].join(","));
    }
  }
  save(lines.join("\n") + "\n", `${page.stream.name}.csv`, "text/csv");
  say(`${count(lines.length - 1, "prediction was", "predictions were")} saved.`);
}

const actions = {
  play: () => (page.feeding ? (page.feeding = false) : feed()),
  pause: async () => {
    page.paused = !page.paused;
    page.feeding = false;
    update();
    say(page.paused ? "Paused: the page is frozen, the stream continues." : "");
    if (!page.paused) await catchUp();
  },
  revise: async () => {
    const part = await postJson(at("/revise"));
    page.again.clear();
    part.labels.forEach((label, i) => page.again.set(part.first + i, { label, sure: part.confidence[i] }));
    const moved = part.labels.filter((label, i) => page.rows.get(part.first + i)?.label !== label).length;
    say(`${count(part.size, "sample of the window was", "samples of the window were")} predicted again with the state as `
      + `it is now; ${moved} changed.`);
    draw();
  },
  reset: async () => {
    page.feeding = false;
    begin(await postJson(at("/reset")));
    forget();
    say("The stream was reset.");
    draw();
  },
  csv: downloadPredictions,
  state: async () => save(await (await ask(at("/state"))).arrayBuffer(), `${page.stream.name}.safetensors`, "application/octet-stream"),
  close: () => {
    location.hash = "";
    location.reload();
  },
};

async function start() {
  try {
    page.info = await getJson("server");
  } catch (error) {
    return say(error.message, true);
  }
  $("login").hidden = true;
  $("by-classes").hidden = !page.info.encoder;
  $("method").replaceChildren(...page.info.methods.map((name) => element("option", {}, name)));
  $("method").value = page.info.default_method;
  const streams = await getJson("streams");
  $("streams").replaceChildren(...streams.map(({ name, method, classes, seen }) => element("li", {},
    element("a", { href: `#${name}` }, name), ` ${method}, ${count(classes, "class", "classes")}`
      + (seen === null ? "" : `, ${count(seen, "sample")}`))));
  if (!streams.length) $("streams").append(element("li", {}, "none yet"));
  const name = location.hash.slice(1);
  if (name) await open(name).catch((error) => say(error.message, true));
}

$("streams").addEventListener("click", (event) => {
  if (event.target.hash) open(event.target.hash.slice(1)).catch((error) => say(error.message, true));
});
$("source").addEventListener("change", () => {
  $("names-line").hidden = document.querySelector("[name=source]:checked").value !== "classes";
});
$("create").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = { method: $("method").value, max_batch: Number($("batch").value) };
  const name = $("name").value.trim().toLowerCase().replace(/[^a-z0-9_-]+/g, "-").replace(/^[-_]+|[-_]+$/g, "");
  if (name) body.name = name;
  if ($("names-line").hidden) body.sample = "simulated";
  else body.classes = $("names").value.split(/[\n,]/).map((name) => name.trim()).filter(Boolean);
  try {
    const made = await postJson("streams", body);
    await open(made.name);
    say("");
    if (body.sample) feed();
  } catch (error) {
    say(error.message, true);
  }
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("moontide-token", $("token").value.trim());
  say("");
  start();
});
for (const [id, action] of Object.entries(actions)) {
  $(id).addEventListener("click", () => Promise.resolve(action()).catch((error) => say(error.message, true)));
}
$("files").addEventListener("change", (event) => upload(event.target.files));
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").className = kind === "dragover" ? "over" : "";
    if (kind === "drop") upload(event.dataTransfer.files);
  });
}
addEventListener("DOMContentLoaded", start);
