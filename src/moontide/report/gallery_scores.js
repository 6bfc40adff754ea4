// ---- right and wrong
function confusion(which) {
  const predicted = which === "now" ? label : before;
  $("show-now").setAttribute("aria-pressed", which === "now");
  $("show-before").setAttribute("aria-pressed", which !== "now");
  const side = which === "now" ? "label" : "before";
  const mistakes = pairs(truth, predicted, (i) => scored(i) && predicted[i] !== truth[i]);
  $("mistakes-title").textContent = mistakes.length ? "Most frequent mistakes (true class → label)" : "No mistake";
  listPairs($("mistakes"), mistakes, (a, b) => ({ truth: a, [side]: b }));
  const inside = [...Array(N).keys()].filter(scored);
  const counts = tally(inside.map((i) => truth[i])), given = tally(inside.map((i) => predicted[i])), missed = new Uint32Array(K);
  for (const [a, b, count] of mistakes) { missed[a] += count; missed[b] += count; }
  const used = [...Array(K).keys()].filter((k) => counts[k] || given[k]);
  const columns = used.length <= MATRIX ? used : used.sort((a, b) => missed[b] - missed[a] || a - b).slice(0, MATRIX);
  const others = used.length - columns.length;
  $("matrix-note").textContent = others ? `The ${number(MATRIX)} classes with the most mistakes, of ${number(used.length)}.` : "";
  const cells = new Map(pairs(truth, predicted, scored).map(([a, b, count]) => [a * K + b, count]));
  const body = columns.filter((k) => counts[k]).map((a) => {
    let remaining = counts[a];
    const row = columns.map((b) => {
      const count = cells.get(a * K + b) || 0;
      remaining -= count;
      const cell = make("td", { className: a === b ? "right" : "" }, count ? make("button", { type: "button", textContent: number(count), onclick: () => only({ truth: a, [side]: b }),
        title: `${D.classes[a]} labelled ${D.classes[b]}` }) : "");
      if (count) cell.style.background = `color-mix(in srgb, var(${a === b ? "--after" : "--bad"}) ${Math.round(8 + 42 * count / counts[a])}%, var(--card))`;
      return cell;
    });
    if (others) row.push(make("td", { textContent: remaining ? number(remaining) : "" }));
    return make("tr", {}, make("th", { scope: "row", textContent: D.classes[a] }), ...row, make("td", { className: "share", textContent: share((cells.get(a * K + a) || 0) / counts[a], 0) }));
  });
  $("matrix").classList.toggle("tall", columns.length > 12);
  $("matrix").replaceChildren(heading("true ↓   label →", ...columns.map((k) => D.classes[k]), ...(others ? ["others"] : []), "right"), make("tbody", {}, ...body));
}

// ---- confidence and accuracy
function shapeOf(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function reliability() {
  const { before: early, now, ece, samples } = D.calibration;
  const side = 300, at = (x) => 44 + x * side, down = (y) => 12 + (1 - y) * side;
  const plot = shapeOf("svg", { viewBox: `0 0 ${side + 62} ${side + 58}`, role: "img", "aria-label": `Accuracy against confidence; the table below has the numbers. Expected calibration error ${share(ece[0])} by zero-shot, ${share(ece[1])} after.` });
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    plot.append(shapeOf("path", { class: "rule", d: `M${at(0)} ${down(tick)}H${at(1)}M${at(tick)} ${down(0)}V${down(1)}` }),
      shapeOf("text", { x: at(0) - 6, y: down(tick) + 4, "text-anchor": "end" }, `${100 * tick}`), shapeOf("text", { x: at(tick), y: down(0) + 18, "text-anchor": "middle" }, `${100 * tick}`));
  }
  plot.append(shapeOf("path", { class: "even", d: `M${at(0)} ${down(0)}L${at(1)} ${down(1)}` }), shapeOf("text", { x: at(0.5), y: down(0) + 38, "text-anchor": "middle" }, "confidence (%)"),
    shapeOf("text", { x: 12, y: down(0.5), "text-anchor": "middle", transform: `rotate(-90 12 ${down(0.5)})` }, "accuracy (%)"));
  for (const [which, bins] of [["early", early], ["now", now]]) {
    plot.append(shapeOf("path", { class: `line ${which}`, d: bins.map(([x, y], place) => `${place ? "L" : "M"}${at(x)} ${down(y)}`).join("") }));
    for (const [x, y, count] of bins) {
      const r = 2.5 + 6 * Math.sqrt(count / samples), mark = { class: `mark ${which}` };
      const node = which === "now" ? shapeOf("circle", { ...mark, cx: at(x), cy: down(y), r }) : shapeOf("rect", { ...mark, x: at(x) - r, y: down(y) - r, width: 2 * r, height: 2 * r });
      node.append(shapeOf("title", {}, `${plural(count, "image")}: confidence ${share(x)}, accuracy ${share(y)}`));
      plot.append(node);
    }
  }
  $("reliability").replaceChildren(plot);
  $("ece").textContent = `Expected calibration error over all ${plural(samples, "image")}, ${D.calibration.bins} bins: zero-shot ${share(ece[0])}, after ${share(ece[1])}. On the diagonal, confidence is how often the label is right.`;
  const rows = [["Zero-shot", early], ["After", now]].flatMap(([title, bins]) => bins.map(([x, y, count]) => make("tr", {}, make("th", { scope: "row", textContent: title }),
    make("td", { textContent: share(x) }), make("td", { textContent: share(y) }), make("td", { textContent: number(count) }))));
  $("bins").replaceChildren(heading("Labels", "Confidence", "Accuracy", "Images"), make("tbody", {}, ...rows));
}
