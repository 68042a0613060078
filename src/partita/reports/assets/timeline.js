// The memory timeline: bytes after every operator, planned and without the plan, with what runs under the pointer.

const PHASES = ["forward", "recompute", "backward"];
const CHART = { left: 74, right: 14, top: 16, bottom: 42 };

class TimelineView {
  constructor(canvas, tip, memory, whenChosen) {
    this.canvas = canvas;
    this.tip = tip;
    this.memory = memory;
    this.whenChosen = whenChosen;
    this.context = canvas.getContext("2d");
    this.at = -1;
    const lines = [memory.planned, memory.plain].filter(Boolean);
    this.length = Math.max(1, ...lines.map((line) => line.moments.bytes.length));
    this.low = Math.min(...lines.map((line) => line.resident_bytes));
    const highest = Math.max(...lines.map((line) => line.peak_bytes));
    const isNear = memory.budget_bytes !== null && memory.budget_bytes <= 1.3 * highest;
    this.high = isNear ? Math.max(highest, memory.budget_bytes) : highest;
    if (this.low < 0.6 * this.high) this.low = 0;
    this.step = roundStep((this.high - this.low) / 5);
    this.low = Math.floor(this.low / this.step) * this.step;
    this.high = Math.max(Math.ceil(this.high / this.step) * this.step, this.low + this.step);
    this.listen();
    new ResizeObserver(() => this.paint()).observe(canvas);
    window.addEventListener("beforeprint", () => this.paint());
  }

  x(at) { return CHART.left + (this.canvas.clientWidth - CHART.left - CHART.right) * at / this.length; }
  y(bytes) {
    const bottom = this.canvas.clientHeight - CHART.bottom;
    return bottom - (bottom - CHART.top) * (bytes - this.low) / (this.high - this.low);
  }

  listen() {
    this.canvas.addEventListener("pointermove", (event) => {
      const wide = this.canvas.clientWidth - CHART.left - CHART.right;
      this.go(Math.floor((event.offsetX - CHART.left) / wide * this.length));
    });
    this.canvas.addEventListener("pointerleave", () => this.go(-1));
    this.canvas.addEventListener("click", () => this.choose());
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
      if (step) this.go(Math.max(0, this.at + step));
      else if (event.key === "Home") this.go(0);
      else if (event.key === "End") this.go(this.length - 1);
      else if (event.key === "Enter") this.choose();
      else if (event.key === "Escape") this.go(-1);
      else return;
      event.preventDefault();
    });
  }

  choose() {
    const { moments } = this.memory.planned;
    const node = this.at < 0 ? undefined : nodeByName().get(text(moments.node[this.at]));
    if (node !== undefined) this.whenChosen(node);
  }

  go(at) {
    this.at = at < 0 || at >= this.memory.planned.moments.bytes.length ? -1 : at;
    this.tip.textContent = this.at < 0 ? "" : this.told(this.at);
    this.paint();
  }

  told(at) {
    const { planned: { moments }, plain, plain_name: name } = this.memory;
    const column = (name) => text(moments[name][at]);
    const where = [column("node") || column("operator"), column("path")].filter(Boolean).join(" in ");
    const isKnown = plain && at < plain.moments.bytes.length;
    const beside = isKnown ? `; ${name}, after as many operators: ${shownBytes(plain.moments.bytes[at])}` : "";
    const when = `after operator ${shownCount(at + 1)}, ${column("phase")} of ${column("segment")}`;
    return `${shownBytes(moments.bytes[at])} ${when}: ${where}${beside}`;
  }

  paint() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight, dense = window.devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = Math.round(width * dense);
    this.canvas.height = Math.round(height * dense);
    const style = getComputedStyle(document.documentElement);
    this.color = (name) => style.getPropertyValue(name).trim();
    this.context.setTransform(dense, 0, 0, dense, 0, 0);
    this.context.font = `11px ${this.color("--font")}`;
    this.paintScale(width, height);
    const { planned, plain, budget_bytes: budget } = this.memory;
    if (planned.resident_bytes > this.low) {
      this.context.fillStyle = this.color("--resident");
      const top = this.y(planned.resident_bytes);
      this.context.fillRect(CHART.left, top, width - CHART.left - CHART.right, this.y(this.low) - top);
    }
    if (plain) this.paintLine(plain, this.color("--muted"), null);
    this.paintLine(planned, this.color("--accent"), this.color("--accent-soft"));
    if (budget !== null && budget >= this.low && budget <= this.high) this.paintBudget(budget, width);
    this.paintPhases(planned, height);
    this.paintPeak(planned);
    if (this.at >= 0) this.paintPointer(planned, height);
  }

  paintScale(width) {
    const context = this.context;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let mark = this.low; mark <= this.high; mark += this.step) {
      context.fillStyle = this.color("--line");
      context.fillRect(CHART.left, Math.round(this.y(mark)), width - CHART.left - CHART.right, 1);
      context.fillStyle = this.color("--muted");
      context.fillText(mark === 0 ? "0" : shownMark(mark), CHART.left - 8, this.y(mark));
    }
  }

  // The highest of each column of pixels, as steps.
  paintLine(line, stroke, fill) {
    const { bytes } = line.moments, context = this.context;
    if (!bytes.length) return;
    const columns = Math.min(this.length, Math.ceil(this.canvas.clientWidth - CHART.left - CHART.right));
    context.beginPath();
    context.moveTo(this.x(0), this.y(bytes[0]));
    let end = 0;
    for (let column = 0; column < columns; column++) {
      const [start, next] = [column, column + 1].map((at) => Math.floor(at * this.length / columns));
      const stop = Math.max(next, start + 1);
      if (start >= bytes.length) break;
      let most = bytes[start];
      for (let at = start; at < stop && at < bytes.length; at++) most = Math.max(most, bytes[at]);
      end = Math.min(stop, bytes.length);
      context.lineTo(this.x(start), this.y(most));
      context.lineTo(this.x(end), this.y(most));
    }
    context.strokeStyle = stroke;
    context.lineWidth = fill ? 1.6 : 1.2;
    context.stroke();
    if (!fill) return;
    context.lineTo(this.x(end), this.y(this.low));
    context.lineTo(this.x(0), this.y(this.low));
    context.fillStyle = fill;
    context.fill();
  }

  paintBudget(budget, width) {
    const context = this.context;
    context.strokeStyle = this.color("--bad");
    context.setLineDash([7, 4]);
    context.beginPath();
    context.moveTo(CHART.left, this.y(budget));
    context.lineTo(width - CHART.right, this.y(budget));
    context.stroke();
    context.setLineDash([]);
    context.textAlign = "left";
    context.fillStyle = this.color("--bad");
    const isHigh = this.y(budget) < CHART.top + 14;
    context.fillText(`budget ${shownBytes(budget)}`, CHART.left + 6, this.y(budget) + (isHigh ? 9 : -8));
  }

  paintPhases(line, height) {
    const { phase } = line.moments, context = this.context;
    for (let start = 0; start < phase.length;) {
      let stop = start + 1;
      while (stop < phase.length && phase[stop] === phase[start]) stop++;
      context.fillStyle = this.color(`--phase-${Math.max(0, PHASES.indexOf(text(phase[start])))}`);
      context.fillRect(this.x(start), height - CHART.bottom + 6, Math.max(0.5, this.x(stop) - this.x(start)), 8);
      start = stop;
    }
    context.textAlign = "left";
    context.fillStyle = this.color("--muted");
    context.fillText("operators: forward, then backward", CHART.left, height - 12);
  }

  paintPeak(line) {
    if (!line.moments.bytes.length) return;
    const context = this.context, x = this.x(line.peak_at + 0.5), y = this.y(line.peak_bytes);
    context.fillStyle = this.color("--bad");
    context.beginPath();
    context.arc(x, y, 4, 0, 7);
    context.fill();
    const isLeft = x < this.canvas.clientWidth / 2;
    context.textAlign = isLeft ? "left" : "right";
    context.fillStyle = this.color("--text");
    context.fillText(`peak ${shownBytes(line.peak_bytes)}`, x + (isLeft ? 9 : -9), Math.max(y - 8, 8));
  }

  paintPointer(line, height) {
    const context = this.context, x = this.x(this.at + 0.5);
    context.strokeStyle = this.color("--muted");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, CHART.top);
    context.lineTo(x, height - CHART.bottom);
    context.stroke();
    context.fillStyle = this.color("--accent");
    context.beginPath();
    context.arc(x, this.y(line.moments.bytes[this.at]), 3.5, 0, 7);
    context.fill();
  }
}

function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough) || power;
}

function shownMark(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0, value = bytes;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${Number(value.toPrecision(6))} ${units[at]}`;
}
