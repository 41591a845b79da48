/** The study: instructions, warm-ups, games with hidden partners, rankings. The server decides what comes next. */
import { busy, h, note, say, title } from "./dom.js";
import { recipe } from "./home.js";
import { keep, request, ticket } from "./net.js";
import { play } from "./play.js";

/** @typedef {import("./app.js").App} App */

const SECRET = "sextet.participant";
const path = (/** @type {string} */ tail = "") => `/api/study/${encodeURIComponent(localStorage.getItem(SECRET) ?? "")}${tail}`;
const named = (/** @type {string} */ label) => (label.length < 3 ? `Partner ${label}` : label);
const texts = (/** @type {string} */ text) => (text ?? "").split(/\n\s*\n/).filter(Boolean).map((part) => h("p", {}, part));

/** @param {App} app */
export async function study(app) {
  if (!app.setup.study)
    return app.page("study", "No study here", h("p", {}, "This server runs no study. Start it with --study FILE.toml, or just play."), h("p", {}, h("a", { class: "button", href: "#" }, "Home")));
  const game = ticket();
  if (game?.study) return playOne(app, game);
  if (!localStorage.getItem(SECRET)) return welcome(app);
  try {
    const now = await request(path());
    if (now.complete && ["warmup", "play"].includes(now.stage)) return await next(app); // reloaded at the game's end
    return stage(app, now);
  } catch (error) {
    if (/** @type {any} */ (error).status !== 404) throw error;
    localStorage.removeItem(SECRET);
    return welcome(app);
  }
}

/** @param {App} app */
function welcome(app) {
  const problem = h("p", { role: "alert", class: "problem" });
  const start = h("button", { type: "button", class: "main", onclick: () => busy(start, problem, async () => {
    localStorage.setItem(SECRET, (await request("/api/study", {})).participant);
    await study(app);
  }) }, "Take part");
  app.page("study", "Cooking study", h("div", { class: "card" },
    h("p", {}, "You will cook with several partners and say which ones you liked. Your games and rankings are recorded, without your name."),
    h("p", {}, "You may close the page and come back later on this device."), problem, h("p", { class: "row" }, start)));
  note({ phase: "welcome" });
}

/** Moves on in the server's order. @param {App} app @param {object} [body] */
async function next(app, body = {}) {
  await request(path("/next"), body);
  await study(app);
}

/** @param {App} app @param {any} now the server's word on where this participant is */
function stage(app, now) {
  const problem = h("p", { role: "alert", class: "problem" });
  /** @param {string} text @param {() => Promise<any>} work */
  const button = (text, work) => {
    const one = h("button", { type: "button", class: "main", onclick: () => busy(one, problem, work) }, text);
    return h("p", { class: "row" }, one);
  };
  const progress = now.total > 0 && now.stage !== "done" && h("p", { class: "progress" },
    h("progress", { max: now.total, value: now.done, "aria-label": "Progress" }), ` ${now.done} of ${now.total} games done`);
  const start = async () => {
    const game = { ...(await request(path("/game"), {})), study: true };
    keep(game);
    playOne(app, game);
  };
  const kitchen = title(now.kitchen ?? "");
  const shown = {
    instructions: () => ["Instructions", h("div", { class: "columns" },
      h("div", { class: "card" }, texts(now.text), problem, button("I have read this", () => next(app))), recipe())],
    warmup: () => [`Warm-up: ${kitchen}`, h("div", { class: "card" }, texts(now.text), h("p", {}, "You are alone in the kitchen. Get to know it."), problem, button("Start the warm-up", start))],
    play: () => [`${kitchen} with ${named(now.label ?? "")}`, h("div", { class: "card" }, texts(now.text), problem, button("Start the game", start))],
    ranking: () => [`Ranking: ${kitchen}`, ranking(app, now, problem, button)],
    done: () => ["Thank you", h("div", { class: "card" }, texts(now.text), h("p", {}, "You have played all games. You can close this page."),
      h("p", { class: "row" }, h("button", { type: "button", onclick: () => {
        localStorage.removeItem(SECRET);
        study(app);
      } }, "Start for another person")))],
  }[now.stage]?.() ?? ["The study goes on elsewhere", h("p", {}, `This page does not know the stage "${now.stage}". Reload it.`)];
  app.page("study", shown[0], progress, shown[1]);
  note({ phase: now.stage });
}

/** @param {App} app @param {import("./net.js").Ticket} game */
function playOne(app, game) {
  play(app, game, async () => {
    keep(null);
    await request(path("/next"), {}).catch(() => {}); // refused if the game ended early: then it is played again
    await study(app);
  });
}

/**
 * The partners in an order that two buttons beside each one change.
 * @param {App} app @param {any} now @param {HTMLElement} problem @param {(text: string, work: () => Promise<any>) => any} button
 */
function ranking(app, now, problem, button) {
  /** @type {string[]} */
  const order = [...now.partners];
  const list = h("ol", { class: "ranking" });
  /** @param {string} who @param {number} by @param {string} way */
  function move(who, by, way) {
    const from = order.indexOf(who);
    order.splice(from + by, 0, ...order.splice(from, 1));
    draw();
    const moved = list.children[from + by];
    (moved.querySelector(`.${way}:not(:disabled)`) ?? moved.querySelector("button:not(:disabled)"))?.focus();
    say(`${named(who)} is now number ${from + by + 1} of ${order.length}.`);
  }
  function draw() {
    list.replaceChildren(...order.map((who, index) => h("li", {}, h("span", {}, named(who)),
      h("button", { type: "button", class: "up", disabled: index === 0, "aria-label": `${named(who)} up`, onclick: () => move(who, -1, "up") }, "▲"),
      h("button", { type: "button", class: "down", disabled: index === order.length - 1, "aria-label": `${named(who)} down`, onclick: () => move(who, 1, "down") }, "▼"))));
  }
  draw();
  return h("div", { class: "card" }, texts(now.text), h("p", {}, "The buttons move a partner up or down."), list, problem,
    button("This is my order", () => next(app, { ranking: order })));
}
