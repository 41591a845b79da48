/** Everything seen in a kitchen, in simple shapes. One unit is one cell; the origin is the centre of the cell. */

const INK = "#3b2f26";
const TAU = 2 * Math.PI;
export const CHEFS = [
  { name: "blue", colour: "#2f6db5", dark: "#1d4a80" },
  { name: "red", colour: "#c0443c", dark: "#862a24" },
];
const WAYS = [[0, -1], [0, 1], [1, 0], [-1, 0]]; // N S E W

/** @typedef {CanvasRenderingContext2D} Pen */

/** @param {Pen} pen @param {string|null} fill @param {string|null} [line] @param {number} [width] */
function ink(pen, fill, line = null, width = 0.02) {
  if (fill) {
    pen.fillStyle = fill;
    pen.fill();
  }
  if (line) {
    pen.strokeStyle = line;
    pen.lineWidth = width;
    pen.stroke();
  }
}

/** @param {Pen} pen @param {number} x @param {number} y @param {number} rx @param {number} [ry] */
function oval(pen, x, y, rx, ry = rx) {
  pen.beginPath();
  pen.ellipse(x, y, rx, ry, 0, 0, TAU);
}

/** @param {Pen} pen @param {number} x @param {number} y @param {number} w @param {number} h @param {number} r */
function box(pen, x, y, w, h, r) {
  pen.beginPath();
  pen.roundRect(x, y, w, h, r);
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
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    Object.assign(pen, { lineWidth: 22, lineJoin: "round", strokeStyle: rim, fillStyle: fill });
    if (rim) pen.strokeText(text, 0, 0);
    pen.fillText(text, 0, 0);
  });
}

/** @param {Pen} pen */
export function onion(pen) {
  pen.beginPath();
  pen.moveTo(0, -0.2);
  pen.bezierCurveTo(0.03, -0.12, 0.2, -0.1, 0.19, 0.04);
  pen.bezierCurveTo(0.18, 0.17, 0.08, 0.19, 0, 0.19);
  pen.bezierCurveTo(-0.08, 0.19, -0.18, 0.17, -0.19, 0.04);
  pen.bezierCurveTo(-0.2, -0.1, -0.03, -0.12, 0, -0.2);
  ink(pen, "#ebb93d", "#8a6410", 0.022);
  for (const bend of [-0.1, 0, 0.1]) {
    pen.beginPath();
    pen.moveTo(bend * 0.3, -0.12);
    pen.quadraticCurveTo(bend * 1.7, 0.03, bend * 0.5, 0.17);
    ink(pen, null, "#b9851b", 0.014);
  }
  pen.beginPath();
  pen.moveTo(-0.035, -0.25);
  pen.lineTo(0, -0.18);
  pen.lineTo(0.045, -0.26);
  ink(pen, null, "#6f8f3a", 0.03);
}

/** @param {Pen} pen */
export function dish(pen) {
  oval(pen, 0, 0.015, 0.23, 0.215);
  ink(pen, "#0003");
  oval(pen, 0, 0, 0.22, 0.205);
  ink(pen, "#fff", "#77736c", 0.022);
  oval(pen, 0, 0, 0.14, 0.128);
  ink(pen, "#f4f1ea", "#c9c4ba", 0.016);
}

/** @param {Pen} pen */
export function soup(pen) {
  dish(pen);
  oval(pen, 0, 0, 0.155, 0.142);
  ink(pen, "#d9822b", "#97500f", 0.018);
  for (const [x, y] of [[-0.06, -0.03], [0.05, 0.04], [0.04, -0.06]]) {
    oval(pen, x, y, 0.032, 0.026);
    ink(pen, "#f6cf78");
  }
}

const ITEMS = { onion, dish, soup };

/** Draws an object by the protocol's name for it. @param {Pen} pen @param {string} name */
export const item = (pen, name) => ITEMS[name]?.(pen);

/** @param {Pen} pen @param {boolean} odd */
export function floor(pen, odd) {
  pen.fillStyle = odd ? "#e9dec9" : "#f2eadb";
  pen.fillRect(-0.5, -0.5, 1, 1);
  pen.strokeStyle = "#0000000f";
  pen.lineWidth = 0.02;
  pen.strokeRect(-0.5, -0.5, 1, 1);
}

/** A worktop; `front` shows the cupboard below it. @param {Pen} pen @param {boolean} front */
function counter(pen, front) {
  pen.fillStyle = "#b98b5b";
  pen.fillRect(-0.5, -0.5, 1, 1);
  box(pen, -0.47, -0.47, 0.94, front ? 0.8 : 0.94, 0.07);
  ink(pen, "#cba377");
  if (!front) return;
  pen.fillStyle = "#835d38";
  pen.fillRect(-0.5, 0.34, 1, 0.16);
  pen.fillStyle = "#6b4a2b";
  pen.fillRect(-0.5, 0.34, 1, 0.03);
  pen.fillRect(-0.08, 0.42, 0.16, 0.025);
}

/** @param {Pen} pen */
function crate(pen) {
  for (const [x, y] of [[-0.15, -0.14], [0.15, -0.14], [0, -0.19]]) at(pen, x, y, 0.85, () => onion(pen));
  box(pen, -0.36, -0.08, 0.72, 0.38, 0.05);
  ink(pen, "#8b5a2b", "#57361a", 0.025);
  for (const y of [-0.03, 0.12]) {
    box(pen, -0.33, y, 0.66, 0.11, 0.02);
    ink(pen, "#a9713c");
  }
  at(pen, 0, 0.11, 0.6, () => onion(pen));
}

/** @param {Pen} pen */
function dishes(pen) {
  box(pen, -0.36, -0.3, 0.72, 0.6, 0.08);
  ink(pen, "#7d93a6", "#4e6273", 0.025);
  for (const y of [0.08, 0.01, -0.06]) at(pen, 0, y, 1.12, () => dish(pen));
}

/** The hatch where soups are served: a bell on a green mat. @param {Pen} pen */
function hatch(pen) {
  box(pen, -0.42, -0.42, 0.84, 0.74, 0.08);
  ink(pen, "#5f9a66", "#3c6b43", 0.03);
  box(pen, -0.36, -0.36, 0.72, 0.62, 0.05);
  ink(pen, null, "#8fc495", 0.02);
  box(pen, -0.27, 0.08, 0.54, 0.08, 0.03);
  ink(pen, "#6d5a16");
  pen.beginPath();
  pen.arc(0, 0.08, 0.22, Math.PI, 0);
  ink(pen, "#f0c94a", "#6d5a16", 0.025);
  pen.beginPath();
  pen.arc(0, 0.08, 0.15, 1.1 * Math.PI, 1.4 * Math.PI);
  ink(pen, null, "#fff3c4", 0.035);
  oval(pen, 0, -0.18, 0.045);
  ink(pen, "#f0c94a", "#6d5a16", 0.022);
}

/** @param {Pen} pen */
function stove(pen) {
  box(pen, -0.44, -0.44, 0.88, 0.76, 0.09);
  ink(pen, "#8d8d93", "#5b5b62", 0.03);
  oval(pen, 0, -0.06, 0.35);
  ink(pen, "#4b4b52");
}

/** Draws what does not move. @param {Pen} pen @param {string} mark of the grid @param {boolean} odd @param {boolean} front */
export function fixture(pen, mark, odd, front) {
  if (mark === " ") return floor(pen, odd);
  counter(pen, front);
  ({ O: crate, D: dishes, S: hatch, P: stove })[mark]?.(pen);
}

/**
 * A pot: its onions, a ring for the 20 steps of cooking, steam and a tick when it is ready.
 * @param {Pen} pen @param {number} onions @param {number} cooking @param {number} time in seconds, for the steam
 */
export function pot(pen, onions, cooking, time) {
  const ready = cooking >= 20;
  for (const x of [-0.33, 0.33]) {
    box(pen, x - 0.07, -0.11, 0.14, 0.1, 0.03);
    ink(pen, "#2a2a2f");
  }
  oval(pen, 0, -0.06, 0.31);
  ink(pen, "#3c3c42", "#1f1f23", 0.03);
  oval(pen, 0, -0.06, 0.235);
  ink(pen, ready ? "#e08a2e" : onions === 3 ? "#c9a25a" : "#26262a");
  const places = [[-0.095, 0], [0.095, 0], [0, -0.15]];
  for (const [x, y] of places.slice(0, ready ? 0 : onions)) at(pen, x, y, 0.5, () => onion(pen));
  if (onions === 3 && !ready) {
    pen.beginPath();
    pen.arc(0, -0.06, 0.37, 0, TAU);
    ink(pen, null, "#0006", 0.075);
    pen.beginPath();
    pen.arc(0, -0.06, 0.37, -TAU / 4, -TAU / 4 + (TAU * cooking) / 20);
    ink(pen, null, "#ffd166", 0.06);
  }
  if (!ready) return;
  for (const [x, y] of [[-0.09, -0.1], [0.07, -0.02], [0.02, -0.16]]) {
    oval(pen, x, y, 0.035, 0.028);
    ink(pen, "#f8d892");
  }
  pen.lineCap = "round";
  for (const x of [-0.13, 0, 0.13]) {
    const sway = 0.03 * Math.sin(4 * time + 9 * x);
    pen.beginPath();
    pen.moveTo(x, -0.22);
    pen.bezierCurveTo(x + 0.05 + sway, -0.29, x - 0.05 + sway, -0.35, x + sway, -0.43);
    ink(pen, null, "#ffffffd9", 0.04);
  }
  oval(pen, 0.28, 0.17, 0.13);
  ink(pen, "#2e7d32", "#fff", 0.03);
  pen.beginPath();
  pen.moveTo(0.215, 0.175);
  pen.lineTo(0.265, 0.225);
  pen.lineTo(0.345, 0.12);
  ink(pen, null, "#fff", 0.04);
}

/** Hats differ in shape, so that nobody needs the colours. @param {Pen} pen @param {number} seat */
function hat(pen, seat) {
  const { colour, dark } = CHEFS[seat];
  if (seat === 0) {
    pen.beginPath();
    pen.moveTo(-0.13, -0.2);
    pen.bezierCurveTo(-0.3, -0.27, -0.2, -0.46, -0.08, -0.4);
    pen.bezierCurveTo(-0.05, -0.5, 0.05, -0.5, 0.08, -0.4);
    pen.bezierCurveTo(0.2, -0.46, 0.3, -0.27, 0.13, -0.2);
    pen.closePath();
    ink(pen, "#fff", INK, 0.022);
    box(pen, -0.145, -0.235, 0.29, 0.075, 0.02);
    ink(pen, colour, dark, 0.018);
    return;
  }
  pen.beginPath();
  pen.ellipse(0.02, -0.235, 0.25, 0.115, -0.12, 0, TAU);
  ink(pen, colour, dark, 0.022);
  oval(pen, 0.03, -0.345, 0.035);
  ink(pen, colour, dark, 0.018);
  box(pen, -0.16, -0.215, 0.32, 0.06, 0.02);
  ink(pen, "#fff", dark, 0.016);
}

/** A head in its hat, seen from where the kitchen is seen. @param {Pen} pen @param {number} seat @param {number} facing */
function head(pen, seat, facing) {
  const dx = WAYS[facing][0];
  for (const side of dx ? [-dx * 0.4] : [-1, 1]) {
    oval(pen, side * 0.17, -0.06, 0.04, 0.045);
    ink(pen, "#f2c9a0", INK, 0.018);
  }
  oval(pen, 0, -0.09, 0.175, 0.165);
  ink(pen, facing === 0 ? "#6b4226" : "#f2c9a0", INK, 0.022);
  for (const side of facing === 1 ? [-1, 1] : facing === 0 ? [] : [0]) {
    oval(pen, side * 0.065 + dx * 0.09, -0.08, 0.024, 0.034);
    ink(pen, INK);
  }
  if (dx) {
    oval(pen, dx * 0.175, -0.04, 0.04, 0.035);
    ink(pen, "#e3ad7d", INK, 0.016);
  }
  if (facing === 1) {
    pen.beginPath();
    pen.arc(0, -0.03, 0.05, 0.3, Math.PI - 0.3);
    ink(pen, null, INK, 0.02);
  }
  hat(pen, seat);
}

/** Hands, and what they hold. @param {Pen} pen @param {number} facing @param {string|null} held */
function hands(pen, facing, held) {
  const [dx, dy] = WAYS[facing];
  for (const side of [-1, 1]) {
    oval(pen, dx * 0.25 + side * (dy ? 0.22 : 0.02), 0.13 + (dx ? side * 0.08 : 0), 0.06);
    ink(pen, "#f2c9a0", INK, 0.018);
  }
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
    oval(pen, 0, 0.37, 0.27, 0.09);
    ink(pen, "#0000002e");
    if (facing === 0) hands(pen, facing, held);
    box(pen, -0.24, 0, 0.48, 0.38, 0.17);
    ink(pen, colour, dark, 0.025);
    if (facing !== 0) {
      box(pen, -0.14 + 0.08 * dx, 0.08, 0.28, 0.29, 0.07);
      ink(pen, "#fff", dark, 0.014);
    }
    words(pen, String(seat + 1), 0.08 * dx, 0.25, 0.18, facing === 0 ? "#fff" : dark);
    head(pen, seat, facing);
    if (facing !== 0) hands(pen, facing, held);
  });
  if (held && facing !== 0) return; // what is held shows the way already
  at(pen, dx * 0.44, dy * 0.44, 1, () => {
    pen.rotate(Math.atan2(dy, dx));
    pen.beginPath();
    pen.moveTo(0.06, 0);
    pen.lineTo(-0.04, -0.085);
    pen.lineTo(-0.04, 0.085);
    pen.closePath();
    ink(pen, colour, "#fff", 0.025);
  });
}

/** A sign over one's own chef. @param {Pen} pen @param {number} seat */
export function you(pen, seat) {
  box(pen, -0.2, -0.88, 0.4, 0.2, 0.08);
  ink(pen, CHEFS[seat].dark, "#fff", 0.02);
  words(pen, "YOU", 0, -0.773, 0.13, "#fff");
}
