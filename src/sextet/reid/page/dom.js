/** Small helpers: elements, requests, and what screen readers hear. Text from the server only becomes text nodes. */

/**
 * Makes an element; `on...` properties become listeners, true and false add or leave out an attribute.
 * @param {string} tag @param {Record<string, any>} [props]
 * @param {...any} children elements and texts, or arrays of them; null and false are left out
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const drawn = ["svg", "line"].includes(tag);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== false));
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
  for (const [name, value] of Object.entries(facts)) document.documentElement.dataset[name] = String(value);
}

/** A failure whose message can be shown to people. */
export class Problem extends Error {}

const ADVICE = {
  401: "Open the link with the token that the server printed.",
  413: "This picture is too large for the server.",
  429: "The server is busy. Wait a moment and try again.",
};

/**
 * One request; the answer's JSON. Throws a Problem in words, or an AbortError.
 * @param {string} path @param {URLSearchParams} [asked] @param {RequestInit} [options]
 */
export async function request(path, asked, options) {
  let answer, data;
  try {
    answer = await fetch(`/api/${path}?${asked ?? ""}`, options);
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
  throw new Problem(said ?? `The server's answer cannot be read (status ${answer.status}). Try again.`);
}
