/** The first page: what to play, with whom and where; and the page behind an invitation. */
import { h } from "./base.js";
import { Board } from "./board.js";
import { busy, link, title } from "./dom.js";
import { keep, request, ticket } from "./net.js";
import { at, chef, CHEFS, dish, fixture, onion, pot, soup } from "./shapes.js";

/** @typedef {import("./app.js").App} App @typedef {import("./app.js").Setup} Setup */

const KINDS = {
  agent: "Trained agents",
  human_proxy: "Trained to play as people do",
  published: "Published agents of 2019",
  person: "Another person",
  nobody: "Alone",
};
const LENGTHS = [[10, "10 s, a quick try"], [30, "30 s"], [120, "2 minutes"], [300, "5 minutes"]];
const CHOICES = "sextet.choices";

/** A small picture drawn as in the kitchen. @param {(pen: CanvasRenderingContext2D) => void} draw */
export function picture(draw) {
  const side = 52 * Math.ceil(devicePixelRatio || 1);
  const canvas = h("canvas", { class: "picture", width: side, height: side, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  at(pen, side / 2, side / 2, side, () => draw(pen));
  return canvas;
}

/** @param {number} seat */
const portrait = (seat) => picture((pen) => at(pen, 0, 0.07, 0.86, () => chef(pen, seat, 1, null)));

/** How to cook, in pictures and words. */
export function recipe() {
  /** @param {(pen: CanvasRenderingContext2D) => void} draw @param {string} text */
  const step = (draw, text) => h("li", {}, picture(draw), h("span", {}, text));
  return h("section", { class: "card", "aria-labelledby": "recipe" },
    h("h2", { id: "recipe" }, "How to cook"),
    h("ol", { class: "recipe" },
      step((pen) => at(pen, 0, 0.04, 1.9, () => onion(pen)), "Carry 3 onions to a pot, one at a time."),
      step((pen) => at(pen, 0, 0.08, 1.15, () => pot(pen, 3, 13, 0)), "The soup cooks by itself, for 20 steps (3 seconds)."),
      step((pen) => at(pen, 0, 0, 1.9, () => dish(pen)), "Take a dish and fill it at the pot."),
      step((pen) => at(pen, 0, 0, 1.9, () => soup(pen)), "Carry the soup to the green hatch with the bell."),
      step((pen) => fixture(pen, "S", false, false), "Each soup is worth 20 points for the team.")),
    h("p", {}, "You act on the cell you face: walk against it, then take or put. Counters hold one thing each."));
}

/** @param {Setup} setup @param {string} kitchen */
function partners(setup, kitchen) {
  const able = setup.partners.filter((partner) => partner.kitchen === null || partner.kitchen === kitchen);
  const kinds = new Set([...Object.keys(KINDS), ...able.map((partner) => partner.kind)]);
  return [...kinds].map((kind) => {
    const group = able.filter((partner) => partner.kind === kind);
    return h("optgroup", { label: KINDS[kind] ?? kind }, group.map(({ id, label }) => h("option", { value: id }, label)));
  }).filter((group) => group.children.length > 0);
}

/** @param {App} app */
export function home(app) {
  const { setup, go } = app;
  if (setup.study && setup.partners.length === 0) return go("#study");
  const old = JSON.parse(localStorage.getItem(CHOICES) ?? "{}");
  const first = setup.kitchens.find((kitchen) => kitchen.name === old.kitchen) ?? setup.kitchens[0];
  /** @type {[HTMLElement, Board][]} */
  const boards = [];
  const kitchens = setup.kitchens.map((kitchen) => {
    const canvas = h("canvas", { "aria-hidden": "true" });
    const frame = h("span", { class: "thumb" }, canvas);
    boards.push([frame, new Board(frame, canvas, kitchen)]);
    const radio = h("input", { type: "radio", name: "kitchen", value: kitchen.name, checked: kitchen === first });
    return h("label", { class: "choice" }, radio, frame, h("span", {}, title(kitchen.name)));
  });
  const seats = [[0, "Blue, tall hat"], [1, "Red, flat cap"], ["random", "Either"]].map(([value, text]) =>
    h("label", { class: "choice seat" },
      h("input", { type: "radio", name: "seat", value, checked: String(value) === String(old.seat ?? "random") }),
      h("span", {}, [0, 1].filter((seat) => value === "random" || value === seat).map(portrait)),
      h("span", {}, text)));
  const partner = h("select", { name: "partner", id: "partner" });
  const full = Math.round(setup.horizon * setup.tick_seconds);
  const length = h("select", { name: "seconds", id: "seconds" },
    h("option", { value: "" }, `${setup.horizon} steps (${full} s)`),
    LENGTHS.map(([seconds, text]) => h("option", { value: seconds }, text)));
  length.value = old.seconds ?? "";
  const name = h("input", { name: "name", id: "name", maxlength: 40, autocomplete: "off", value: old.name ?? "" });
  const problem = h("p", { role: "alert", class: "problem" });
  const start = h("button", { class: "main" }, "Start");
  const form = h("form", { class: "card", onchange: refresh, onsubmit: submit },
    h("fieldset", {}, h("legend", {}, "Kitchen"), h("div", { class: "choices" }, kitchens)),
    h("fieldset", {}, h("legend", {}, "You are"), h("div", { class: "choices seats" }, seats)),
    h("div", { class: "fields" },
      h("p", {}, h("label", { for: "partner" }, "Partner"), partner),
      h("p", {}, h("label", { for: "seconds" }, "Length"), length),
      h("p", {}, h("label", { for: "name" }, "Name (optional)"), name)),
    problem, h("p", { class: "row" }, start));

  function refresh() {
    const { kitchen, seat } = Object.fromEntries(new FormData(form));
    if (partner.dataset.kitchen !== kitchen) {
      const wanted = partner.value || old.partner;
      partner.replaceChildren(...partners(setup, String(kitchen)));
      partner.dataset.kitchen = String(kitchen);
      if (partner.querySelector(`option[value="${CSS.escape(wanted ?? "")}"]`)) partner.value = wanted;
    }
    for (const [, board] of boards) {
      board.seat = seat === "random" ? null : Number(seat);
      board.draw();
    }
  }
  /** @param {Event} event */
  function submit(event) {
    event.preventDefault();
    const chosen = Object.fromEntries(new FormData(form));
    localStorage.setItem(CHOICES, JSON.stringify(chosen));
    const { kitchen, partner, seat, seconds, name } = chosen;
    const body = { kitchen, partner, seat: seat === "random" ? seat : Number(seat) };
    if (seconds) Object.assign(body, { seconds: Number(seconds) });
    if (String(name).trim()) Object.assign(body, { name });
    busy(start, problem, () => begin(go, body));
  }

  const running = ticket() && !ticket().study;
  const back = running && h("p", { class: "card row" }, "You are in a game.", link("Go on with it", "#play"));
  app.page("home", "Cook together", back, h("div", { class: "columns" }, form, recipe()));
  app.leave(() => boards.forEach(([, board]) => board.close()));
  refresh();
}

/** Starts a game with these settings and goes to it. @param {App["go"]} go @param {object} body */
export async function begin(go, body) {
  keep({ ...(await request("/api/games", body)), again: body });
  go("#play");
}

/** Takes the seat an invitation offers. @param {App} app */
export async function join(app) {
  app.page("join", "Joining the game", h("p", {}, "One moment…"));
  try {
    keep(await request("/api/games/join", { invite: app.argument }));
    location.replace("#play");
  } catch (error) {
    app.page("join", "This invitation does not work",
      h("p", { role: "alert" }, /** @type {Error} */ (error).message),
      h("p", {}, "Each invitation works once. Ask the other player for a new one."),
      h("p", {}, link("Home", "#")));
  }
}

/** @param {number} seat @returns {string} how the page names a chef */
export const chefName = (seat) => `${CHEFS[seat].name}, number ${seat + 1}, with the ${seat === 0 ? "tall hat" : "flat cap"}`;
