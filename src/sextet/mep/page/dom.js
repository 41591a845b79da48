/** Buttons, links and words of this page. */
import { h } from "./base.js";

/** @param {string} text @param {(event: any) => any} onclick @param {string} [kind] "main" for what one came for */
export const button = (text, onclick, kind) => h("button", { type: "button", class: kind, onclick }, text);

/** A link that looks like a button. @param {string} text @param {string} href @param {object} [more] */
export const link = (text, href, more) => h("a", { class: "button", href, ...more }, text);

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
