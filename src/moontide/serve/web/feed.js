"use strict";
// Feeding a stream: the sample sets that the server offers, and images that somebody drops or chooses.

async function feed() {
  page.feeding = true;
  update();
  try {
    const n = isSimulated() ? (await sampleSet()).n : page.info.sample_images;
    const part = isSimulated() ? CHUNK : 8;
    for (let start = page.stream.total % n; start < n && page.feeding; start += part) {
      await feedPart(start, Math.min(part, n - start), newKey());
      await sleep(PACE);
      if (start + part >= n) say("The whole sample set is in the stream.");
    }
  } catch (error) {
    say(error.message, true);
  }
  page.feeding = false;
  update();
}

// Push a part of the sample set, and keep its true classes. The part is written down before it is sent: a page that is
// reloaded meanwhile sends it again under the same key, which counts it once and tells the numbers of its samples.
async function feedPart(start, size, key) {
  page.pending = { start, size, key };
  write();
  const { first, labels } = await (isSimulated() ? pushSimulated : pushPictures)(start, size, key);
  labels.forEach((label, i) => label >= 0 && page.truth.set(first + i, label));
  page.orders.add(isSimulated() ? "in random order" : "folder by folder");
  page.pending = null;
  remember();
  draw();
}

const isSimulated = () => page.stream.source === "simulated";
const newKey = () => crypto.randomUUID?.() ?? String(Math.random());

async function sampleSet() {
  if (!page.samples) {
    const response = await ask("samples/simulated");
    const [n, d] = response.headers.get("X-Shape").split(",").map(Number);
    const labels = response.headers.get("X-Labels").split(",").map(Number);
    page.samples = { n, d, labels, rows: new Float32Array(await response.arrayBuffer()) };
  }
  return page.samples;
}

async function pushSimulated(start, size, key) {
  const { d, labels, rows } = await sampleSet();
  const headers = { "Content-Type": "application/octet-stream", "X-Shape": `${size},${d}` };
  const answer = await push("/embeddings", { headers, body: rows.slice(start * d, (start + size) * d) }, key);
  return { first: answer.first, labels: labels.slice(start, start + size) };
}

async function pushPictures(start, size, key) {
  const files = [], labels = [];
  for (let i = start; i < start + size; i++) {
    const response = await ask(`samples/images/${i}`);
    labels.push(page.stream.class_names.indexOf(response.headers.get("X-Label")));
    files.push(await response.blob());
  }
  return { first: await pushFiles(files, key), labels };
}

// Push, and retry when the server is busy. The key ensures that a push that is sent twice counts once.
async function push(path, options, key = newKey()) {
  const headers = { ...options.headers, "Idempotency-Key": key };
  for (let tries = 0; ; tries++) {
    try {
      const answer = await (await ask(at(path), { ...options, method: "POST", headers })).json();
      if (answer.labels && answer.first >= page.from) add(answer); // else from before a reset
      return answer;
    } catch (error) {
      const busy = error.status === 429 || error.status === 503 || error.status === undefined;
      if (!busy || tries === 20) throw error;
      say("The server is busy or unreachable; retrying.");
      await sleep(1000 * (error.wait || 1));
      say("");
    }
  }
}

async function pushFiles(files, key) {
  const form = new FormData();
  for (const file of files) form.append("images", file, "image");
  const answer = await push("/images", { body: form }, key);
  const pictures = await Promise.all(files.map((file) => thumbnail(file).catch(() => null)));
  pictures.forEach((picture, i) => picture && page.pictures.set(answer.first + i, picture));
  for (const number of page.pictures.keys()) {
    if (page.pictures.size <= SHOWN) break;
    page.pictures.delete(number);
  }
  remember();
  return answer.first;
}

async function upload(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  try {
    for (let start = 0; start < images.length; start += 8) {
      say(`Sending ${start + 1} to ${Math.min(start + 8, images.length)} of ${count(images.length, "image")}.`);
      await pushFiles(images.slice(start, start + 8));
      draw();
    }
    const there = `${count(images.length, "image")} ${images.length === 1 ? "is" : "are"} in the stream.`;
    say(images.length ? there : "These are not images.", !images.length);
  } catch (error) {
    say(error.message, true);
  }
}
