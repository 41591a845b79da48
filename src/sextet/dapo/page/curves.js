/** What was measured at every step, as small charts that share a cursor, each with what it tells. */
import { h, note, request, say } from "./base.js";
import { title } from "./run.js";

/** @typedef {number[]} Point step and value, or step, mean, least and most @typedef {Record<string, Point[]>} Series */

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [320, 150, 46, 18, 8];
/**
 * Charts: heading, names of series with what they are called (a name may end in *), what it tells, and a factor.
 * @type {[string, Record<string, string>, string, Record<string, any>?][]}
 */
const CHARTS = [
  ["Accuracy of the test, %", { "eval/avg@*": "mean", "eval/pass@*": "any right", "eval/cons@*": "majority", "eval/p(right)": "probability of the answer" },
    "What counts: it should rise. If only the training's rises, the model learns the problems by heart."],
  ["Accuracy in training, %", { "answers/accuracy": "answers" },
    "Of all groups that were sampled. It should rise; near 100 there is little left to learn.", { factor: 100 }],
  ["Reward", { "reward/mean": "mean", "reward/length_penalty": "length penalty in it" },
    "Of the groups that are trained on. With dynamic sampling these are never all right, so the accuracy says more. A growing penalty: answers come near the limit."],
  ["Entropy", { "policy/entropy": "per token" },
    "Should fall slowly or stay. A fast fall to 0 means that exploration has ended (raise clip_high); a steady rise, that answers turn into noise.", { zero: true }],
  ["Probability of sampled tokens", { "policy/probability": "mean" }, "The other side of entropy: close to 1 the model hardly tries anything new."],
  ["Length of answers, tokens", { "answers/length": "mean", "answers/length_max": "longest", "answers/length_min": "shortest" },
    "Longer answers with a rising accuracy are reasoning; longer ones without it are filler. A sudden change is a warning."],
  ["Cut off, %", { "answers/truncated": "answers" }, "Answers that reached the limit of length. Should stay low; if it rises, allow more tokens or punish length.", { factor: 100, zero: true }],
  ["Clipped tokens, %", { "policy/clip_high": "from above", "policy/clip_low": "from below", "policy/dual_clip": "dual clip" },
    "Tokens that the clipping holds back. Below 1 % or so is usual; much more means that steps are too large.", { factor: 100, zero: true }],
  ["KL to the weights before the step", { "policy/kl_old": "estimate" }, "How far updates move the policy. Small and even is healthy; peaks go with peaks of the gradient."],
  ["Groups", { "groups/mixed": "mixed (kept)", "groups/right": "all right", "groups/wrong": "all wrong", "groups/failed": "failed" },
    "Only mixed groups teach. All right growing: problems get too easy. All wrong staying high: they are too hard.", { zero: true }],
  ["Rounds of sampling", { "groups/rounds": "rounds" }, "More rounds for a step: mixed groups are rare, and generation takes longer.", { zero: true }],
  ["Staleness, steps", { "async/staleness": "mean", "async/staleness_max": "oldest token" }, "How old the weights were that sampled an answer. 0 when generation waits for training.", { zero: true }],
  ["Difference to the generator", { "policy/rollout_difference": "of log-probabilities" }, "Should stay close to 0; a rise means that generator and trainer disagree.", { zero: true }],
  ["Gradient norm", { "train/grad_norm": "before clipping" }, "Even, with few peaks. Growing without end comes before divergence.", { zero: true }],
  ["Learning rate", { "train/learning_rate": "rate" }, "The warm-up, then constant.", { zero: true }],
  ["Without a verdict", { "groups/failures": "answers" }, "Answers on which the verifier failed. Should be 0; see the failed groups among the samples.", { zero: true }],
];

/** @param {string} tag @param {Record<string, any>} attributes @param {...any} children @returns {any} */
function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** A number in few characters. @param {number} value */
export function brief(value) {
  const size = Math.abs(value);
  if (value === 0 || Number.isInteger(value) && size < 1e5) return String(value);
  return size >= 1e5 || size < 1e-2 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

/** Whether a pattern names a series; those of kinds of problems, as "eval/avg@4, hard", only by their full name. @param {string} pattern @param {string} name */
const names = (pattern, name) => (pattern.endsWith("*") ? name.startsWith(pattern.slice(0, -1)) && !name.includes(",") : name === pattern);

/**
 * The lines of a chart. @param {Record<string, string>} wanted @param {Series[]} runs one, or two that are compared
 * @param {number} factor
 */
function lines(wanted, runs, factor) {
  const found = [];
  for (const [at, series] of runs.entries()) {
    for (const [number, [pattern, text]] of Object.entries(wanted).entries()) {
      const name = Object.keys(series).find((one) => names(pattern, one));
      if (name === undefined || /(pass|cons)@1$/.test(name)) continue; // of one answer they are the mean
      const points = series[name].filter((point) => point[1] !== null).map(([step, ...values]) => [step, ...values.map((value) => value * factor)]);
      if (points.length) found.push({ points, look: `line-${number % 4} run-${at}`, text, run: at });
    }
  }
  return found;
}

/** Values at a step, of the nearest point. @param {Point[]} points @param {number} step */
const nearest = (points, step) => points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));

/** @param {import("./app.js").View} view */
export async function curves({ part, parts, place, signal, fail }) {
  /** @type {((step: number|null) => void)[]} */
  let cursors = [];
  let other = "";
  const choice = h("select", { onchange: () => {
    other = choice.value;
    load().catch(fail);
  } }, h("option", { value: "" }, "nothing"), parts.filter(({ name }) => name !== part).map(({ name }) => h("option", { value: name }, title(name))));
  const charts = h("div", { class: "charts" });
  place.append(
    parts.length > 1 ? h("label", { class: "card compare" }, `Solid: ${title(part)}. Dashed, to compare: `, choice) : "",
    charts);

  /** @param {string} heading @param {ReturnType<typeof lines>} shown @param {string} help @param {boolean} zero */
  function chart(heading, shown, help, zero) {
    const all = shown.flatMap(({ points }) => points);
    const [first, last] = [Math.min(...all.map(([step]) => step)), Math.max(...all.map(([step]) => step))];
    let [low, high] = [Math.min(...all.flatMap((point) => point.slice(1))), Math.max(...all.flatMap((point) => point.slice(1)))];
    if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (low === high) [low, high] = zero && low === 0 ? [0, 1] : [low - Math.abs(low) / 10 - 1e-9, high + Math.abs(high) / 10 + 1e-9];
    const x = (/** @type {number} */ step) => LEFT + (last === first ? 0.5 : (step - first) / (last - first)) * (WIDTH - LEFT - 8);
    const y = (/** @type {number} */ value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const path = (/** @type {number[][]} */ points) => `M${points.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`;
    const middle = (low + high) / 2;
    const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" },
      ...[low, middle, high].flatMap((value) => [
        draw("line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: y(value), y2: y(value) }),
        draw("text", { x: LEFT - 5, y: y(value) + 3.5, "text-anchor": "end" }, brief(Number(value.toPrecision(3))))]),
      draw("text", { x: x(first), y: HEIGHT - 4, "text-anchor": last === first ? "middle" : "start" }, `step ${first}`),
      ...(last === first ? [] : [draw("text", { x: x(last), y: HEIGHT - 4, "text-anchor": "end" }, String(last))]),
      ...shown.flatMap(({ points, look }) => [
        ...(points[0].length > 2 ? [draw("path", { class: `band ${look}`, d: `${path([...points.map(([step, , , most]) => [x(step), y(most)]),
          ...points.toReversed().map(([step, , least]) => [x(step), y(least)])])}Z` })] : []),
        points.length === 1 ? draw("circle", { class: look, cx: x(points[0][0]), cy: y(points[0][1]), r: 3 })
          : draw("path", { class: `curve ${look}`, d: path(points.map(([step, value]) => [x(step), y(value)])) })]));
    const cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    picture.append(cursor);
    const values = shown.map(({ look, text, run }) => ({ look, text, run, number: h("b", {}) }));
    const entries = [...new Set(values.map(({ text }) => text))].map((text) => // a text once, with a number of each run
      h("span", {}, values.filter((value) => value.text === text).flatMap(({ look, run, number }, at) => [
        h("span", { class: `key ${look}`, "aria-hidden": "true" }), at === 0 && text,
        run > 0 && h("span", { class: "unseen" }, "compared:"), number])));
    const when = h("span", { class: "soft when" });
    const tell = (/** @type {number|null} */ step) => {
      const at = step === null ? last : Math.min(Math.max(step, first), last);
      when.textContent = `step ${at}`;
      shown.forEach(({ points }, number) => (values[number].number.textContent = brief(Number(nearest(points, at)[1].toPrecision(4)))));
      cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
      cursor.setAttribute("x1", x(at));
      cursor.setAttribute("x2", x(at));
    };
    tell(null);
    cursors.push(tell);
    const everywhere = (/** @type {number|null} */ step) => {
      cursors.forEach((other) => other(step));
      note({ cursor: step });
    };
    let now = last;
    const frame = h("div", {
      class: "frame", tabindex: 0, role: "slider", "aria-label": heading, "aria-valuemin": first, "aria-valuemax": last,
      onpointermove: (/** @type {any} */ event) => {
        const box = picture.getBoundingClientRect();
        const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - 8);
        everywhere(Math.round(first + Math.min(1, Math.max(0, share)) * (last - first)));
      },
      onpointerleave: () => everywhere(null),
      onblur: () => everywhere(null),
      onfocus: () => step(now),
      onkeydown: (/** @type {any} */ event) => {
        const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: first, End: last }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        step(Math.min(Math.max(to, first), last));
      },
    }, picture);
    const step = (/** @type {number} */ to) => {
      now = to;
      everywhere(now);
      frame.setAttribute("aria-valuenow", now);
      frame.setAttribute("aria-valuetext", `step ${now}: ${values.map(({ text, run, number }) => `${text}${run ? ", compared," : ""} ${number.textContent}`).join(", ")}`);
    };
    frame.setAttribute("aria-valuenow", last);
    return h("figure", { class: "card chart" }, h("h3", {}, heading), frame,
      h("p", { class: "values" }, when, entries),
      h("figcaption", { class: "soft" }, help));
  }

  async function load() {
    const wanted = other ? [part, other] : [part];
    const runs = await Promise.all(wanted.map((name) => request(`/api/curves?${new URLSearchParams({ part: name })}`, { signal })));
    for (const series of runs) { // a kind of which there was none in a step is not in its row
      for (const kind of series["groups/rounds"] ? ["mixed", "right", "wrong", "failed"] : []) {
        const known = new Map((series[`groups/${kind}`] ?? []).map((/** @type {Point} */ point) => [point[0], point]));
        if (known.size) series[`groups/${kind}`] = series["groups/rounds"].map(([step]) => known.get(step) ?? [step, 0]);
      }
    }
    cursors = [];
    const patterns = CHARTS.flatMap(([, series]) => Object.keys(series));
    const known = CHARTS.map(([heading, series, help, { factor = 1, zero = false } = {}]) => {
      const shown = lines(series, runs, factor);
      return shown.length > 0 && chart(heading, shown, help, zero);
    });
    const others = [...new Set(runs.flatMap((series) => Object.keys(series)))].filter((name) => !patterns.some((one) => names(one, name)));
    const rest = h("details", { class: "rest" }, h("summary", {}, `All other series (${others.length})`));
    rest.addEventListener("toggle", () => rest.append(h("div", { class: "charts" },
      others.sort().map((name) => chart(name, lines({ [name]: "value" }, runs, 1), "", false)))), { once: true });
    charts.replaceChildren(...known.filter(Boolean));
    place.querySelector(".rest")?.remove();
    if (others.length) place.append(rest);
    else charts.append(h("p", { class: "card" }, "There are no curves yet, or none of this part: choose one of its trainings above."));
    note({ charts: known.filter(Boolean).length, compared: other || null });
    say(`${known.filter(Boolean).length} charts`);
  }

  await load();
  return { update: () => load().catch(fail) };
}
