/** Answers with each token shaded by its probability; the number is told on hover, touch and keyboard focus. */
import { find, h } from "./base.js";

/**
 * @typedef {{text: string, pieces: string[], logp: (number|null)[], versions: number[], stopped: boolean,
 *   score?: number, reward?: number, penalty?: number, advantage?: number|null, right?: boolean|null, note?: string,
 *   failure?: string}} Answer
 */

const [HEAD, TAIL, MORE] = [400, 120, 2000]; // tokens of a long answer that are shown, and then at a time
const SHORT = 50; // tokens up to which the probability of the whole answer says something
/** Controls, and marks that turn the direction of text: shown by their codes, so that they do nothing. */
// eslint-disable-next-line no-control-regex
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** A text of which every character can be seen. @param {string} text */
export const visible = (text) =>
  text.replace(ODD, (odd) => `⟨${odd.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

/** A probability in words. @param {number|null} logp */
export function percent(logp) {
  if (logp === null || logp === undefined) return "unknown";
  const p = 100 * Math.exp(logp);
  if (p < 1e-6) return "under 0.000001 %";
  return `${p >= 99.95 ? "100" : p >= 10 ? p.toFixed(1) : p.toPrecision(2)} %`;
}

/** @param {Answer} answer @param {number} index */
function token(answer, index) {
  const [piece, logp] = [answer.pieces[index], answer.logp[index]];
  const last = index === answer.pieces.length - 1 && answer.stopped;
  const end = last && piece.trim() === "" ? "■" : "";
  const text = end || visible(piece).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t") || "▫";
  const element = h("span", { class: end ? "token end" : "token", "data-index": index, tabindex: -1 }, text);
  element.style.setProperty("--rare", String(logp === null ? 1 : 1 - Math.exp(logp)));
  return element;
}

/** What is told of a token. @param {Answer} answer @param {number} index */
function told(answer, index) {
  const version = answer.versions.length && new Set(answer.versions).size > 1 ? `, weights of step ${answer.versions[index]}` : "";
  const what = index === answer.pieces.length - 1 && answer.stopped ? "end of the answer" : `“${visible(answer.pieces[index]).slice(0, 60)}”`;
  return `${what}: ${percent(answer.logp[index])} (token ${index + 1} of ${answer.pieces.length}${version})`;
}

/** Hides the tip. */
export function untip() {
  find("#tip").hidden = true;
}

/** Shows a text beside an element. @param {Element} element @param {string} text */
function tip(element, text) {
  const box = find("#tip");
  box.textContent = text;
  box.hidden = false;
  const [at, size] = [element.getClientRects()[0], box.getBoundingClientRect()];
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - size.width - 8));
  const above = at.top - size.height - 6;
  box.style.left = `${left}px`;
  box.style.top = `${above > 4 ? above : at.bottom + 6}px`;
}

/**
 * The tokens of an answer. One of them is in the order of the Tab key; arrow keys, Home and End go on from there.
 * @param {Answer} answer @param {string} label
 */
export function tokens(answer, label) {
  const count = answer.pieces.length;
  const box = h("div", { class: "tokens", dir: "auto", role: "group", "aria-label": `${label}: tokens, to be read one by one with the arrow keys` });
  const range = (/** @type {number} */ from, /** @type {number} */ to) =>
    Array.from({ length: to - from }, (_, at) => token(answer, from + at));
  if (count <= HEAD + 2 * TAIL) {
    box.append(...range(0, count));
  } else {
    let open = HEAD;
    const more = h("button", { type: "button", class: "fold", onclick: () => {
      const next = Math.min(open + MORE, count - TAIL);
      const fresh = range(open, next);
      more.before(...fresh);
      open = next;
      if (open === count - TAIL) more.remove();
      else words();
      focus(fresh[0]);
    } });
    const words = () => {
      more.textContent = `… ${(count - TAIL - open).toLocaleString("en")} more tokens: show ${open + MORE < count - TAIL ? MORE.toLocaleString("en") : "them"} …`;
    };
    words();
    box.append(...range(0, HEAD), more, ...range(count - TAIL, count));
  }
  let current = box.querySelector(".token");
  current?.setAttribute("tabindex", "0");
  const focus = (/** @type {any} */ next) => {
    if (!next) return;
    current.setAttribute("tabindex", "-1");
    current = next;
    current.setAttribute("tabindex", "0");
    current.focus();
  };
  const tell = (/** @type {any} */ target) => {
    if (!target.classList.contains("token")) return;
    target.setAttribute("aria-describedby", "tip");
    tip(target, told(answer, Number(target.dataset.index)));
  };
  box.addEventListener("pointerover", (/** @type {any} */ event) => tell(event.target));
  box.addEventListener("pointerleave", untip);
  box.addEventListener("focusin", (/** @type {any} */ event) => tell(event.target));
  box.addEventListener("focusout", untip);
  box.addEventListener("pointerdown", (/** @type {any} */ event) => {
    if (event.target.classList.contains("token")) focus(event.target);
  });
  box.addEventListener("keydown", (/** @type {any} */ event) => {
    if (event.key === "Escape") return untip();
    const all = [...box.querySelectorAll(".token")];
    const at = all.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere the arrow keys change the step
    focus(all[to]);
  });
  return box;
}

/** A number of a reward or an advantage. @param {number|null|undefined} value */
const signed = (value) => (value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${Number(value.toFixed(3))}`);

/** Right, wrong, or why nothing is known. @param {Answer} answer */
export function verdict(answer) {
  if (answer.right === undefined) return ["unknown", "", ""];
  if (answer.failure) return ["failed", "⚠", `no verdict (${answer.failure})`];
  if (answer.right === null) return ["unknown", "?", "not judged"];
  return answer.right ? ["right", "✓", "right"] : ["wrong", "✗", "wrong"];
}

/** A card with all that is known of an answer. @param {Answer} answer @param {number} number from 1 */
export function card(answer, number) {
  const [look, sign, word] = verdict(answer);
  const label = `Answer ${number}`;
  const length = answer.pieces.length;
  const versions = [...new Set(answer.versions)].sort((a, b) => a - b);
  const sum = answer.logp.reduce((total, value) => total + (value ?? -Infinity), 0);
  const whole = length <= SHORT;
  const said = answer.text.replace(/^… /, "").trim(); // long ones come without their beginning
  const lossy = !answer.pieces.join("").trim().endsWith(said);
  /** @param {string} name @param {any} value @param {string} [help] */
  const fact = (name, value, help) => h("div", { title: help }, h("dt", {}, name), h("dd", {}, value));
  const judged = answer.reward !== undefined;
  return h("li", { class: `answer ${look}` },
    h("h3", {}, label, word && h("span", { class: "verdict" }, h("span", { "aria-hidden": "true" }, sign), ` ${word}`)),
    length ? tokens(answer, label) : h("p", { class: "soft" }, "(an empty answer)"),
    !answer.stopped && h("p", { class: "cut" }, "✂ cut off at the limit of length"),
    lossy && h("details", {}, h("summary", {}, "As text"), h("p", { class: "text", dir: "auto" }, visible(answer.text))),
    h("dl", {},
      judged && fact("advantage", signed(answer.advantage), "what the answer is pushed by; – if its group was not trained on"),
      judged && fact("reward", signed(answer.reward)),
      judged && fact("score", signed(answer.score), "of the verifier, before the length penalty"),
      judged && fact("length penalty", signed(answer.penalty)),
      fact("tokens", length.toLocaleString("en")),
      length > 0 && fact(whole ? "probability" : "… per token", percent(whole ? sum : sum / length), whole ? "of the whole answer" : "geometric mean"),
      versions.length > 1 && fact("weights of steps", `${versions[0]} to ${versions.at(-1)}`)),
    answer.note && h("p", { class: "why" }, h("b", {}, answer.failure ? "why: " : "verifier read: "), h("bdi", {}, visible(answer.note))));
}

/** What the shading means. */
export const legend = () => h("p", { class: "legend soft" }, "Each token is shaded by its probability:",
  ...["100 %", "50 %", "0 %"].map((text, at) => {
    const key = h("span", { class: "token" }, text);
    key.style.setProperty("--rare", String(at / 2));
    return key;
  }), "Point at one, or go to it with the keyboard, for the number.");
