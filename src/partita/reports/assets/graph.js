// The graph on a canvas: groups that open, drawn where they are visible.
//
// All nodes stand in one order in which they can run, and a group is an unbroken run of it: a region, the calls in one
// module, or some neighbours of too many. So no grouping has a cycle, at any level.

const MOST_CHILDREN = 120, FEW_INPUTS = 6;
const NODE_HEIGHT = 36, GROUP_HEIGHT = 50, HEADER = 30, PADDING = 16, GAP_X = 22, GAP_Y = 30;

function makeGroup(kind, label, start, end, children, extra) {
  return { kind, label, start, end, children, isOpen: false, parent: null, x: 0, y: 0, width: 0, height: 0, plan: null, ...extra };
}
function makeLeaf(node, at) {
  return { kind: "node", label: nodes.name[node], node, start: at, end: at + 1, children: null, isOpen: false, parent: null,
    x: 0, y: 0, width: 0, height: 0, plan: null };
}

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
  const leaves = (start, end) => Array.from({ length: end - start }, (_, step) => makeLeaf(sequence[start + step], start + step));
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
    const inside = children.slice(Math.floor(part * children.length / parts), Math.floor((part + 1) * children.length / parts));
    const last = inside[inside.length - 1];
    made.push(makeGroup("chunk", `${inside[0].label} … ${last.label}`, inside[0].start, last.end, chunked(inside)));
  }
  return made;
}

// Colours: what is shown by them, as one key for a node, or a number.

function hueOf(number) { return (212 + number * 137.5) % 360; }
const NEUTRAL = -1;

const OVERLAYS = {
  region: { label: "Region", key: (node) => nodes.region[node], name: (key) => regions[key].name },
  treatment: {
    label: "Treatment",
    keys: () => [...new Set(regions.map((region) => region.treatment))],
    key: (node) => (nodes.region[node] < 0 ? -1 : OVERLAYS.treatment.numbers.get(regions[nodes.region[node]].treatment)),
    name: (key) => OVERLAYS.treatment.list[key],
  },
  body: {
    label: "Distinct body",
    key: (node) => (nodes.region[node] < 0 ? -1 : regions[nodes.region[node]].body),
    name: (key) => data.bodies[key].name,
  },
  mode: { label: "Mode", key: (node) => nodes.mode[node] - 1, name: (key) => data.modes[key + 1] },
  effects: {
    label: "Effects",
    key: (node) => EFFECTS.findLastIndex((name) => has(node, name)),
    name: (key) => EFFECTS[key],
  },
  half: {
    label: "Forward and backward",
    key: (node) => (has(node, "saved for backward") ? 2 : has(node, "backward") ? 1 : has(node, "forward") ? 0 : -1),
    name: (key) => ["forward", "backward", "saved for backward"][key],
  },
  flops: { label: "FLOPs", amount: (node) => nodes.flops[node] || 0, shown: shownFlops },
  bytes: { label: "Bytes of results", amount: (node) => nodes.bytes[node] || 0, shown: shownBytes },
};
OVERLAYS.treatment.list = OVERLAYS.treatment.keys();
OVERLAYS.treatment.numbers = new Map(OVERLAYS.treatment.list.map((name, at) => [name, at]));
if (data.kind !== "joint graph") delete OVERLAYS.half;

class GraphView {
  constructor(canvas, whenSelected, whenDrawn) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.whenSelected = whenSelected;
    this.whenDrawn = whenDrawn;
    this.by = "region";
    this.overlay = "region";
    this.showState = false;
    this.scale = 1;
    this.left = 0;
    this.top = 0;
    this.selected = null;
    this.hovered = null;
    this.drawn = { boxes: 0, edges: 0 };
    this.isDue = false;
    this.labels = new Map();
    this.readColors();
    this.rebuild();
    this.listen();
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  // Structure.

  rebuild() {
    const kept = this.selected;
    this.tree = buildTree(this.by, this.showState);
    this.amounts = new Map();
    this.counts = new Map();
    // A single group says nothing that its inside does not.
    let alone = this.tree.root.children.filter((child) => child.children && child.kind !== "inputs");
    while (alone.length === 1 && alone[0].kind !== "region") {
      alone[0].isOpen = true;
      alone = alone[0].children.filter((child) => child.children);
    }
    this.arrange(this.tree.root);
    this.selected = null;
    if (kept && kept.kind === "node") this.showNode(kept.node, false);
    else if (kept && kept.kind === "region" && this.by === "region") this.showRegion(kept.region, false);
  }

  // Sizes and places of everything in an open group, from the inside out.
  arrange(item) {
    if (!item.children || !item.isOpen) { this.measure(item); return; }
    for (const child of item.children) if (!child.width || (child.isOpen && !child.plan)) this.arrange(child);
    const links = this.linksIn(item);
    const plan = layered(item.children, links.map((link) => [link.from, link.to]), GAP_X, GAP_Y);
    item.children.forEach((child, at) => { child.x = plan.at[at].x; child.y = plan.at[at].y; });
    const labelWidth = item.kind === "root" ? 0 : Math.min(this.widthOf(item.label, true) + 70, 420);
    const inner = Math.max(plan.width, labelWidth);
    const shift = (inner - plan.width) / 2 + PADDING;
    for (const child of item.children) { child.x += shift; child.y += HEADER + PADDING; }
    for (const route of plan.routes) {
      for (let at = 0; at < route.length; at += 2) { route[at] += shift; route[at + 1] += HEADER + PADDING; }
    }
    item.plan = { links, routes: plan.routes };
    item.width = inner + 2 * PADDING;
    item.height = plan.height + HEADER + 2 * PADDING;
  }

  measure(item) {
    if (item.children) {
      item.width = Math.min(Math.max(this.widthOf(item.label, true) + 40, 170), 300);
      item.height = GROUP_HEIGHT;
    } else {
      const second = this.widthOf(secondLine(item.node), false);
      item.width = Math.min(Math.max(this.widthOf(item.label, false) + 30, second + 30, 96), 230);
      item.height = NODE_HEIGHT;
    }
  }

  // The edges between the children of a group, each once, with how many values and bytes they stand for.
  linksIn(item) {
    if (item.links) return item.links;
    const { sequence, position } = this.tree;
    const child = new Int32Array(item.end - item.start);
    item.children.forEach((one, at) => child.fill(at, one.start - item.start, one.end - item.start));
    const found = new Map();
    for (let at = item.start; at < item.end; at++) {
      for (const source of inputsOf().of(sequence[at])) {
        const from = position[source];
        if (from < item.start || from >= item.end) continue;
        const one = child[from - item.start], other = child[at - item.start];
        if (one >= other) continue;
        const key = one * item.children.length + other;
        const link = found.get(key) || { from: one, to: other, count: 0, bytes: 0 };
        link.count += 1;
        link.bytes += nodes.bytes[source] || 0;
        found.set(key, link);
      }
    }
    item.links = [...found.values()];
    return item.links;
  }

  widthOf(label, isBold) {
    const key = (isBold ? "b" : "n") + label;
    if (!this.labels.has(key)) {
      this.context.font = isBold ? this.fonts.bold : this.fonts.plain;
      this.labels.set(key, this.context.measureText(label).width);
    }
    return this.labels.get(key);
  }

  setOpen(item, isOpen) {
    this.wasMoved = true;
    if (!item.children || item.isOpen === isOpen || item.kind === "root") return;
    const before = this.placeOf(item);
    item.isOpen = isOpen;
    item.plan = null;
    for (let at = item; at; at = at.parent) this.arrange(at);
    const after = this.placeOf(item);
    // What was clicked stays where it was on the screen.
    this.left += (before.x + before.width / 2 - after.x - after.width / 2) * this.scale;
    this.top += (before.y - after.y) * this.scale;
    this.draw();
  }

  collapseAll() {
    for (const item of this.tree.items) {
      if (item.kind === "root") continue;
      item.isOpen = false;
      item.plan = null;
      item.width = 0;
    }
    this.selected = null;
    this.arrange(this.tree.root);
    this.fit();
    this.whenSelected(null);
  }

  placeOf(item) {
    let x = 0, y = 0;
    for (let at = item; at; at = at.parent) { x += at.x; y += at.y; }
    return { x, y, width: item.width, height: item.height };
  }

  // The innermost drawn item that holds a place of the sequence.
  visibleAt(place) {
    let item = this.tree.root;
    while (item.isOpen) {
      let low = 0, high = item.children.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (item.children[middle].start <= place) low = middle; else high = middle - 1;
      }
      item = item.children[low];
    }
    return item;
  }

  openDownTo(place, isThere) {
    let item = this.tree.root;
    const opened = [];
    while (!isThere(item)) {
      if (!item.children) break;
      if (!item.isOpen) { item.isOpen = true; item.plan = null; opened.push(item); }
      item = item.children.find((child) => child.start <= place && place < child.end);
    }
    for (const one of opened.reverse()) this.arrange(one);
    if (opened.length) for (let at = opened[opened.length - 1].parent; at; at = at.parent) this.arrange(at);
    return item;
  }

  showNode(node, isMoved = true) {
    let place = this.tree.position[node];
    if (place < 0 && has(node, "state") && isMoved) { this.showState = true; this.rebuild(); place = this.tree.position[node]; }
    if (place < 0) { this.select({ kind: "node", node, label: nodes.name[node], children: null, isAbsent: true }); return; }
    const item = this.openDownTo(place, (one) => one.kind === "node");
    this.select(item);
    if (isMoved) this.moveTo(item);
  }

  showRegion(region, isMoved = true) {
    if (this.by !== "region") { this.by = "region"; this.rebuild(); }
    const item = this.tree.items.find((one) => one.kind === "region" && one.region === region);
    if (!item) return;
    this.openDownTo(item.start, (one) => one === item);
    this.select(item);
    if (isMoved) this.moveTo(item);
  }

  select(item) {
    this.selected = item;
    this.whenSelected(item);
    this.draw();
  }

  moveTo(item) {
    this.wasMoved = true;
    const place = this.placeOf(item), { width, height } = this.size();
    this.scale = Math.min(Math.max(this.scale, 0.8), 1.2);
    this.left = width / 2 - (place.x + place.width / 2) * this.scale;
    this.top = Math.max(height / 2 - (place.y + Math.min(place.height, height / this.scale) / 2) * this.scale, 60 - place.y * this.scale);
    this.draw();
  }

  // What is seen.

  size() {
    return { width: this.canvas.clientWidth || 1, height: this.canvas.clientHeight || 1 };
  }

  fit() {
    const { width, height } = this.size(), root = this.tree.root;
    const whole = Math.min(width / (root.width + 20), (height - 50) / (root.height + 10));
    // A long chain is read from its beginning; so small that nothing can be read would help nobody.
    this.scale = Math.min(1, Math.max(whole, Math.min(0.5, width / (root.width + 20)), 0.06));
    this.left = (width - root.width * this.scale) / 2;
    this.top = 34 - HEADER * this.scale;
    this.draw();
  }

  showAll() {
    const { width, height } = this.size(), root = this.tree.root;
    this.scale = Math.min(1, width / (root.width + 20), (height - 50) / root.height);
    this.left = (width - root.width * this.scale) / 2;
    this.top = Math.max(34 - HEADER * this.scale, (height - root.height * this.scale) / 2);
    this.draw();
  }

  zoom(factor, x, y) {
    this.wasMoved = true;
    const scale = Math.min(Math.max(this.scale * factor, 0.01), 3), { width, height } = this.size();
    const atX = x === undefined ? width / 2 : x, atY = y === undefined ? height / 2 : y;
    this.left = atX - (atX - this.left) * scale / this.scale;
    this.top = atY - (atY - this.top) * scale / this.scale;
    this.scale = scale;
    this.draw();
  }

  resize() {
    const { width, height } = this.size(), dense = window.devicePixelRatio || 1;
    if (!this.canvas.clientWidth) return;
    this.canvas.width = Math.round(width * dense);
    this.canvas.height = Math.round(height * dense);
    if (!this.wasShown || !this.wasMoved) this.fit();
    this.wasShown = true;
    this.paint();
  }

  readColors() {
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
    this.isDark = color("--scheme") === "dark";
    this.colors = { text: color("--text"), muted: color("--muted"), line: color("--line-strong"), back: color("--back"), box: color("--box"),
      accent: color("--accent"), group: color("--group"), edge: color("--edge"), out: color("--out") };
    const family = color("--font");
    this.fonts = { plain: `12px ${family}`, bold: `600 13px ${family}`, small: `11px ${family}` };
  }

  draw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => { this.isDue = false; this.paint(); });
  }

  paint() {
    const { width, height } = this.size(), dense = window.devicePixelRatio || 1, context = this.context;
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.clearRect(0, 0, width, height);
    context.setTransform(dense * this.scale, 0, 0, dense * this.scale, dense * this.left, dense * this.top);
    const view = { left: -this.left / this.scale, top: -this.top / this.scale };
    view.right = view.left + width / this.scale;
    view.bottom = view.top + height / this.scale;
    this.drawn = { boxes: 0, edges: 0 };
    this.paintItem(this.tree.root, 0, 0, view);
    this.paintSelection(view);
    this.whenDrawn(this);
  }

  paintItem(item, outerX, outerY, view) {
    const x = outerX + item.x, y = outerY + item.y;
    if (x > view.right || y > view.bottom || x + item.width < view.left || y + item.height < view.top) return;
    if (!item.isOpen) { this.paintBox(item, x, y); return; }
    if (item.kind !== "root") this.paintFrame(item, x, y);
    if (Math.max(item.width, item.height) * this.scale < 14) return;
    this.paintEdges(item, x, y, view);
    for (const child of item.children) this.paintItem(child, x, y, view);
  }

  paintFrame(item, x, y) {
    const context = this.context, color = this.colorOf(item);
    this.drawn.boxes += 1;
    context.beginPath();
    context.roundRect(x, y, item.width, item.height, 8);
    context.fillStyle = color ? this.tint(color, 0.5) : this.colors.group;
    context.fill();
    context.lineWidth = item === this.selected ? 2.5 : 1;
    context.strokeStyle = item === this.selected ? this.colors.accent : color ? this.bar(color) : this.colors.line;
    context.stroke();
    if (this.scale < 0.2) return;
    context.fillStyle = this.colors.text;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.font = this.fonts.bold;
    context.fillText("−", x + 12, y + HEADER / 2 + 2);
    context.fillText(this.cut(item.label, item.width - 60, true), x + 30, y + HEADER / 2 + 2);
  }

  paintBox(item, x, y) {
    const context = this.context, color = this.colorOf(item), isGroup = item.children !== null;
    this.drawn.boxes += 1;
    context.beginPath();
    if (this.scale < 0.15) context.rect(x, y, item.width, item.height);
    else context.roundRect(x, y, item.width, item.height, isGroup ? 8 : 6);
    context.fillStyle = color ? this.tint(color, 1) : this.colors.box;
    context.fill();
    context.lineWidth = item === this.selected ? 2.5 : item === this.hovered ? 1.8 : 1;
    context.strokeStyle = item === this.selected || item === this.hovered ? this.colors.accent : color ? this.bar(color) : this.colors.line;
    context.stroke();
    if (this.scale < 0.28) return;
    context.textBaseline = "middle";
    context.textAlign = "left";
    if (isGroup) this.paintGroupText(item, x, y);
    else this.paintNodeText(item, x, y);
  }

  paintGroupText(item, x, y) {
    const context = this.context;
    context.fillStyle = this.colors.text;
    context.font = this.fonts.bold;
    context.fillText("+", x + 12, y + 17);
    context.fillText(this.cut(item.label, item.width - 38, true), x + 28, y + 17);
    context.font = this.fonts.small;
    context.fillStyle = this.colors.muted;
    context.fillText(this.cut(this.subtitle(item), item.width - 38, false), x + 28, y + 34);
    this.paintShares(item, x, y);
  }

  paintNodeText(item, x, y) {
    const context = this.context;
    context.fillStyle = this.colors.text;
    context.font = this.fonts.plain;
    context.fillText(this.cut(item.label, item.width - 22, false), x + 11, y + 12);
    context.font = this.fonts.small;
    context.fillStyle = this.colors.muted;
    context.fillText(this.cut(secondLine(item.node), item.width - 22, false), x + 11, y + 26);
  }

  subtitle(item) {
    const count = plural(item.end - item.start, "node");
    if (item.kind === "region") return `${count} · ${regions[item.region].treatment}`;
    if (item.kind === "module") return `${text(data.modules[item.module][1])} · ${count}`;
    return count;
  }

  // A strip that says which colours are inside, where there are several.
  paintShares(item, x, y) {
    const counts = this.countsOf(item);
    if (!counts || counts.length < 2) return;
    const total = item.end - item.start, context = this.context, width = item.width - 16;
    let at = x + 8;
    for (const [key, count] of counts) {
      const wide = width * count / total;
      context.fillStyle = key === NEUTRAL ? this.colors.line : this.bar({ hue: hueOf(key), strength: 1 });
      context.fillRect(at, y + item.height - 6, wide, 3);
      at += wide;
    }
  }

  // An edge is drawn if it is in sight; many edges of one kind are one path.
  paintEdges(item, x, y, view) {
    const context = this.context;
    context.lineWidth = Math.max(1, 0.7 / this.scale);
    context.strokeStyle = this.colors.edge;
    context.beginPath();
    item.plan.routes.forEach((route) => {
      if (!inSight(route, x, y, view)) return;
      this.drawn.edges += 1;
      trace(context, route, x, y);
    });
    context.stroke();
    if (this.scale < 0.35) return;
    context.fillStyle = this.colors.edge;
    context.beginPath();
    for (const route of item.plan.routes) {
      const endX = x + route[route.length - 2], endY = y + route[route.length - 1];
      if (endX < view.left || endX > view.right || endY < view.top || endY > view.bottom) continue;
      arrow(context, endX, endY);
    }
    context.fill();
  }

  paintSelection(view) {
    const item = this.selected;
    if (!item || item.isAbsent) return;
    const { sequence, position } = this.tree, context = this.context;
    const here = this.placeOf(item), before = new Set(), after = new Set();
    for (let at = item.start; at < item.end && at - item.start < 5000; at++) {
      for (const source of inputsOf().of(sequence[at])) before.add(position[source]);
      for (const user of usersOf().of(sequence[at])) after.add(position[user]);
    }
    const isOutside = (place) => place >= 0 && (place < item.start || place >= item.end);
    const link = (places, color, isIncoming) => {
      const items = new Set([...places].filter(isOutside).map((place) => this.visibleAt(place)));
      context.strokeStyle = context.fillStyle = color;
      context.lineWidth = Math.max(1.8, 1.2 / this.scale);
      for (const other of items) {
        const there = this.placeOf(other);
        const [from, to] = isIncoming ? [there, here] : [here, there];
        const points = this.routeBetween(...(isIncoming ? [other, item] : [item, other]))
          || [from.x + from.width / 2, from.y + from.height, to.x + to.width / 2, to.y];
        if (!inSight(points, 0, 0, view)) continue;
        context.beginPath();
        trace(context, points, 0, 0);
        context.stroke();
        context.beginPath();
        arrow(context, points[points.length - 2], points[points.length - 1]);
        context.fill();
      }
    };
    link(before, this.colors.accent, true);
    link(after, this.colors.out, false);
  }

  // The way of the edge between two boxes of one group, on the page.
  routeBetween(one, other) {
    const around = one.parent;
    if (!around || around !== other.parent || !around.plan) return null;
    const from = around.children.indexOf(one), to = around.children.indexOf(other);
    const at = around.plan.links.findIndex((link) => link.from === from && link.to === to);
    if (at < 0) return null;
    const place = this.placeOf(around);
    return around.plan.routes[at].map((value, axis) => value + (axis % 2 ? place.y : place.x));
  }

  cut(label, width, isBold) {
    if (this.widthOf(label, isBold) <= width) return label;
    const key = `${isBold ? "B" : "N"}${Math.round(width)} ${label}`;
    if (!this.labels.has(key)) {
      let low = 0, high = label.length;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.widthOf(label.slice(0, middle) + "…", isBold) <= width) low = middle; else high = middle - 1;
      }
      this.labels.set(key, label.slice(0, low) + "…");
    }
    return this.labels.get(key);
  }

  // Colours.

  tint(color, part) {
    const strong = color.strength;
    return this.isDark
      ? `hsl(${color.hue} ${20 + 14 * strong}% ${12 + 9 * strong * part}%)`
      : `hsl(${color.hue} ${55 + 15 * strong}% ${98.5 - (5 * strong + 1.5) * part - 12 * (strong > 1 ? strong - 1 : 0)}%)`;
  }

  bar(color) {
    return this.isDark ? `hsl(${color.hue} 32% ${34 + 14 * color.strength}%)` : `hsl(${color.hue} 42% ${76 - 14 * color.strength}%)`;
  }

  colorOf(item) {
    const overlay = OVERLAYS[this.overlay];
    if (overlay.amount) {
      const share = this.amountOf(item) / (this.amountOf(this.tree.root) || 1);
      if (!share) return null;
      const strength = Math.min(1, Math.max(0, 1 + Math.log10(share) / 4));
      return { hue: 212 - 190 * strength, strength: 0.4 + 1.2 * strength };
    }
    const counts = this.countsOf(item);
    const only = counts && counts.length === 1 ? counts[0][0] : NEUTRAL;
    return only === NEUTRAL ? null : { hue: hueOf(only), strength: 1 };
  }

  amountOf(item) {
    let found = this.amounts.get(item);
    if (found === undefined) {
      const amount = OVERLAYS[this.overlay].amount;
      found = 0;
      if (item.children) for (const child of item.children) found += this.amountOf(child);
      else found = amount(item.node);
      this.amounts.set(item, found);
    }
    return found;
  }

  // How many nodes of a group have which key, the most frequent first.
  countsOf(item) {
    if (OVERLAYS[this.overlay].amount) return null;
    let found = this.counts.get(item);
    if (!found) {
      const key = OVERLAYS[this.overlay].key, counted = new Map();
      for (let at = item.start; at < item.end; at++) {
        const own = Math.max(key(this.tree.sequence[at]), NEUTRAL);
        counted.set(own, (counted.get(own) || 0) + 1);
      }
      found = [...counted].sort((one, other) => other[1] - one[1]);
      this.counts.set(item, found);
    }
    return found;
  }

  setOverlay(name) {
    this.overlay = name;
    this.amounts = new Map();
    this.counts = new Map();
    this.draw();
  }

  // Mouse and keys.

  itemAt(x, y) {
    const pointX = (x - this.left) / this.scale, pointY = (y - this.top) / this.scale;
    const inside = (item, outerX, outerY) => {
      const itemX = outerX + item.x, itemY = outerY + item.y;
      if (pointX < itemX || pointY < itemY || pointX > itemX + item.width || pointY > itemY + item.height) return null;
      if (item.isOpen) {
        for (const child of item.children) {
          const found = inside(child, itemX, itemY);
          if (found) return found;
        }
        if (item.kind === "root" || pointY > itemY + HEADER + 6) return item.kind === "root" ? null : { item, isHeader: false };
      }
      return { item, isHeader: true };
    };
    return inside(this.tree.root, 0, 0);
  }

  listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.offsetX, y: event.offsetY, left: this.left, top: this.top, isMoved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) { this.hover(event); return; }
      if (Math.hypot(event.offsetX - drag.x, event.offsetY - drag.y) > 4) drag.isMoved = true;
      if (!drag.isMoved) return;
      this.left = drag.left + event.offsetX - drag.x;
      this.top = drag.top + event.offsetY - drag.y;
      this.wasMoved = true;
      canvas.classList.add("dragging");
      this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      canvas.classList.remove("dragging");
      if (drag && !drag.isMoved) this.click(event.offsetX, event.offsetY);
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { if (this.hovered) { this.hovered = null; this.draw(); } });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const step = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
      this.zoom(Math.exp(-Math.max(-120, Math.min(120, step)) * 0.0022), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  hover(event) {
    const found = this.itemAt(event.offsetX, event.offsetY), item = found && found.isHeader ? found.item : null;
    this.canvas.classList.toggle("pointing", item !== null);
    if (item === this.hovered) return;
    this.hovered = item;
    this.canvas.title = item ? hint(item, this) : "";
    this.draw();
  }

  click(x, y) {
    const found = this.itemAt(x, y);
    if (!found) { this.select(null); return; }
    if (found.isHeader && found.item.children) this.setOpen(found.item, !found.item.isOpen);
    this.select(found.item);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const item = this.selected && !this.selected.isAbsent ? this.selected : null;
    const siblings = item && item.parent ? item.parent.children : this.tree.root.children;
    const at = item ? siblings.indexOf(item) : -1;
    const go = (to) => { if (to) { this.select(to); this.keepInSight(to); } };
    switch (event.key) {
      case "ArrowDown": go(siblings[Math.min(at + 1, siblings.length - 1)]); break;
      case "ArrowUp": go(siblings[Math.max(at - 1, 0)]); break;
      case "ArrowRight":
        if (item && item.children && !item.isOpen) { this.setOpen(item, true); this.select(item); } else if (item && item.isOpen) go(item.children[0]);
        break;
      case "ArrowLeft":
        if (item && item.isOpen) { this.setOpen(item, false); this.select(item); } else if (item && item.parent && item.parent.kind !== "root") go(item.parent);
        break;
      case "Enter": case " ": if (item && item.children) { this.setOpen(item, !item.isOpen); this.select(item); } break;
      case "Escape": this.select(null); break;
      case "+": case "=": this.zoom(1.25); break;
      case "-": this.zoom(0.8); break;
      case "0": this.showAll(); break;
      default: return;
    }
    event.preventDefault();
  }

  keepInSight(item) {
    const place = this.placeOf(item), { width, height } = this.size(), edge = 40;
    if (this.scale < 0.4) { this.moveTo(item); return; }
    const left = place.x * this.scale + this.left, top = place.y * this.scale + this.top;
    const wide = Math.min(place.width * this.scale, width - 2 * edge), high = Math.min(place.height * this.scale, height - 3 * edge);
    this.left += Math.max(0, edge - left) - Math.max(0, left + wide - width + edge);
    this.top += Math.max(0, 1.5 * edge - top) - Math.max(0, top + high - height + edge);
    this.draw();
  }
}

function secondLine(node) {
  const target = text(nodes.target[node]);
  return text(nodes.value[node]) || (target === nodes.name[node] ? opOf(node) : target);
}

function hint(item, view) {
  if (item.kind === "node") return `${nodes.name[item.node]}: ${text(nodes.target[item.node])} ${text(nodes.value[item.node])}`;
  return `${item.label}: ${view.subtitle(item)}`;
}

function inSight(route, x, y, view) {
  let left = Infinity, right = -Infinity, top = Infinity, bottom = -Infinity;
  for (let at = 0; at < route.length; at += 2) {
    left = Math.min(left, route[at]); right = Math.max(right, route[at]);
    top = Math.min(top, route[at + 1]); bottom = Math.max(bottom, route[at + 1]);
  }
  return x + right >= view.left && x + left <= view.right && y + bottom >= view.top && y + top <= view.bottom;
}

function trace(context, route, x, y) {
  context.moveTo(x + route[0], y + route[1]);
  for (let at = 2; at < route.length; at += 2) {
    const fromX = x + route[at - 2], fromY = y + route[at - 1], toX = x + route[at], toY = y + route[at + 1];
    if (fromX === toX) { context.lineTo(toX, toY); continue; }
    const middle = (fromY + toY) / 2;
    context.bezierCurveTo(fromX, middle, toX, middle, toX, toY);
  }
}

function arrow(context, x, y) {
  context.moveTo(x, y);
  context.lineTo(x - 4, y - 7);
  context.lineTo(x + 4, y - 7);
  context.closePath();
}
