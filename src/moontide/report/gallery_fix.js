// ---- corrections: labels that a person sets, which the method can be given
const KEPT = `moontide-labels-${D.report}`, MATCHES = 8;
const given = new Map();  // the labels that the method was given
for (let i = 0; i < N && D.known; i++) if (D.known[i]) given.set(i, D.known[i] - 1);
let fixes = kept() || new Map(given), discarded = null, choosing = -1, matches = [], active = 0, origin = null;

function kept() {
  try {
    const held = JSON.parse(localStorage.getItem(KEPT));
    return Array.isArray(held) ? new Map(held.filter(([i, k]) => Number.isInteger(i) && i >= 0 && i < N && Number.isInteger(k) && k >= 0 && k < K)) : null;
  } catch { return null; }  // a browser without storage
}
function keep() {
  const same = fixes.size === given.size && [...fixes].every(([i, k]) => given.get(i) === k);
  let saved = true;
  try { if (same) localStorage.removeItem(KEPT); else localStorage.setItem(KEPT, JSON.stringify([...fixes])); } catch { saved = same; }
  $("unsaved").hidden = saved || !fixes.size;
}
function fix(i, k) {
  if (k === null ? !fixes.delete(i) : fixes.get(i) === k) return;
  if (k !== null) fixes.set(i, k);
  discarded = null;
  keep();
  showFixes([i]);
}
function fixLine(i) {
  if (!fixes.has(i)) return null;
  const k = fixes.get(i);
  return make("span", { className: "set", textContent: `✎ ${given.get(i) === k ? "known" : k === label[i] ? "confirmed" : "corrected"}: ${D.classes[k]}` });
}
function showFixes(changed) {
  for (const i of changed) {
    const held = document.querySelector(`#grid [data-image="${i}"]`);
    if (!held) continue;
    const focused = held === document.activeElement, again = tile(i);
    if (origin === held) origin = again.firstChild;
    held.parentNode.replaceWith(again);
    if (focused) again.firstChild.focus();
  }
  if ($("one").open) showFix(current);
  const own = [...fixes].filter(([i, k]) => given.get(i) !== k).length;
  $("fixed").textContent = fixes.size ? `${plural(fixes.size, "label")} known, ${number(own)} of them set here.` : "No label corrected yet.";
  $("export").disabled = !fixes.size;
  $("forget").disabled = !own && !discarded && fixes.size === given.size;
  $("forget").textContent = discarded ? "Bring back" : "Discard";
}
function showFix(i) {
  $("one-fix").replaceChildren(fixLine(i) || "");
  const likely = [...D.top.subarray(i * TOP, (i + 1) * TOP)];
  $("fix").firstChild.nextSibling.replaceChildren(...likely.map((k) => make("option", { value: k, textContent: D.classes[k] })));
  $("fix").value = fixes.has(i) ? fixes.get(i) : "";
}
function toCsv() {
  const plain = (text) => (/^'*[=+\-@\t\r\n]/.test(text) ? `'${text}` : text);  // what a spreadsheet would compute
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const cell = (text) => quoted(plain(text));
  const called = (k) => (D.classes.indexOf(D.classes[k]) === k ? D.classes[k] : String(k));  // the first among equal names
  const rows = [...fixes].sort(([a], [b]) => a - b).map(([i, k]) => `${cell(D.prefix + name(i))},${cell(called(k))}\n`);
  return `id,label\n${rows.join("")}`;
}
function download() {
  const address = URL.createObjectURL(new Blob([toCsv()], { type: "text/csv;charset=utf-8" }));
  make("a", { href: address, download: "labels.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// ---- the field for a class name
function choose(i, from) {
  choosing = i;
  origin = from;
  origin.classList.add("choosing");
  ($("one").open ? $("one") : document.body).append($("chooser"));  // nothing outside an open dialog can be used
  $("choosing").textContent = `Label of ${file(i)}`;
  $("typed").value = "";
  $("chooser").hidden = false;
  $("typed").focus({ preventScroll: true });
  match();
}
function close() {
  choosing = -1;
  $("chooser").hidden = true;
  origin.classList.remove("choosing");
}
function leave() {
  if (choosing < 0) return;
  close();
  (origin.isConnected ? origin : document.body).focus({ preventScroll: true });
}
function match() {
  const words = $("typed").value.toLowerCase().split(/\s+/).filter(Boolean);
  const likely = [...D.top.subarray(choosing * TOP, (choosing + 1) * TOP)];
  const called = (k) => D.classes[k].toLowerCase(), whole = words.join(" ");
  const place = (k) => (called(k) === whole ? -1 : (called(k).startsWith(whole) ? 0 : TOP + 1) + (likely.includes(k) ? likely.indexOf(k) : TOP));
  matches = [];
  for (let k = 0; k < D.choices; k++) if (words.every((word) => called(k).includes(word))) matches.push(k);
  matches = matches.sort((a, b) => place(a) - place(b) || D.classes[a].localeCompare(D.classes[b])).slice(0, MATCHES);
  active = 0;
  showMatches();
}
function showMatches() {
  $("matches").replaceChildren(...matches.map((k, at) => make("li", { id: `match-${at}`, role: "option", "aria-selected": String(at === active), textContent: D.classes[k],
    onpointerdown: (event) => event.preventDefault(), onclick: () => set(k) })));
  if (!matches.length) $("matches").append(make("li", { className: "soft", textContent: "No class has that name." }));
  $("typed").setAttribute("aria-activedescendant", matches.length ? `match-${active}` : "");
}
function set(k) {
  fix(choosing, k);
  leave();
}
function typed(event) {
  const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (move && matches.length) { active = (active + move + matches.length) % matches.length; showMatches(); }
  else if (event.key === "Enter") { if (matches.length) set(matches[active]); }
  else if (event.key === "Escape") leave();
  else if (event.key === "Backspace" && !$("typed").value) set(null);
  else { event.stopPropagation(); return; }
  event.preventDefault();
  event.stopPropagation();
}
function key(event) {  // on a picture: arrows move, letters begin a class name, Backspace removes a correction
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  const held = event.target.closest("#grid .tile"), i = $("one").open ? current : held ? Number(held.dataset.image) : -1;
  if (i < 0) return;
  if (event.key.length === 1 && /[^\s/]/.test(event.key)) choose(i, event.target);  // the field gets the letter
  else if (event.key === "Backspace" || event.key === "Delete") { fix(i, null); event.preventDefault(); }
  else if (held && event.key.startsWith("Arrow")) { go(held, event.key); event.preventDefault(); }
}
function go(held, arrow) {
  const tiles = [...document.querySelectorAll("#grid .tile")], at = tiles.indexOf(held);
  const across = tiles.filter((tile) => tile.getBoundingClientRect().top === tiles[0].getBoundingClientRect().top).length;
  const to = at + { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across }[arrow];
  if (tiles[to]) return tiles[to].focus();
  const page = state.page;
  turn(to < 0 ? page - 1 : page + 1);
  const now = document.querySelectorAll("#grid .tile");
  if (state.page !== page) now[to < 0 ? now.length - 1 : 0].focus();
  else held.isConnected ? held.focus() : now[at].focus();
}
function corrections() {
  const all = [...Array(D.choices).keys()].sort((a, b) => D.classes[a].localeCompare(D.classes[b])).map((k) => make("option", { value: k, textContent: D.classes[k] }));
  $("fix").replaceChildren(make("option", { value: "", textContent: "not set" }), make("optgroup", { label: "Likeliest" }), make("optgroup", { label: "All classes" }, ...all));
  $("fix").onchange = () => fix(current, $("fix").value === "" ? null : Number($("fix").value));
  $("typed").oninput = match;
  $("typed").onkeydown = typed;
  $("chooser").onfocusout = (event) => { if (choosing >= 0 && !$("chooser").contains(event.relatedTarget)) close(); };
  $("export").onclick = download;
  $("forget").onclick = () => {
    const changed = new Set([...fixes.keys(), ...(discarded || given).keys()]);
    [fixes, discarded] = discarded ? [discarded, null] : [new Map(given), fixes];
    keep();
    showFixes(changed);
  };
  addEventListener("keydown", key);
  keep();
  showFixes([]);
}
