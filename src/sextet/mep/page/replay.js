/** Recorded games: the list, and a viewer with a slider. */
import { h, note } from "./base.js";
import { Board } from "./board.js";
import { button, link, title } from "./dom.js";
import { request } from "./net.js";
import { CHEFS } from "./shapes.js";

/** @typedef {import("./app.js").App} App */

const file = (/** @type {string} */ game) => `/api/games/${encodeURIComponent(game)}/file`;

/** @param {App} app */
export async function games(app) {
  const { games } = await request("/api/games");
  const heads = ["Played", "Kitchen", "Partner", "You were", "Score", "Steps", ""];
  const rows = games.map((/** @type {any} */ one) => {
    const seat = CHEFS[one.seat]?.name ?? "–";
    const when = new Date(one.time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const steps = one.finished ? one.steps : `${one.steps}, not finished`;
    const cells = [when, title(one.kitchen), one.partner, seat, one.score, steps];
    return h("tr", {}, cells.map((text, index) => h("td", { "data-head": heads[index] }, String(text))),
      h("td", { class: "row" }, link("Watch", `#replay=${one.game}`, { "aria-label": `Watch the game of ${when}` }),
        link("Download", file(one.game), { download: true, "aria-label": `Download the game of ${when}` })));
  });
  app.page("replays", "Recorded games", rows.length === 0
    ? h("p", { class: "card" }, "No game is recorded yet. ", h("a", { href: "#" }, "Play one"), ".")
    : h("div", { class: "card" }, h("table", {},
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows))));
}

/** Draws the score over time, and where in it we are. @param {HTMLCanvasElement} canvas @param {number[]} scores @param {number} now */
function curve(canvas, scores, now) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const inset = 8; // half of the slider's knob, so that the line and the knob agree
  const x = (/** @type {number} */ step) => inset + (step / Math.max(1, scores.length - 1)) * (width - 2 * inset);
  const top = Math.max(20, ...scores);
  const y = (/** @type {number} */ score) => height - 4 - (score / top) * (height - 22);
  pen.beginPath();
  pen.moveTo(x(0), y(0));
  scores.forEach((score, step) => {
    pen.lineTo(x(step), y(scores[Math.max(0, step - 1)]));
    pen.lineTo(x(step), y(score));
  });
  pen.strokeStyle = style.getPropertyValue("--accent");
  pen.lineWidth = 2;
  pen.stroke();
  pen.fillStyle = style.color;
  pen.font = "12px system-ui, sans-serif";
  scores.forEach((score, step) => {
    if (score > (scores[step - 1] ?? 0)) pen.fillText(String(score), Math.min(x(step) + 3, width - 24), y(score) - 4);
  });
  pen.fillRect(x(now) - 0.5, 0, 1, height);
}

/** @param {App} app */
export async function viewer(app) {
  const game = app.argument;
  const { kitchen, names, frames } = await request(`/api/games/${encodeURIComponent(game)}/replay`);
  const scores = frames.map((/** @type {any} */ frame) => frame.score);
  const last = frames.length - 1;
  const canvas = h("canvas", { role: "img", "aria-label": `The kitchen ${title(kitchen.name)}` });
  const stage = h("div", { class: "stage" }, canvas);
  const moved = () => seek(Number(slider.value), true);
  const slider = h("input", { type: "range", min: 0, max: last, value: 0, "aria-label": "Step", oninput: moved });
  const line = h("canvas", { class: "curve", role: "img", "aria-label": `Score over time, ${scores[last]} at the end` });
  const toggle = button("Play", () => run(!running), "main");
  const speeds = [1, 2, 4].map((times) => h("option", { value: times }, `${times}×`));
  const speed = h("select", { "aria-label": "Speed", onchange: pace }, speeds);
  const counter = h("output", {});
  let [step, running, due] = [0, false, 0];

  app.page("replay", `Replay: ${title(kitchen.name)}`, h("section", { class: "replay" },
    h("p", { class: "row" }, names.map((/** @type {string} */ name, /** @type {number} */ seat) =>
      h("span", {}, h("b", { class: `seat-${seat}` }, CHEFS[seat].name), ` ${name}`))),
    stage,
    h("div", { class: "card controls" }, slider, line,
      h("p", { class: "row" }, toggle, speed, counter, link("Download", file(game), { download: true })))));
  const board = new Board(stage, canvas, kitchen);
  const watch = new ResizeObserver(() => curve(line, scores, step));
  watch.observe(line);
  slider.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.code !== "Space") return;
    event.preventDefault();
    run(!running);
  });

  const tick = () => (1000 * app.setup.tick_seconds) / Number(speed.value);
  function pace() {
    board.tween = Math.min(100, 0.8 * tick());
    due = performance.now() + tick();
  }
  /** @param {number} next @param {boolean} [jump] */
  function seek(next, jump = false) {
    board.show(frames[next], jump || next - step !== 1);
    step = next;
    slider.value = String(step);
    slider.setAttribute("aria-valuetext", `Step ${step} of ${last}, score ${scores[step]}`);
    counter.textContent = `Step ${step} of ${last} · score ${scores[step]}`;
    curve(line, scores, step);
    note({ step, score: scores[step], phase: running ? "playing" : "paused" });
  }
  /** @param {boolean} on */
  function run(on) {
    running = on;
    toggle.textContent = on ? "Pause" : "Play";
    if (on && step === last) seek(0, true);
    pace();
    note({ phase: on ? "playing" : "paused" });
    if (on) requestAnimationFrame(frame);
  }
  /** @param {number} now */
  function frame(now) {
    if (!running) return;
    if (now >= due) {
      due = Math.max(due + tick(), now);
      seek(step + 1);
      if (step === last) return run(false);
    }
    requestAnimationFrame(frame);
  }
  app.leave(() => {
    running = false;
    board.close();
    watch.disconnect();
  });
  seek(0, true);
  pace();
}
