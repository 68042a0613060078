// The data of the report, and what is derived from it. Nodes and regions are numbers, as in the data.
// Names and labels come from models and files: they are only ever set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const nodes = data.nodes, regions = data.regions, FLAG = data.flags;
const NODE_COUNT = nodes.name.length;
const OUTSIDE = -1, NOWHERE = -2;

const text = (number) => (number < 0 ? "" : data.texts[number]);
const opOf = (node) => data.ops[nodes.op[node]];
const has = (node, flag) => (nodes.flags[node] & FLAG[flag]) !== 0;
const modulePath = (node) => (nodes.module[node] < 0 ? "" : text(data.modules[nodes.module[node]][0]));
const EFFECTS = ["mutates", "random numbers", "side effect", "communicates", "unknown effects", "fence"];
const effectsOf = (node) => EFFECTS.filter((name) => has(node, name));

// Numbers for people.

const GROUPED = new Intl.NumberFormat("en-US");
function shownCount(number) {
  return number === null || number === undefined || number === "" ? "?" : GROUPED.format(number);
}
function shownScaled(number, units) {
  if (number === null || number === undefined || number === "") return "?";
  let at = 0, value = number;
  while (Math.abs(value) >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  const digits = at === 0 ? 0 : value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[at]}`.trim();
}
const OPERATOR = FLAG.operator;
const operatorsIn = (sequence) => sequence.reduce((sum, node) => sum + ((nodes.flags[node] & OPERATOR) !== 0), 0);
// With ~, bytes at the sizes of the trace: sizes are dynamic.
const traced = (shown, isDynamic) => (number) => (isDynamic && number !== null ? `~${shown(number)}` : shown(number));
const shownBytes = (number) => shownScaled(number, ["B", "kB", "MB", "GB", "TB"]);
const shownFlops = (number) => (number === 0 ? "0" : shownScaled(number, ["", "k", "M", "G", "T", "P"]));
const plural = (count, one, several) => `${shownCount(count)} ${count === 1 ? one : several || one + "s"}`;

// Neighbours: all edges in arrays, those of one node from start[node] to start[node + 1].

function adjacency(sources, targets, extraSources, extraTargets) {
  const count = sources.length + (extraSources ? extraSources.length : 0);
  const start = new Int32Array(NODE_COUNT + 1), list = new Int32Array(count);
  const each = (visit) => {
    for (let at = 0; at < sources.length; at++) visit(sources[at], targets[at]);
    if (extraSources) for (let at = 0; at < extraSources.length; at++) visit(extraSources[at], extraTargets[at]);
  };
  each((source) => { start[source + 1] += 1; });
  for (let node = 0; node < NODE_COUNT; node++) start[node + 1] += start[node];
  const next = start.slice();
  each((source, target) => { list[next[source]++] = target; });
  return { of: (node) => list.subarray(start[node], start[node + 1]) };
}

function lazily(make) {
  let made = null;
  return () => (made = made || make());
}

const edges = data.edges, effectEdges = data.effect_edges;
const inputsOf = lazily(() => adjacency(edges.to, edges.from));
const usersOf = lazily(() => adjacency(edges.from, edges.to));
const effectsBefore = lazily(() => adjacency(effectEdges.to, effectEdges.from));
const effectsAfter = lazily(() => adjacency(effectEdges.from, effectEdges.to));
const allBefore = lazily(() => adjacency(edges.to, edges.from, effectEdges.to, effectEdges.from));
const allAfter = lazily(() => adjacency(edges.from, edges.to, effectEdges.from, effectEdges.to));
const copiesOf = new Map(data.copies);
const nodeByName = lazily(() => new Map(nodes.name.map((name, node) => [name, node])));
const regionByName = lazily(() => new Map(regions.map((region, at) => [region.name, at])));

// Why a node is where it is.

function explain(node) {
  return {
    where: whereIs(node),
    remarks: remarksOn(node),
    pathIn: separatingPath(node, allBefore()).reverse(),
    pathOut: separatingPath(node, allAfter()),
    after: Array.from(effectsBefore().of(node)),
    before: Array.from(effectsAfter().of(node)),
  };
}

function whereIs(node) {
  const owner = nodes.region[node];
  if (copiesOf.has(node)) {
    const names = copiesOf.get(node).map((at) => regions[at].name);
    if (owner === OUTSIDE) names.push("outside every region");
    return `A number that is computed wherever it is read: ${names.join(", ")}.`;
  }
  if (owner >= 0) {
    const region = regions[owner];
    const labelled = region.label === null ? "" : `, labelled ${region.label}`;
    let told = `In region ${region.name}, treated by ${region.treatment}${labelled}`;
    if (has(node, "with its reader")) told += ", the only one that reads this number";
    if (has(node, "with its container")) told += ", where the container is made that it takes an item from";
    return told + ".";
  }
  if (opOf(node) === "placeholder") return "An input of the program; in no region.";
  if (opOf(node) === "output") return "The output of the program; in no region.";
  if (nodes.reason[node] >= 0) return `Outside every region: ${data.reasons[nodes.reason[node]].text}.`;
  if (opOf(node) === "get_attr") return "Outside every region: attributes are read outside and passed in.";
  return "Outside every region; the policy gives no reason.";
}

function remarksOn(node) {
  const remarks = [];
  if (has(node, "mode toggle")) remarks.push("It only switches a mode; each region sets the mode that its nodes need.");
  else if (nodes.mode[node] > 0) remarks.push(`It runs under ${data.modes[nodes.mode[node]]}.`);
  if (has(node, "unknown effects")) remarks.push("Its effects are unknown, so nothing with an effect moves past it.");
  return remarks;
}

// The shortest path from a node, through nodes outside all regions, to another region of the same label: why these two
// are not one region.
function separatingPath(start, adjacent) {
  const own = nodes.region[start];
  if (own < 0) return [];
  const cameFrom = new Map([[start, -1]]);
  const queue = [start];
  for (let head = 0; head < queue.length; head++) {
    const node = queue[head];
    for (const other of adjacent.of(node)) {
      const owner = nodes.region[other];
      if (cameFrom.has(other) || owner === NOWHERE || owner === own) continue;
      cameFrom.set(other, node);
      if (owner < 0) queue.push(other);
      else if (node !== start && regions[owner].label === regions[own].label) {
        const path = [];
        for (let at = other; at >= 0; at = cameFrom.get(at)) path.push(at);
        return path.reverse();
      }
    }
  }
  return [];
}

// Elements, made of text alone.

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}
