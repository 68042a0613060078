// Search: names of regions and nodes, operators and modules; all words must be there, exact names come first.

const MOST_MATCHES = 40, MOST_REGIONS = 12, MOST_FOUND = 400;

const searched = lazily(() => {
  const texts = data.texts.map((entry) => entry.toLowerCase());
  return {
    names: nodes.name.map((name) => name.toLowerCase()),
    texts,
    paths: data.modules.map(([path]) => texts[path]),
    regions: regions.map((region) => `${region.name} ${region.label ?? ""}`.toLowerCase()),
  };
});

function matchesOf(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean), known = searched(), found = [];
  if (!words.length) return found;
  const exact = nodeByName().get(query);
  if (exact !== undefined) found.push({ node: exact });
  known.regions.forEach((own, region) => {
    if (found.length < MOST_REGIONS && words.every((word) => own.includes(word))) found.push({ region });
  });
  const starts = [], contains = [], weights = [];
  for (let node = 0; node < NODE_COUNT && contains.length < MOST_FOUND; node++) {
    const name = known.names[node], target = known.texts[nodes.target[node]];
    const path = nodes.module[node] < 0 ? "" : known.paths[nodes.module[node]];
    const isMatch = words.every((word) => name.includes(word) || target.includes(word) || path.includes(word));
    if (!isMatch || node === exact) continue;
    (has(node, "state") ? weights : name.startsWith(words[0]) ? starts : contains).push({ node });
  }
  return found.concat(starts, contains, weights).slice(0, MOST_MATCHES);
}

class Search {
  constructor(input, list, whenTaken) {
    this.input = input;
    this.list = list;
    this.whenTaken = whenTaken;
    this.matches = [];
    this.chosen = -1;
    input.addEventListener("input", () => this.show());
    input.addEventListener("focus", () => { if (input.value.trim()) this.show(); });
    input.addEventListener("blur", () => this.close());
    input.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("keydown", (event) => {
      const isTyped = event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea");
      if (event.key !== "/" || isTyped) return;
      event.preventDefault();
      input.focus();
      input.select();
    });
  }

  show() {
    const query = this.input.value.trim();
    this.matches = matchesOf(query);
    this.chosen = this.matches.length ? 0 : -1;
    const options = this.matches.map((match, at) => this.option(match, at));
    this.list.replaceChildren(...(options.length ? options : [el("li", { class: "muted" }, "Nothing has this name.")]));
    this.list.hidden = query === "";
    this.input.setAttribute("aria-expanded", String(query !== ""));
    this.mark();
  }

  option(match, at) {
    const isRegion = match.region !== undefined;
    const name = isRegion ? regions[match.region].name : nodes.name[match.node];
    const about = isRegion ? ["region"] : [text(nodes.target[match.node]), modulePath(match.node)].filter(Boolean);
    const made = el("li", { role: "option", id: `match-${at}` },
      el("span", { class: "name clip" }, name), el("span", { class: "muted clip" }, about.join(" · ")));
    // Before the input loses the focus, which closes the list.
    made.addEventListener("pointerdown", (event) => { event.preventDefault(); this.take(at); });
    return made;
  }

  mark() {
    [...this.list.children].forEach((option, at) => option.setAttribute("aria-selected", String(at === this.chosen)));
    if (this.chosen < 0) {
      this.input.removeAttribute("aria-activedescendant");
      return;
    }
    this.input.setAttribute("aria-activedescendant", `match-${this.chosen}`);
    this.list.children[this.chosen].scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], count = this.matches.length;
    if (step && count) {
      this.chosen = (this.chosen + step + count) % count;
      this.mark();
    } else if (event.key === "Enter") this.take(this.chosen);
    else if (event.key === "Escape") {
      this.input.value = "";
      this.whenTaken(null);
    } else return;
    event.preventDefault();
  }

  take(at) {
    if (!this.matches[at]) return;
    this.close();
    this.whenTaken(this.matches[at]);
  }

  close() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
  }
}
