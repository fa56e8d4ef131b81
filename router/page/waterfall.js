// Where the time of one answer went, as bars over time.

import { h, s, seconds } from "./dom.js";

const [WIDE, LEFT, RIGHT, LANE, BAR, TOP] = [760, 112, 12, 30, 14, 24];
const NAMES = { queue: "router and queues", reserve: "blocks reserved", prefill: "prompt computed", handoff: "KV handed over", decode: "tokens" };

/** The spans of an answer: lane, colour, begin and end in microseconds. */
export function spans(choice) {
  const end = choice.end_us ?? choice.age_us;
  const at = (what) => choice.marks.filter((mark) => mark.what === what).map((mark) => mark.at_us);
  const after = (what, from) => at(what).find((time) => time >= from);
  const list = [];
  const add = (lane, kind, begin, until) => list.push({ lane, kind, begin, end: Math.max(begin, Math.min(until ?? end, end)) });
  add("router", "queue", 0, at("placed")[0] ?? at("not placed")[0]);
  for (const mark of choice.marks) {
    if (mark.what === "decode asked") {
      const reserved = after("blocks reserved", mark.at_us);
      if (!mark.local) add("decode", "reserve", mark.at_us, reserved ?? after("computed at the decode worker", mark.at_us));
    }
    if (mark.what === "computed at the decode worker") add("decode", "prefill", mark.at_us, choice.token_us.find((time) => time >= mark.at_us));
    if (mark.what === "prefill asked") add("prefill", "prefill", mark.at_us, after("prompt computed", mark.at_us));
  }
  if (choice.handoff) add("transfer", "handoff", Math.max(0, choice.handoff.at_us - choice.handoff.seconds * 1e6), choice.handoff.at_us);
  if (choice.token_us.length > 0) add("tokens", "decode", choice.token_us[0], choice.token_us.at(-1));
  return { spans: list, end: Math.max(end, 1), faults: [...at("recovering"), ...at("stream lost")] };
}

const LANES = [["router", "router"], ["prefill", "prefill worker"], ["transfer", "transfer"], ["decode", "decode worker"], ["tokens", "tokens"]];

export function waterfall(choice) {
  const { spans: list, end, faults } = spans(choice);
  const x = (time) => LEFT + (time / end) * (WIDE - LEFT - RIGHT);
  const lanes = LANES.filter(([lane]) => lane !== "prefill" && lane !== "transfer" ? true : list.some((span) => span.lane === lane));
  const y = (lane) => TOP + lanes.findIndex(([name]) => name === lane) * LANE;
  const bottom = TOP + lanes.length * LANE;
  const parts = [];
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const place = x(part * end);
    parts.push(s("line", { class: "axis", x1: place, x2: place, y1: TOP - 4, y2: bottom }),
      s("text", { class: "label", x: place, y: 13, "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }, seconds(part * end * 1e-6)));
  }
  for (const [lane, name] of lanes) parts.push(s("text", { class: "label", x: 0, y: y(lane) + BAR - 1 }, name));
  for (const span of list) {
    const wide = Math.max(2, x(span.end) - x(span.begin));
    parts.push(s("rect", { class: `bar c-${span.kind}`, x: x(span.begin), y: y(span.lane), width: wide, height: span.kind === "decode" ? 3 : BAR, rx: 2 },
      s("title", null, `${NAMES[span.kind]}: ${seconds((span.end - span.begin) * 1e-6)}`)));
  }
  const ticks = choice.token_us.map((time) => `M${x(time).toFixed(1)} ${y("tokens")}v${BAR}`).join("");
  parts.push(s("path", { class: "tick", d: ticks }));
  for (const time of faults) parts.push(s("line", { class: "fault", x1: x(time), x2: x(time), y1: TOP - 4, y2: bottom }));
  const told = list.map((span) => `${span.lane}: ${NAMES[span.kind]} ${seconds((span.end - span.begin) * 1e-6)}`).join("; ");
  const svg = s("svg", { class: "waterfall", viewBox: `0 0 ${WIDE} ${bottom}`, role: "img", "aria-label": `Waterfall over ${seconds(end * 1e-6)}. ${told}` }, parts);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Waterfall" }, svg);
}

export const legend = () => h("div", { class: "legend", "aria-hidden": "true" }, Object.entries(NAMES).map(([kind, name]) => h("span", { class: `c-${kind}` }, name)));
