/** The answers of a step: its groups by kind, and all answers to a prompt side by side. */
import { find, h, note, request, say } from "./base.js";
import { card, legend, untip, visible } from "./tokens.js";

/**
 * @typedef {{draw: number, problem: number, kind: string, trained: boolean, prompt: string, answer: string,
 *   answers: import("./tokens.js").Answer[]}} Group
 */

/** Filters: name, what the badge says, and what it means. */
const KINDS = /** @type {Record<string, [string, string]>} */ ({
  all: ["all", "every group"],
  mixed: ["mixed", "some answers are right and some are wrong: there is something to learn"],
  right: ["all right", "nothing to learn: every answer is right"],
  wrong: ["all wrong", "nothing to learn: no answer is right"],
  truncated: ["truncated", "an answer was cut off at the limit of length"],
  failed: ["failed", "the verifier came to no verdict on an answer"],
});
const SIGNS = { mixed: "±", right: "✓", wrong: "✗", failed: "⚠" };
const PAUSE = 120; // ms in which the slider may go on
const LONG = 1500; // characters of a prompt from which it is folded

/** @param {Group} group @param {string} kind */
function isA(group, kind) {
  if (kind === "truncated") return group.answers.some((answer) => !answer.stopped);
  return kind === "all" || kind === group.kind || (kind === "failed" && group.answers.some((answer) => answer.failure));
}

/** @param {Group} group @param {string} text in small letters */
const holds = (group, text) => [group.prompt, group.answer, ...group.answers.flatMap((answer) => [answer.text, answer.note ?? ""])]
  .some((place) => place.toLowerCase().includes(text));

/** How many characters texts have in common at their beginning, whole words only. @param {string[]} texts */
function common(texts) {
  let at = 0;
  while (at < texts[0].length && texts.every((text) => text[at] === texts[0][at])) at += 1;
  return texts.length < 2 ? 0 : texts[0].slice(0, at).search(/\s\S*$/) + 1;
}

/** A function that makes of each of these prompts what tells it from the others. @param {string[]} prompts */
export function telling(prompts) {
  const all = [...new Set(prompts)];
  const backwards = (/** @type {string} */ text) => text.split("").reverse().join("");
  const [before, after] = all.length ? [common(all), common(all.map(backwards))] : [0, 0];
  return (/** @type {string} */ prompt) => prompt.slice(before, prompt.length - after).trim().slice(0, 160) || prompt.slice(-160);
}

/** @param {string} kind */
const badge = (kind) => h("span", { class: `badge ${kind}` }, h("span", { "aria-hidden": "true" }, SIGNS[kind]), ` ${KINDS[kind]?.[0] ?? kind}`);

/** @param {Group} group */
const count = (group) => `${group.answers.filter((answer) => answer.right).length} of ${group.answers.length} right`;

/** Shows a group. @param {Group} group */
function whole(group) {
  const long = group.prompt.length > LONG;
  const prompt = h("p", { class: "text", dir: "auto" }, visible(group.prompt));
  return [
    h("div", { class: "card head" },
      h("h2", {}, badge(group.kind), ` ${count(group)}`),
      h("p", { class: "soft" }, `${group.trained ? "Trained on" : "Not trained on"}; problem ${group.problem}, draw ${group.draw}; ${KINDS[group.kind]?.[1] ?? ""}.`),
      h("h3", {}, "Prompt"),
      long ? h("details", {}, h("summary", {}, `${group.prompt.length.toLocaleString("en")} characters`), prompt) : prompt,
      h("p", {}, h("b", {}, "Right answer: "), h("bdi", { class: "gold" }, visible(group.answer)))),
    legend(),
    h("ol", { class: "answers" }, group.answers.map((answer, at) => card(answer, at + 1))),
  ];
}

/** @param {import("./app.js").View} view */
export async function samples({ part, facts, argument, place, signal, fail }) {
  let steps = facts.samples;
  if (steps.length === 0) {
    const none = facts.config.method === "ablate" ? "choose one of its trainings above"
      : facts.config.samples_kept ? "there are some after the first step" : "samples_kept was 0 in this training";
    place.append(h("p", { class: "card" }, `No answers were kept here: ${none}.`));
    return {};
  }
  const [linked, draw] = argument.split("/");
  let at = Math.max(0, argument === "" ? steps.length - 1 : steps.indexOf(Number(linked)));
  let chosen = draw === undefined ? -1 : Number(draw);
  let filter = "all";
  /** @type {Group[]} */
  let groups = [];
  let short = telling([]);
  let running = new AbortController();
  let showing = new AbortController();
  let timer = 0;
  signal.addEventListener("abort", () => [running, showing].forEach((one) => one.abort()));

  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: at, id: "step", oninput: () => go(Number(slider.value), PAUSE) });
  const number = h("output", { for: "step" });
  const move = (/** @type {number} */ by, /** @type {string} */ text, /** @type {string} */ label) =>
    h("button", { type: "button", "aria-label": label, onclick: () => go(at + by) }, text);
  const [back, next] = [move(-1, "‹", "Step before"), move(1, "›", "Next step")];
  const search = h("input", { type: "search", placeholder: "in prompts and answers", maxlength: 200, oninput: () => draw_list() });
  const chips = h("fieldset", { class: "chips" }, h("legend", { class: "unseen" }, "Groups shown"),
    Object.entries(KINDS).map(([kind, [word, help]]) => h("label", { class: "chip", title: help },
      h("input", { type: "radio", name: "filter", value: kind, checked: kind === filter, onchange: () => {
        filter = kind;
        draw_list();
      } }), word, h("span", { class: "count" }))));
  const list = h("fieldset", { class: "card list" });
  const detail = h("section", { class: "detail", "aria-label": "Group" });
  place.append(
    h("form", { class: "card bar", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
      h("div", { class: "steps" }, back, h("label", { for: "step" }, "Step ", number), slider, next),
      chips,
      h("label", { class: "search" }, "Search ", search)),
    h("div", { class: "columns" }, list, detail));

  /** Goes to a step by its place among those with samples. @param {number} place @param {number} [pause] */
  async function go(place, pause = 0) {
    at = Math.min(Math.max(place, 0), steps.length - 1);
    slider.value = String(at);
    slider.setAttribute("aria-valuetext", `step ${steps[at]}`);
    number.textContent = String(steps[at]);
    back.disabled = at === 0;
    next.disabled = at === steps.length - 1;
    running.abort();
    running = new AbortController();
    const mine = running.signal;
    clearTimeout(timer);
    await new Promise((then) => (timer = pause ? window.setTimeout(then, pause) : (then(null), 0)));
    note({ state: "loading" });
    try {
      groups = await request(`/api/samples?${new URLSearchParams({ part, step: String(steps[at]) })}`, { signal: mine });
      short = telling(groups.map((group) => group.prompt));
      for (const label of chips.querySelectorAll("label")) {
        const kind = label.querySelector("input").value;
        label.querySelector(".count").textContent = String(groups.filter((group) => isA(group, kind)).length);
      }
      await draw_list();
    } catch (error) {
      if (!mine.aborted) fail(error);
    }
  }

  /** Lists the groups under the filter, and shows the one that is chosen, or else the first. */
  async function draw_list() {
    const text = search.value.toLowerCase();
    const found = groups.filter((group) => isA(group, filter) && holds(group, text));
    const focused = list.contains(document.activeElement);
    if (!found.some((group) => group.draw === chosen)) chosen = found[0]?.draw ?? -1;
    list.replaceChildren(
      h("legend", { class: "unseen" }, "Groups"),
      h("p", { class: "soft" }, found.length === 1 ? "1 group" : `${found.length} groups`),
      ...found.map((group) => h("label", { class: "group" },
        h("input", { type: "radio", name: "group", value: group.draw, checked: group.draw === chosen, onchange: () => {
          chosen = group.draw;
          load();
        } }),
        h("span", { class: "row" }, badge(group.kind), h("span", {}, count(group)),
          group.answers.some((answer) => !answer.stopped) && h("span", { title: KINDS.truncated[1] }, "✂")),
        h("span", { class: "prompt", dir: "auto" }, visible(short(group.prompt))))));
    if (focused) list.querySelector(":checked")?.focus();
    note({ step: steps[at], groups: found.length, filter, state: "loading" });
    if (chosen === -1) {
      detail.replaceChildren(h("p", { class: "card" }, "No group of this step is like that."));
      say("no groups");
      return note({ draw: null, state: "done" });
    }
    await load();
  }

  /** Shows the chosen group. */
  async function load() {
    showing.abort();
    showing = new AbortController();
    const [mine, step] = [showing.signal, steps[at]];
    untip();
    try {
      const group = await request(`/api/samples?${new URLSearchParams({ part, step: String(step), draw: String(chosen) })}`, { signal: mine });
      detail.replaceChildren(...whole(group));
      history.replaceState(null, "", `#samples=${step}/${chosen}`);
      find("#problem").textContent = "";
      say(`step ${step}, ${KINDS[group.kind]?.[0]}, ${count(group)}`);
      note({ draw: chosen, state: "done" });
    } catch (error) {
      if (!mine.aborted) fail(error);
    }
  }

  addEventListener("keydown", (event) => {
    const target = /** @type {any} */ (event.target);
    const own = target.matches?.("input:not([name=group]), textarea, select");
    if (own || event.altKey || event.ctrlKey || event.metaKey || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    go(at + (event.key === "ArrowLeft" ? -1 : 1));
  }, { signal });

  await go(at);
  return {
    /** @param {import("./app.js").Facts} now */
    update(now) {
      const last = at === steps.length - 1;
      steps = now.samples;
      slider.max = String(steps.length - 1);
      if (last) go(steps.length - 1); // whoever looks at the newest goes on to do so
      else next.disabled = false;
    },
  };
}
