
// -- the parts of the page --
const MARKS = {ok: "●", work: "▶", wait: "·", ask: "?", warn: "!", bad: "✗"};
function drawHead() {
  const open = [...requests.values()].filter(isOpen), atWork = open.filter(isAtWork).length;
  $("live").className = link === "live" ? "ok" : "bad";
  say($("live").lastChild, link);
  if (!picture) return;
  const {fleet, gateway, needs} = picture;
  let {sentence, level} = picture;
  const skipped = picture.machines.filter((each) => each.online && restOf(each));
  const names = joined(skipped.map((each) => each.name), ", ");
  if (names && level === "ok")
    [sentence, level] = [`Ready, but ${names} is skipped after a failure.`, "warn"];
  const work = joined([`gateway ${host(gateway.url)}`, open.length ? `${atWork} working` : "idle",
    open.length > atWork && `${open.length - atWork} waiting`]);
  say($("fleet"), fleet);
  say($("sentence"), sentence, true);
  $("sentence").className = level;
  say($("gateway"), joined([clock(now()), gateway.followed ? work : gateway.says]));
  const state = link !== "live" ? "wait" : level === "ok" && atWork ? "work" : level;
  document.title = joined([`${MARKS[state]} ${needs.length || atWork || ""}`.trim(), fleet], " ");
  drawIcon(state);
}
// The tab's icon: a disc in the color of the state, with its mark.
function drawIcon(state) {
  const colours = getComputedStyle(document.documentElement);
  const name = {work: "ok", ask: "warn", wait: "dim"}[state] || state;
  const colour = colours.getPropertyValue(`--${name}`);
  if ($("icon").said === colour + state) return;
  $("icon").said = colour + state;
  const canvas = Object.assign(document.createElement("canvas"), {width: 32, height: 32});
  const pen = canvas.getContext("2d");
  pen.fillStyle = colour;
  pen.arc(16, 16, 15, 0, 7);
  pen.fill();
  Object.assign(pen, {fillStyle: colours.getPropertyValue("--panel"), font: "bold 22px sans-serif",
    textAlign: "center", textBaseline: "middle"});
  if (state !== "ok") pen.fillText(MARKS[state], 16, 17);
  $("icon").setAttribute("href", canvas.toDataURL());
}
const restOf = (machine) => [...rests.values()].find((each) =>
  each.node === machine.name && (!each.route || each.until > now()));
// A machine's models: the fleet's (one with two names once), then others that are loaded.
function modelsOn(machine) {
  const rows = new Map();
  const row = (name, key = name.toLowerCase().replace(/:latest$/, "")) => rows.get(key)
    || rows.set(key, {name, slots: 0, names: [], aliases: [], agents: [],
      state: "not of this fleet"}).get(key);
  for (const {model, slots, context, state, node, name, alias, warm, kept} of picture.models) {
    if (node !== machine.name) continue;
    const {names, aliases, agents} = Object.assign(row(model), {slots, context, state});
    Object.assign(row(model), {warm: warm ?? row(model).warm, kept: kept || row(model).kept});
    names.push(name);
    aliases.push(alias);
    agents.push(...picture.agents.filter((each) => each.route === name).map((each) => each.name));
  }
  for (const loaded of machine.loaded) row(loaded.name).loaded = loaded;
  return [...rows];
}
const makeModel = () => make("li", make("div.row", make("b@name"), make("span@busy")),
  make("p.dim@what"));
const makeCard = () => make("li.card",
  make("div.row", make("h3@name"), make("span@state")), make("p.dim.what@what"),
  make("p.dim@why"), make("ul@models"),
  make("div.row", make("div.bar@bar"), make("span.dim@memory")),
  make("div.row", make("svg.spark", {viewBox: "0 0 59 20", preserveAspectRatio: "none",
    "aria-hidden": "true"}, make("polyline@line")), make("span.rate", make("b@speed"), " tok/s")));
function drawMachines() {
  const flow = flows();
  keep($("machines"), named(picture.machines), makeCard, (card, machine, parts) => {
    const rest = restOf(machine), left = rest ? Math.ceil(rest.until - now()) : 0;
    let [state, level, why] = ["● online", "ok", ""];
    if (!machine.online) [state, level, why] = [`○ ${machine.why}`, "bad", machine.fix];
    else if (left > 0) [state, level, why] = [`◐ skipped ${left} s`, "warn",
      `${rest.why}; its work goes elsewhere`];
    else if (rest) [state, level] = ["◐ skipped until it answers", "warn"];
    card.className = `card m${machine.colour}${machine.online ? "" : " off"}`;
    say(parts.name, machine.name);
    say(parts.state, state);
    parts.state.className = level;
    say(parts.what, joined([machine.server, host(machine.endpoint),
      machine.latency_seconds === null ? "" : `${count(1000 * machine.latency_seconds)} ms`]));
    say(parts.why, why, true);
    parts.why.hidden = !why;
    keep(parts.models, modelsOn(machine), makeModel, fillModel);
    drawMemory(parts, machine);
    const {bins, now: speed} = flow.get(machine.name), most = Math.max(...bins, 1);
    const points = bins.map((each, index) => `${index},${(19 - 18 * each / most).toFixed(2)}`);
    parts.line.setAttribute("points", points.join(" "));
    say(parts.speed, count(speed));
  });
}
function fillModel(row, model, {name, busy, what}) {
  const open = [...requests.values()].filter(isOpen), {loaded} = model;
  const full = open.filter((each) => model.names.includes(lastStep(each).route)).length;
  const queue = open.filter((each) => !isAtWork(each) && model.aliases.includes(each.alias)).length;
  const context = loaded?.context || model.context;
  say(name, model.name);
  say(busy, joined([model.slots && `${full} / ${model.slots} busy`, queue && `${queue} waiting`]));
  busy.className = full ? "busy" : "dim";
  say(what, joined([context ? `${Math.round(context / 1024)}k` : "",
    loaded && loaded.gpu !== null ? `${loaded.gpu} % GPU` : "", loaded?.unloads,
    model.state === "ready" ? "" : model.state, model.agents.join(", "),
    warmthOn(model)]));
}
function warmthOn({warm, kept}) {
  if (warm) return kept ? `${kept} of ${amount(warm, "agent")} warm` : `keeps ${warm} warm`;
  return kept && `${kept} warm`;
}
// Without a known total no share can be drawn.
function drawMemory({bar, memory}, machine) {
  const used = machine.loaded.reduce((sum, each) => sum + each.bytes, 0);
  const whole = Math.max(machine.memory || 0, used, 1);
  keep(bar, machine.memory ? named(machine.loaded) : [], () => make("i"), (part, each) => {
    part.style.width = `${100 * each.bytes / whole}%`;
    part.title = `${each.name}: ${gigabytes(each.bytes)} GB`;
  });
  bar.style.visibility = machine.memory && machine.online ? "" : "hidden";
  say(memory, !machine.online ? "" : machine.memory
    ? `${gigabytes(used)} of ${gigabytes(machine.memory)} GB` : `${gigabytes(used)} GB loaded`);
}
let near = "";  // under the pointer: its routes stand out
function drawRoutes() {
  const [svg, agents, models, machines] = $("routes").children;
  const model = Object.fromEntries(named(picture.models));
  const list = (column, rows, describe) => keep(column, named(rows),
    () => make("li", make("span@name"), make("span.dim.one@more")), (item, row, parts) => {
      const [name, more, title] = describe(row, item);
      say(parts.name, name);
      say(parts.more, more);
      item.title = title;
      item.onmouseenter = item.onmouseleave = ({type}) => {
        near = type === "mouseenter" ? row.name : "";
        drawRoutes();
      };
    });
  list(agents, picture.agents, (each) => [each.name, "",
    `${each.name}: ${model[each.route].model} on ${model[each.route].node}`]);
  list(models, picture.models, (each) => [each.model, each.alias,
    joined([`${each.alias}: ${each.model} on ${each.node}`, ...each.fallback], ", else ")]);
  list(machines, picture.machines, (each, item) => {
    item.className = `box m${each.colour}`;
    return [each.name, each.online ? "" : each.why, each.endpoint];
  });
  const edges = plan(model);
  $("spares").hidden = ![...edges.values()].some((each) => each.isSpare);
  drawEdges(svg, edges, {agents, models, machines});
}
// Every route that a request can take, in its machine's color while one is on it.
function plan(model) {
  const edges = new Map();
  const add = (from, to, isSpare = false, key = JSON.stringify([from, to])) => edges.get(key)
    || edges.set(key, {from, to, isSpare, works: ""}).get(key);
  for (const {name, route: wanted} of picture.agents) add(["agents", name], ["models", wanted]);
  for (const {name, node, fallback} of picture.models)
    for (const each of [node, ...fallback.map((other) => model[other].node)])
      add(["models", name], ["machines", each], each !== node);
  for (const request of [...requests.values()].filter(isAtWork)) {
    const {route: name, node} = lastStep(request), works = `works ${colourOf(node)}`;
    const asker = nameOf(laneOf(request)).replace(/\?$/, "");
    const agent = picture.agents.find((each) => each.name === asker);
    const asked = picture.models.filter((each) => each.alias === request.alias);
    const planned = asked.find((each) => each.name === agent?.route)
      || asked.find((each) => each.name === name) || asked[0];
    if (!planned) continue;
    const models = ["models", planned.name];
    if (planned.name === agent?.route) add(["agents", asker], models).works = works;
    add(models, ["machines", node], true).works = works;
  }
  return edges;
}
function drawEdges(svg, edges, columns) {
  const frame = svg.getBoundingClientRect();
  const place = ([column, name]) => columns[column].kept.get(name)?.getBoundingClientRect();
  keep(svg, [...edges], () => make("path"), (path, {from, to, isSpare, works}) => {
    const left = place(from), right = place(to);
    if (!left || !right) return;
    const x1 = left.right - frame.left, y1 = left.top + left.height / 2 - frame.top;
    const x2 = right.left - frame.left, y2 = right.top + right.height / 2 - frame.top;
    const middle = (x1 + x2) / 2;
    path.setAttribute("d", `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
    path.setAttribute("class", joined([isSpare && "spare", works,
      [from[1], to[1]].includes(near) && "near"], " "));
  });
}
