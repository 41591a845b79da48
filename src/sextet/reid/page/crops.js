/** Pictures of people, the stripes that the model cuts them into, and the cards of the ranking. */
import { h } from "./base.js";

/**
 * @typedef {Record<string, number[]>} Cuts rows from 0 to 1 by branch, the edges included
 * @typedef {{index: number, id: number, camera: number, distance: number, rank: number|null,
 *   mark: "right"|"wrong"|"left_out"|null}} Hit
 * @typedef {{name: string, branches: string[], data: string, version: string, size: number[], query: number,
 *   gallery: number, cameras: number[]}} Model
 */

export const MARKS = {
  right: ["✓", "same person"],
  wrong: ["✗", "someone else"],
  left_out: ["–", "same camera, not counted"],
};

/** @param {number} camera */
export const cameraName = (camera) => (camera < 0 ? "camera unknown" : `camera ${camera + 1}`);

/** @param {number} id */
export const personName = (id) => (id === 0 ? "a passer-by" : `person ${id}`);

/** @param {string} branch such as "part-3" */
export const branchName = (branch) => branch.replace(/^\w+-(\d+)$/, "$1 stripes");

/**
 * A picture of a split. @param {Model} model @param {string} split @param {number} index @param {string} alt
 */
export function crop(model, split, index, alt) {
  const asked = new URLSearchParams({ model: model.name, v: model.version });
  const [height, width] = model.size;
  return h("img", { src: `/api/crop/${split}/${index}.png?${asked}`, alt, width, height, loading: "lazy", decoding: "async" });
}

/** A frame around a picture, for stripes to be drawn on. @param {any} picture */
export const frame = (picture) => h("div", { class: "frame" }, picture);

/**
 * Draws the rows at which the branches cut a picture; each branch has its colour and dashes.
 * @param {HTMLElement} frame @param {Cuts} cuts @param {string[]} branches all of the model @param {Set<string>} shown
 */
export function drawCuts(frame, cuts, branches, shown) {
  frame.querySelector("svg")?.remove();
  const lines = branches.flatMap((branch, number) =>
    !shown.has(branch) ? [] : (cuts[branch] ?? []).slice(1, -1).flatMap((row) =>
      ["under", `branch-${number % 4}`].map((look) =>
        h("line", { x1: 0, x2: 1, y1: row, y2: row, class: look, "data-branch": look === "under" ? null : branch }))));
  if (lines.length) {
    frame.append(h("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" }, lines));
  }
}

/** A place in the ranking. @param {Model} model @param {Hit} hit */
export function card(model, hit) {
  const [sign, text] = hit.mark ? MARKS[hit.mark] : ["", ""];
  const place = hit.rank === null ? "Not counted" : `Rank ${hit.rank}`;
  const alt = `${place}: ${personName(hit.id)}, ${cameraName(hit.camera)}`;
  return h("li", { class: `hit ${hit.mark ?? "unknown"}`, "data-index": hit.index },
    h("div", { class: "top" }, h("b", { class: "rank", "aria-hidden": "true" }, hit.rank ?? "–"),
      h("span", { class: "distance", title: "distance" }, hit.distance.toFixed(3))),
    frame(crop(model, "gallery", hit.index, alt)),
    hit.mark && h("span", { class: "mark" }, h("span", { "aria-hidden": "true" }, sign), ` ${text}`),
    h("span", { class: "soft" }, `${personName(hit.id)}, ${cameraName(hit.camera)}`));
}
