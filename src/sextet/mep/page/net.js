/**
 * Talking with the server: requests, and the line of a game that mends itself.
 *
 * @typedef {{x: number, y: number, facing: number, held: string|null}} Chef facing 0 to 3 is N S E W
 * @typedef {{name: string, width: number, height: number, grid: string[], starts: number[][], pots: number[][]}} Kitchen
 * @typedef {{step: number, score: number, time_left: number, phase: string, players: Chef[], event: string|null,
 *   counters: {x: number, y: number, object: string}[],
 *   pots: {x: number, y: number, onions: number, cooking: number}[]}} State
 * @typedef {{game: string, player: string, seat: number, invite?: string|null, study?: boolean, again?: object}} Ticket
 */
import { request as ask } from "./base.js";

/** One request; the answer's JSON. @param {string} path @param {object} [body] sent with POST if given */
export const request = (path, body) =>
  ask(path, body && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

const TICKET = "sextet.game";

/** The game this tab is in, which outlives a reload. @returns {Ticket|null} */
export function ticket() {
  try {
    return JSON.parse(sessionStorage.getItem(TICKET) ?? "null");
  } catch {
    return null;
  }
}

/** @param {Ticket|null} game */
export function keep(game) {
  if (game) sessionStorage.setItem(TICKET, JSON.stringify(game));
  else sessionStorage.removeItem(TICKET);
}

/** Why a closed line is not opened again, by its code. */
const FINAL = {
  4404: "This game is over, or the server does not know it any more.",
  4409: "This game goes on in another tab or window.",
};
const WAITS = [0.3, 0.6, 1.2, 2.5, 5, 5, 10, 10, 15, 15, 15, 15]; // seconds; the server ends a game after 120

const SILENCE = 3000; // milliseconds

/** The line of one player in one game; opened again with growing pauses whenever it breaks. */
export class Line {
  /**
   * @param {Ticket} game
   * @param {{message: (m: any) => void, trouble: (text: string) => void, lost: (text: string, code: number) => void}} on
   */
  constructor(game, on) {
    this.on = on;
    this.tries = 0;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    this.url = `${scheme}//${location.host}/api/games/${encodeURIComponent(game.game)}?player=${encodeURIComponent(game.player)}`;
    this.retry = () => this.open();
    addEventListener("online", this.retry);
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    if (this.closed || (this.socket && this.socket.readyState < WebSocket.CLOSING)) return;
    const socket = (this.socket = new WebSocket(this.url));
    const end = (/** @type {number} */ code) => {
      clearTimeout(this.silence);
      socket.onmessage = socket.onclose = null;
      if (!this.closed) this.broken(code);
    };
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      this.tries = 0;
      clearTimeout(this.silence);
      // A network can vanish without a word; a game being played is never silent.
      if (message.phase === "playing") this.silence = setTimeout(() => {
        socket.close();
        this.socket = null;
        end(0);
      }, SILENCE);
      this.on.message(message);
    };
    socket.onclose = (event) => end(event.code);
  }

  /** @param {number} code */
  broken(code) {
    if (FINAL[code] || this.tries >= WAITS.length) {
      this.close();
      this.on.lost(FINAL[code] ?? "The server cannot be reached any more. Check that it is running.", code);
      return;
    }
    const wait = WAITS[this.tries++];
    const why = code === 4429 ? "The server is full" : "The connection is lost";
    this.on.trouble(`${why}; trying again (${this.tries} of ${WAITS.length})`);
    this.timer = setTimeout(this.retry, 1000 * wait);
  }

  /** @param {object} message dropped while the line is broken */
  send(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    clearTimeout(this.silence);
    removeEventListener("online", this.retry);
    this.socket?.close();
  }
}
