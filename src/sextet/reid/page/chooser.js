/** Whom to look for: the query pictures by person, and a picture of one's own. */
import { find, h, note, request } from "./base.js";
import { cameraName, crop, personName } from "./crops.js";

/** @typedef {import("./crops.js").Model} Model */

export class Chooser {
  /** @param {(index: number) => void} pick @param {(file: File) => void} upload @param {(problem: Error) => void} fail */
  constructor(pick, upload, fail) {
    this.fail = fail;
    this.page = 0;
    this.pages = 1;
    /** @type {Model} */
    this.model;
    this.picked = -1;
    this.number = find("#pager input");
    find("#people").addEventListener("change", (/** @type {any} */ event) => pick(Number(event.target.value)));
    find("#pager").addEventListener("click", (/** @type {any} */ event) => {
      if (event.target.value && event.target.type === "button") this.show(this.page + Number(event.target.value));
    });
    this.number.addEventListener("change", () => this.show(Number(this.number.value) - 1));
    find("#chooser").addEventListener("submit", (/** @type {Event} */ event) => event.preventDefault());
    const input = find("#drop input");
    input.addEventListener("change", () => {
      if (input.files[0]) upload(input.files[0]);
      input.value = ""; // the same file may be chosen again
    });
    for (const name of ["dragover", "dragleave", "drop"]) {
      addEventListener(name, (/** @type {any} */ event) => {
        event.preventDefault(); // anywhere, or the browser leaves the page for the file
        find("#drop").classList.toggle("over", name === "dragover");
        if (name === "drop" && event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]);
      });
    }
  }

  /** Shows a page of query pictures; those out of range show the nearest. @param {number} page */
  async show(page) {
    const wanted = Math.min(Math.max(0, Math.trunc(page) || 0), this.pages - 1);
    try {
      const asked = new URLSearchParams({ model: this.model.name, page: String(wanted) });
      this.draw(await request(`/api/people?${asked}`));
    } catch (error) {
      this.fail(/** @type {Error} */ (error));
    }
  }

  /** @param {{page: number, pages: number, pictures: {index: number, id: number, camera: number}[]}} answer */
  draw({ page, pages, pictures }) {
    const ids = [...new Set(pictures.map((picture) => picture.id))];
    find("#people").replaceChildren(...ids.map((id) =>
      h("fieldset", {}, h("legend", {}, personName(id)),
        pictures.filter((picture) => picture.id === id).map(({ index, camera }) =>
          h("label", { class: "choice" },
            h("input", { type: "radio", name: "query", value: index, checked: index === this.picked }),
            crop(this.model, "query", index, `${personName(id)}, ${cameraName(camera)}`),
            h("span", { "aria-hidden": "true" }, camera < 0 ? "" : camera + 1))))));
    Object.assign(this, { page, pages });
    this.number.value = String(page + 1);
    this.number.max = String(pages);
    find("#pager span").textContent = String(pages);
    const [back, next] = document.querySelectorAll("#pager button");
    back.toggleAttribute("disabled", page === 0);
    next.toggleAttribute("disabled", page === pages - 1);
    note({ page });
  }

  /** Marks a query picture, or none (-1). @param {number} index */
  mark(index) {
    this.picked = index;
    for (const radio of document.querySelectorAll("#people input")) {
      /** @type {any} */ (radio).checked = Number(/** @type {any} */ (radio).value) === index;
    }
  }
}
