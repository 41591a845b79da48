/** The canvas of a kitchen: whole pixels to a cell, crisp on any screen, moving smoothly between ticks. */
import { at, chef, fixture, item, pot, ring, words, you } from "./shapes.js";

/** @typedef {import("./net.js").Kitchen} Kitchen @typedef {import("./net.js").State} State */

const TWEEN = 100; // milliseconds
const FLASH = 1300;
const SIGNED = 12; // steps with a sign over one's own chef; the ring stays
export const still = matchMedia("(prefers-reduced-motion: reduce)");

/** The state of a kitchen before the game starts. @param {Kitchen} kitchen @returns {any} */
export const opening = (kitchen) => ({
  players: kitchen.starts.map(([x, y]) => ({ x, y, facing: 0, held: null })),
  pots: kitchen.pots.map(([x, y]) => ({ x, y, onions: 0, cooking: 0 })),
  counters: [],
});

export class Board {
  /**
   * Fills `frame`, whose size the page's style decides, and follows it.
   * @param {HTMLElement} frame @param {HTMLCanvasElement} canvas inside the frame
   * @param {Kitchen} kitchen @param {number|null} [seat] the chef marked "you"
   */
  constructor(frame, canvas, kitchen, seat = null) {
    this.frame = frame;
    this.canvas = canvas;
    this.kitchen = kitchen;
    this.seat = seat;
    this.cell = 0; // in pixels of the device
    this.ratio = 0; // of these to one of the page's
    /** @type {State} */
    this.state = this.before = opening(kitchen);
    this.since = 0;
    this.tween = TWEEN;
    /** @type {{x: number, y: number, until: number}|null} */
    this.flash = null;
    this.pen = canvas.getContext("2d");
    this.ground = document.createElement("canvas");
    this.watch = new ResizeObserver(() => this.fit());
    this.watch.observe(frame);
    this.fit();
  }

  /** Chooses the largest whole number of device pixels to a cell. */
  fit() {
    const { width, height, grid } = this.kitchen;
    const ratio = devicePixelRatio || 1;
    const room = Math.min(this.frame.clientWidth / width, this.frame.clientHeight / height);
    const cell = Math.max(8, Math.floor(room * ratio));
    if (cell === this.cell && ratio === this.ratio) return;
    this.cell = cell;
    this.ratio = ratio;
    for (const canvas of [this.canvas, this.ground]) {
      canvas.width = cell * width;
      canvas.height = cell * height;
    }
    this.canvas.style.width = `${(cell * width) / ratio}px`;
    this.canvas.style.height = `${(cell * height) / ratio}px`;
    const pen = this.ground.getContext("2d");
    grid.forEach((row, y) => [...row].forEach((mark, x) => {
      const front = grid[y + 1]?.[x] === " ";
      at(pen, (x + 0.5) * cell, (y + 0.5) * cell, cell, () => fixture(pen, mark, (x + y) % 2 === 1, front));
    }));
    this.draw();
  }

  /** @param {State} state @param {boolean} [jump] without movement between, as after a scrub */
  show(state, jump = false) {
    const server = state.players.find((chef, seat) => this.state.players[seat].held === "soup" && !chef.held);
    this.before = jump || still.matches ? state : this.state;
    this.state = state;
    this.since = performance.now();
    if (state.event === "delivered" && server) {
      const [dx, dy] = [[0, -1], [0, 1], [1, 0], [-1, 0]][server.facing];
      this.flash = { x: server.x + dx, y: server.y + dy, until: this.since + FLASH };
    } else if (jump) this.flash = null;
    this.run();
  }

  /** Draws until nothing moves. */
  run() {
    if (this.frameRequest || !this.frame.isConnected) return;
    this.frameRequest = requestAnimationFrame(() => {
      this.frameRequest = 0;
      this.draw();
      const now = performance.now();
      const steam = !still.matches && this.state.pots.some((pot) => pot.cooking >= 20);
      if (steam || now < this.since + this.tween || (this.flash && now < this.flash.until)) this.run();
      else if (this.flash) {
        this.flash = null;
        this.draw();
      }
    });
  }

  draw() {
    if (this.ratio !== (devicePixelRatio || 1)) return this.fit(); // moved to another screen
    const { pen, cell, state, before } = this;
    const now = performance.now();
    const part = Math.min(1, (now - this.since) / this.tween);
    /** @param {number} x @param {number} y @param {() => void} draw */
    const put = (x, y, draw) => at(pen, (x + 0.5) * cell, (y + 0.5) * cell, cell, draw);
    pen.drawImage(this.ground, 0, 0);
    for (const { x, y, object } of state.counters) put(x, y - 0.06, () => item(pen, object));
    const time = still.matches ? 0 : now / 1000;
    for (const { x, y, onions, cooking } of state.pots) put(x, y, () => pot(pen, onions, cooking, time));
    const places = state.players.map((player, seat) => {
      const old = before.players[seat];
      const near = Math.abs(old.x - player.x) + Math.abs(old.y - player.y) === 1;
      return near ? [old.x + (player.x - old.x) * part, old.y + (player.y - old.y) * part] : [player.x, player.y];
    });
    const order = [0, 1].sort((a, b) => places[a][1] - places[b][1]);
    for (const seat of order) {
      const [x, y] = places[seat];
      if (seat === this.seat) put(x, y, () => ring(pen, seat));
      put(x, y - 0.04, () => chef(pen, seat, state.players[seat].facing, state.players[seat].held));
    }
    if (this.seat !== null && !(state.step > SIGNED) && cell > 30 * this.ratio) {
      const [x, y] = places[this.seat];
      put(x, y, () => you(pen, this.seat));
    }
    if (this.flash && now < this.flash.until) {
      const rise = still.matches ? 0.5 : 1 - (this.flash.until - now) / FLASH;
      put(this.flash.x, this.flash.y - rise * 0.5, () => words(pen, "+20", 0, 0, 0.42, "#fff", "#1d4d22"));
    }
  }

  close() {
    this.watch.disconnect();
    cancelAnimationFrame(this.frameRequest);
  }
}
