// The page: light and dark, the graph with its tools, tabs, and what connects the parts.

const byId = (id) => document.getElementById(id);

// Light and dark: as the system has it, until the button is used; on paper, light.

const isDarkSystem = window.matchMedia("(prefers-color-scheme: dark)");
const whenRecoloured = [];
let chosenScheme = null, isPrinting = false;

function scheme() {
  if (isPrinting) return "light";
  return chosenScheme || (isDarkSystem.matches ? "dark" : "light");
}

function applyScheme() {
  document.documentElement.dataset.scheme = scheme();
  byId("theme").textContent = scheme() === "dark" ? "Light" : "Dark";
  for (const recolour of whenRecoloured) recolour();
}

byId("theme").addEventListener("click", () => {
  chosenScheme = scheme() === "dark" ? "light" : "dark";
  applyScheme();
});
isDarkSystem.addEventListener("change", applyScheme);
applyScheme();

byId("title").textContent = data.title;
byId("kind").textContent = `${data.kind}, ${plural(NODE_COUNT, "node")}, ${plural(regions.length, "region")}`;

// The graph and its tools.

const view = new GraphView(byId("graph"), showDetails, () => {
  paintTools();
  paintLegend();
});
whenRecoloured.push(() => {
  view.readColors();
  view.paint();
});

function goToNode(node) {
  showTab("graph");
  view.showNode(node);
}
function goToRegion(region) {
  showTab("graph");
  view.showRegion(region);
}

function buildTools() {
  const button = (label, title, act, more) =>
    el("button", { type: "button", title, "aria-label": title, onclick: act, ...more }, label);
  const group = (by, label) => button(label, `Group by ${by}`, () => {
    view.regroup(by, view.showState);
    view.fit();
  }, { "data-by": by });
  const options = Object.entries(OVERLAYS).map(([name, overlay]) => el("option", { value: name }, overlay.label));
  const overlay = el("select", { id: "overlay", "aria-label": "Colour by" }, options);
  overlay.addEventListener("change", () => view.setOverlay(overlay.value));
  const weights = el("input", { type: "checkbox", id: "weights" });
  weights.addEventListener("change", () => {
    view.regroup(view.by, weights.checked);
    view.fit();
  });
  byId("tools").replaceChildren(
    el("span", { class: "joined", role: "group", "aria-label": "Group by" },
      group("region", "Regions"), group("module", "Modules")),
    el("label", {}, "Colour ", overlay),
    el("label", {}, weights, " Weights"),
    el("span", { class: "joined" },
      button("−", "Zoom out", () => view.zoom(0.8)),
      button("+", "Zoom in", () => view.zoom(1.25)),
      button("Fit", "Show everything", () => view.showAll())),
    button("Collapse", "Close all groups", () => view.collapseAll()));
}

function paintTools() {
  for (const button of byId("tools").querySelectorAll("[data-by]")) {
    button.setAttribute("aria-pressed", String(view.by === button.dataset.by));
  }
  byId("weights").checked = view.showState;
}

function paintLegend() {
  const overlay = OVERLAYS[view.overlay], legend = byId("legend");
  const key = [view.overlay, view.by, view.isDark, view.showState].join(" ");
  if (legend.dataset.key === key) return;
  legend.dataset.key = key;
  if (overlay.amount) {
    const all = overlay.shown(view.amountOf(view.tree.root));
    const ramp = el("span", { class: "ramp" });
    legend.replaceChildren(el("span", {}, `${overlay.label}: few`), ramp, el("span", {}, `many of ${all}`));
    return;
  }
  const counts = legendCounts(overlay), shown = 8;
  const entries = counts.slice(0, shown).map(([own, count]) => legendEntry(overlay.name(own), own, count));
  const more = counts.length - shown;
  if (more > 0) entries.push(el("span", { class: "muted" }, `${shownCount(more)} more`));
  if (!counts.length) entries.push(el("span", { class: "muted" }, `${overlay.label}: none here`));
  legend.replaceChildren(...entries);
}

// How many nodes have which key, the most frequent first; of a region, as everywhere, those that are operators.
function legendCounts(overlay) {
  const counted = new Map(), { start, end } = view.tree.root;
  for (const node of view.tree.sequence.slice(start, end)) {
    const key = overlay.key(node);
    if (key < 0 || (overlay.ofOperators && !has(node, "operator"))) continue;
    counted.set(key, (counted.get(key) || 0) + 1);
  }
  return [...counted].sort((one, other) => other[1] - one[1]);
}

function legendEntry(name, key, count) {
  const swatch = el("i", { "aria-hidden": "true" });
  swatch.style.background = view.bar({ hue: hueOf(key), strength: 1 });
  const title = `${name}: ${plural(count, "node")}`;
  return el("span", { title }, swatch, el("span", { class: "clip" }, name), el("b", {}, shownCount(count)));
}

// Tabs.

const sum = (numbers) => numbers.reduce((all, own) => all + own, 0);
const TABS = {
  graph: { label: "Graph" },
  regions: { label: "Regions", count: regions.length, build: buildRegions },
  bodies: { label: "Bodies", count: data.bodies.length, build: buildBodies },
  outside: { label: "Outside", count: sum(data.excluded.map((group) => group.count)), build: buildOutside },
  memory: { label: "Memory", build: buildMemory },
  checks: {
    label: "Checks",
    count: data.failures.length + (data.verification ? data.verification.differences.length : 0),
    isBad: true,
    build: buildChecks,
  },
};
let shownTab = "graph";

function buildTab(name) {
  const { build } = TABS[name];
  delete TABS[name].build;
  if (build) build(byId(`panel-${name}`));
}

function showTab(name) {
  shownTab = name;
  for (const other of Object.keys(TABS)) {
    const isShown = other === name, tab = byId(`tab-${other}`);
    byId(`panel-${other}`).hidden = !isShown;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
  }
  buildTab(name);
  if (name === "graph") view.resize();
}

for (const [name, { label, count, isBad }] of Object.entries(TABS)) {
  const badge = count ? el("span", { class: isBad ? "badge bad" : "badge" }, shownCount(count)) : null;
  const roles = { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` };
  byId("tabs").append(el("button", { type: "button", ...roles, onclick: () => showTab(name) }, label, badge));
}
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], names = Object.keys(TABS);
  if (!step) return;
  showTab(names[(names.indexOf(shownTab) + step + names.length) % names.length]);
  byId(`tab-${shownTab}`).focus();
});

buildTools();
view.covered = () => byId("tools").offsetTop + byId("tools").offsetHeight;
showDetails(null);
showTab("graph");

new Search(byId("search"), byId("results"), (match) => {
  if (match && match.region !== undefined) goToRegion(match.region);
  else if (match) goToNode(match.node);
  byId("graph").focus({ preventScroll: true });
});

window.addEventListener("beforeprint", () => {
  isPrinting = true;
  Object.keys(TABS).forEach(buildTab);
  applyScheme();
  view.beginPaper();
});
window.addEventListener("afterprint", () => {
  isPrinting = false;
  applyScheme();
  view.endPaper();
});

// For the console, and for scripts that drive the page.
window.partita = { data, view, explain, showTab, goToNode, goToRegion };
