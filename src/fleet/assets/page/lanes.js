
// -- the time line --
function warmthOf({waited_for, cached_tokens, read_again_tokens, read_again_why, session}) {
  const isSession = picture?.sessions.some((each) => each.session === waited_for);
  const other = isSession ? titleOf(waited_for) : nameOf(`${session}\n${waited_for}`);
  return [waited_for && `waited so that ${other} stays warm`,
    cached_tokens && `${count(cached_tokens)} tokens were still warm`,
    read_again_tokens && `${count(read_again_tokens)} tokens read again: ${read_again_why}`];
}
function words(request) {
  const steps = request.steps.map((each, index) => {
    const took = ((request.steps[index + 1]?.at ?? request.end ?? now()) - each.at).toFixed(1);
    const verb = {wait: "waited", read: "read the prompt for", write: "wrote for"}[each.what];
    return each.node || took > 0 ? joined([`${verb} ${took} s`, each.node], " on ") : "";
  });
  return joined([called.get(laneOf(request)), clock(request.begun), request.alias, ...steps,
    ...request.marks.map((mark) => `${mark.node} failed: ${mark.why}`),
    request.tokens ? `${count(request.tokens)} tokens, ${count(speedOf(request))} a second` : "",
    ...warmthOf(request.receipt || {}), stateOf(request)], ", ");
}
// The time frame: the smallest of FITS with all requests of the last half hour.
function frameOf(to) {
  const begun = [...requests.values()].map((each) => each.begun).filter((each) => each > to - 1800);
  const needed = to - Math.min(to, ...begun);
  const wanted = SPANS[span] || FITS.find((each) => each >= needed) || 1800;
  return {from: to - wanted, wanted};
}
function nameLanes() {
  const used = {};
  called.clear();
  for (const lane of lanes) {
    const name = nameOf(lane), [session] = lane.split("\n"), key = `${session}\n${name}`;
    used[key] = (used[key] || 0) + 1;
    called.set(lane, used[key] > 1 ? `${name} #${used[key]}` : name);
  }
}
function drawLanes() {
  const to = now(), found = new Map(), frame = frameOf(to);
  for (const request of requests.values())
    if ((request.end ?? to) > frame.from)
      found.set(laneOf(request), [...found.get(laneOf(request)) || [], request]);
  nameLanes();
  const sessions = [...new Set([...found.keys()].map((lane) => lane.split("\n")[0]))];
  const main = (lane) => lane.endsWith("\n") ? 0 : 1;
  const shown = sessions.flatMap((session) => [
    [session, {title: titleOf(session)}],
    ...[...lanes].filter((lane) => found.has(lane) && lane.startsWith(`${session}\n`))
      .sort((a, b) => main(a) - main(b)).map((lane) => [lane, {lane}])]);
  const makeRow = ({lane}) => lane ? make("li.lane", make("span@label"), make("ul.track@track"))
    : make("li", make("h3.one@label"));
  const makeBar = () => make("li", make("button@bar", {tabindex: "-1"}));
  keep($("lanes"), shown, makeRow, (row, {lane, title}, {label, track}) => {
    say(label, title || called.get(lane));
    label.title = title || called.get(lane);
    if (lane) keep(track, named(found.get(lane), "id"), makeBar,
      (item, request, {bar}) => drawBar(item, bar, request, frame));
  });
  $("axis").hidden = !found.size;
  keep($("axis"), [5, 4, 3, 2, 1, 0].map((fifth) => [fifth, fifth]), () => make("span"),
    (mark, fifth) => say(mark, fifth ? `−${ago(frame.wanted * fifth / 5)}` : "now"));
  keep($("spans"), Object.keys(SPANS).map((each) => [each, each]), (each) => {
    const button = make("button", {type: "button"}, each);
    button.onclick = () => { span = each; drawLanes(); };
    return button;
  }, (button, each) => button.setAttribute("aria-pressed", each === span));
  say($("told"), told ? words(told) : found.size ? "" : "Nothing was asked in this time.");
}
function drawBar(item, bar, request, {from, wanted}) {
  const begin = Math.max(request.begun, from), end = request.end ?? from + wanted;
  const whole = Math.max(end - begin, .001);
  const share = (time) => 100 * Math.min(Math.max(time - begin, 0) / whole, 1);
  item.style.left = `${100 * (begin - from) / wanted}%`;
  item.style.width = `${100 * whole / wanted}%`;
  bar.request = request;
  bar.setAttribute("aria-label", words(request));
  const steps = request.steps.map((each, name) =>
    ({...each, name, until: request.steps[name + 1]?.at ?? end}))
    .filter((each) => each.node || each.until - each.at > .1);
  const marks = request.marks.map((mark) => ({name: mark, what: "mark", at: mark.time}));
  if (!marks.length && !["ok", "left", "stopped"].includes(request.receipt?.outcome ?? "ok"))
    marks.push({name: "end", what: "mark", at: end});
  keep(bar, named([...steps, ...marks]), () => make("i"), (part, each) => {
    part.className = `${each.what} ${colourOf(each.node)}`;
    part.style.left = `${share(each.at)}%`;
    if (each.until) part.style.width = `${share(each.until) - share(each.at)}%`;
    else say(part, "×");
  });
}
// One stop for Tab; the arrows go from bar to bar and from lane to lane.
function walk(event) {
  const bars = [...$("lanes").querySelectorAll("button")];
  const rows = [...$("lanes").querySelectorAll(".lane")];
  const index = bars.indexOf(document.activeElement);
  const lane = rows.indexOf(document.activeElement.closest(".lane"));
  const newest = (row) => [...row?.querySelectorAll("button") || []].pop();
  const next = {ArrowLeft: bars[index - 1], ArrowRight: index < 0 ? bars.at(-1) : bars[index + 1],
    ArrowUp: newest(rows[lane - 1]), ArrowDown: newest(rows[lane + 1]),
    Home: bars[0], End: bars.at(-1)}[event.key];
  if (!next) return;
  event.preventDefault();
  next.focus();
}
function tell(event) {
  told = event.type.endsWith("out") ? undefined : event.target.closest("button")?.request;
  drawLanes();
}

// -- tables: a narrow page shows each row as a card --
const cell = ([, kind]) => make(`td${kind}`, make("i.dot@dot", {hidden: ""}), make("span@text"));
function makeHeads(columns) {
  return columns.map(([name, kind]) => make(`th${kind}`, name));
}
// Each value is words, or [words, class] or [words, "", machine].
function fillRow(row, values) {
  values.forEach((value, index) => {
    const [words, level = "", node] = [value].flat(), {dot, text} = row.children[index].parts;
    say(text, words, Boolean(level === "code"));
    text.className = level;
    dot.hidden = !node;
    if (node) dot.setAttribute("class", `dot ${colourOf(node)}`);
  });
}
const REQUESTS = [["Time", ".one.small"], ["Agent", ".one"], ["Model", ".one.small"],
  ["Machine", ".one"],
  ["Outcome", ".last"], ["Waited", ".number.wide"], ["First token", ".number.wide"],
  ["Tok/s", ".number"], ["In", ".number"], ["Out", ".number"]];
function cells(request) {
  const {receipt, steps} = request, placed = steps.filter((each) => each.node);
  const {node = "", route = "-", model = route} = placed.at(-1) || {};  // never today's file's
  const first = steps.find((each) => each.what === "write")?.at ?? NaN, state = stateOf(request);
  const level = !receipt || state === "ok" ? "" : "bad";
  const asker = joined([isTask(request) && titleOf(request.session), called.get(laneOf(request))]);
  return [clock(request.end ?? request.begun), asker, model,
    [node || "-", "", node],
    [joined([state, ...request.marks.map((mark) => `${mark.node} ${mark.why}`),
      receipt?.read_again_tokens && `${count(receipt.read_again_tokens)} read again`]), level],
    seconds(receipt ? receipt.waited_seconds : (placed[0]?.at ?? now()) - request.begun),
    seconds(receipt ? receipt.first_byte_seconds : first ? first - request.begun : null),
    speedOf(request) ? count(speedOf(request)) : "-",
    receipt ? count(receipt.input_tokens) : "-", count(request.tokens)];
}
function drawRequests() {
  const wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...requests.values()].sort((a, b) => (b.end ?? 1e15) - (a.end ?? 1e15)
    || b.begun - a.begun).slice(0, SHOWN).map((request) => [request.id, cells(request)]);
  const fit = all.filter(([, row]) =>
    wanted.every((word) => row.join(" ").toLowerCase().includes(word)));
  keep($("rows"), fit.slice(0, rowsShown), () => make("tr", ...REQUESTS.map((each) =>
    cell(each))), fillRow);
  say($("count"), wanted.length ? `${fit.length} of ${amount(all.length, "request")}`
    : amount(all.length, "request"));
  $("more").hidden = fit.length <= rowsShown;
  say($("more"), `Show all ${fit.length}`);
  $("table").hidden = !all.length;
  $("nothing").hidden = all.length > 0;
  say($("nothing"), `No request yet. Type \`${picture?.hint || "subagent-fleet up"}\` in a `
    + "terminal, and ask for something.", true);
}
const TASKS = [["State", ".one"], ["Task", ".one"], ["Agent", ".one.small.wide"],
  ["Machine", ".one"], ["Time", ".one.small"], ["Changes", ".one.small"], ["Now", ".whole"]];
function drawTasks() {
  const {tasks} = picture, [going, over] = $("tasks").querySelectorAll("tbody");
  const draw = (body, rows) => keep(body, named(rows), () => make("tr", ...TASKS.map((each) =>
    cell(each))), (row, task) => fillRow(row, [[`${task.mark} ${task.state}`, task.level],
    task.name, task.agent, [task.where, "", task.where], took(task.seconds), task.diff,
    [joined([task.now, task.fix]), "code"]]));
  const finished = tasks.filter((each) => each.over);
  $("tasks").hidden = !tasks.length;
  draw(going, tasks.filter((each) => !each.over));
  draw(over, finished);
  going.parentElement.hidden = finished.length === tasks.length;
  over.closest("details").hidden = !finished.length;
  say($("tasks").querySelector("summary"), `${finished.length} finished`);
}

// -- what there is only now and then --
const NOTES = {
  needs: (row) => [row.level, joined([row.what, row.fix], "\n")],
  warmup: (row) => [row.state === "failed" ? "bad" : "",
    `${row.model} on ${row.node}: ${row.state}, ${seconds(row.seconds)} ${row.detail}`,
    row.size_bytes ? row.pulled_bytes / row.size_bytes : row.stage === "done" ? 1 : null],
  findings: (row) => [row.level, joined([row.what, row.fix], " → ")],
  log: (row) => [{error: "bad", warning: "warn"}[row.level], row.line],
};
function drawNotes() {
  for (const [id, describe] of Object.entries(NOTES)) {
    $(id).hidden = !picture[id].length;
    keep($(id).lastElementChild, picture[id].map((row, index) => [index, row]),
      () => make("li", make("p", make("b@mark"), make("span@text")), make("progress@meter")),
      (item, row, {mark, text, meter}) => {
        const [level, words, share] = describe(row);
        item.className = level || "";
        mark.hidden = id === "log" || !level;
        say(mark, `${MARKS[level]} `);
        say(text, words, ["findings", "needs"].includes(id));
        meter.hidden = share === undefined;
        meter.setAttribute("aria-label", words);
        if (share > 0) meter.value = share;
        else meter.removeAttribute("value");
      });
  }
  keep($("legend"), named(picture.machines), (each) => make("li",
    make(`i.dot.m${each.colour}`), each.name));
}
function drawSoon(news) {  // at most four times a second, and only while it is visible
  if (typeof news === "string") link = news;
  if (document.hidden) return drawHead();  // its title is visible even then
  if (timer) return;
  timer = setTimeout(() => {
    [timer, drawnAt] = [0, Date.now()];
    for (const part of [drawHead, drawLanes, drawRequests]) part();
    if (picture) for (const part of [drawMachines, drawRoutes, drawTasks, drawNotes]) part();
  }, Math.max(0, drawnAt + 250 - Date.now()));
}
function copy({target}) {
  const button = target.closest(".copy");
  if (!button) return;
  navigator.clipboard.writeText(button.textContent).then(() => {
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 2000);
  }, () => getSelection().selectAllChildren(button));
}
$("columns").append(...makeHeads(REQUESTS));
$("tasks").querySelector("thead tr").append(...makeHeads(TASKS));
$("filter").addEventListener("input", drawRequests);
$("more").addEventListener("click", () => { rowsShown = SHOWN; drawRequests(); });
$("scroll").addEventListener("keydown", walk);
for (const kind of ["focusin", "focusout", "mouseover", "mouseout"])
  $("lanes").addEventListener(kind, tell);
document.addEventListener("click", copy);
document.addEventListener("visibilitychange", drawSoon);
window.addEventListener("resize", drawSoon);
setInterval(drawSoon, 1000);
follow();
