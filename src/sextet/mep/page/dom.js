/** Small helpers for building pages out of elements. Text from the server only ever becomes text nodes. */

/**
 * Makes an element; `on...` properties become listeners, true and false add or leave out an attribute.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...any} children elements and texts, or arrays of them; null and false are left out
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== false && child !== undefined));
  return element;
}

/** @param {string} text @param {(event: any) => any} onclick @param {string} [kind] "main" for what one came for */
export const button = (text, onclick, kind) => h("button", { type: "button", class: kind, onclick }, text);

/** A link that looks like a button. @param {string} text @param {string} href @param {object} [more] */
export const link = (text, href, more) => h("a", { class: "button", href, ...more }, text);

/** Says something to screen readers without moving the focus. @param {string} text */
export function say(text) {
  document.querySelector("#live").textContent = text;
}

/** Notes the state of the page where tests and other tools can read it. @param {Record<string, any>} facts */
export function note(facts) {
  for (const [name, value] of Object.entries(facts)) {
    if (value === null) delete document.documentElement.dataset[name];
    else document.documentElement.dataset[name] = String(value);
  }
}

/** @param {string} name such as "cramped_room" @returns {string} "Cramped room" */
export const title = (name) => (name.charAt(0).toUpperCase() + name.slice(1)).replaceAll("_", " ");

/**
 * Runs a button's work with the button switched off, and shows a failure in words beside it.
 * @param {HTMLButtonElement} button @param {HTMLElement} problem @param {() => Promise<any>} work
 */
export async function busy(button, problem, work) {
  button.disabled = true;
  problem.textContent = "";
  try {
    await work();
  } catch (error) {
    problem.textContent = /** @type {Error} */ (error).message;
  } finally {
    button.disabled = false;
  }
}
