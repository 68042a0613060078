// Tables that sort and filter, and of many rows only draw those in sight.

const ROW_HEIGHT = 31, MOST_PRINTED = 1000;

// A column has a name; the value of a row, for sorting, and how that is shown; or a cell of its own; what is searched
// of a row, if not the value; and whether it is a number.
class Table {
  constructor(columns, rows, options) {
    this.columns = columns;
    this.rows = rows;
    this.options = options;
    this.sorted = null;
    this.isDescending = false;
    this.filter = "";
    this.body = el("tbody");
    this.heads = columns.map((column, at) => this.head(column, at));
    this.count = el("p", { class: "muted count", "aria-live": "polite" });
    this.table = el("table", { class: "data", "aria-label": this.options.label, "aria-rowcount": rows.length },
      el("thead", {}, el("tr", {}, this.heads)), this.body);
    const named = { tabindex: "0", role: "region", "aria-label": this.options.label };
    this.scroller = el("div", { class: "scroller", ...named }, this.table);
    this.scroller.addEventListener("scroll", () => this.paint());
    this.body.addEventListener("keydown", (event) => this.key(event));
    const searched = (row) => columns.map((column) => (column.searched || column.value)(row) ?? "");
    this.texts = rows.map((row) => searched(row).join(" ").toLowerCase());
    this.arrange();
    new ResizeObserver(() => this.paint()).observe(this.scroller);
    window.addEventListener("beforeprint", () => { this.isPrinted = true; this.paint(); });
    window.addEventListener("afterprint", () => { this.isPrinted = false; this.paint(); });
  }

  // The input to filter by, and the table.
  elements() {
    const label = this.options.filter;
    const input = el("input", { type: "search", class: "filter", placeholder: label, "aria-label": label });
    input.addEventListener("input", () => { this.filter = input.value.trim().toLowerCase(); this.arrange(); });
    return [el("div", { class: "above" }, input, this.count), this.scroller];
  }

  head(column, at) {
    const sort = () => this.sortBy(at);
    const button = el("button", { type: "button", title: column.title, onclick: sort }, column.name);
    return el("th", { scope: "col", class: column.isNumber ? "number" : null, "aria-sort": "none" }, button);
  }

  sortBy(at) {
    this.isDescending = this.sorted === at ? !this.isDescending : Boolean(this.columns[at].isNumber);
    this.sorted = at;
    for (const head of this.heads) head.setAttribute("aria-sort", "none");
    this.heads[at].setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
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
        const isBefore = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
        return isBefore * sign;
      });
    }
    const all = plural(this.rows.length, this.options.one, this.options.several);
    const isAll = this.shown.length === this.rows.length;
    this.count.textContent = isAll ? all : `${shownCount(this.shown.length)} of ${all}`;
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
    const below = this.isPrinted ? 0 : this.shown.length - last;
    if (below > 0) made.push(spacer(below * ROW_HEIGHT, this.columns.length));
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.row : undefined;
    this.body.replaceChildren(...made);
    if (focused !== undefined) this.rowElement(Number(focused))?.focus({ preventScroll: true });
  }

  row(at, place) {
    const row = this.rows[at], chosen = this.options.chosen;
    const cells = this.columns.map((column) => {
      const shown = column.cell ? column.cell(row) : (column.shown || String)(column.value(row) ?? "");
      const isLong = typeof shown === "string" && shown.length > 24;
      return el("td", { class: column.isNumber ? "number" : column.class, title: isLong ? shown : null }, shown);
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
    const lowest = (place + 3) * ROW_HEIGHT - this.scroller.clientHeight;
    this.scroller.scrollTop = Math.min(Math.max(this.scroller.scrollTop, lowest), place * ROW_HEIGHT);
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
