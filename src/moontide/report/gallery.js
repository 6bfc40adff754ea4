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
const confidence = (i) => D.confidence[i];
function tally(classes) {
  const counts = new Uint32Array(K);
  for (const k of classes) counts[k]++;
  return counts;
}
const countsNow = tally(label), countsBefore = tally(before);
const scored = (i) => !D.known || !D.known[i];  // known labels do not count
const isClass = (i) => label[i] < D.k;  // not none of these, nor an upper level of a tree
let changedCount = 0, scoredCount = 0, rightNow = 0, rightBefore = 0;
for (let i = 0; i < N; i++) {
  changedCount += label[i] !== before[i];
  if (!scored(i) || !isClass(i)) continue;
  scoredCount++;
  if (truth) { rightNow += label[i] === truth[i]; rightBefore += before[i] === truth[i]; }
}
const bySize = [...Array(K).keys()].sort((a, b) => countsNow[b] - countsNow[a] || countsBefore[b] - countsBefore[a] || a - b);
const rank = new Uint32Array(K);
bySize.forEach((k, r) => { rank[k] = r; });

// ---- header
function head() {
  const seen = bySize.filter((k) => countsNow[k] && k < D.k).length, others = label.filter((k) => k >= D.k).length;
  $("title").textContent = `${plural(N, "image")}, ${plural(D.k, "class", "classes")}`;
  document.title = `${$("title").textContent} – Moontide`;
  $("about").textContent = Object.entries(D.about).map(([key, value]) => `${key} ${value}`).join(" · ");
  const fact = (title, value, more) => make("div", {}, make("dt", { textContent: title }), make("dd", {}, `${value} `, make("small", { textContent: more })));
  $("facts").append(
    fact("Changed from zero-shot", number(changedCount), `of ${number(N)} (${share(changedCount / N)})`),
    fact("Classes that appear", number(seen), `of ${number(D.k)}`));
  if (others) $("facts").append(fact(D.choices > D.k ? "None of these" : "At an upper level", number(others), D.choices > D.k && K > D.choices ? "or at an upper level" : `of ${number(N)}`));
  if (truth && scoredCount) {
    const gain = 100 * (rightNow - rightBefore) / scoredCount;
    $("facts").append(fact("Accuracy", share(rightNow / scoredCount), `zero-shot ${share(rightBefore / scoredCount)} (${gain < 0 ? "−" : "+"}${Math.abs(gain).toFixed(1)})${others ? `, of ${number(scoredCount)} with a class` : ""}`));
  }
  if (D.skipped_count) $("facts").append(fact("Skipped files", number(D.skipped_count), "listed below"));
  for (const link of document.querySelectorAll("nav [data-for]")) link.hidden = link.dataset.for === "confusion" ? !truth : !D.skipped_count;
}

// ---- images: filters, order, pages
const state = { page: 0, found: new Uint32Array(0) };
const KINDS = [["all", "All images", () => true], ["changed", "Changed from zero-shot", (i) => label[i] !== before[i]], ["same", "Not changed", (i) => label[i] === before[i]],
  ["known", "Known or corrected", (i) => fixes.has(i)]];
if (truth) KINDS.push(
  ["wrong", "Wrong", (i) => label[i] !== truth[i]],
  ["fixed", "Put right", (i) => label[i] === truth[i] && before[i] !== truth[i]],
  ["spoilt", "Made wrong", (i) => label[i] !== truth[i] && before[i] === truth[i]]);
const ORDERS = [["pictures", "Changed first"], ["low", "Least confident first"], ["high", "Most confident first"], ["name", "File name"]];
if (D.unknown) ORDERS.splice(3, 0, ["unknown", "Least like any class first"]);

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
    high: (a, b) => confidence(b) - confidence(a) || a - b, unknown: (a, b) => D.unknown[b] - D.unknown[a] || a - b, name: (a, b) => (name(a) < name(b) ? -1 : name(a) > name(b) ? 1 : a - b) };
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
  return make("li", {}, make("button", { type: "button", className: fixes.has(i) ? "tile fixed" : "tile", title: D.prefix + name(i), "data-image": i, onclick: () => open(i) },
    picture(i),
    make("span", { className: "text" },
      make("span", { className: "name", textContent: D.classes[label[i]] }),
      label[i] === before[i] ? null : make("span", { className: "was", textContent: `↻ was ${D.classes[before[i]]}` }),
      fixLine(i),
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
  if (now === was) lines.push(`Zero-shot predicts ${quoted(was)} too (${tenths(D.before_share[i])}).`);
  else lines.push(`Zero-shot predicts ${quoted(was)} (${tenths(D.before_share[i])}); together with the other images the prediction is ${quoted(now)} (${tenths(confidence(i))}).`);
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
  showFix(i);
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
    if (/^(INPUT|SELECT)$/.test(event.target.tagName)) return;
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
  $("beta-note").textContent = D.beta ? "Upper bar zero-shot, lower bar after. β is the weight of the images in a class vector: at 0 it stays at its name, at 1 the name no longer counts."
    : "Upper bar zero-shot, lower bar after. β per class is shown only if one run of a method with β labels all images together.";
  showShares();
}

// ---- skipped
function skips() {
  $("skipped").hidden = !D.skipped_count;
  $("skipped-note").textContent = `${plural(D.skipped_count, "file")} could not be used${D.skipped.length < D.skipped_count ? `; the first ${number(D.skipped.length)} are` : ""}:`;
  $("skips").replaceChildren(heading("File", "Reason"), make("tbody", {}, ...D.skipped.map(([path, reason]) => make("tr", {}, make("td", { textContent: path }), make("td", { textContent: reason })))));
}
