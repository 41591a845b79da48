/** The settings of a search: cameras, ranking, and which stripes are drawn. */
import { h } from "./base.js";
import { branchName } from "./crops.js";

/** @typedef {import("./crops.js").Model} Model */

export class Settings {
  /** @param {HTMLElement} form @param {{search: () => void, draw: () => void}} on */
  constructor(form, on) {
    this.form = form;
    this.on = on;
    /** @type {Model} */
    this.model;
    /** @type {Set<number>} */
    this.cameras = new Set();
    this.rerank = false;
    /** @type {Set<string>} branches whose stripes are drawn */
    this.branches = new Set();
    this.cutHits = false;
    this.leftOut = false;
  }

  /** Offers what a model has. @param {Model} model */
  offer(model) {
    if (this.model?.version !== model.version) this.cameras = new Set(model.cameras);
    this.model = model;
    this.branches = new Set(model.branches);
    /** A checkbox for a member of a set. @param {Set<any>} set @param {any} item @param {string} text @param {() => void} then @param {any} [key] */
    const member = (set, item, text, then, key) => this.box(text, set.has(item), (on) => {
      if (on) set.add(item);
      else set.delete(item);
      then();
    }, key);
    /** @param {"rerank"|"cutHits"|"leftOut"} name @param {string} text @param {() => void} then */
    const flag = (name, text, then) => this.box(text, this[name], (on) => {
      this[name] = on;
      then();
    });
    /** @param {string} title @param {any[]} boxes */
    const group = (title, ...boxes) => h("fieldset", {}, h("legend", {}, title), boxes);
    this.form.replaceChildren(
      group("Cameras searched", ...model.cameras.map((camera) =>
        member(this.cameras, camera, camera < 0 ? "unknown" : String(camera + 1), this.on.search))),
      group("Ranking", flag("rerank", "re-rank by shared neighbours", this.on.search),
        flag("leftOut", "show those not counted", this.on.draw)),
      ...(model.branches.length === 0 ? [] : [group("Stripes drawn", ...model.branches.map((branch, number) =>
        member(this.branches, branch, branchName(branch), this.on.draw, h("span", { class: `key key-${number % 4}` }))),
      flag("cutHits", "on the gallery too", this.on.draw))]));
  }

  /** @param {string} text @param {boolean} checked @param {(on: boolean) => void} change @param {any} [key] */
  box(text, checked, change, key = null) {
    const onchange = (/** @type {any} */ event) => change(event.target.checked);
    return h("label", { class: "box" }, h("input", { type: "checkbox", checked, onchange }), key, text);
  }
}
