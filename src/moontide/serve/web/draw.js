"use strict";
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
  const given = numbers.filter((n) => page.rows.get(n).known !== null).length;
  if (given) facts.push(fact("True classes given", String(given)));
  const known = [...page.truth.keys()].filter((n) => page.rows.has(n));
  if (known.length) {
    const right = (key) => known.filter((n) => page.rows.get(n)[key] === page.truth.get(n)).length / known.length;
    const [before, after] = [right("before"), right("label")];
    facts.push(fact("Right before", percent(before)), fact("Right after", percent(after)),
      fact("Gain", `${after < before ? "−" : "+"}${(100 * Math.abs(after - before)).toFixed(1)} points`));
    $("order").textContent = `The gain is that of ${count(known.length, "sample")} fed by this page `
      + `${[...page.orders].join(" and ")}; in another order it can be another.`;
  }
  $("order").hidden = !known.length;
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
    cells.push(element("td", { class: "verdict" }, changed ? "≠ changed" : "= same"), truthCell(number, row));
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
  const others = classes.length - shown.length;
  const never = page.stream.class_names.length - classes.length;
  $("others").textContent = `${others ? `${count(others, "more class was", "more classes were")} predicted; ` : ""}${never} of `
    + `${count(page.stream.class_names.length, "class", "classes")} never.`;
}

// Fetch and draw the map, one at a time however fast events arrive; `stale` asks for another one afterwards.
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
