/** What every page needs: elements, requests, and words. Text from the server only ever becomes text nodes. */

const DRAWN = ["svg", "line"];

/**
 * Makes an element; `on...` properties become listeners, true and false add or leave out an attribute.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...any} children elements and texts, or arrays of them; null and false are left out
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const drawn = DRAWN.includes(tag);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== false && child !== undefined));
  return element;
}

/** The element of the page with this selector. @param {string} selector @returns {any} */
export const find = (selector) => document.querySelector(selector);

/** Says something to screen readers without moving the focus. @param {string} text */
export function say(text) {
  find("#live").textContent = text;
}

/** Notes the state of the page where tests and other tools can read it. @param {Record<string, any>} facts */
export function note(facts) {
  for (const [name, value] of Object.entries(facts)) {
    if (value === null) delete document.documentElement.dataset[name];
    else document.documentElement.dataset[name] = String(value);
  }
}

/** A failure whose message can be shown to people. */
export class Problem extends Error {
  /** @param {string} message @param {number} [status] of the answer; 0: there was none */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const ADVICE = {
  401: "Open the link with the token that the server printed.",
  403: "Open the page with the address that the server printed.",
  413: "This is too large for the server.",
  429: "The server is busy. Wait a moment and try again.",
};

/**
 * One request; the answer's JSON. Throws a Problem in words, or an AbortError.
 * @param {string} address @param {RequestInit} [options]
 */
export async function request(address, options) {
  let answer, data;
  try {
    answer = await fetch(address, options);
    data = await answer.json().catch((error) => {
      if (error.name === "AbortError") throw error; // given up while the answer was on its way
      return null;
    });
  } catch (error) {
    if (/** @type {Error} */ (error).name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Check that it is running, then try again.");
  }
  if (answer.ok && data) return data;
  const said = typeof data?.error === "string" ? data.error : ADVICE[answer.status];
  throw new Problem(said ?? `The server's answer cannot be read (status ${answer.status}). Try again.`, answer.status);
}
