/** Asks the model: one prompt, several sampled answers side by side. */
import { find, h, note, request, say } from "./base.js";
import { telling } from "./samples.js";
import { card, legend, visible } from "./tokens.js";

/** @typedef {{examples: string[], characters: string|null, most_samples: number, most_new: number, max_tokens: number}} Model */

/** @param {import("./app.js").View} view */
export async function ask({ part, facts, place, signal, fail }) {
  if (facts.why_not) {
    place.append(h("p", { class: "card" }, `The model cannot be asked: ${facts.why_not}. If the training was stopped, go on with: `, h("code", {}, "sextet resume"), "."));
    return { update: (/** @type {any} */ now) => !now.why_not && dispatchEvent(new Event("hashchange")) };
  }
  find("#view").replaceChildren(h("p", { class: "card" }, "Loading the model…"));
  /** @type {Model} */
  const model = await request(`/api/model?${new URLSearchParams({ part })}`, { signal });
  const prompt = h("textarea", { id: "prompt", rows: 4, maxlength: 20000, spellcheck: "false", dir: "auto" });
  prompt.value = model.examples[0] ?? "";

  /** A slider with its number. @param {string} text @param {Record<string, any>} range @param {string} help */
  function slide(text, range, help) {
    const input = h("input", { type: "range", ...range, oninput: () => tell() });
    const output = h("output", {});
    const tell = () => (output.textContent = Number(input.value).toLocaleString("en"));
    tell();
    return { input, label: h("label", { class: "slide", title: help }, h("span", {}, text, " ", output), input) };
  }
  const samples = slide("Answers", { min: 1, max: model.most_samples, value: 4 }, "how many are sampled");
  const temperature = slide("Temperature", { min: 0, max: 2, step: 0.05, value: 1 }, "0: always the most probable token; 1: as in training; above: more surprises");
  const top = slide("Top-p", { min: 0.05, max: 1, step: 0.05, value: 1 }, "only from the most probable tokens that together have this probability");
  const length = h("input", { type: "number", min: 1, max: model.most_new, value: model.max_tokens, required: true, inputmode: "numeric" });
  const seed = h("input", { type: "number", min: 0, max: 2 ** 31 - 1, value: 0, required: true, inputmode: "numeric" });
  const button = h("button", { class: "main" }, "Ask");
  const again = h("button", { type: "button", onclick: () => {
    seed.value = String((Number(seed.value) + 1) % 2 ** 31);
    send();
  } }, "Ask again, with the next seed");
  const answers = h("section", { class: "detail", "aria-label": "Answers" });
  const short = telling(model.examples);
  const examples = model.examples.length > 0 && h("fieldset", { class: "examples" }, h("legend", {}, "Prompts of the task"),
    model.examples.map((text) => h("button", { type: "button", dir: "auto", title: "Take this prompt", onclick: () => {
      prompt.value = text;
      prompt.focus();
    } }, visible(short(text)))));
  place.append(
    h("form", { class: "card question", onsubmit: (/** @type {Event} */ event) => {
      event.preventDefault();
      send();
    } },
      h("label", { for: "prompt" }, "Prompt"), prompt,
      model.characters && h("p", { class: "soft" }, "This tiny model knows these characters only: ", h("code", {}, visible(model.characters).replace(/\n/g, "↵"))),
      examples,
      h("div", { class: "slides" }, samples.label, temperature.label, top.label,
        h("label", {}, "Most tokens ", length), h("label", {}, "Seed ", seed)),
      h("p", { class: "row" }, button, again),
      h("p", { class: "soft" }, "The same seed gives the same answers. Ctrl+Enter in the prompt asks. Probabilities are those at the temperature, before top-p.")),
    answers);
  prompt.addEventListener("keydown", (/** @type {any} */ event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  });

  async function send() {
    if (!place.querySelector("form").reportValidity()) return;
    const buttons = [button, again];
    buttons.forEach((one) => (one.disabled = true));
    answers.setAttribute("aria-busy", "true");
    find("#problem").textContent = "";
    note({ state: "asking" });
    const question = {
      part, prompt: prompt.value, samples: Number(samples.input.value), temperature: Number(temperature.input.value),
      top_p: Number(top.input.value), max_tokens: Number(length.value), seed: Number(seed.value),
    };
    try {
      const found = await request("/api/ask", {
        method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(question),
      });
      const right = found.answers.filter((/** @type {any} */ answer) => answer.right).length;
      const known = found.answer === null ? "This prompt is not a problem of the task, so nothing is judged."
        : `${right} of ${found.answers.length} right. `;
      answers.replaceChildren(
        h("p", {}, known, found.answer !== null && h("b", {}, "Right answer: "), found.answer !== null && h("bdi", { class: "gold" }, visible(found.answer))),
        legend(),
        h("ol", { class: "answers" }, found.answers.map((/** @type {any} */ answer, /** @type {number} */ at) => card(answer, at + 1))));
      say(`${found.answers.length} answers. ${known}`);
      note({ state: "done", answers: found.answers.length, seed: question.seed });
    } catch (error) {
      fail(error);
    } finally {
      buttons.forEach((one) => (one.disabled = false));
      answers.removeAttribute("aria-busy");
    }
  }
  return {};
}
