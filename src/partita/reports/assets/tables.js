// Tables that sort and filter, and of many rows only draw those in sight.

const ROW_HEIGHT = 31, MOST_PRINTED = 1000;

// A column: its title, the value of a row (for sorting), how that is shown, whether it is a number, and a cell of its own.
class Table {
  constructor(columns, rows, options) {
    this.columns = columns;
    this.rows = rows;
    this.options = options || {};
    this.sorted = null;
    this.isDescending = false;
    this.filter = "";
    this.body = el("tbody");
    this.heads = columns.map((column, at) => this.head(column, at));
    this.count = el("p", { class: "muted count", "aria-live": "polite" });
    this.table = el("table", { class: "data", "aria-label": this.options.label, "aria-rowcount": rows.length },
      el("thead", {}, el("tr", {}, this.heads)), this.body);
    this.scroller = el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": this.options.label }, this.table);
    this.scroller.addEventListener("scroll", () => this.paint());
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.texts = rows.map((row) => columns.map((column) => String(column.searched ? column.searched(row) : column.value(row) ?? "")).join(" ").toLowerCase());
    this.arrange();
    new ResizeObserver(() => this.paint()).observe(this.scroller);
    window.addEventListener("beforeprint", () => { this.isPrinted = true; this.paint(); });
    window.addEventListener("afterprint", () => { this.isPrinted = false; this.paint(); });
  }

  // The input to filter by, and the table.
  elements() {
    const input = el("input", { type: "search", class: "filter", placeholder: this.options.filter || "Filter", "aria-label": this.options.filter || "Filter" });
    input.addEventListener("input", () => { this.filter = input.value.trim().toLowerCase(); this.arrange(); });
    return [el("div", { class: "above" }, input, this.count), this.scroller];
  }

  head(column, at) {
    const button = el("button", { type: "button", title: column.title || null, onclick: () => this.sortBy(at) }, column.name);
    return el("th", { scope: "col", class: column.isNumber ? "number" : null, "aria-sort": "none" }, button);
  }

  sortBy(at) {
    this.isDescending = this.sorted === at ? !this.isDescending : Boolean(this.columns[at].isNumber);
    this.sorted = at;
    this.heads.forEach((head, other) => head.setAttribute("aria-sort", other !== at ? "none" : this.isDescending ? "descending" : "ascending"));
    this.arrange();
  }

  arrange() {
    const words = this.filter.split(/\s+/).filter(Boolean);
    this.shown = this.rows.map((_, at) => at).filter((at) => words.every((word) => this.texts[at].includes(word)));
    if (this.sorted !== null) {
      const { value } = this.columns[this.sorted], sign = this.isDescending ? -1 : 1;
      const keys = this.rows.map((row) => value(row));
      this.shown.sort((one, other) => {
        const a = keys[one], b = keys[other];
        if (a === b) return one - other;
        if (a === null || a === undefined) return 1;  // What is not known comes last.
        if (b === null || b === undefined) return -1;
        return (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })) * sign;
      });
    }
    this.count.textContent = this.shown.length === this.rows.length ? plural(this.rows.length, this.options.one || "row")
      : `${shownCount(this.shown.length)} of ${plural(this.rows.length, this.options.one || "row")}`;
    this.scroller.scrollTop = 0;
    this.paint();
  }

  paint() {
    const height = this.scroller.clientHeight || 600;
    let first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - 10);
    let last = Math.min(this.shown.length, first + Math.ceil(height / ROW_HEIGHT) + 20);
    if (this.isPrinted) { first = 0; last = Math.min(this.shown.length, MOST_PRINTED); }
    const made = [];
    if (first > 0) made.push(spacer(first * ROW_HEIGHT, this.columns.length));
    for (let at = first; at < last; at++) made.push(this.row(this.shown[at], at));
    if (last < this.shown.length && !this.isPrinted) made.push(spacer((this.shown.length - last) * ROW_HEIGHT, this.columns.length));
    const focused = document.activeElement && this.body.contains(document.activeElement) ? document.activeElement.dataset.row : null;
    this.body.replaceChildren(...made);
    if (focused !== null && focused !== undefined) this.rowElement(Number(focused))?.focus({ preventScroll: true });
  }

  row(at, place) {
    const row = this.rows[at], chosen = this.options.chosen;
    const cells = this.columns.map((column) => {
      const shown = column.cell ? column.cell(row) : column.shown ? column.shown(column.value(row)) : column.value(row) ?? "";
      return el("td", { class: column.isNumber ? "number" : column.class, title: typeof shown === "string" && shown.length > 24 ? shown : null }, shown);
    });
    const made = el("tr", { tabindex: chosen ? "0" : null, "aria-rowindex": place + 2 }, cells);
    made.dataset.row = at;
    if (chosen) made.addEventListener("click", (event) => { if (!event.target.closest("button, a")) chosen(row, at); });
    return made;
  }

  rowElement(at) {
    return this.body.querySelector(`tr[data-row="${at}"]`);
  }

  key(event) {
    const here = event.target.closest("tr");
    if (!here || here !== event.target) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (this.options.chosen) this.options.chosen(this.rows[Number(here.dataset.row)], Number(here.dataset.row));
      return;
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const place = this.shown.indexOf(Number(here.dataset.row)) + step;
    if (place < 0 || place >= this.shown.length) return;
    this.scroller.scrollTop = Math.min(Math.max(this.scroller.scrollTop, (place + 3) * ROW_HEIGHT - this.scroller.clientHeight), place * ROW_HEIGHT);
    this.paint();
    this.rowElement(this.shown[place])?.focus({ preventScroll: true });
  }
}

function spacer(height, columns) {
  const cell = el("td", { colspan: columns });
  cell.style.height = `${height}px`;
  return el("tr", { class: "spacer", "aria-hidden": "true" }, cell);
}

// A number with a bar behind it, as wide as its part of the largest.
function barCell(value, most, shown) {
  const bar = el("span", { class: "part" });
  bar.style.width = `${most && value ? Math.max(1, 100 * value / most) : 0}%`;
  return el("span", { class: "parted" }, bar, el("span", {}, shown(value)));
}
