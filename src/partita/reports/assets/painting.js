// Draws what is in sight of an arrangement on a canvas.

class Painting extends Arrangement {
  constructor(canvas) {
    super(canvas.getContext("2d"));
    this.canvas = canvas;
    this.overlay = "region";
    this.scale = 1;
    this.left = 0;
    this.top = 0;
    this.selected = null;
    this.hovered = null;
    this.drawn = { boxes: 0, edges: 0 };
    this.isDue = false;
    // Pixels of the canvas for each of the page; its size on paper, while that is printed.
    this.dense = 1;
    this.paper = null;
    this.readColors();
    this.forgetSums();
  }

  size() {
    return this.paper || { width: this.canvas.clientWidth || 1, height: this.canvas.clientHeight || 1 };
  }

  readColors() {
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
    this.isDark = color("--scheme") === "dark";
    const names = { text: "text", muted: "muted", line: "line-strong", box: "box", group: "group", edge: "edge",
      accent: "accent", out: "out" };
    this.colors = Object.fromEntries(Object.entries(names).map(([name, variable]) => [name, color(`--${variable}`)]));
  }

  draw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => { this.isDue = false; this.paint(); });
  }

  paint() {
    const { width, height } = this.size(), dense = this.dense, context = this.context;
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.clearRect(0, 0, width, height);
    context.setTransform(dense * this.scale, 0, 0, dense * this.scale, dense * this.left, dense * this.top);
    const view = { left: -this.left / this.scale, top: -this.top / this.scale };
    view.right = view.left + width / this.scale;
    view.bottom = view.top + height / this.scale;
    this.drawn = { boxes: 0, edges: 0 };
    this.paintItem(this.tree.root, 0, 0, view);
    this.paintSelection(view);
    this.whenDrawn();
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
    const isMarked = item === this.selected || item === this.hovered;
    context.strokeStyle = isMarked ? this.colors.accent : color ? this.bar(color) : this.colors.line;
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
    const count = plural(operatorsIn(this.tree.sequence.slice(item.start, item.end)), "node");
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

  cut(label, width, isBold) {
    if (label.length <= LONGEST_LABEL && this.widthOf(label, isBold) <= width) return label;
    const key = `${isBold ? "B" : "N"}${Math.round(width)} ${label}`;
    if (!this.labels.has(key)) {
      let low = 0, high = Math.min(label.length, LONGEST_LABEL);
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.widthOf(label.slice(0, middle) + "…", isBold) <= width) low = middle; else high = middle - 1;
      }
      this.labels.set(key, label.slice(0, low) + "…");
    }
    return this.labels.get(key);
  }

  // Colours.

  // A fill: `part` of the strength of its colour.
  tint({ hue, strength }, part) {
    if (this.isDark) return `hsl(${hue} ${20 + 14 * strength}% ${12 + 9 * strength * part}%)`;
    const light = 98.5 - (5 * strength + 1.5) * part - 12 * Math.max(0, strength - 1);
    return `hsl(${hue} ${55 + 15 * strength}% ${light}%)`;
  }

  // A line or a strip.
  bar({ hue, strength }) {
    return this.isDark ? `hsl(${hue} 32% ${34 + 14 * strength}%)` : `hsl(${hue} 42% ${76 - 14 * strength}%)`;
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

  forgetSums() {
    this.amounts = new Map();
    this.counts = new Map();
  }
}

function secondLine(node) {
  const target = text(nodes.target[node]);
  return text(nodes.value[node]) || (target === nodes.name[node] ? opOf(node) : target);
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
