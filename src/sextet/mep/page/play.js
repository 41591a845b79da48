/** A game in progress: the kitchen, the score, the keys, and what to say when something is in the way. */
import { h, note, say } from "./base.js";
import { Board } from "./board.js";
import { busy, button, link, title } from "./dom.js";
import { begin, chefName } from "./home.js";
import { Input, INTERACT, touchControls } from "./input.js";
import { keep, Line, ticket } from "./net.js";
import { CHEFS } from "./shapes.js";

/** @typedef {import("./app.js").App} App @typedef {import("./net.js").Ticket} Ticket */

/** The game this tab is in. @param {App} app */
export function playing(app) {
  const game = ticket();
  if (game?.study) app.go("#study");
  else if (game) play(app, game);
  else app.go("#");
}

/**
 * @param {App} app @param {Ticket} game
 * @param {() => void} [finished] study only: what comes after the game, instead of the usual choices
 */
export function play(app, game, finished) {
  const score = h("output", {}, "0");
  const clock = h("span", {}, "–");
  const bar = h("span", { class: "bar" });
  const who = h("span", { class: "who" });
  const hands = h("span", { class: "hands" });
  const canvas = h("canvas", { role: "img", "aria-label": "The kitchen" });
  const curtain = h("div", { class: "curtain" });
  const stage = h("div", { class: "stage", onclick: tapped }, canvas, curtain);
  const leave = button("End game", () => line.send({ type: "leave" }), "quiet");
  const problem = h("p", { role: "alert", class: "problem" });
  const input = new Input(act);
  /** @type {Board|undefined} */
  let board;
  let state = { phase: "waiting", score: 0, step: 0 };
  let [partner, length, ready, covered] = ["", 1, false, ""];

  app.page("play", "Game", h("section", { class: "play" },
    h("div", { class: "hud" },
      h("p", { class: "score" }, "Score ", score),
      h("p", { class: "clock" }, h("span", {}, "Time left ", clock), h("span", { class: "track" }, bar)),
      h("p", { class: "people" }, who, hands),
      finished ? null : leave, problem),
    stage, touchControls(input)));
  const line = new Line(game, { message: heard, trouble, lost });
  app.leave(() => {
    input.close();
    line.close();
    board?.close();
  });

  /** @param {number} action */
  function act(action) {
    if (state.phase === "playing") line.send({ type: "action", action });
    else if (action === INTERACT) start();
  }
  function start() {
    if (state.phase !== "waiting" || ready) return;
    ready = true;
    line.send({ type: "ready" });
    cover();
  }
  /** @param {MouseEvent} event */
  function tapped(event) {
    if (!(/** @type {Element} */ (event.target).closest("button, input, a"))) start();
  }

  /** @param {any} message */
  function heard(message) {
    if (message.type === "start") begun(message);
    else if (message.type === "state") tick(message);
    else if (message.type === "over") over(message);
    else if (message.type === "error") problem.textContent = message.message;
  }
  /** @param {any} message */
  function begun(message) {
    partner = message.partner === "You" ? "another person" : message.partner; // "You" is who gave no name
    length = message.steps * message.tick_seconds;
    input.tick = message.tick_seconds;
    board ??= new Board(stage, canvas, message.kitchen, message.seat);
    who.replaceChildren("You are ", h("b", { class: `seat-${message.seat}` }, CHEFS[message.seat].name),
      h("span", { class: "extra" }, ` (${message.seat + 1}, ${message.seat ? "flat cap" : "tall hat"})`),
      " with ", h("b", {}, partner));
    canvas.setAttribute("aria-label", `The kitchen ${title(message.kitchen.name)}. You are ${chefName(message.seat)}.`);
    if (ready) line.send({ type: "ready" });
    covered = "";
    game.seat = message.seat;
  }
  /** @param {import("./net.js").State} next */
  function tick(next) {
    if (next.score > state.score) say(`Soup delivered. Score ${next.score}.`);
    if (next.step < state.step) covered = "";
    state = next;
    board.show(next);
    if (next.phase === "playing") input.repeat();
    const { held } = next.players[game.seat];
    score.textContent = String(next.score);
    clock.textContent = `${Math.ceil(next.time_left)} s`;
    bar.style.transform = `scaleX(${Math.max(0, Math.min(1, next.time_left / length))})`;
    hands.textContent = held ? `In your hands: ${held}` : "Your hands are empty";
    note({ step: next.step, score: next.score, phase: next.phase });
    cover();
  }

  /** Covers the kitchen with what there is to say in this phase, or uncovers it. */
  function cover() {
    const key = `${state.phase} ${ready}`;
    if (key === covered) return;
    covered = key;
    const { phase } = state;
    if (phase === "waiting" && ready) card("Waiting for the other player", h("p", {}, "The game starts when both are ready."), invitation());
    else if (phase === "waiting") {
      const whom = /^nobody/i.test(partner) ? "You are alone: the other cook stands still." : `You play with ${partner}.`;
      card("Press space or tap to start", invitation() ?? h("p", {}, whom), button("Start", start, "main"));
    } else if (phase === "paused") {
      const why = "Your partner's connection is lost. The game goes on when it is back, and ends after two minutes without it.";
      card("Paused", h("p", {}, why));
    } else if (phase === "playing") curtain.replaceChildren();
  }
  /** @param {string} heading @param {...any} content */
  function card(heading, ...content) {
    const top = h("h2", { tabindex: -1 }, heading);
    curtain.replaceChildren(h("div", { class: "card" }, top, ...content));
    say(heading);
    return top;
  }
  function invitation() {
    if (!game.invite) return null;
    const value = `${location.origin}${location.pathname}#join=${game.invite}`;
    const field = h("input", { readonly: true, "aria-label": "Link for the other player", value });
    const copy = button("Copy", async () => {
      field.select();
      const done = await navigator.clipboard?.writeText(value).then(() => true, () => false);
      copy.textContent = done ? "Copied" : "Press Ctrl+C";
    });
    const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
    return h("div", { class: "invitation" }, h("p", {}, "Send this link to the other player:"), h("p", { class: "row" }, field, copy),
      h("p", { class: "soft" }, local ? "It works on this computer only. For others, start the server with --host."
        : "If the server has a token, they must open its address with the token first."));
  }
  /** @param {string} text */
  function trouble(text) {
    note({ phase: "lost" });
    covered = "";
    card("One moment", h("p", {}, text));
  }
  /** @param {string} text @param {number} code */
  function lost(text, code) {
    input.close();
    if (code === 4404) keep(null);
    note({ phase: "lost" });
    const on = finished ? button("Go on", finished, "main") : link("Home", "#");
    const again = code !== 4404 && button("Try again", () => app.go(location.hash));
    card("This game cannot go on here", h("p", {}, text), h("p", { class: "row" }, on, again)).focus();
  }
  /** @param {any} message */
  function over(message) {
    keep(null);
    line.close();
    input.close();
    leave.remove();
    state = { ...state, phase: "over", score: message.score };
    score.textContent = String(message.score);
    note({ score: message.score, phase: "over" });
    const again = button("Play again", () => busy(again, problem, () => begin(app.go, game.again)), "main");
    const choices = finished ? [button("Go on", finished, "main")]
      : [game.again && again, message.saved && link("Watch the replay", `#replay=${message.game}`), link("Home", "#")];
    const soups = Math.round(message.score / 20);
    const result = h("p", { class: "final" }, h("b", {}, String(message.score)), ` points: ${soups} ${soups === 1 ? "soup" : "soups"}`);
    card("The game is over", result, problem, h("p", { class: "row" }, ...choices)).focus();
    say(`The game is over. Score ${message.score}.`);
  }
}
