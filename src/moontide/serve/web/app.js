"use strict";
// The page of a stream. All text goes into the document as text, never as HTML.

const SHOWN = 60; // rows of the table of predictions
const KEPT = 4000; // samples that shares over time are made of
const BINS = 40;
const MARKS = "ABCDEFGH";
const CHUNK = 16; // samples pushed at once
const PACE = 350; // milliseconds between two pushes of the sample set

const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

const page = {
  info: null, // what the server can do
  stream: null, // its description
  from: 0, // number of the first sample in its state
  rows: new Map(), // sample number -> prediction
  again: new Map(), // sample number -> prediction with the state as it was when asked again
  truth: new Map(), // sample number -> true class, of samples that this page pushed
  pictures: new Map(), // sample number -> address of a thumbnail
  samples: null, // the sample set, once fetched
  feeding: false,
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
const at = (rest) => `streams/${page.stream.name}${rest}`;
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
  location.hash = name;
  $("choose").hidden = true;
  $("stream").hidden = false;
  $("title").textContent = name;
  const { method, source, class_names: names } = page.stream;
  const what = { simulated: "simulated embeddings, not images", prototypes: "embeddings" }[source] || `images by ${source}`;
  $("about").textContent = `${method}, ${names.length} classes, ${what}`;
  $("drop").hidden = !page.info.encoder || source !== page.info.encoder;
  $("play").hidden = !(source === "simulated" || (!$("drop").hidden && page.info.sample_images > 0));
  await catchUp();
  listen();
}

// Take a description; where the stream was reset, forget what was before.
function begin(stream) {
  if (stream.seen < page.stream.seen) forget();
  page.stream = stream;
  page.from = stream.total - stream.seen;
}

function forget() {
  for (const map of [page.rows, page.again, page.truth, page.pictures]) map.clear();
}

// Fetch the predictions that the page does not have yet, of the last KEPT samples.
async function catchUp() {
  begin(await getJson(at("")));
  let next = Math.max(page.from, page.stream.total - KEPT, ...[...page.rows.keys()].map((number) => number + 1));
  while (next < page.stream.total) {
    const part = await getJson(at(`/predictions?first=${next}&size=1000`));
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
        for (const event of events) hear(event);
      }
    } catch (error) {
      if (ending.signal.aborted) return;
      if (error.status === 404) return say("The stream is gone.", true);
    }
    await sleep(1000);
  }
}

function hear(event) {
  const data = event.split("\n").find((line) => line.startsWith("data: "));
  if (!data) return;
  const told = JSON.parse(data.slice(6));
  if (event.includes("event: known")) return takeKnown(told);
  if (told.first < page.from) return; // from before a reset
  begin({ ...page.stream, seen: told.seen, total: told.total, beta: told.beta });
  add(told);
  draw();
}

// Feeding

async function feed() {
  page.feeding = true;
  update();
  try {
    await (page.stream.source === "simulated" ? feedSimulated() : feedPictures());
  } catch (error) {
    say(error.message, true);
  }
  page.feeding = false;
  update();
}

async function feedSimulated() {
  if (!page.samples) {
    const response = await ask("samples/simulated");
    const [n, d] = response.headers.get("X-Shape").split(",").map(Number);
    const labels = response.headers.get("X-Labels").split(",").map(Number);
    page.samples = { n, d, labels, rows: new Float32Array(await response.arrayBuffer()) };
  }
  const { n, d, labels, rows } = page.samples;
  for (let start = page.stream.total % n; start < n && page.feeding; start += CHUNK) {
    const size = Math.min(CHUNK, n - start);
    const headers = { "Content-Type": "application/octet-stream", "X-Shape": `${size},${d}` };
    const answer = await push("/embeddings", { headers, body: rows.slice(start * d, (start + size) * d) });
    for (let i = 0; i < size; i++) page.truth.set(answer.first + i, labels[start + i]);
    draw();
    await sleep(PACE);
    if (start + size === n) say("The whole sample set is in the stream.");
  }
}

async function feedPictures() {
  const n = page.info.sample_images;
  for (let start = page.stream.total % n; start < n && page.feeding; start += 8) {
    const files = [], labels = [];
    for (let i = start; i < Math.min(start + 8, n); i++) {
      const response = await ask(`samples/images/${i}`);
      labels.push(response.headers.get("X-Label"));
      files.push(await response.blob());
    }
    const first = await pushFiles(files);
    labels.forEach((label, i) => {
      const known = page.stream.class_names.indexOf(label);
      if (known >= 0) page.truth.set(first + i, known);
    });
    draw();
    await sleep(PACE);
  }
}

// Push, and come again when the server says so. The key makes a push that is sent twice count once.
async function push(rest, options) {
  const headers = { ...options.headers, "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()) };
  for (let tries = 0; ; tries++) {
    try {
      const answer = await (await ask(at(rest), { ...options, method: "POST", headers })).json();
      if (answer.labels) add(answer);
      return answer;
    } catch (error) {
      const busy = error.status === 429 || error.status === 503 || error.status === undefined;
      if (!busy || tries === 20) throw error;
      say("The server is busy or away; trying again.");
      await sleep(1000 * (error.wait || 1));
      say("");
    }
  }
}

async function pushFiles(files) {
  const form = new FormData();
  for (const file of files) form.append("images", file, "image");
  const answer = await push("/images", { body: form });
  files.forEach((file, i) => page.pictures.set(answer.first + i, URL.createObjectURL(file)));
  for (const [number, address] of page.pictures) {
    if (page.pictures.size <= 4 * SHOWN) break;
    URL.revokeObjectURL(address);
    page.pictures.delete(number);
  }
  return answer.first;
}

async function upload(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  try {
    for (let start = 0; start < images.length; start += 8) {
      say(`Sending ${start + 1} to ${Math.min(start + 8, images.length)} of ${images.length} images.`);
      await pushFiles(images.slice(start, start + 8));
      draw();
    }
    say(images.length ? `${images.length} images are in the stream.` : "These are no images.", !images.length);
  } catch (error) {
    say(error.message, true);
  }
}

// Drawing, at most once a frame and not while paused

function draw() {
  if (page.drawing || page.paused) return;
  page.drawing = true;
  requestAnimationFrame(() => {
    page.drawing = false;
    if (!page.stream) return;
    const numbers = [...page.rows.keys()].sort((a, b) => a - b);
    update();
    drawFacts(numbers);
    drawPredictions(numbers.slice(-SHOWN).reverse());
    drawClasses(numbers);
    drawMap();
  });
}

function update() {
  $("play").textContent = page.feeding ? "Stop feeding" : "Feed the sample set";
  $("pause").setAttribute("aria-pressed", String(page.paused));
  $("pause").textContent = page.paused ? "Go on" : "Pause";
}

function fact(term, value) {
  return element("div", {}, element("dt", {}, term), element("dd", {}, value));
}

function drawFacts(numbers) {
  const { seen, beta } = page.stream;
  const changed = numbers.filter((n) => page.rows.get(n).label !== page.rows.get(n).before).length;
  const facts = [
    fact("Samples in the state", String(seen)),
    fact("Changed by adaptation", numbers.length ? `${changed} (${percent(changed / numbers.length)})` : "none yet"),
  ];
  if (beta) facts.push(fact("Classes believed present", `${beta.filter((b) => b > 0).length} of ${beta.length}`));
  const told = numbers.filter((n) => page.rows.get(n).known !== null).length;
  if (told) facts.push(fact("True classes told", String(told)));
  const known = [...page.truth.keys()].filter((n) => page.rows.has(n));
  if (known.length) {
    const right = (key) => known.filter((n) => page.rows.get(n)[key] === page.truth.get(n)).length / known.length;
    facts.push(fact("Right before", percent(right("before"))), fact("Right after", percent(right("label"))));
  }
  $("facts").replaceChildren(...facts);
}

function prediction(label, sure) {
  return element("td", {}, `${named(label)} `, element("small", {}, percent(sure)));
}

function drawPredictions(numbers) {
  $("now").hidden = !page.again.size;
  $("fix-note").hidden = !canFix();
  if (!numbers.includes(fixing.selected)) fixing.selected = numbers[0] ?? null;
  keepFocus(() => $("predictions").tBodies[0].replaceChildren(...numbers.map((number) => {
    const row = page.rows.get(number), changed = row.label !== row.before;
    const first = element("th", { scope: "row" });
    if (page.pictures.has(number)) first.append(element("img", { src: page.pictures.get(number), alt: `sample ${number}` }));
    first.append(String(number));
    const cells = [first, prediction(row.before, row.beforeSure), prediction(row.label, row.sure)];
    if (page.again.size) {
      const again = page.again.get(number);
      cells.push(again ? prediction(again.label, again.sure) : element("td", {}, "–"));
    }
    cells.push(element("td", {}, changed ? "≠ changed" : "= same"), truthCell(number, row));
    const known = row.known !== null && row.known !== undefined;
    return element("tr", {
      class: `${changed ? "changed" : "same"}${known ? " known" : ""}`, "data-number": number,
      tabindex: number === fixing.selected ? 0 : -1,
    }, ...cells);
  })));
}

// The classes with most samples after adaptation, then by beta; their order gives the marks of the map.
function ranking(numbers) {
  const after = new Map(), before = new Map();
  for (const n of numbers) {
    const row = page.rows.get(n);
    after.set(row.label, (after.get(row.label) || 0) + 1);
    before.set(row.before, (before.get(row.before) || 0) + 1);
  }
  const classes = [...new Set([...after.keys(), ...before.keys()])];
  classes.sort((a, b) => (after.get(b) || 0) - (after.get(a) || 0) || (before.get(b) || 0) - (before.get(a) || 0) || a - b);
  return { classes, after, before };
}

// The share of a class in consecutive parts of the samples.
function shares(numbers, label, key) {
  const bins = Math.min(BINS, Math.max(1, Math.floor(numbers.length / 12)));
  return Array.from({ length: bins }, (_, i) => {
    const part = numbers.slice(Math.floor((i * numbers.length) / bins), Math.floor(((i + 1) * numbers.length) / bins));
    return part.filter((number) => page.rows.get(number)[key] === label).length / Math.max(1, part.length);
  });
}

function spark(before, after, highest) {
  const line = (values) => {
    const points = (values.length > 1 ? values : [values[0], values[0]]).map((share, i, all) =>
      `${((100 * i) / (all.length - 1)).toFixed(1)},${(23 - (22 * share) / highest).toFixed(1)}`);
    return `M${points.join("L")}`;
  };
  return element("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    element("path", { class: "before", d: line(before) }), element("path", { class: "after", d: line(after) }));
}

function meter(value) {
  return element("td", { class: "number" }, element("meter", { min: 0, max: 1, value }), element("span", {}, percent(value)));
}

function drawClasses(numbers) {
  const { classes, after, before } = ranking(numbers);
  const { beta } = page.stream, total = Math.max(1, numbers.length);
  page.marks = new Map(classes.slice(0, MARKS.length).map((label, i) => [label, i]));
  const shown = classes.slice(0, 20);
  const lines = shown.map((label) => ["before", "label"].map((key) => shares(numbers, label, key)));
  const highest = Math.max(0.01, ...lines.flat(2)); // one scale for all
  $("classes").tBodies[0].replaceChildren(...shown.map((label, i) => {
    const mark = page.marks.get(label);
    const value = beta ? beta[label] : null;
    return element("tr", {},
      element("td", {}, mark === undefined ? "·" : element("span", { class: `mark c${mark}` }, MARKS[mark])),
      element("th", { scope: "row" }, named(label)),
      meter((before.get(label) || 0) / total), meter((after.get(label) || 0) / total),
      element("td", {}, spark(...lines[i], highest)),
      element("td", { class: "number" }, value === null ? "–" : value.toFixed(3)),
      element("td", {}, value === null ? "–" : value > 0 ? "● present" : "○ absent"));
  }));
  $("beta-note").hidden = !beta;
  const rest = classes.length - shown.length;
  const never = page.stream.class_names.length - classes.length;
  $("others").textContent = `${rest ? `${rest} more classes were predicted; ` : ""}${never} of `
    + `${page.stream.class_names.length} classes never.`;
}

// Fetch and draw the map, one at a time however fast events come; `stale` asks for another when this one is drawn.
async function drawMap() {
  page.stale = true;
  if (page.mapping) return;
  page.mapping = true;
  while (page.stale) {
    page.stale = false;
    try {
      showMap(page.rows.size ? await getJson(at("/map")) : { x: [], y: [], labels: [] });
    } catch (error) {
      if (error.status !== 409) say(error.message, true); // 409: the window is empty
    }
    await sleep(500);
  }
  page.mapping = false;
}

function showMap(map) {
  const scale = (values, low, high) => {
    const least = Math.min(...values), span = Math.max(...values) - least || 1;
    return values.map((value) => low + ((high - low) * (value - least)) / span);
  };
  const x = scale(map.x, 20, 580), y = scale(map.y, 380, 20);
  $("map").replaceChildren(...map.labels.map((label, i) => {
    const mark = page.marks.get(label), known = mark !== undefined;
    const group = element("g", { transform: `translate(${x[i].toFixed(1)} ${y[i].toFixed(1)})`, class: known ? `c${mark}` : "" },
      element("title", {}, `${map.first + i}: ${named(label)}`),
      known ? element("text", { class: "glyph" }, MARKS[mark]) : element("circle", { r: 2.5, class: "dot" }));
    if (label !== map.zero_shot_labels[i]) group.append(element("circle", { r: 8, class: "ring" }));
    return group;
  }));
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
  say(`${lines.length - 1} predictions were saved.`);
}

const actions = {
  play: () => (page.feeding ? (page.feeding = false) : feed()),
  pause: async () => {
    page.paused = !page.paused;
    page.feeding = false;
    update();
    say(page.paused ? "Paused: the page stands still, the stream goes on." : "");
    if (!page.paused) await catchUp();
  },
  revise: async () => {
    const part = await postJson(at("/revise"));
    page.again.clear();
    part.labels.forEach((label, i) => page.again.set(part.first + i, { label, sure: part.confidence[i] }));
    const moved = part.labels.filter((label, i) => page.rows.get(part.first + i)?.label !== label).length;
    say(`${part.size} samples of the window were predicted again with the state as it is now; ${moved} changed.`);
    draw();
  },
  reset: async () => {
    page.feeding = false;
    begin(await postJson(at("/reset")));
    forget();
    say("The stream is at its start again.");
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
  $("streams").replaceChildren(element("option", { value: "" }, streams.length ? "…" : "none yet"),
    ...streams.map(({ name, method, seen }) => element("option", { value: name }, `${name} (${method}, ${seen ?? "?"} samples)`)));
  const name = location.hash.slice(1);
  if (name) await open(name).catch((error) => say(error.message, true));
}

$("streams").addEventListener("change", (event) => event.target.value && open(event.target.value));
$("source").addEventListener("change", () => {
  $("names-line").hidden = document.querySelector("[name=source]:checked").value !== "classes";
});
$("create").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = { method: $("method").value, max_batch: Number($("batch").value) };
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
