/** The study: instructions, warm-ups, games with hidden partners, rankings. The server decides what comes next. */
import { h, note, say } from "./base.js";
import { busy, button, link, title } from "./dom.js";
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
    return app.page("study", "No study here",
      h("p", {}, "This server runs no study. Start it with --study FILE.toml, or just play."), h("p", {}, link("Home", "#")));
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
  const enter = async () => {
    localStorage.setItem(SECRET, (await request("/api/study", {})).participant);
    await study(app);
  };
  const start = button("Take part", () => busy(start, problem, enter), "main");
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
  const action = (text, work) => {
    const one = button(text, () => busy(one, problem, work), "main");
    return [problem, h("p", { class: "row" }, one)];
  };
  /** @param {...any} content */
  const card = (...content) => h("div", { class: "card" }, texts(now.text), ...content);
  const start = async () => {
    const game = { ...(await request(path("/game"), {})), study: true };
    keep(game);
    playOne(app, game);
  };
  const again = button("Start for another person", () => {
    localStorage.removeItem(SECRET);
    study(app);
  });
  const kitchen = title(now.kitchen ?? "");
  const [heading, content] = {
    instructions: () => ["Instructions", h("div", { class: "columns" }, card(action("I have read this", () => next(app))), recipe())],
    warmup: () => [`Warm-up: ${kitchen}`, card(action("Start the warm-up", start))],
    play: () => [`${kitchen} with ${named(now.label ?? "")}`, card(action("Start the game", start))],
    ranking: () => {
      const [order, list] = ranking(now.partners);
      const send = action("This is my order", () => next(app, { ranking: order }));
      return [`Ranking: ${kitchen}`, card(h("p", {}, "The buttons move a partner up or down."), list, send)];
    },
    done: () => ["Thank you", card(h("p", { class: "row" }, again))],
  }[now.stage]?.() ?? ["Please reload the page", h("p", {}, `This page does not know the stage "${now.stage}".`)];
  const bar = h("progress", { max: now.total, value: now.done, "aria-label": "Progress" });
  const progress = now.total > 0 && now.stage !== "done" && h("p", { class: "progress" }, bar, `${now.done} of ${now.total} games done`);
  app.page("study", heading, progress, content);
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
 * A list whose order two buttons beside each partner change.
 * @param {string[]} partners @returns {[string[], HTMLElement]} the order, which changes, and the list
 */
function ranking(partners) {
  const order = [...partners];
  const list = h("ol", { class: "ranking" });
  /** @param {string} who @param {number} by */
  function move(who, by) {
    const to = order.indexOf(who) + by;
    order.splice(to, 0, ...order.splice(to - by, 1));
    draw();
    const buttons = [...list.children[to].querySelectorAll("button")];
    (buttons[by < 0 ? 0 : 1].disabled ? buttons[by < 0 ? 1 : 0] : buttons[by < 0 ? 0 : 1]).focus();
    say(`${named(who)} is now number ${to + 1} of ${order.length}.`);
  }
  /** @param {string} who @param {number} by @param {boolean} disabled */
  const mover = (who, by, disabled) => h("button", { type: "button", disabled, onclick: () => move(who, by),
    "aria-label": `${named(who)} ${by < 0 ? "up" : "down"}` }, by < 0 ? "▲" : "▼");
  function draw() {
    list.replaceChildren(...order.map((who, index) => h("li", {}, h("span", {}, named(who)),
      mover(who, -1, index === 0), mover(who, 1, index === order.length - 1))));
  }
  draw();
  return [order, list];
}
