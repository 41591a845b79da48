/** Keys and touch become actions: 0 to 3 move N S E W, 4 stays, 5 interacts. */
import { h } from "./base.js";
import { button } from "./dom.js";

export const STAY = 4;
export const INTERACT = 5;
const KEYS = {
  ArrowUp: 0, KeyW: 0, ArrowDown: 1, KeyS: 1, ArrowRight: 2, KeyD: 2, ArrowLeft: 3, KeyA: 3,
  KeyP: STAY, Space: INTERACT, Enter: INTERACT, NumpadEnter: INTERACT,
};
const CONTROLS = "button, a, input, select, textarea, summary";

/**
 * Sends an action the moment a key goes down, and again each tick while it is held. A key let go within one tick
 * acts once, wherever in the tick it was pressed: repeats start after `tick` seconds, for interacting after three.
 */
export class Input {
  /** @param {(action: number) => void} send */
  constructor(send) {
    this.send = send;
    this.tick = 0.15;
    /** @type {{source: any, action: number, since: number}[]} the newest last */
    this.held = [];
    this.stop = new AbortController();
    const listen = { signal: this.stop.signal };
    addEventListener("keydown", (event) => this.key(event), listen);
    addEventListener("keyup", (event) => this.release(event.code), listen);
    addEventListener("blur", () => this.clear(), listen);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const action = KEYS[event.code];
    const target = /** @type {Element} */ (event.target);
    if (action === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.matches("input, select, textarea") || (action === INTERACT && target.matches(CONTROLS))) return;
    event.preventDefault();
    if (!event.repeat) this.press(event.code, action);
  }

  /** @param {any} source what is pressed @param {number} action */
  press(source, action) {
    this.held = this.held.filter((item) => item.source !== source);
    this.held.push({ source, action, since: performance.now() });
    this.send(action);
  }

  /** @param {any} source */
  release(source) {
    this.held = this.held.filter((item) => item.source !== source);
  }

  /** To be called at every new state of the game. */
  repeat() {
    clearTimeout(this.timer);
    const last = this.held.at(-1);
    if (!last) return;
    const hold = 1000 * this.tick * (last.action === INTERACT ? 3 : 0.95);
    const wait = last.since + hold - performance.now();
    if (wait <= 0) this.send(last.action);
    else this.timer = setTimeout(() => this.held.at(-1) === last && this.send(last.action), wait);
  }

  clear() {
    this.held = [];
    clearTimeout(this.timer);
  }

  close() {
    this.clear();
    this.stop.abort();
  }
}

/**
 * Buttons for thumbs. The cross follows a sliding thumb; each part is also a button of its own.
 * @param {Input} input
 */
export function touchControls(input) {
  const names = ["Up", "Down", "Right", "Left"];
  const arrows = names.map((name, action) =>
    h("button", { type: "button", class: `arrow ${name.toLowerCase()}`, "aria-label": name, onclick: once(action) }, "▲▼▶◀"[action]));
  const cross = h("div", { class: "cross", role: "group", "aria-label": "Move" }, arrows);
  const act = button("Take / put", once(INTERACT), "act");

  /** A click without a pointer: from a keyboard or an assistive tool. @param {number} action */
  function once(action) {
    return (/** @type {MouseEvent} */ event) => event.detail === 0 && input.send(action);
  }
  let current = -1;
  /** @param {PointerEvent} event */
  function steer(event) {
    const box = cross.getBoundingClientRect();
    const x = event.clientX - box.left - box.width / 2;
    const y = event.clientY - box.top - box.height / 2;
    const action = Math.abs(y) > Math.abs(x) ? (y < 0 ? 0 : 1) : x > 0 ? 2 : 3;
    if (action === current) return;
    current = action;
    arrows.forEach((arrow, index) => arrow.classList.toggle("pressed", index === action));
    input.press(cross, action);
  }
  function letGo() {
    current = -1;
    arrows.forEach((arrow) => arrow.classList.remove("pressed"));
    input.release(cross);
  }
  cross.addEventListener("pointerdown", (event) => {
    cross.setPointerCapture(event.pointerId);
    steer(event);
  });
  cross.addEventListener("pointermove", (event) => current >= 0 && steer(event));
  act.addEventListener("pointerdown", () => input.press(act, INTERACT));
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    cross.addEventListener(end, letGo);
    act.addEventListener(end, () => input.release(act));
  }
  for (const part of [cross, act]) part.addEventListener("contextmenu", (event) => event.preventDefault());
  const touch = h("div", { class: "touch" }, cross, act);
  touch.addEventListener("mousedown", (event) => event.preventDefault()); // the focus stays where it is
  return touch;
}
