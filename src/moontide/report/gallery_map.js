// ---- map
const view = { x: 0.5, y: 0.5, zoom: 1 };
const canvas = $("plot"), tip = $("tip");
const width = extreme(D.x) || 1, height = extreme(D.y) || 1;
function extreme(array) {
  let most = 0;
  for (const value of array) if (value > most) most = value;
  return most;
}
const small = new Map();  // if there are few images, they are drawn as marks
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
    for (let r = members.length - 1; r >= 0; r--) {  // the largest class is drawn last
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
  if (size >= 2) {  // a ring around each changed image
    pen.globalAlpha = 1;
    pen.strokeStyle = ink;
    pen.beginPath();
    for (let i = 0; i < N; i++) {
      if (label[i] === before[i] || !state.inside[i]) continue;
      const off = small.has(i) ? 28 : 0, x = left + D.x[i] * scale + off, y = top + D.y[i] * scale - off;  // around the corner of a picture
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
  const others = used.slice(COLOURED).reduce((sum, k) => sum + countsNow[k], 0);
  if (others) rows.push(make("li", {}, make("button", { type: "button", className: "plain", disabled: true }, entry(used[COLOURED]), `${plural(used.length - COLOURED, "other class", "other classes")}`, make("b", { textContent: number(others) }))));
  if (changedCount && N <= 2000) rows.push(make("li", { className: "soft", textContent: "◯ a ring: changed from zero-shot" }));
  $("legend").replaceChildren(...rows);
}
