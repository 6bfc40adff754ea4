"use strict";
// Everything shown is text set by textContent: a name of a file or a class is never parsed as markup.
const PAGE = 60, ROWS = 20, MATRIX = 20, LIST = 12, COLOURED = 10, PICTURED = 60;
const SHAPES = ["circle", "square", "triangle", "diamond", "cross"];
const COLOURS = { light: ["#0b57b0", "#d1550a", "#0f7b4f", "#a3157c", "#6b4fc4", "#8a6100", "#0c7c8c", "#c22b3b", "#4d5a6b", "#5f7d00"],
  dark: ["#74adff", "#ff9b52", "#4fd39a", "#f786d2", "#b49dff", "#e8bb4d", "#5ad1e0", "#ff8b93", "#b3bfd0", "#b6d957"] };
const $ = (id) => document.getElementById(id);
const D = JSON.parse($("data").textContent);
for (const [key, value] of Object.entries(D)) if (value && value.type) D[key] = unpack(value);
const N = D.n, K = D.classes.length, TOP = D.top.width, NEAR = D.neighbours.width;
const label = D.label, before = D.before, truth = D.truth;
const dark = matchMedia("(prefers-color-scheme: dark)");

function unpack({ type, width, data }) {  // little-endian, like every machine with a browser
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const array = new { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array }[type](bytes.buffer);
  array.width = width;
  return array;
}
function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key in node && key !== "list") node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}
const number = (x) => x.toLocaleString("en-GB");
const share = (x, digits = 1) => `${(100 * x).toFixed(digits)}\u00a0%`;
const tenths = (x) => (x > 0 && x < 50 ? "<\u00a00.5\u00a0%" : `${Math.round(x / 100)}\u00a0%`);
const plural = (n, word, many = `${word}s`) => `${number(n)} ${n === 1 ? word : many}`;
const name = (i) => D.names[i];
const file = (i) => name(i).split("/").pop() || name(i);
const quoted = (k) => `“${D.classes[k]}”`;
const confidence = (i) => D.top_now[i * TOP + Math.max(0, D.top.subarray(i * TOP, i * TOP + TOP).indexOf(label[i]))];
function tally(classes) {
  const counts = new Uint32Array(K);
  for (const k of classes) counts[k]++;
  return counts;
}
const countsNow = tally(label), countsBefore = tally(before);
let changedCount = 0, rightNow = 0, rightBefore = 0;
for (let i = 0; i < N; i++) {
  changedCount += label[i] !== before[i];
  if (truth) { rightNow += label[i] === truth[i]; rightBefore += before[i] === truth[i]; }
}
const bySize = [...Array(K).keys()].sort((a, b) => countsNow[b] - countsNow[a] || countsBefore[b] - countsBefore[a] || a - b);
const rank = new Uint32Array(K);
bySize.forEach((k, r) => { rank[k] = r; });

// ---- header
function head() {
  const seen = bySize.filter((k) => countsNow[k]).length;
  $("title").textContent = `${plural(N, "image")}, ${plural(K, "class", "classes")}`;
  document.title = `${$("title").textContent} – Moontide`;
  $("about").textContent = Object.entries(D.about).map(([key, value]) => `${key} ${value}`).join(" · ");
  const fact = (title, value, more) => make("div", {}, make("dt", { textContent: title }), make("dd", {}, `${value} `, make("small", { textContent: more })));
  $("facts").append(
    fact("Changed from zero-shot", number(changedCount), `of ${number(N)} (${share(changedCount / N)})`),
    fact("Classes that appear", number(seen), `of ${number(K)}`));
  if (truth) {
    const gain = 100 * (rightNow - rightBefore) / N;
    $("facts").append(fact("Accuracy", share(rightNow / N), `zero-shot ${share(rightBefore / N)} (${gain < 0 ? "−" : "+"}${Math.abs(gain).toFixed(1)})`));
  }
  if (D.skipped_count) $("facts").append(fact("Skipped files", number(D.skipped_count), "listed below"));
  for (const link of document.querySelectorAll("nav [data-for]")) link.hidden = link.dataset.for === "confusion" ? !truth : !D.skipped_count;
}

// ---- images: filters, order, pages
const state = { page: 0, found: new Uint32Array(0) };
const KINDS = [["all", "All images", () => true], ["changed", "Changed from zero-shot", (i) => label[i] !== before[i]], ["same", "Not changed", (i) => label[i] === before[i]]];
if (truth) KINDS.push(
  ["wrong", "Wrong", (i) => label[i] !== truth[i]],
  ["fixed", "Put right", (i) => label[i] === truth[i] && before[i] !== truth[i]],
  ["spoilt", "Made wrong", (i) => label[i] !== truth[i] && before[i] === truth[i]]);
const ORDERS = [["pictures", "Changed first"], ["low", "Least confident first"], ["high", "Most confident first"], ["name", "File name"]];

function choices(select, options) {
  select.replaceChildren(...options.map(([value, text]) => make("option", { value, textContent: text })));
}
function classChoices(select, counts) {
  const used = bySize.filter((k) => counts[k]).sort((a, b) => D.classes[a].localeCompare(D.classes[b]));
  choices(select, [["", "Any"], ...used.map((k) => [k, `${D.classes[k]} (${number(counts[k])})`])]);
}
function find() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const test = KINDS.find(([key]) => key === $("kind").value)[2];
  const wanted = [["label", label], ["before", before], ["truth", truth]].filter(([id]) => $(id).value !== "").map(([id, array]) => [Number($(id).value), array]);
  const found = [];
  for (let i = 0; i < N; i++) {
    if (!test(i) || wanted.some(([k, array]) => array[i] !== k)) continue;
    if (words.length) {
      const text = `${name(i)} ${D.classes[label[i]]} ${D.classes[before[i]]}`.toLowerCase();
      if (!words.every((word) => text.includes(word))) continue;
    }
    found.push(i);
  }
  const first = (i) => (D.pictures[i] ? 0 : 2) + (label[i] !== before[i] ? 0 : 1);
  const orders = { pictures: (a, b) => first(a) - first(b) || confidence(b) - confidence(a) || a - b, low: (a, b) => confidence(a) - confidence(b) || a - b,
    high: (a, b) => confidence(b) - confidence(a) || a - b, name: (a, b) => (name(a) < name(b) ? -1 : name(a) > name(b) ? 1 : a - b) };
  state.found = found.sort(orders[$("order").value]);
  state.inside = new Uint8Array(N);
  for (const i of found) state.inside[i] = 1;
  state.page = 0;
  showPage();
  showLegend();
  draw();
}
function picture(i) {
  const data = D.pictures[i];
  return data ? make("img", { className: "picture", alt: "", src: `data:image/jpeg;base64,${data}`, decoding: "async" })
    : make("div", { className: "picture nopicture" }, make("span", { textContent: "no picture here" }));
}
function truthLine(i) {
  if (!truth) return null;
  const right = label[i] === truth[i];
  return make("span", { className: `truth ${right ? "good" : "bad"}`, textContent: right ? "✓ right" : `✗ true: ${D.classes[truth[i]]}` });
}
function tile(i, below) {
  const sure = confidence(i);
  const bar = make("i");
  bar.style.width = `${sure / 100}%`;
  return make("li", {}, make("button", { type: "button", className: "tile", title: D.prefix + name(i), onclick: () => open(i) },
    picture(i),
    make("span", { className: "text" },
      make("span", { className: "name", textContent: D.classes[label[i]] }),
      label[i] === before[i] ? null : make("span", { className: "was", textContent: `↻ was ${D.classes[before[i]]}` }),
      truthLine(i),
      below || make("span", { className: "meter" }, make("span", { className: "track" }, bar), tenths(sure)),
      make("span", { className: "file", textContent: file(i) }))));
}
function showPage() {
  const pages = Math.max(1, Math.ceil(state.found.length / PAGE));
  state.page = Math.min(Math.max(state.page, 0), pages - 1);
  const shown = state.found.slice(state.page * PAGE, (state.page + 1) * PAGE);
  $("grid").replaceChildren(...shown.map((i) => tile(i)));
  if (!shown.length) $("grid").append(make("li", { className: "none", textContent: "No image matches these filters." }));
  const pictures = Object.keys(D.pictures).length;
  const some = pictures < N ? `; ${number(pictures)} of all ${number(N)} have a picture in this page` : "";
  $("status").textContent = `${plural(state.found.length, "image")}${state.found.length < N ? ` of ${number(N)}` : ""}${some}.`;
  $("page").value = state.page + 1;
  $("page").max = pages;
  $("pages").textContent = number(pages);
  $("first").disabled = $("previous").disabled = state.page === 0;
  $("last").disabled = $("next").disabled = state.page === pages - 1;
  document.querySelector(".pager").hidden = pages === 1;
}
function turn(page) {
  state.page = page;
  showPage();
  $("images").scrollIntoView();
}
function only(filters) {  // show the images of some classes
  $("search").value = "";
  $("kind").value = filters.kind || "all";
  for (const id of ["label", "before", "truth"]) $(id).value = filters[id] ?? "";
  find();
  $("images").scrollIntoView();
  $("search").focus({ preventScroll: true });
}
function images() {
  choices($("kind"), KINDS);
  choices($("order"), ORDERS);
  classChoices($("label"), countsNow);
  classChoices($("before"), countsBefore);
  $("truth-box").hidden = !truth;
  classChoices($("truth"), truth ? tally(truth) : new Uint32Array(K));
  for (const id of ["kind", "label", "before", "truth", "order"]) $(id).onchange = find;
  $("search").oninput = find;
  $("clear").onclick = () => only({});
  $("first").onclick = () => turn(0);
  $("previous").onclick = () => turn(state.page - 1);
  $("next").onclick = () => turn(state.page + 1);
  $("last").onclick = () => turn(Infinity);
  $("page").onchange = () => turn((Number($("page").value) || 1) - 1);
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT)$/.test(event.target.tagName)) { event.preventDefault(); $("search").focus(); }
  });
}

// ---- one image
let current = -1;
function why(i) {
  const now = label[i], was = before[i], lines = [];
  if (now === was) lines.push(`Zero-shot said ${quoted(was)} too (${tenths(D.before_share[i])}).`);
  else lines.push(`Zero-shot said ${quoted(was)} (${tenths(D.before_share[i])}); seen together with the others it is ${quoted(now)} (${tenths(confidence(i))}).`);
  const near = nearest(i);
  if (near.length) {
    const count = (k) => near.filter(([j]) => label[j] === k).length;
    const same = `${count(now)} of its ${plural(near.length, "nearest image")} ${count(now) === 1 ? "is" : "are"} labelled ${quoted(now)}`;
    lines.push(now === was ? `${same}.` : `${same}, ${count(was)} ${quoted(was)}.`);
  }
  for (const k of new Set([now, was])) {
    const mean = !D.beta ? "" : D.beta[k] < 0.005 ? "; with no image to move it, its mean stays at its name"
      : `; ${share(D.beta[k], 0)} of its mean comes from images, the rest from its name (β)`;
    lines.push(`${quoted(k)} has ${plural(countsNow[k], "image")}, ${number(countsBefore[k])} by zero-shot${mean}.`);
  }
  if (truth) lines.push(now === truth[i] ? `${quoted(now)} is right.` : `It is really ${quoted(truth[i])}.`);
  return lines;
}
function nearest(i) {
  const found = [];
  for (let e = i * NEAR; e < (i + 1) * NEAR; e++) if (D.neighbours[e] !== i) found.push([D.neighbours[e], D.cosines[e] / 10000]);
  return found;
}
function bars(early, now) {
  const pair = [["early", early], ["now", now]].map(([className, width]) => {
    const bar = make("i", { className });
    bar.style.width = `${Math.min(100, 100 * width)}%`;
    return bar;
  });
  return make("td", { className: "bars" }, ...pair);
}
function open(i) {
  current = i;
  $("one-picture").replaceChildren(picture(i));
  $("one-title").textContent = D.classes[label[i]];
  $("one-name").textContent = D.prefix + name(i);
  $("why").replaceChildren(...why(i).map((line) => make("li", { textContent: line })));
  const rows = [];
  for (let t = i * TOP; t < (i + 1) * TOP; t++) {
    rows.push(make("tr", { className: D.top[t] === label[i] ? "chosen" : "" }, make("th", { scope: "row", textContent: D.classes[D.top[t]] }),
      bars(D.top_before[t] / 10000, D.top_now[t] / 10000), make("td", { textContent: tenths(D.top_before[t]) }), make("td", { textContent: tenths(D.top_now[t]) })));
  }
  $("top").replaceChildren(heading("Class", "", "Zero-shot", "After"), make("tbody", {}, ...rows));
  $("near").replaceChildren(...nearest(i).map(([j, cosine]) => tile(j, make("span", { className: "meter", textContent: `similarity ${cosine.toFixed(2)}` }))));
  const at = state.found.indexOf(i);
  $("where").textContent = at < 0 ? "" : `${number(at + 1)} of ${number(state.found.length)}`;
  $("back").disabled = at <= 0;
  $("forth").disabled = at < 0 || at === state.found.length - 1;
  if (!$("one").open) $("one").showModal();
  $("one").scrollTop = 0;
}
function step(by) {
  const next = state.found[state.found.indexOf(current) + by];
  if (state.found.indexOf(current) >= 0 && next !== undefined) open(next);
}
function one() {
  $("close").onclick = () => $("one").close();
  $("back").onclick = () => step(-1);
  $("forth").onclick = () => step(1);
  $("one").onclick = (event) => { if (event.target === $("one")) $("one").close(); };
  $("one").onkeydown = (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  };
}

// ---- what changed
function heading(...titles) {
  return make("thead", {}, make("tr", {}, ...titles.map((title) => (title instanceof Node ? make("th", { scope: "col" }, title) : make("th", { scope: "col", textContent: title })))));
}
function pairs(from, to, test) {
  const counts = new Map();
  for (let i = 0; i < N; i++) {
    if (!test(i)) continue;
    const key = from[i] * K + to[i];
    counts.set(key, (counts.get(key) || 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]).map(([key, count]) => [Math.floor(key / K), key % K, count]);
}
function listPairs(list, found, filters) {
  list.replaceChildren(...found.slice(0, LIST).map(([a, b, count]) => make("li", {}, make("button", { type: "button", className: "plain", onclick: () => only(filters(a, b)) },
    make("span", { textContent: `${D.classes[a]} → ${D.classes[b]}` }), make("b", { textContent: number(count) })))));
  if (found.length > LIST) list.append(make("li", { className: "soft", textContent: `and ${plural(found.length - LIST, "further pair")}` }));
}
const shares = { order: "now", rows: ROWS };
function showShares() {
  const keys = { name: (a, b) => D.classes[a].localeCompare(D.classes[b]), early: (a, b) => countsBefore[b] - countsBefore[a], now: (a, b) => rank[a] - rank[b],
    moved: (a, b) => (countsNow[b] - countsBefore[b]) - (countsNow[a] - countsBefore[a]), beta: (a, b) => D.beta[b] - D.beta[a] };
  const used = bySize.filter((k) => countsNow[k] || countsBefore[k]).sort(keys[shares.order]);
  const most = Math.max(...countsNow, ...countsBefore);
  const column = (key, title) => make("button", { type: "button", textContent: shares.order === key ? `${title} ↓` : title, onclick: () => { shares.order = key; showShares(); } });
  const rows = used.slice(0, shares.rows).map((k) => {
    const moved = countsNow[k] - countsBefore[k];
    return make("tr", {}, make("th", { scope: "row" }, make("button", { type: "button", className: "plain", textContent: D.classes[k], onclick: () => only(countsNow[k] ? { label: k } : { before: k }) })),
      bars(countsBefore[k] / most, countsNow[k] / most), make("td", { textContent: share(countsBefore[k] / N) }), make("td", { textContent: share(countsNow[k] / N) }),
      make("td", { textContent: moved > 0 ? `+${number(moved)}` : moved < 0 ? `−${number(-moved)}` : "0" }), D.beta ? make("td", { textContent: D.beta[k].toFixed(2) }) : null);
  });
  const titles = [column("name", "Class"), "", column("early", "Zero-shot"), column("now", "After"), column("moved", "Images")];
  $("shares").replaceChildren(heading(...titles, ...(D.beta ? [column("beta", "β")] : [])), make("tbody", {}, ...rows));
  $("more-shares").hidden = used.length <= shares.rows;
  $("more-shares").textContent = `Show all ${number(used.length)} classes`;
  $("more-shares").onclick = () => { shares.rows = K; showShares(); };
}
function changes() {
  const found = pairs(before, label, (i) => label[i] !== before[i]);
  $("moves-box").hidden = !found.length;
  document.querySelector(".columns").classList.toggle("single", !found.length);
  listPairs($("moves"), found, (a, b) => ({ before: a, label: b }));
  $("beta-note").textContent = D.beta ? "Upper bar zero-shot, lower bar after. β is the share of the images in the mean of a class: 0 leaves it at its name, 1 forgets the name."
    : "Upper bar zero-shot, lower bar after. There is one β a class only where one run of a method with β labels all images together.";
  showShares();
}

// ---- right and wrong
function confusion(which) {
  const predicted = which === "now" ? label : before;
  $("show-now").setAttribute("aria-pressed", which === "now");
  $("show-before").setAttribute("aria-pressed", which !== "now");
  const side = which === "now" ? "label" : "before";
  const mistakes = pairs(truth, predicted, (i) => predicted[i] !== truth[i]);
  $("mistakes-title").textContent = mistakes.length ? "Most frequent mistakes (true class → label)" : "No mistake";
  listPairs($("mistakes"), mistakes, (a, b) => ({ truth: a, [side]: b }));
  const counts = tally(truth), given = tally(predicted), missed = new Uint32Array(K);
  for (const [a, b, count] of mistakes) { missed[a] += count; missed[b] += count; }
  const used = [...Array(K).keys()].filter((k) => counts[k] || given[k]);
  const columns = used.length <= MATRIX ? used : used.sort((a, b) => missed[b] - missed[a] || a - b).slice(0, MATRIX);
  const others = used.length - columns.length;
  $("matrix-note").textContent = others ? `The ${number(MATRIX)} classes with the most mistakes, of ${number(used.length)}.` : "";
  const cells = new Map(pairs(truth, predicted, () => true).map(([a, b, count]) => [a * K + b, count]));
  const body = columns.filter((k) => counts[k]).map((a) => {
    let rest = counts[a];
    const row = columns.map((b) => {
      const count = cells.get(a * K + b) || 0;
      rest -= count;
      const cell = make("td", { className: a === b ? "right" : "" }, count ? make("button", { type: "button", textContent: number(count), onclick: () => only({ truth: a, [side]: b }),
        title: `${D.classes[a]} labelled ${D.classes[b]}` }) : "");
      if (count) cell.style.background = `color-mix(in srgb, var(${a === b ? "--after" : "--bad"}) ${Math.round(8 + 42 * count / counts[a])}%, var(--card))`;
      return cell;
    });
    if (others) row.push(make("td", { textContent: rest ? number(rest) : "" }));
    return make("tr", {}, make("th", { scope: "row", textContent: D.classes[a] }), ...row, make("td", { className: "share", textContent: share((cells.get(a * K + a) || 0) / counts[a], 0) }));
  });
  $("matrix").classList.toggle("tall", columns.length > 12);
  $("matrix").replaceChildren(heading("true ↓   label →", ...columns.map((k) => D.classes[k]), ...(others ? ["others"] : []), "right"), make("tbody", {}, ...body));
}

// ---- map
const view = { x: 0.5, y: 0.5, zoom: 1 };
const canvas = $("plot"), tip = $("tip");
const width = extreme(D.x) || 1, height = extreme(D.y) || 1;
function extreme(array) {
  let most = 0;
  for (const value of array) if (value > most) most = value;
  return most;
}
const small = new Map();  // few images are their own marks
for (const [i, data] of N > PICTURED ? [] : Object.entries(D.pictures)) {
  const image = new Image();
  image.onload = draw;
  image.src = `data:image/jpeg;base64,${data}`;
  small.set(Number(i), image);
}
function frame() {  // how positions become pixels
  const w = canvas.clientWidth, h = canvas.clientHeight, pad = small.size ? 48 : 24;
  const scale = Math.min((w - 2 * pad) / width, (h - 2 * pad) / height) * view.zoom;
  return { scale, left: w / 2 - view.x * width * scale, top: h / 2 - view.y * height * scale };
}
const colour = (k) => (rank[k] < COLOURED ? COLOURS[dark.matches ? "dark" : "light"][rank[k]] : getComputedStyle(document.documentElement).getPropertyValue("--early"));
const shape = (k) => (rank[k] < COLOURED ? SHAPES[rank[k] % SHAPES.length] : "circle");
function trace(pen, kind, x, y, r) {
  if (kind === "circle") { pen.moveTo(x + r, y); pen.arc(x, y, r, 0, 7); }
  else if (kind === "square") pen.rect(x - r * 0.9, y - r * 0.9, 1.8 * r, 1.8 * r);
  else {
    const corners = { triangle: [[0, -1.2], [1.1, 0.9], [-1.1, 0.9]], diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
      cross: [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]] }[kind];
    corners.forEach(([a, b], at) => (at ? pen.lineTo(x + a * r, y + b * r) : pen.moveTo(x + a * r, y + b * r)));
    pen.closePath();
  }
}
function draw() {
  const w = canvas.clientWidth, h = canvas.clientHeight, ratio = devicePixelRatio || 1;
  if (!w) return;
  canvas.width = w * ratio;
  canvas.height = h * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const { scale, left, top } = frame();
  const size = Math.min(7, Math.max(1.3, 0.12 * Math.sqrt(w * h / N))) * Math.min(2.5, Math.sqrt(view.zoom));
  const members = bySize.filter((k) => countsNow[k]).map(() => []);
  for (let i = 0; i < N; i++) members[rank[label[i]]].push(i);
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink");
  for (const inside of [0, 1]) {
    pen.globalAlpha = inside ? (N > 5000 ? 0.6 : 0.85) : 0.1;
    for (let r = members.length - 1; r >= 0; r--) {  // the largest class is drawn last of all
      const k = bySize[r], kind = shape(k);
      pen.fillStyle = colour(k);
      pen.beginPath();
      for (const i of members[r]) {
        if (state.inside[i] !== inside) continue;
        const x = left + D.x[i] * scale, y = top + D.y[i] * scale;
        if (x < -9 || y < -9 || x > w + 9 || y > h + 9) continue;
        if (size < 2) pen.rect(x - size, y - size, 2 * size, 2 * size); else trace(pen, kind, x, y, size);
      }
      pen.fill();
    }
  }
  for (const [i, image] of small) {
    if (!image.complete || !image.naturalWidth) continue;
    const side = 56, x = left + D.x[i] * scale - side / 2, y = top + D.y[i] * scale - side / 2, cut = Math.min(image.naturalWidth, image.naturalHeight);
    pen.globalAlpha = state.inside[i] ? 1 : 0.15;
    pen.drawImage(image, (image.naturalWidth - cut) / 2, (image.naturalHeight - cut) / 2, cut, cut, x, y, side, side);
    pen.lineWidth = 3;
    pen.strokeStyle = pen.fillStyle = colour(label[i]);
    pen.strokeRect(x, y, side, side);
    pen.beginPath();
    trace(pen, shape(label[i]), x + side, y, size);
    pen.fill();
    pen.lineWidth = 1;
  }
  if (size >= 2) {  // a ring around each that changed
    pen.globalAlpha = 1;
    pen.strokeStyle = ink;
    pen.beginPath();
    for (let i = 0; i < N; i++) {
      if (label[i] === before[i] || !state.inside[i]) continue;
      const off = small.has(i) ? 28 : 0, x = left + D.x[i] * scale + off, y = top + D.y[i] * scale - off;  // or its corner
      pen.moveTo(x + size + 2, y);
      pen.arc(x, y, size + 2, 0, 7);
    }
    pen.stroke();
  }
  canvas.setAttribute("aria-label", `Map of ${plural(N, "image")} by similarity; the images themselves are in the list above.`);
}
function under(event) {
  const box = canvas.getBoundingClientRect(), { scale, left, top } = frame();
  const x = (event.clientX - box.left - left) / scale, y = (event.clientY - box.top - top) / scale;
  let best = -1, least = (14 / scale) ** 2;
  for (let i = 0; i < N; i++) {
    if (!state.inside[i]) continue;
    const distance = (D.x[i] - x) ** 2 + (D.y[i] - y) ** 2;
    if (distance < least) { least = distance; best = i; }
  }
  return best;
}
function zoom(factor) {
  view.zoom = Math.min(40, Math.max(1, view.zoom * factor));
  if (view.zoom === 1) view.x = view.y = 0.5;
  draw();
}
function showTip(event) {
  const i = under(event);
  tip.hidden = i < 0;
  if (i < 0) return;
  tip.replaceChildren(D.pictures[i] ? picture(i) : "", make("b", { textContent: D.classes[label[i]] }), label[i] === before[i] ? "" : ` (was ${D.classes[before[i]]})`, make("br"), file(i));
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  tip.style.left = `${Math.max(4, x > box.width / 2 ? x - 156 : x + 12)}px`;
  tip.style.top = `${Math.max(4, Math.min(y - 20, box.height - tip.offsetHeight - 6))}px`;
}
function map() {
  let held = null;
  canvas.onpointerdown = (event) => { held = { x: event.clientX, y: event.clientY, moved: false }; };
  canvas.onpointermove = (event) => {
    if (!held) return showTip(event);
    const dx = event.clientX - held.x, dy = event.clientY - held.y;
    if (!held.moved && Math.hypot(dx, dy) < 5) return;
    const { scale } = frame();
    view.x -= dx / scale / width;
    view.y -= dy / scale / height;
    Object.assign(held, { x: event.clientX, y: event.clientY, moved: true });
    tip.hidden = true;
    draw();
  };
  canvas.onpointerup = (event) => {
    const pressed = held && !held.moved ? under(event) : -1;
    held = null;
    tip.hidden = true;
    if (pressed >= 0) open(pressed);
  };
  canvas.onpointerleave = canvas.onpointercancel = () => { held = null; tip.hidden = true; };
  canvas.onkeydown = (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move) { view.x += 0.1 * move[0] / view.zoom; view.y += 0.1 * move[1] / view.zoom; draw(); event.preventDefault(); }
    if (event.key === "+" || event.key === "=") zoom(1.5);
    if (event.key === "-") zoom(1 / 1.5);
  };
  $("closer").onclick = () => zoom(1.5);
  $("wider").onclick = () => zoom(1 / 1.5);
  $("whole").onclick = () => zoom(0);
  new ResizeObserver(draw).observe(canvas);
  dark.onchange = () => { showLegend(); draw(); };
}
function showLegend() {
  const entry = (k) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("viewBox", "-8 -8 16 16");
    svg.setAttribute("aria-hidden", "true");
    const points = [];
    trace({ moveTo: (x, y) => points.push(`M${x} ${y}`), lineTo: (x, y) => points.push(`L${x} ${y}`), closePath: () => points.push("Z"),
      rect: (x, y, a, b) => points.push(`M${x} ${y}h${a}v${b}h${-a}Z`), arc: (x, y, r) => points.push(`A${r} ${r} 0 1 1 ${x - r} ${y}A${r} ${r} 0 1 1 ${x + r} ${y}`) }, shape(k), 0, 0, 6);
    path.setAttribute("d", points.join(""));
    path.setAttribute("fill", colour(k));
    svg.append(path);
    return svg;
  };
  const used = bySize.filter((k) => countsNow[k]);
  const rows = used.slice(0, COLOURED).map((k) => make("li", {}, make("button", { type: "button", className: "plain", "aria-pressed": String($("label").value === String(k)),
    onclick: () => { $("label").value = $("label").value === String(k) ? "" : k; find(); } }, entry(k), make("span", { textContent: D.classes[k] }), make("b", { textContent: number(countsNow[k]) }))));
  const rest = used.slice(COLOURED).reduce((sum, k) => sum + countsNow[k], 0);
  if (rest) rows.push(make("li", {}, make("button", { type: "button", className: "plain", disabled: true }, entry(used[COLOURED]), `${plural(used.length - COLOURED, "other class", "other classes")}`, make("b", { textContent: number(rest) }))));
  if (changedCount && N <= 2000) rows.push(make("li", { className: "soft", textContent: "◯ a ring: changed from zero-shot" }));
  $("legend").replaceChildren(...rows);
}

// ---- skipped
function skips() {
  $("skipped").hidden = !D.skipped_count;
  $("skipped-note").textContent = `${plural(D.skipped_count, "file")} could not be used${D.skipped.length < D.skipped_count ? `; the first ${number(D.skipped.length)} are` : ""}:`;
  $("skips").replaceChildren(heading("File", "Reason"), make("tbody", {}, ...D.skipped.map(([path, reason]) => make("tr", {}, make("td", { textContent: path }), make("td", { textContent: reason })))));
}

head();
images();
one();
changes();
map();
find();
skips();
if (truth) {
  $("confusion").hidden = false;
  $("show-now").onclick = () => confusion("now");
  $("show-before").onclick = () => confusion("before");
  confusion("now");
}
