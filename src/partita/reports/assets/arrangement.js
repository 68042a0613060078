// Which groups are open, and where everything is: each item beside the upper left corner of the group around it.

const NODE_HEIGHT = 36, GROUP_HEIGHT = 50, HEADER = 30, PADDING = 16, GAP_X = 22, GAP_Y = 30;

class Arrangement {
  constructor(context) {
    this.context = context;
    this.by = "region";
    this.showState = false;
    this.labels = new Map();
    const family = getComputedStyle(document.documentElement).getPropertyValue("--font").trim();
    this.fonts = { plain: `12px ${family}`, bold: `600 13px ${family}`, small: `11px ${family}` };
  }

  build() {
    this.tree = buildTree(this.by, this.showState);
    // A single group says nothing that its inside does not.
    let alone = this.tree.root.children.filter((child) => child.children && child.kind !== "inputs");
    while (alone.length === 1 && alone[0].kind !== "region") {
      alone[0].isOpen = true;
      alone = alone[0].children.filter((child) => child.children);
    }
    this.arrange(this.tree.root);
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

  toggle(item, isOpen) {
    item.isOpen = isOpen;
    item.plan = null;
    for (let at = item; at; at = at.parent) this.arrange(at);
  }

  closeAll() {
    for (const item of this.tree.items) {
      if (item.kind === "root") continue;
      item.isOpen = false;
      item.plan = null;
      item.width = 0;
    }
    this.arrange(this.tree.root);
  }

  // Where an item is on the whole drawing.
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

  // Opens what is around a place of the sequence, down to the item for which `isThere` holds.
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
}
