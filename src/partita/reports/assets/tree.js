// The tree of groups. All nodes stand in one order in which they can run, and a group is an unbroken run of it: a
// region, the calls in one module, or some neighbours of too many. So no grouping has a cycle, at any level.

const MOST_CHILDREN = 120, FEW_INPUTS = 6;

function makeItem(kind, label, start, end, children) {
  const place = { x: 0, y: 0, width: 0, height: 0 };
  return { kind, label, start, end, children, isOpen: false, parent: null, plan: null, ...place };
}
const makeGroup = (kind, label, start, end, children, extra) =>
  ({ ...makeItem(kind, label, start, end, children), ...extra });
const makeLeaf = (node, at) => ({ ...makeItem("node", nodes.name[node], at, at + 1, null), node });

// The sequence of drawn nodes, and the tree of groups over it.
function buildTree(by, showState) {
  const sequence = [];
  const isShown = (node) => showState || !has(node, "state");
  for (let node = 0; node < NODE_COUNT; node++) if (opOf(node) === "placeholder" && isShown(node)) sequence.push(node);
  const inputs = sequence.length;
  for (const node of data.order) if (isShown(node) && !has(node, "mode toggle")) sequence.push(node);
  const body = sequence.length;
  for (let node = 0; node < NODE_COUNT; node++) if (opOf(node) === "output") sequence.push(node);
  const position = new Int32Array(NODE_COUNT).fill(-1);
  sequence.forEach((node, at) => { position[node] = at; });
  const leaves = (start, end) => sequence.slice(start, end).map((node, step) => makeLeaf(node, start + step));
  let top = leaves(0, inputs);
  if (inputs > FEW_INPUTS) top = [makeGroup("inputs", "inputs", 0, inputs, chunked(top))];
  top = top.concat(by === "module" ? moduleGroups(sequence, inputs, body, 0) : regionGroups(sequence, inputs, body));
  top = top.concat(leaves(body, sequence.length));
  const root = makeGroup("root", data.title, 0, sequence.length, chunked(top), { isOpen: true });
  const items = [];
  (function adopt(item) {
    item.id = items.length;
    items.push(item);
    for (const child of item.children || []) { child.parent = item; adopt(child); }
  })(root);
  return { root, items, sequence, position };
}

function regionGroups(sequence, start, end) {
  const found = [];
  for (let at = start; at < end;) {
    const region = nodes.region[sequence[at]];
    let stop = at + 1;
    while (stop < end && nodes.region[sequence[stop]] === region) stop++;
    const inside = chunked(moduleGroups(sequence, at, stop, region >= 0 ? commonDepth(sequence, at, stop) : 0));
    if (region >= 0) found.push(makeGroup("region", regions[region].name, at, stop, inside, { region }));
    else found.push(...inside);
    at = stop;
  }
  return found;
}

const moduleChains = [];
function chainOfModule(module) {
  if (module < 0) return [];
  if (!moduleChains[module]) {
    const around = data.modules[module][2];
    moduleChains[module] = [...(around < 0 ? [] : chainOfModule(around)), module];
  }
  return moduleChains[module];
}

function commonDepth(sequence, start, end) {
  let common = null;
  for (let at = start; at < end; at++) {
    const chain = chainOfModule(nodes.module[sequence[at]]);
    if (common === null) common = chain;
    let same = 0;
    while (same < common.length && same < chain.length && common[same] === chain[same]) same++;
    if (same < common.length) common = common.slice(0, same);
    if (!common.length) return 0;
  }
  return common === null ? 0 : common.length;
}

function moduleGroups(sequence, start, end, depth) {
  const found = [];
  for (let at = start; at < end;) {
    const module = chainOfModule(nodes.module[sequence[at]])[depth];
    if (module === undefined) { found.push(makeLeaf(sequence[at], at)); at++; continue; }
    let stop = at + 1;
    while (stop < end && chainOfModule(nodes.module[sequence[stop]])[depth] === module) stop++;
    const inside = moduleGroups(sequence, at, stop, depth + 1);
    if (inside.length === 1) found.push(inside[0]);
    else found.push(makeGroup("module", text(data.modules[module][0]), at, stop, chunked(inside), { module }));
    at = stop;
  }
  return found;
}

// Neighbours together, where a group would have too many children to be read.
function chunked(children) {
  if (children.length <= MOST_CHILDREN) return children;
  const parts = Math.min(MOST_CHILDREN, Math.ceil(children.length / 60)), made = [];
  for (let part = 0; part < parts; part++) {
    const [start, end] = [part, part + 1].map((at) => Math.floor(at * children.length / parts));
    const inside = children.slice(start, end);
    const last = inside[inside.length - 1];
    made.push(makeGroup("chunk", `${inside[0].label} … ${last.label}`, inside[0].start, last.end, chunked(inside)));
  }
  return made;
}
