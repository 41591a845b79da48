/** The entry: chooses a training and a view of it, and keeps both up to date while training goes on. */
import { find, h, note, Problem, request } from "./base.js";
import { ask } from "./ask.js";
import { curves } from "./curves.js";
import { about, rowOf, title } from "./run.js";
import { samples } from "./samples.js";

/**
 * @typedef {{name: string, samples: number, finished: boolean}} Part
 * @typedef {{name: string, step: number, finished: boolean, samples: number[], why_not: string, config: any, seconds: number|null,
 *   method: Record<string, any>, results: Record<string, any>, warnings: string[]}} Facts
 * @typedef {{part: string, parts: Part[], facts: Facts, argument: string, place: HTMLElement, signal: AbortSignal,
 *   fail: (error: any) => void}} View a view fills its place; its signal ends when another view comes
 */

const VIEWS = { ask, samples, curves, run: about };
const REFRESH = 10_000;
/** @type {Part[]} */
let parts = [];
let part = "";
let leaving = new AbortController();
/** @type {{update?: (facts: Facts) => void}} */
let shown = {};
/** @type {Facts} */
let facts;

/** @param {any} error */
function fail(error) {
  if (error.name === "AbortError") return;
  find("#problem").textContent = error.message;
  note({ state: "error" });
  if (!(error instanceof Problem)) throw error;
}

/** @param {Facts} facts */
function describe({ name, step, finished, config }) {
  const many = config.method === "ablate";
  const where = finished ? "finished" : many ? "not finished" : `step ${step} of ${config.optim.steps}, not finished`;
  const task = many ? `comparison on ${config.ablation}` : `${rowOf(part) ?? config.method} on ${config.task.name}, model ${config.model.source}`;
  find("#state").textContent = `${task}, ${where}`;
  document.title = `DAPO: ${name}`;
  if (parts.length < 2) find("h1").textContent = document.title;
}

/** Shows the view that the address names: #view, or #view=argument. */
async function show() {
  const [, name, argument] = /^#?([a-z]*)=?(.*)$/.exec(location.hash) ?? ["", "", ""];
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  find("#problem").textContent = "";
  note({ state: "loading" });
  try {
    facts = await request(`/api/part?${new URLSearchParams({ part })}`, { signal });
    describe(facts);
    const view = name in VIEWS ? name : facts.samples.length ? "samples" : facts.why_not ? "curves" : "ask";
    for (const link of document.querySelectorAll("nav a")) {
      if (link.getAttribute("href") === `#${view}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const place = h("div", { class: `view ${view}` });
    shown = (await VIEWS[view]({ part, parts, facts, argument: decodeURIComponent(argument), place, signal, fail })) ?? {};
    if (signal.aborted) return;
    find("#view").replaceChildren(place);
    note({ view, part, state: "done" });
  } catch (error) {
    if (!signal.aborted) find("#view").replaceChildren();
    fail(error);
  }
}

/** Offers parts to choose from. @param {Part[]} fresh */
function offer(fresh) {
  parts = fresh;
  find("#parts select").replaceChildren(...parts.map(({ name }) => h("option", { value: name, selected: name === part }, title(name))));
  find("#parts").hidden = parts.length < 2;
}

/** Asks how far training is, and tells the view. */
async function refresh() {
  if (!facts || document.hidden || parts.every(({ finished }) => finished)) return;
  try {
    const { signal } = leaving;
    const [now, fresh] = await Promise.all([request(`/api/part?${new URLSearchParams({ part })}`, { signal }), request("/api/parts", { signal })]);
    if (fresh.length === parts.length) parts = fresh;
    else offer(fresh); // an ablation has begun another training
    const moved = now.step !== facts.step || now.finished !== facts.finished;
    facts = now;
    describe(facts);
    if (moved) shown.update?.(facts);
  } catch (error) {
    fail(error);
  }
}

async function start() {
  try {
    parts = await request("/api/parts");
  } catch (error) {
    find("#state").textContent = "";
    return fail(error);
  }
  const worth = (/** @type {Part} */ one) => Number(one.samples > 0) + Number(one.name.includes("-dapo-")) / 2;
  part = parts.reduce((best, one) => (worth(one) > worth(best) ? one : best)).name;
  offer(parts);
  find("#parts select").addEventListener("change", (/** @type {any} */ event) => {
    part = event.target.value;
    show();
  });
  find(".skip").addEventListener("click", (/** @type {Event} */ event) => {
    event.preventDefault();
    find("#main").focus();
  });
  addEventListener("hashchange", show);
  setInterval(refresh, REFRESH);
  await show();
}

start();
