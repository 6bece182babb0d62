"use strict";
// What came from a machine, a file or a client is only ever put into textContent.
const WINDOW = 300, BIN = 5, KEPT = 600;  // seconds; seconds; requests
const FITS = [30, 60, 150, 300, 600, 900, 1200];  // a fifth of each is a good number
const SPANS = {Fit: 0, "1 min": 60, "5 min": 300, "30 min": 1800};
const SOME = innerWidth < 640 ? 8 : 25, SHOWN = 200;  // rows of requests, and all of them
const requests = new Map(), rests = new Map();  // by id, the oldest first; by node and model
const lanes = new Set(), called = new Map();  // session and agent, oldest first; their names
let picture = null, lead = 0, link = "connecting", told, drawnAt = 0, timer = 0;
let span = "Fit", rowsShown = SOME;
const $ = (id) => document.getElementById(id);
const now = () => Date.now() / 1000 + lead;
const count = (value) => Math.round(value).toLocaleString("en");
const amount = (many, noun) => `${many} ${noun}${many === 1 ? "" : "s"}`;
const seconds = (value) => value === null ? "-" : `${value.toFixed(1)} s`;
const clock = (time) => new Date(time * 1000).toTimeString().slice(0, 8);
const gigabytes = (bytes) => (bytes / 1e9).toFixed(1);
const joined = (words, between = " · ") => words.filter(Boolean).join(between);
const host = (url) => url.replace(/^http:\/\//, "");
const took = (time) => time < 60 ? `${Math.round(time)} s` : time < 3600
  ? `${Math.floor(time / 60)}m${String(Math.floor(time % 60)).padStart(2, "0")}s`
  : `${Math.floor(time / 3600)}h${String(Math.floor(time / 60) % 60).padStart(2, "0")}m`;
const ago = (time) => time % 60 ? `${time} s` : `${time / 60} min`;

// -- events --
const HAPPENS = {
  hello(event) {
    lead = event.time - Date.now() / 1000;
    rests.clear();
    for (const [id, request] of requests) if (isOpen(request)) requests.delete(id);
  },
  picture(event) { picture = event; },
  request(row) {
    const {receipt = null} = row, steps = receipt?.steps ?? row.steps;
    lanes.add(laneOf(row));
    if (lanes.size > KEPT) lanes.delete(lanes.values().next().value);
    requests.set(row.id, {...row, receipt, begun: steps[0].at, end: receipt && receipt.time,
      steps: steps.map((each) => each.why ? {at: each.at, what: each.what} : each),
      marks: steps.filter(({why}) => why).map((each) => ({...each, time: each.at})),
      tokens: receipt ? receipt.output_tokens : row.output_tokens,
      countedAt: receipt ? receipt.time : row.counted_at ?? steps.at(-1).at});
    for (const [id, each] of requests)
      if (requests.size > KEPT && !isOpen(each)) requests.delete(id);
  },
  rest(row) {
    const place = `${row.node}\n${row.route}`;
    if (row.seconds) rests.set(place, {...row, until: row.time + row.seconds});
    else rests.delete(place);
  },
};
function follow() {
  const source = new EventSource("events");
  source.onmessage = ({data}) => {
    const event = JSON.parse(data);
    HAPPENS[event.kind]?.(event);
    drawSoon("live");
  };
  source.onerror = () => drawSoon(source.readyState === 2
    ? "ended: open the address that ui prints" : "trying again");
}

// -- what follows from them --
const lastStep = (request) => request.steps.at(-1);
const writeOf = (request) => request.steps.findLast((each) => each.what === "write");
const isOpen = (request) => !request.receipt;
const isAtWork = (request) => isOpen(request) && lastStep(request).node;
const stateOf = (request) => request.receipt ? request.receipt.outcome
  : {wait: "waiting", read: "reading", write: "writing"}[lastStep(request).what];
const laneOf = (request) => `${request.session}\n${request.agent_id}`;
const colourOf = (node) =>
  `m${picture?.machines.find((each) => each.name === node)?.colour ?? "x"}`;
function nameOf(lane, [session, id] = lane.split("\n")) {
  const known = picture?.names.find((each) => each.agent_id === id && each.session === session);
  return known?.agent || id || "main";
}
function titleOf(session) {
  const known = picture?.sessions.find((each) => each.session === session);
  if (known?.title || !session) return known?.title || "requests without a session";
  const program = /^ses_/.test(session) ? "opencode, "
    : /^\w{8}-\w{4}-7/.test(session) ? "codex, " : "";
  return `${program}session ${session.slice(0, 12)}`;
}
const isTask = ({session}) => session && picture?.tasks.some((each) => each.session === session);
function speedOf({tokens, countedAt, ...request}) {
  const write = writeOf(request);
  return write && tokens ? tokens / Math.max(countedAt - write.at, .05) : 0;
}
// Tokens a second of each machine: in bins over the window, and now.
function flows() {
  const from = Math.floor(now() / BIN) * BIN - WINDOW, found = new Map();
  for (const {name} of picture.machines)
    found.set(name, {bins: Array(WINDOW / BIN).fill(0), now: 0});
  for (const request of requests.values()) {
    const speed = speedOf(request), {at, node} = writeOf(request) || {}, flow = found.get(node);
    if (!speed || !flow) continue;
    const until = Math.max(request.end ?? now(), at + .05);
    if (isOpen(request)) flow.now += speed;
    flow.bins.forEach((_, index) => {
      const begin = from + index * BIN;
      const part = Math.min(until, begin + BIN) - Math.max(at, begin);
      if (part > 0) flow.bins[index] += speed * part / BIN;
    });
  }
  return found;
}

// -- the tree --
// Make `tag.class@name`; objects are attributes; the name is a key in `parts` of each ancestor.
function make(what, ...children) {
  const [, tag, classes, part] = what.match(/^(\w+)((?:\.[\w-]+)*)@?(\w*)$/);
  const like = ["svg", "path", "polyline"].includes(tag) ? "svg" : "body";
  const element = document.createElementNS(document.querySelector(like).namespaceURI, tag);
  element.setAttribute("class", classes.slice(1).replaceAll(".", " "));
  element.parts = part ? {[part]: element} : {};
  for (const child of children) {
    if (typeof child === "string" || child instanceof Node) element.append(child);
    else for (const [key, value] of Object.entries(child)) element.setAttribute(key, value);
    Object.assign(element.parts, child.parts);
  }
  return element;
}
// Set a text; in our own texts, `commands` become buttons that copy.
function say(element, words, hasCode = false) {
  if (element.said === words) return;
  element.said = words;
  const pieces = hasCode ? words.split("`") : [words];
  element.replaceChildren(...pieces.map((each, index) => index % 2 === 0 ? each
    : /^\w+:( |$)|^\S+$/.test(each) ? make("code", each)  // a key or a name, not a command
    : make("button.copy", {type: "button", title: "copy"}, make("code", each))));
}
// Make an element's children match [key, value] rows; reuse the old ones.
function keep(parent, rows, create, fill = () => {}) {
  const old = parent.kept || new Map();
  let next = parent.firstChild;
  parent.kept = new Map();
  for (const [key, value] of rows) {
    const child = old.get(key) || create(value);
    old.delete(key);
    parent.kept.set(key, child);
    if (child === next) next = next.nextSibling;
    else parent.insertBefore(child, next);
    fill(child, value, child.parts);
  }
  for (const child of old.values()) child.remove();
}
const named = (rows, key = "name") => rows.map((row) => [row[key], row]);
