/** Everything seen in a kitchen, in simple shapes. One unit is one cell; the origin is the centre of the cell. */

/** @typedef {CanvasRenderingContext2D} Pen */

const [INK, SKIN, HAIR] = ["#3b2f26", "#f2c9a0", "#6b4226"];
const TURN = 2 * Math.PI;
const WAYS = [[0, -1], [0, 1], [1, 0], [-1, 0]]; // N S E W
export const CHEFS = [
  { name: "blue", colour: "#2f6db5", dark: "#1d4a80" },
  { name: "red", colour: "#c0443c", dark: "#862a24" },
];

/** @param {number} x @param {number} y @param {number} rx @param {number} [ry] */
function oval(x, y, rx, ry = rx) {
  const shape = new Path2D();
  shape.ellipse(x, y, rx, ry, 0, 0, TURN);
  return shape;
}

/** Part of a circle; turns count from the right, clockwise. @param {number} y @param {number} r @param {number} from @param {number} to */
function arc(y, r, from, to) {
  const shape = new Path2D();
  shape.arc(0, y, r, from * TURN, to * TURN);
  return shape;
}

/** @param {number} x @param {number} y @param {number} w @param {number} h @param {number} [r] */
function box(x, y, w, h, r = 0) {
  const shape = new Path2D();
  shape.roundRect(x, y, w, h, r);
  return shape;
}

/** A path in the notation of SVG. @param {string} text */
const path = (text) => new Path2D(text);

/** @param {Pen} pen @param {Path2D} shape @param {string|null} fill @param {string|null} [line] @param {number} [width] */
function ink(pen, shape, fill, line = null, width = 0.022) {
  Object.assign(pen, { fillStyle: fill, strokeStyle: line, lineWidth: width });
  if (fill) pen.fill(shape);
  if (line) pen.stroke(shape);
}

/** Draws with another origin and scale. @param {Pen} pen @param {number} x @param {number} y @param {number} scale @param {() => void} draw */
export function at(pen, x, y, scale, draw) {
  pen.save();
  pen.translate(x, y);
  pen.scale(scale, scale);
  draw();
  pen.restore();
}

/**
 * Bold text around a point, with a rim if one is given.
 * @param {Pen} pen @param {string} text @param {number} x @param {number} y @param {number} size
 * @param {string} fill @param {string} [rim]
 */
export function words(pen, text, x, y, size, fill, rim) {
  at(pen, x, y, size / 100, () => {
    pen.font = "700 100px system-ui, sans-serif"; // browsers round fonts of less than a pixel
    Object.assign(pen, { textAlign: "center", textBaseline: "middle", lineWidth: 22, lineJoin: "round", strokeStyle: rim, fillStyle: fill });
    if (rim) pen.strokeText(text, 0, 0);
    pen.fillText(text, 0, 0);
  });
}

/** @param {Pen} pen */
export function onion(pen) {
  ink(pen, path("M0-.2C.03-.12.2-.1.19.04C.18.17.08.19 0 .19C-.08.19-.18.17-.19.04C-.2-.1-.03-.12 0-.2"), "#ebb93d", "#8a6410");
  ink(pen, path("M-.03-.12Q-.17.03-.05.17M0-.12V.17M.03-.12Q.17.03.05.17"), null, "#b9851b", 0.014);
  ink(pen, path("M-.035-.25L0-.18L.045-.26"), null, "#6f8f3a", 0.03);
}

/** @param {Pen} pen */
export function dish(pen) {
  ink(pen, oval(0, 0.015, 0.23, 0.215), "#0003");
  ink(pen, oval(0, 0, 0.22, 0.205), "#fff", "#77736c");
  ink(pen, oval(0, 0, 0.14, 0.128), "#f4f1ea", "#c9c4ba", 0.016);
}

/** @param {Pen} pen */
export function soup(pen) {
  dish(pen);
  ink(pen, oval(0, 0, 0.155, 0.142), "#d9822b", "#97500f", 0.018);
  for (const [x, y] of [[-0.06, -0.03], [0.05, 0.04], [0.04, -0.06]]) ink(pen, oval(x, y, 0.032, 0.026), "#f6cf78");
}

const ITEMS = { onion, dish, soup };

/** Draws an object by the protocol's name for it. @param {Pen} pen @param {string} name */
export const item = (pen, name) => ITEMS[name]?.(pen);

/** A worktop; `front` shows the cupboard below it. @param {Pen} pen @param {boolean} front */
function counter(pen, front) {
  ink(pen, box(-0.5, -0.5, 1, 1), "#b98b5b");
  ink(pen, box(-0.47, -0.47, 0.94, front ? 0.8 : 0.94, 0.07), "#cba377");
  if (!front) return;
  ink(pen, box(-0.5, 0.34, 1, 0.16), "#835d38");
  ink(pen, path("M-.5 .355H.5M-.08 .43H.08"), null, "#6b4a2b", 0.03);
}

/** @param {Pen} pen */
function crate(pen) {
  for (const [x, y] of [[-0.15, -0.14], [0.15, -0.14], [0, -0.19]]) at(pen, x, y, 0.85, () => onion(pen));
  ink(pen, box(-0.36, -0.08, 0.72, 0.38, 0.05), "#8b5a2b", "#57361a", 0.025);
  for (const y of [-0.03, 0.12]) ink(pen, box(-0.33, y, 0.66, 0.11, 0.02), "#a9713c");
  at(pen, 0, 0.11, 0.6, () => onion(pen));
}

/** @param {Pen} pen */
function dishes(pen) {
  ink(pen, box(-0.36, -0.3, 0.72, 0.6, 0.08), "#7d93a6", "#4e6273", 0.025);
  for (const y of [0.08, 0.01, -0.06]) at(pen, 0, y, 1.12, () => dish(pen));
}

/** The hatch where soups are served: a bell on a green mat. @param {Pen} pen */
function hatch(pen) {
  ink(pen, box(-0.42, -0.42, 0.84, 0.74, 0.08), "#5f9a66", "#3c6b43", 0.03);
  ink(pen, box(-0.36, -0.36, 0.72, 0.62, 0.05), null, "#8fc495", 0.02);
  ink(pen, box(-0.27, 0.08, 0.54, 0.08, 0.03), "#6d5a16");
  ink(pen, arc(0.08, 0.22, 0.5, 1), "#f0c94a", "#6d5a16", 0.025);
  ink(pen, arc(0.08, 0.15, 0.55, 0.7), null, "#fff3c4", 0.035);
  ink(pen, oval(0, -0.18, 0.045), "#f0c94a", "#6d5a16");
}

/** @param {Pen} pen */
function stove(pen) {
  ink(pen, box(-0.44, -0.44, 0.88, 0.76, 0.09), "#8d8d93", "#5b5b62", 0.03);
  ink(pen, oval(0, -0.06, 0.35), "#4b4b52");
}

const FIXTURES = { O: crate, D: dishes, S: hatch, P: stove };

/** Draws what does not move. @param {Pen} pen @param {string} mark of the grid @param {boolean} odd @param {boolean} front */
export function fixture(pen, mark, odd, front) {
  if (mark === " ") return ink(pen, box(-0.5, -0.5, 1, 1), odd ? "#e9dec9" : "#f2eadb", "#0000000f");
  counter(pen, front);
  FIXTURES[mark]?.(pen);
}

/**
 * A pot: its onions, a ring for the 20 steps of cooking, steam and a tick when it is ready.
 * @param {Pen} pen @param {number} onions @param {number} cooking @param {number} time in seconds, for the steam
 */
export function pot(pen, onions, cooking, time) {
  const ready = cooking >= 20;
  for (const x of [-0.4, 0.26]) ink(pen, box(x, -0.11, 0.14, 0.1, 0.03), "#2a2a2f");
  ink(pen, oval(0, -0.06, 0.31), "#3c3c42", "#1f1f23", 0.03);
  ink(pen, oval(0, -0.06, 0.235), ready ? "#e08a2e" : onions === 3 ? "#c9a25a" : "#26262a");
  const places = [[-0.095, 0], [0.095, 0], [0, -0.15]];
  for (const [x, y] of places.slice(0, ready ? 0 : onions)) at(pen, x, y, 0.5, () => onion(pen));
  if (onions === 3 && !ready) {
    ink(pen, oval(0, -0.06, 0.37), null, "#0006", 0.075);
    ink(pen, arc(-0.06, 0.37, -0.25, cooking / 20 - 0.25), null, "#ffd166", 0.06);
  }
  if (!ready) return;
  for (const [x, y] of [[-0.09, -0.1], [0.07, -0.02], [0.02, -0.16]]) ink(pen, oval(x, y, 0.035, 0.028), "#f8d892");
  pen.lineCap = "round";
  for (const x of [-0.13, 0, 0.13]) {
    const sway = 0.03 * Math.sin(4 * time + 9 * x);
    ink(pen, path(`M${x} -.22C${x + 0.05 + sway} -.29 ${x - 0.05 + sway} -.35 ${x + sway} -.43`), null, "#ffffffd9", 0.04);
  }
  ink(pen, oval(0.28, 0.17, 0.13), "#2e7d32", "#fff", 0.03);
  ink(pen, path("M.215 .175L.265 .225L.345 .12"), null, "#fff", 0.04);
}

/** Hats differ in shape, so that nobody needs the colours. @param {Pen} pen @param {number} seat */
function hat(pen, seat) {
  const { colour, dark } = CHEFS[seat];
  if (seat === 0) {
    ink(pen, path("M-.13-.2C-.3-.27-.2-.46-.08-.4C-.05-.5 .05-.5 .08-.4C.2-.46 .3-.27 .13-.2Z"), "#fff", INK);
    ink(pen, box(-0.145, -0.235, 0.29, 0.075, 0.02), colour, dark, 0.018);
  } else {
    ink(pen, path("M-.23-.2C-.27-.31 .02-.4 .2-.34C.33-.29 .26-.19 .15-.16C.02-.12-.19-.11-.23-.2Z"), colour, dark);
    ink(pen, oval(0.03, -0.365, 0.035), colour, dark, 0.018);
    ink(pen, box(-0.16, -0.215, 0.32, 0.06, 0.02), "#fff", dark, 0.016);
  }
}

/** A head in its hat, seen from where the kitchen is seen. @param {Pen} pen @param {number} seat @param {number} facing */
function head(pen, seat, facing) {
  const dx = WAYS[facing][0];
  for (const side of dx ? [-dx * 0.4] : [-1, 1]) ink(pen, oval(side * 0.17, -0.06, 0.04, 0.045), SKIN, INK, 0.018);
  ink(pen, oval(0, -0.09, 0.175, 0.165), facing === 0 ? HAIR : SKIN, INK);
  for (const x of [[], [-0.065, 0.065], [0.09], [-0.09]][facing]) ink(pen, oval(x, -0.08, 0.024, 0.034), INK);
  if (dx) ink(pen, oval(dx * 0.175, -0.04, 0.04, 0.035), "#e3ad7d", INK, 0.016);
  if (facing === 1) ink(pen, arc(-0.03, 0.05, 0.05, 0.45), null, INK, 0.02);
  hat(pen, seat);
}

/** Hands, and what they hold. @param {Pen} pen @param {number} facing @param {string|null} held */
function hands(pen, facing, held) {
  const [dx, dy] = WAYS[facing];
  for (const side of [-1, 1])
    ink(pen, oval(dx * 0.25 + side * (dy ? 0.22 : 0.02), 0.13 + (dx ? side * 0.08 : 0), 0.06), SKIN, INK, 0.018);
  const [x, y] = [[0.27, 0.02], [0, 0.2], [0.31, 0.13], [-0.31, 0.13]][facing];
  if (held) at(pen, x, y, 0.82, () => item(pen, held));
}

/**
 * A chef, and at the edge of the cell a pointer to what an action would touch.
 * @param {Pen} pen @param {number} seat @param {number} facing 0 to 3 is N S E W @param {string|null} held
 */
export function chef(pen, seat, facing, held) {
  const { colour, dark } = CHEFS[seat];
  const [dx, dy] = WAYS[facing];
  at(pen, 0, -0.06, 1.15, () => {
    ink(pen, oval(0, 0.37, 0.27, 0.09), "#0000002e");
    if (facing === 0) hands(pen, facing, held);
    ink(pen, box(-0.24, 0, 0.48, 0.38, 0.17), colour, dark, 0.025);
    if (facing !== 0) ink(pen, box(-0.14 + 0.08 * dx, 0.08, 0.28, 0.29, 0.07), "#fff", dark, 0.014);
    words(pen, String(seat + 1), 0.08 * dx, 0.25, 0.18, facing === 0 ? "#fff" : dark);
    head(pen, seat, facing);
    if (facing !== 0) hands(pen, facing, held);
  });
  if (held && facing !== 0) return; // what is held shows the way already
  at(pen, dx * 0.44, dy * 0.44, 1, () => {
    pen.rotate(Math.atan2(dy, dx));
    ink(pen, path("M.06 0L-.04-.085V.085Z"), colour, "#fff", 0.025);
  });
}

/** A ring on the floor, under one's own chef. @param {Pen} pen @param {number} seat */
export const ring = (pen, seat) => ink(pen, oval(0, 0.35, 0.38, 0.15), "#ffffffb0", CHEFS[seat].dark, 0.045);

/** A sign over one's own chef. @param {Pen} pen @param {number} seat */
export function you(pen, seat) {
  ink(pen, box(-0.2, -0.88, 0.4, 0.2, 0.08), CHEFS[seat].dark, "#fff", 0.02);
  words(pen, "YOU", 0, -0.773, 0.13, "#fff");
}
