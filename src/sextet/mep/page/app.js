/** The entry: reads the server's set-up and shows the view that the address names. */
import { h, note } from "./base.js";
import { button, link } from "./dom.js";
import { home, join } from "./home.js";
import { request } from "./net.js";
import { playing } from "./play.js";
import { games, viewer } from "./replay.js";
import { study } from "./study.js";

/**
 * @typedef {{id: string, label: string, kitchen: string|null, kind: string}} Partner
 * @typedef {{title: string, tick_seconds: number, horizon: number, study: boolean,
 *   kitchens: import("./net.js").Kitchen[], partners: Partner[]}} Setup
 * @typedef {{setup: Setup, go: (address: string) => void, argument: string,
 *   page: (view: string, heading: string, ...content: any[]) => void, leave: (close: () => void) => void}} App
 */

const VIEWS = { "": home, play: playing, join, replays: games, replay: viewer, study };
const main = /** @type {HTMLElement} */ (document.querySelector("#main"));
/** @type {(() => void)[]} */
let closers = [];
/** @type {Setup} */
let setup;
let turn = 0; // counts the views, so that a late answer does not replace a newer one

/** Shows a page, with its heading in focus. @type {App["page"]} */
function page(view, heading, ...content) {
  for (const close of closers.splice(0)) close();
  const top = h("h1", { tabindex: -1 }, heading);
  main.replaceChildren(top, ...content.flat().filter(Boolean));
  document.title = `${heading} – ${setup?.title ?? "Overcooked"}`;
  note({ view, step: null, score: null, phase: null });
  scrollTo(0, 0);
  top.focus({ preventScroll: true });
}

/** @type {App["go"]} */
function go(address) {
  if (location.hash === address) show();
  else location.hash = address;
}

async function show() {
  const [, name, argument] = /^#?([a-z]*)=?(.*)$/.exec(location.hash) ?? ["", "", ""];
  const mine = ++turn;
  /** @type {App["page"]} */
  const current = (...parts) => {
    if (mine !== turn) throw new Error("the visitor has gone on to another view");
    page(...parts);
  };
  try {
    setup ??= await request("/api/setup");
    document.querySelector("#to-study").toggleAttribute("hidden", !setup.study);
    document.querySelector("nav").toggleAttribute("hidden", setup.study && setup.partners.length === 0);
    for (const link of document.querySelectorAll("nav a")) {
      const here = link.getAttribute("href") === `#${name === "replay" ? "replays" : name}`;
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const leave = (/** @type {() => void} */ close) => closers.push(close);
    await (VIEWS[name] ?? home)({ setup, go, argument: decodeURIComponent(argument), page: current, leave });
  } catch (error) {
    if (mine !== turn) return;
    page("error", "That did not work", h("p", { role: "alert" }, /** @type {Error} */ (error).message),
      h("p", { class: "row" }, button("Try again", show, "main"), link("Home", "#")));
  }
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.querySelector("h1")?.focus();
});
addEventListener("hashchange", show);
show();
