// The graph that one looks at: what is selected, where one looks, mouse and keys.

class GraphView extends Painting {
  constructor(canvas, whenSelected, whenDrawn) {
    super(canvas);
    this.whenSelected = whenSelected;
    this.whenDrawn = whenDrawn;
    // How much of the canvas is covered at the top.
    this.covered = () => 38;
    // Whether the graph has been drawn, and whether somebody has moved it since.
    this.wasShown = this.wasMoved = false;
    this.build();
    this.listen();
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  // The graph in other groups, with the same thing selected if that is a node or a region.
  regroup(by, showState) {
    const kept = this.selected;
    this.by = by;
    this.showState = showState;
    this.selected = null;
    this.forgetSums();
    this.build();
    if (kept && kept.kind === "node") this.showNode(kept.node, false);
    else if (kept && kept.kind === "region" && by === "region") this.showRegion(kept.region, false);
    else this.select(null);
  }

  setOverlay(name) {
    this.overlay = name;
    this.forgetSums();
    this.draw();
  }

  setOpen(item, isOpen) {
    if (!item.children || item.isOpen === isOpen || item.kind === "root") return;
    this.wasMoved = true;
    const before = this.placeOf(item);
    this.toggle(item, isOpen);
    const after = this.placeOf(item);
    // What was clicked stays where it was on the screen.
    this.left += (before.x + before.width / 2 - after.x - after.width / 2) * this.scale;
    this.top += (before.y - after.y) * this.scale;
    this.draw();
  }

  collapseAll() {
    this.closeAll();
    this.fit();
    this.select(null);
  }

  showNode(node, isMoved = true) {
    let place = this.tree.position[node];
    if (place < 0 && has(node, "state") && isMoved) {
      this.regroup(this.by, true);
      place = this.tree.position[node];
    }
    if (place < 0) {
      this.select({ kind: "node", node, label: nodes.name[node], children: null, isAbsent: true });
      return;
    }
    const item = this.openDownTo(place, (one) => one.kind === "node");
    this.select(item);
    if (isMoved) this.moveTo(item);
  }

  showRegion(region, isMoved = true) {
    if (this.by !== "region") this.regroup("region", this.showState);
    const item = this.tree.items.find((one) => one.kind === "region" && one.region === region);
    if (!item) {  // Nothing of it is drawn: its nodes only switch modes, say.
      this.select({ kind: "region", region, label: regions[region].name, children: null, isAbsent: true });
      return;
    }
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
    const middle = place.y + Math.min(place.height, height / this.scale) / 2;
    this.top = Math.max(height / 2 - middle * this.scale, this.covered() + 22 - place.y * this.scale);
    const isWhole = this.tree.root.height * this.scale < height - 20;
    if (isWhole) this.top = Math.max(this.top, this.highest());
    this.draw();
  }

  // What is seen.

  // Where the drawing begins if its first row is right below what is covered.
  highest() {
    return this.covered() + 12 - (HEADER + PADDING) * this.scale;
  }

  fit() {
    const { width, height } = this.size(), root = this.tree.root;
    const whole = Math.min(width / (root.width + 20), (height - this.covered() - 12) / (root.height + 10));
    // A long chain is read from its beginning; so small that nothing can be read would help nobody.
    this.scale = Math.min(1, Math.max(whole, Math.min(0.5, width / (root.width + 20)), 0.06));
    this.left = (width - root.width * this.scale) / 2;
    this.top = this.highest();
    this.wasMoved = false;
    this.draw();
  }

  showAll() {
    const { width, height } = this.size(), root = this.tree.root;
    this.scale = Math.min(1, width / (root.width + 20), (height - this.covered() - 12) / root.height);
    this.left = (width - root.width * this.scale) / 2;
    this.top = Math.max(this.highest(), (height - root.height * this.scale) / 2);
    this.draw();
  }

  // On paper nobody can move it: what somebody has chosen to see, else all of it unless that is too small to read.
  beginPaper() {
    this.kept = [this.scale, this.left, this.top, this.wasMoved];
    const seen = this.size(), paper = { width: 700, height: 860 }, root = this.tree.root;
    this.paper = paper;
    this.setResolution(3);
    if (this.wasMoved) {
      const factor = Math.min(paper.width / seen.width, paper.height / seen.height);
      [this.scale, this.left, this.top] = [this.scale * factor, this.left * factor, this.top * factor];
    } else if (paper.height / root.height < 0.35) this.fit();
    else this.showAll();
    this.paint();
  }

  endPaper() {
    this.paper = null;
    [this.scale, this.left, this.top, this.wasMoved] = this.kept;
    this.resize();
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

  setResolution(dense) {
    const { width, height } = this.size();
    this.canvas.width = Math.round(width * dense);
    this.canvas.height = Math.round(height * dense);
    this.dense = dense;
  }

  resize() {
    if (!this.canvas.clientWidth || this.paper) return;
    this.setResolution(window.devicePixelRatio || 1);
    if (!this.wasShown || !this.wasMoved) this.fit();
    this.wasShown = true;
    this.paint();
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
        if (item.kind === "root") return null;
        if (pointY > itemY + HEADER + 6) return { item, isHeader: false };
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
    const act = this.keys()[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  }

  keys() {
    const item = this.selected && !this.selected.isAbsent ? this.selected : null;
    const siblings = item && item.parent ? item.parent.children : this.tree.root.children;
    const at = item ? siblings.indexOf(item) : -1;
    const go = (to) => { if (to) { this.select(to); this.keepInSight(to); } };
    const open = (isOpen) => { if (item && item.children) { this.setOpen(item, isOpen); this.select(item); } };
    const around = item && item.parent.kind !== "root" ? item.parent : null;
    const toggle = () => open(item && !item.isOpen);
    return {
      ArrowDown: () => go(siblings[Math.min(at + 1, siblings.length - 1)]),
      ArrowUp: () => go(siblings[Math.max(at - 1, 0)]),
      ArrowRight: () => (item && item.isOpen ? go(item.children[0]) : open(true)),
      ArrowLeft: () => (item && item.isOpen ? open(false) : go(around)),
      Enter: toggle,
      " ": toggle,
      Escape: () => this.select(null),
      "+": () => this.zoom(1.25),
      "=": () => this.zoom(1.25),
      "-": () => this.zoom(0.8),
      0: () => this.showAll(),
    };
  }

  keepInSight(item) {
    const place = this.placeOf(item), { width, height } = this.size(), edge = 40;
    if (this.scale < 0.4) { this.moveTo(item); return; }
    const left = place.x * this.scale + this.left, top = place.y * this.scale + this.top;
    const wide = Math.min(place.width * this.scale, width - 2 * edge);
    const high = Math.min(place.height * this.scale, height - 3 * edge);
    this.left += Math.max(0, edge - left) - Math.max(0, left + wide - width + edge);
    this.top += Math.max(0, 1.5 * edge - top) - Math.max(0, top + high - height + edge);
    this.draw();
  }
}

function hint(item, view) {
  if (item.kind === "node") return `${item.label}: ${text(nodes.target[item.node])} ${text(nodes.value[item.node])}`;
  return `${item.label}: ${view.subtitle(item)}`;
}
