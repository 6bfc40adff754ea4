"use strict";
// Correcting labels in the table of predictions: arrow keys move, letters search a class, Enter sets it.

const MATCHES = 8; // classes offered at once
const fixing = { selected: null, number: null, active: 0, matches: [] }; // sample numbers, and what is offered

const body = () => $("predictions").tBodies[0];
const rowOf = (number) => body().querySelector(`tr[data-number="${number}"]`);
const canFix = () => page.info.accept_known.includes(page.stream.method);

// Classes that a text may mean: those that begin with it, then those with a word that does, then those with it inside.
function matching(text) {
  const wanted = text.trim().toLowerCase();
  const rank = (name) => {
    const at = name.toLowerCase().indexOf(wanted);
    return at < 0 ? 3 : at === 0 ? 0 : /\W/.test(name[at - 1]) ? 1 : 2;
  };
  return page.stream.class_names.map((name, label) => ({ name, label, rank: rank(name) }))
    .filter((each) => each.rank < 3).sort((a, b) => a.rank - b.rank || a.label - b.label).slice(0, MATCHES);
}

const picker = element("span", { class: "picker" });
const search = element("input", { type: "text", role: "combobox", "aria-expanded": "true", "aria-controls": "offered", autocomplete: "off" });
const offered = element("ul", { id: "offered", role: "listbox" });
picker.append(search, offered);

function offer() {
  fixing.matches = matching(search.value);
  fixing.active = Math.max(0, Math.min(fixing.active, fixing.matches.length - 1));
  offered.replaceChildren(...fixing.matches.map(({ name }, i) => {
    const option = element("li", { role: "option", id: `offered-${i}`, "aria-selected": String(i === fixing.active) }, name);
    option.addEventListener("mousedown", (event) => { event.preventDefault(); choose(i); });
    return option;
  }));
  if (!fixing.matches.length) offered.append(element("li", {}, "no such class"));
  search.setAttribute("aria-activedescendant", `offered-${fixing.active}`);
}

function openPicker(number, text = "") {
  Object.assign(fixing, { selected: number, number, active: 0 });
  search.value = text;
  search.setAttribute("aria-label", `True class of sample ${number}`);
  offer();
  rowOf(number)?.querySelector(".truth").replaceChildren(picker);
  search.focus();
}

function closePicker() {
  fixing.number = null;
  picker.remove();
  draw();
  rowOf(fixing.selected)?.focus();
}

function choose(i) {
  const match = fixing.matches[i], number = fixing.number;
  if (!match) return;
  closePicker();
  setKnown(number, match.label);
}

async function setKnown(number, label) {
  try {
    await push("/known", {
      headers: { "Content-Type": "application/json" }, body: JSON.stringify({ samples: [number], labels: [label] }),
    });
    takeKnown({ samples: [number], known: [label] });
    say(label === null ? `The true class of sample ${number} was withdrawn.`
      : `Sample ${number} is ${named(label)}; later samples benefit.`);
  } catch (error) {
    say(error.message, true);
  }
}

// Take over known labels, from an event or from this page.
function takeKnown({ samples, known }) {
  samples.forEach((number, i) => {
    const row = page.rows.get(number);
    if (row) row.known = known[i];
  });
  draw();
}

// The last cell of a row: what is known, the picker, or a button that opens it.
function truthCell(number, row) {
  const cell = element("td", { class: "truth" });
  if (fixing.number === number) cell.append(picker);
  else if (row.known !== null && row.known !== undefined) {
    cell.append(element("strong", {}, named(row.known)), " ", element("small", {}, row.known === row.label ? "✓ confirmed" : "✎ corrected"));
  } else if (canFix()) cell.append(element("button", { type: "button", tabindex: "-1" }, "Correct"));
  return cell;
}

function select(number) {
  fixing.selected = number;
  for (const row of body().rows) row.tabIndex = Number(row.dataset.number) === number ? 0 : -1;
  rowOf(number)?.focus();
}

// Put the focus back where it was, after the rows were drawn anew.
function keepFocus(drawRows) {
  const inside = $("predictions").contains(document.activeElement), typing = document.activeElement === search;
  const { selectionStart: from, selectionEnd: to } = search;
  drawRows();
  if (fixing.number !== null && !rowOf(fixing.number)) fixing.number = null;
  if (typing && fixing.number !== null) {
    search.focus();
    search.setSelectionRange(from, to);
  } else if (inside) rowOf(fixing.selected)?.focus();
}

search.addEventListener("input", () => { fixing.active = 0; offer(); });
search.addEventListener("keydown", (event) => {
  event.stopPropagation();
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    fixing.active += event.key === "ArrowDown" ? 1 : -1;
    offer();
  } else if (event.key === "Enter") choose(fixing.active);
  else if (event.key === "Escape") closePicker();
  else return;
  event.preventDefault();
});

body().addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (!row || picker.contains(event.target)) return;
  const number = Number(row.dataset.number);
  select(number);
  if (canFix() && event.target.closest("img, button, .truth")) openPicker(number);
});
body().addEventListener("keydown", (event) => {
  const row = event.target.closest("tr");
  if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = Number(row.dataset.number);
  const to = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling,
    Home: body().firstElementChild, End: body().lastElementChild };
  if (event.key in to) {
    if (to[event.key]) select(Number(to[event.key].dataset.number));
  } else if (canFix() && (event.key === "Enter" || event.key.length === 1)) openPicker(number, event.key === "Enter" ? "" : event.key.trim());
  else if (canFix() && (event.key === "Delete" || event.key === "Backspace")) setKnown(number, null);
  else return;
  event.preventDefault();
});
