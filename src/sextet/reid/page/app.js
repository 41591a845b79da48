/** The entry: asks the server what it has, and shows the answer for the person that is picked. */
import { find, h, note, Problem, request, say } from "./base.js";
import { Chooser } from "./chooser.js";
import { cameraName, card, crop, drawCuts, frame, personName } from "./crops.js";
import { Settings } from "./settings.js";

/** @typedef {import("./crops.js").Model} Model @typedef {import("./crops.js").Hit} Hit */

const COUNT = 30;
const MOST = 200; // places of a ranking that the server gives at once
/** @type {{run: string, max_upload: number, models: Model[]}} */
let about;
/** @type {Model} */
let model;
/** @type {number|File|null} a query picture, or one's own */
let source = null;
let count = COUNT;
/** @type {any} the last answer */
let answer = null;
/** @type {Map<number, import("./crops.js").Cuts>} of gallery pictures, by index */
let known = new Map();
let running = new AbortController();

const settings = new Settings(find("#settings"), { search, draw });
const chooser = new Chooser(
  (index) => {
    ask(index);
    if (matchMedia("(max-width: 899px)").matches && !find("#people :focus-visible")) find("#answer").scrollIntoView();
  },
  ask,
  fail,
);

/** @param {Error} error */
function fail(error) {
  if (error.name === "AbortError") return;
  find("#problem").textContent = error.message;
  find("#answer").removeAttribute("aria-busy");
  note({ state: "error" });
  if (!(error instanceof Problem)) throw error;
}

/** Looks for another person. @param {number|File} other */
function ask(other) {
  const own = other instanceof File;
  if (own && other.size > about.max_upload) {
    const [size, limit] = [other.size, about.max_upload].map((bytes) => (bytes / 2 ** 20).toFixed(1));
    return fail(new Problem(`${other.name} has ${size} MB; the limit is ${limit} MB.`));
  }
  source = other;
  count = COUNT;
  chooser.mark(own ? -1 : other);
  history.replaceState(null, "", own ? " " : `#query=${other}`);
  return search();
}

/** Asks for the ranking that the settings describe, and shows it. */
async function search() {
  if (source === null) return;
  running.abort(); // of an earlier question, which nobody waits for any more
  running = new AbortController();
  const { signal } = running;
  const [mine, cameras] = [source, settings.cameras];
  if (cameras.size === 0) return fail(new Problem("Choose at least one camera."));
  find("#answer").setAttribute("aria-busy", "true");
  note({ state: "searching" });
  const asked = new URLSearchParams({ model: model.name, rerank: String(settings.rerank), count: String(count) });
  if (cameras.size < model.cameras.length) cameras.forEach((camera) => asked.append("cameras", String(camera)));
  if (typeof mine === "number") asked.set("query", String(mine));
  try {
    const body = mine instanceof File ? { method: "POST", body: mine } : {};
    const found = await request(`/api/search?${asked}`, { signal, ...body });
    const picture = mine instanceof File ? await ownPicture(mine)
      : crop(model, "query", mine, `${personName(found.query.id)}, ${cameraName(found.query.camera)}`);
    if (signal.aborted) return;
    answer = found;
    show(picture);
    note({ state: "done", model: model.name, query: mine instanceof File ? "file" : mine, rerank: settings.rerank });
  } catch (error) {
    fail(/** @type {Error} */ (error));
  }
}

/** Draws a chosen file; a kind that the browser cannot draw is named in words. @param {File} file */
async function ownPicture(file) {
  try {
    const [height, width] = model.size.map((pixels) => 2 * pixels); // squeezed into the form that the model sees
    const bitmap = await createImageBitmap(file, { resizeWidth: width, resizeHeight: height, resizeQuality: "high" });
    const canvas = h("canvas", { width, height, role: "img", "aria-label": file.name });
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    return canvas;
  } catch {
    return h("p", { class: "soft" }, `${file.name} (a kind that this browser does not show)`);
  }
}

function summary() {
  const { query, scores, searched } = answer;
  const where = `${searched.toLocaleString("en")} pictures ranked. `;
  if (query.id === null) return `${where}Nothing is known of your picture, so nothing is marked.`;
  if (!scores) return `${where}None of them shows this person in another camera.`;
  return `${where}${scores.right} of them ${scores.right === 1 ? "shows" : "show"} this person; the first is at rank ${scores.first}.`;
}

/** Shows the answer. @param {any} picture of the query */
function show(picture) {
  const { query, scores, hits, searched } = answer;
  const title = query.id === null ? "Your picture" : `${personName(query.id)}, ${cameraName(query.camera)}`;
  /** @param {string} name @param {string} value @param {string} look */
  const tile = (name, value, look = "") => h("div", { class: look }, h("dt", {}, name), h("dd", {}, value));
  find("#picture").replaceChildren(frame(picture));
  find("#facts").replaceChildren(
    h("h2", {}, title[0].toUpperCase() + title.slice(1)),
    h("p", {}, summary()),
    scores ? h("dl", {},
      tile("Rank 1", scores.first === 1 ? "✓ right" : "✗ wrong", scores.first === 1 ? "right" : "wrong"),
      tile("Average precision", scores.ap.toFixed(3))) : "");
  find("#hits").replaceChildren(...hits.map((/** @type {Hit} */ hit) => card(model, hit)));
  const ranked = hits.filter((/** @type {Hit} */ hit) => hit.rank !== null).length;
  find("#more").hidden = ranked >= Math.min(searched, MOST);
  find("#question").hidden = false;
  find("#problem").textContent = "";
  find("#answer").removeAttribute("aria-busy");
  say(summary());
  note({ hits: ranked });
  draw();
}

/** Draws or removes stripes, and those hits that are not counted; asks for the cuts that are not yet known. */
async function draw() {
  find("#hits").classList.toggle("all", settings.leftOut);
  if (answer === null) return;
  drawCuts(find("#picture .frame"), answer.query.cuts, model.branches, settings.branches);
  const shown = settings.cutHits ? settings.branches : new Set();
  const hits = answer.hits.map((/** @type {Hit} */ hit) => hit.index);
  const wanted = shown.size ? hits.filter((/** @type {number} */ index) => !known.has(index)) : [];
  const mine = known;
  try {
    if (wanted.length) {
      const asked = new URLSearchParams({ model: model.name });
      for (const index of wanted) asked.append("indices", index);
      const cuts = await request(`/api/cuts?${asked}`);
      wanted.forEach((/** @type {number} */ index, /** @type {number} */ at) => mine.set(index, cuts[at]));
      if (mine !== known) return; // of another model
    }
    for (const item of document.querySelectorAll("#hits li")) {
      const cuts = known.get(Number(/** @type {any} */ (item).dataset.index)) ?? {};
      drawCuts(item.querySelector(".frame"), cuts, model.branches, shown);
    }
    note({ cuts: shown.size });
  } catch (error) {
    fail(/** @type {Error} */ (error));
  }
}

/** Changes the model; the question stays where it means the same. @param {Model} next */
async function choose(next) {
  const same = model?.version === next.version;
  model = chooser.model = next;
  known = new Map();
  settings.offer(model);
  find("#intro").textContent =
    `Pick a person, or bring a picture of one: the model sorts the ${model.gallery.toLocaleString("en")} pictures of the ` +
    `gallery (${model.data}) by how alike they look. ✓ is the same person seen by another camera, ✗ is someone else.`;
  if (!same) {
    if (typeof source === "number") source = null;
    await chooser.show(0);
  }
  await search();
}

async function start() {
  try {
    about = await request("/api/about");
  } catch (error) {
    find("#intro").textContent = "";
    return fail(/** @type {Error} */ (error));
  }
  const select = find("#models select");
  select.append(...about.models.map(({ name }, at) => h("option", { value: at }, name)));
  select.addEventListener("change", () => choose(about.models[select.value]));
  find("#models").hidden = about.models.length < 2;
  find("#more").addEventListener("click", () => {
    count = Math.min(count + COUNT, MOST);
    search();
  });
  find("#run").textContent = `run ${about.run}`;
  await choose(about.models[0]);
  const linked = new URLSearchParams(location.hash.slice(1)).get("query") ?? find("#people input").value;
  await ask(Number(linked));
}

start();
