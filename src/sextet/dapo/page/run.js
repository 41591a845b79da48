/** What a training was made with and what came of it. */
import { h } from "./base.js";
import { visible } from "./tokens.js";

/** Names of an ablation's rows. */
const ROWS = { grpo: "GRPO", filter: "overlong filtering", higher: "clip-higher", punish: "soft punishment", token: "token-level loss", dapo: "DAPO" };

/** The names in that of a part: of the run, the task and the row, the learning rate and the seed. @param {string} name */
const names = (name) => (/^(.*\/)?(\w+)-([a-z]+)-([\d.e+-]+)-(\d+)$/.exec(name) ?? []).slice(1);

/** What the row of an ablation is called; undefined for any other part. @param {string} name @returns {string|undefined} */
export const rowOf = (name) => ROWS[names(name)[2]];

/** What people call a part. @param {string} name */
export function title(name) {
  const [before, task, , rate, seed] = names(name);
  return rowOf(name) ? `${before ?? ""}${task}: ${rowOf(name)} (rate ${rate}, seed ${seed})` : name || "the whole run";
}

/** Nested settings by dotted names. @param {Record<string, any>} values @param {string} [before] @returns {[string, any][]} */
const flat = (values, before = "") => Object.entries(values).flatMap(([name, value]) =>
  value !== null && typeof value === "object" ? flat(value, `${before}${name}.`) : [[before + name, value]]);

/** A number, an interval or a text. @param {any} value */
function worth(value) {
  const short = (/** @type {any} */ number) => (typeof number === "number" ? Number(number.toPrecision(4)).toLocaleString("en") : String(number));
  if (value === null || typeof value !== "object") return short(value);
  const bounds = value.low === null || value.low === undefined ? "" : ` [${short(value.low)}, ${short(value.high)}]`;
  return `${short(value.mean)}${bounds}`;
}

/** @param {string} name @param {[any, any, any?][]} rows */
const table = (name, rows) => h("div", { class: "scroll" }, h("table", {}, h("caption", {}, name),
  h("tbody", {}, rows.map(([first, second, third]) =>
    h("tr", {}, h("th", { scope: "row" }, first), h("td", {}, second, third && h("span", { class: "soft" }, ` ${third}`)))))));

/** Shows results, warnings and settings. @param {import("./app.js").View} view */
export function about({ facts, place }) {
  const { results, config, method, warnings, seconds } = facts;
  /** @param {string} name @param {any} value */
  function setting(name, value) {
    const own = method[name.split(".").at(-1)];
    return value === null && own !== undefined ? [name, worth(own), "as the method has it"] : [name, value === null ? "–" : worth(value)];
  }
  place.append(
    h("section", { class: "card" },
      h("h2", {}, "Results"),
      Object.keys(results).length
        ? table("Mean and 95 % interval; shares in percent where there is an interval", Object.entries(results).map(([name, value]) => [name, worth(value)]))
        : h("p", {}, "There are none before the training is finished."),
      seconds && h("p", { class: "soft" }, `Trained in ${Math.round(seconds).toLocaleString("en")} s.`)),
    warnings.length === 0 ? "" : h("section", { class: "card" },
      h("h2", {}, "Warnings"),
      h("ul", {}, warnings.map((text) => h("li", {}, visible(text))))),
    h("section", { class: "card" },
      h("h2", {}, "Settings"),
      table("What this was trained with", flat(config).map(([name, value]) => /** @type {any} */ (setting(name, value))))));
}
