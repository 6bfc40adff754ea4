"use strict";
// Data of a stream that only this page has, kept by the browser: thumbnails and true classes of the samples that it pushed.

const SIDE = 96; // pixels of a thumbnail
const KEYS = "moontide-stream "; // what the names of all that is kept begin with
const keptAs = () => `${KEYS}${page.stream.name} ${page.stream.created}`;
let remembering = 0;

// A square JPEG of the middle of an image, as a data address.
async function thumbnail(file) {
  const image = await createImageBitmap(file);
  const side = Math.min(image.width, image.height);
  const canvas = element("canvas", { width: SIDE, height: SIDE });
  canvas.getContext("2d").drawImage(image, (image.width - side) / 2, (image.height - side) / 2, side, side, 0, 0, SIDE, SIDE);
  image.close();
  return canvas.toDataURL("image/jpeg", 0.8);
}

// Save it soon; many samples at once are saved together.
function remember() {
  clearTimeout(remembering);
  remembering = setTimeout(write, 200);
}

function write() {
  clearTimeout(remembering);
  if (!page.stream) return;
  const recent = [...page.truth].filter(([number]) => number >= page.stream.total - KEPT);
  const entry = JSON.stringify({
    truth: recent, orders: [...page.orders], pictures: [...page.pictures], pending: page.pending,
  });
  const key = keptAs();
  try {
    if (recent.length || page.pictures.size || page.pending) localStorage.setItem(key, entry);
    else localStorage.removeItem(key);
  } catch { // the storage is full: drop the entries of other streams
    for (const other of Object.keys(localStorage)) if (other.startsWith(KEYS) && other !== key) localStorage.removeItem(other);
    try {
      localStorage.setItem(key, entry);
    } catch {
      say("This browser stores nothing; thumbnails and scores are lost with the page.");
    }
  }
}

// Restore what was saved when the page was last open.
function recall() {
  let kept;
  try {
    kept = JSON.parse(localStorage.getItem(keptAs()));
  } catch {
    return; // nothing that can be read
  }
  page.pending = kept?.pending ?? null;
  for (const [number, label] of kept?.truth ?? []) page.truth.set(number, label);
  for (const order of kept?.orders ?? []) page.orders.add(order);
  for (const [number, picture] of kept?.pictures ?? []) page.pictures.set(number, picture);
}

addEventListener("pagehide", write);
