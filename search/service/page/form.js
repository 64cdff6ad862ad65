// What to search: one problem, and one or two searches on it.

import { fromTemplate } from "./dom.js";
import { usesOf } from "./panel.js";

const SECOND = { algorithm: "best-of-n", beam_width: 16 };
const NUMBERS = ["beam_width", "expansion", "seed", "generator_budget", "time_limit"];

export class Form {
  // `onStart` is called with the requests, `onCancel` to stop them, `onOpen` with files of traces.
  constructor(form, { onStart, onCancel, onOpen }) {
    this.form = form;
    this.wishes = form.querySelector("#wishes");
    this.problem = form.querySelector("#problem-text");
    this.offered = null; // the searches that run on the server, and its default, once they are known
    this.#addWish({});
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      onStart(this.#requests());
    });
    form.querySelector("#cancel").addEventListener("click", onCancel);
    form.querySelector("#compare").addEventListener("click", (event) => this.#compare(event.currentTarget));
    form.querySelector("#example").addEventListener("change", (event) => {
      if (event.target.selectedIndex) this.problem.value = event.target.value;
      event.target.selectedIndex = 0;
    });
    form.querySelector("#open").addEventListener("change", async (event) => {
      const files = [...event.target.files];
      event.target.value = "";
      await onOpen(files);
    });
    form.hidden = false;
  }

  // The bearer token; it is nowhere but in its field.
  get token() {
    return this.form.querySelector("#token").value.trim();
  }

  // Whether the server answers nobody without a token.
  get asksToken() {
    return "asksToken" in this.form.dataset;
  }

  // Offers the searches that run on the server, and examples where its generator was made for such problems.
  offer({ searches, default_search: standard, examples }) {
    this.offered = { searches, standard };
    for (const wish of this.wishes.children) this.#limit(wish);
    this.form.querySelector(".examples").hidden = !examples;
    if (examples && !this.problem.value) this.problem.value = this.form.querySelector("#example").options[1].value;
  }

  set running(running) {
    this.form.querySelector("#start").disabled = running;
    this.form.querySelector("#cancel").disabled = !running;
  }

  #addWish(values) {
    const wish = fromTemplate("wish");
    const algorithm = wish.elements.algorithm;
    for (const [name, value] of Object.entries(values)) wish.elements[name].value = value;
    const grey = () => {
      const uses = usesOf(algorithm.value);
      wish.elements.beam_width.disabled = !uses.includes("N");
      wish.elements.expansion.disabled = !uses.includes("M");
    };
    algorithm.addEventListener("change", grey);
    this.#limit(wish);
    grey();
    this.wishes.append(wish);
    this.#name();
  }

  #limit({ elements: { algorithm } }) {
    if (!this.offered) return;
    const { searches, standard } = this.offered;
    const chosen = searches.includes(algorithm.value) ? algorithm.value : standard;
    for (const option of [...algorithm.options]) if (!searches.includes(option.value)) option.remove();
    algorithm.value = chosen;
    algorithm.dispatchEvent(new Event("change"));
  }

  #compare(button) {
    const two = this.wishes.children.length === 1;
    if (two) this.#addWish(SECOND);
    else this.wishes.lastElementChild.remove();
    button.setAttribute("aria-pressed", two);
    this.#name();
  }

  #name() {
    const wishes = [...this.wishes.children];
    for (const [i, wish] of wishes.entries()) {
      wish.querySelector("legend").textContent = wishes.length > 1 ? ["First search", "Second search"][i] : "Search";
    }
  }

  #requests() {
    return [...this.wishes.children].map(({ elements }) => {
      const request = { problem: this.problem.value.trim(), algorithm: elements.algorithm.value };
      for (const name of NUMBERS) {
        const { value, disabled } = elements[name];
        if (value !== "" && !disabled) request[name] = Number(value);
      }
      return request;
    });
  }
}
