// The page: its tabs, the search, the details of what is selected, and the keys.

const byId = (id) => document.getElementById(id);

// Light and dark: as the system has it, until the button is used.

const isDarkSystem = window.matchMedia("(prefers-color-scheme: dark)");
let chosenScheme = null;
const scheme = () => chosenScheme || (isDarkSystem.matches ? "dark" : "light");
const whenRecoloured = [];
function applyScheme() {
  document.documentElement.dataset.scheme = scheme();
  byId("theme").textContent = scheme() === "dark" ? "Light" : "Dark";
  for (const recolour of whenRecoloured) recolour();
}
byId("theme").addEventListener("click", () => { chosenScheme = scheme() === "dark" ? "light" : "dark"; applyScheme(); });
isDarkSystem.addEventListener("change", applyScheme);
applyScheme();

byId("title").textContent = data.title;
byId("kind").textContent = `${data.kind}, ${plural(NODE_COUNT, "node")}, ${plural(regions.length, "region")}`;

// Links to nodes and regions.

const nodeLink = (node) => el("button", { type: "button", class: "link name", title: text(nodes.target[node]), onclick: () => goToNode(node) }, nodes.name[node]);
const regionLink = (region) => el("button", { type: "button", class: "link name", onclick: () => goToRegion(region) }, regions[region].name);
function goToNode(node) { showTab("graph"); view.showNode(node); }
function goToRegion(region) { showTab("graph"); view.showRegion(region); }

// Details.

const fact = (name, ...value) => [el("dt", {}, name), el("dd", {}, ...value)];
const factIf = (condition, name, ...value) => (condition ? fact(name, ...value) : []);
const section = (title, ...content) => el("section", {}, el("h3", {}, title), ...content);
const MOST_LISTED = 60;

function listed(items, make) {
  const shown = items.slice(0, MOST_LISTED).map((item) => el("li", {}, make(item)));
  if (items.length > MOST_LISTED) shown.push(el("li", { class: "muted" }, `${shownCount(items.length - MOST_LISTED)} more`));
  return el("ul", { class: "names" }, shown);
}

function nodeDetails(node) {
  const told = explain(node), owner = nodes.region[node];
  const inputs = Array.from(inputsOf().of(node)), users = Array.from(usersOf().of(node)), effects = effectsOf(node);
  const paths = [["Cut from what is before by", told.pathIn], ["Cut from what is after by", told.pathOut]].filter(([, path]) => path.length);
  const orders = [["Stays after", told.after], ["Stays before", told.before]].filter(([, names]) => names.length);
  return [
    el("h2", { class: "name" }, nodes.name[node]),
    el("p", { class: "muted" }, `${opOf(node)} ${text(nodes.target[node])}`),
    el("dl", {}, fact("value", text(nodes.value[node]) || "not traced"), fact("bytes", shownCount(nodes.bytes[node])),
      factIf(nodes.flops[node], "FLOPs", shownCount(nodes.flops[node])), factIf(modulePath(node), "module", modulePath(node)),
      factIf(owner >= 0, "region", owner >= 0 ? regionLink(owner) : ""), fact("mode", data.modes[nodes.mode[node]]),
      factIf(effects.length, "effects", effects.join(", ")), factIf(has(node, "saved for backward"), "backward", "saved for backward")),
    section("Why it is here", el("p", {}, told.where), told.remarks.map((remark) => el("p", {}, remark)),
      paths.map(([lead, path]) => el("p", {}, `${lead} `, path.flatMap((step, at) => [at ? " → " : "", nodeLink(step)]))),
      orders.map(([lead, names]) => el("div", {}, el("p", {}, `${lead}, by memory, random numbers or side effects:`), listed(names, nodeLink)))),
    inputs.length ? section(`Reads ${inputs.length}`, listed(inputs, crossingLine)) : null,
    users.length ? section(`Read by ${users.length}`, listed(users, crossingLine)) : null,
  ];
}

const crossingLine = (node) => [nodeLink(node), " ", el("span", { class: "muted" }, text(nodes.value[node]))];

// What crosses a border: values that are computed, and weights, of which there are more than one wants to see at once.
function borderTable(title, crossings) {
  const weights = crossings.filter(([node]) => has(node, "state")), others = crossings.filter(([node]) => !has(node, "state"));
  const total = weights.reduce((sum, [, , , bytes]) => sum + (bytes || 0), 0);
  return section(`${title} ${crossings.length}`, others.length || !weights.length ? crossingTable(others) : null,
    weights.length ? el("details", {}, el("summary", {}, `${plural(weights.length, "weight")}, ${shownBytes(total)}`), crossingTable(weights)) : null);
}

function crossingTable(crossings) {
  if (!crossings.length) return el("p", { class: "muted" }, "Nothing.");
  const rows = crossings.slice(0, 400).map(([node, place, value, bytes]) => el("tr", {},
    el("td", {}, nodeLink(node), place || ""), el("td", {}, text(value)), el("td", { class: "number" }, shownBytes(bytes))));
  if (crossings.length > 400) rows.push(el("tr", {}, el("td", { colspan: 3, class: "muted" }, `${shownCount(crossings.length - 400)} more`)));
  return el("table", { class: "data small" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "name"), el("th", { scope: "col" }, "value"), el("th", { scope: "col", class: "number" }, "bytes"))),
    el("tbody", {}, rows));
}

function regionDetails(at) {
  const region = regions[at], alike = data.bodies[region.body].regions;
  const failures = data.failures.filter((failure) => failure.region === region.name);
  const compiled = data.compilations.filter((one) => one.region === region.name);
  return [
    el("h2", { class: "name" }, region.name),
    el("p", { class: "muted" }, region.treatment),
    el("dl", {}, factIf(region.label !== null, "label", region.label), fact("nodes", shownCount(region.nodes)),
      fact("bytes in", shownCount(region.bytes_in)), fact("bytes out", shownCount(region.bytes_out)), fact("FLOPs", shownCount(region.flops)),
      factIf(region.saved_bytes !== null, "saved", `${shownCount(region.saved_bytes)} bytes, ${shownCount(region.saved_bytes_after)} after`),
      factIf(region.recomputed_flops !== null, "recomputed", `${shownCount(region.recomputed_flops)} FLOPs`)),
    failures.map((failure) => el("p", { class: "bad" }, `Runs eagerly: ${failure.backend} failed${failure.node ? ` at ${failure.node}` : ""}: ${failure.reason}`)),
    compiled.length ? section("Compiled", el("ul", { class: "names" }, compiled.map((one) => el("li", {}, compiledLine(one))))) : null,
    borderTable("In", region.inputs), borderTable("Out", region.outputs),
    alike.length > 1 ? section(`Equal bodies ${alike.length}`, listed(alike, regionLink)) : null,
  ];
}

function compiledLine(one) {
  const how = one.loaded ? "loaded" : one.shared_with !== null ? `shared with ${one.shared_with}` : `${one.seconds.toFixed(1)} s`;
  return `${one.backend} for (${one.inputs.join(", ")})${one.gradients ? " with gradients" : ""}: ${how}`;
}

function groupDetails(item) {
  const sum = (column) => { let total = 0; for (let at = item.start; at < item.end; at++) total += column[view.tree.sequence[at]] || 0; return total; };
  const inside = new Set();
  for (let at = item.start; at < item.end; at++) if (nodes.region[view.tree.sequence[at]] >= 0) inside.add(nodes.region[view.tree.sequence[at]]);
  return [
    el("h2", { class: "name" }, item.label),
    el("p", { class: "muted" }, view.subtitle(item)),
    el("dl", {}, fact("nodes", shownCount(item.end - item.start)), fact("bytes of results", shownCount(sum(nodes.bytes))), fact("FLOPs", shownCount(sum(nodes.flops)))),
    inside.size ? section(`Regions ${inside.size}`, listed([...inside], regionLink)) : null,
  ];
}

function overview() {
  const inRegions = nodes.region.reduce((count, region) => count + (region >= 0 ? 1 : 0), 0);
  const flops = nodes.flops.reduce((sum, own) => sum + own, 0);
  const repeated = data.bodies.filter((body) => body.regions.length > 1);
  const checked = data.verification;
  return [
    el("h2", {}, "Overview"),
    el("dl", {}, fact("nodes", shownCount(NODE_COUNT)), fact("in regions", shownCount(inRegions)), fact("regions", shownCount(regions.length)),
      fact("distinct bodies", `${shownCount(data.bodies.length)}${repeated.length ? `, ${shownCount(repeated.length)} repeated` : ""}`),
      fact("FLOPs", shownFlops(flops)),
      factIf(data.saved && data.saved.saved_bytes !== null, "saved for backward",
        data.saved ? `${shownBytes(data.saved.saved_bytes)}, ${shownBytes(data.saved.saved_bytes_after)} after` : ""),
      factIf(data.memory, "memory peak", data.memory ? shownBytes(data.memory.planned.peak_bytes) : ""),
      fact("verified", checked === null ? "not in this report" : checked.equal ? `nothing differs in ${plural(checked.calls, "call")}` : el("span", { class: "bad" }, plural(checked.differences.length, "difference"))),
      factIf(data.failures.length, "failures", el("span", { class: "bad" }, shownCount(data.failures.length)))),
    data.remarks.length ? section("Remarks", data.remarks.map((remark) => el("p", {}, remark))) : null,
    section("Keys", el("dl", { class: "keys" }, [["/", "search"], ["↓ ↑", "next, previous"], ["→ ←", "into a group, out of it"], ["Enter", "open, close"], ["Esc", "clear"],
      ["+ − 0", "zoom, show all"]].flatMap(([key, does]) => fact(el("kbd", {}, key), does)))),
  ];
}

function showDetails(item) {
  const content = !item ? overview() : item.kind === "node" ? nodeDetails(item.node) : item.kind === "region" ? regionDetails(item.region) : groupDetails(item);
  const close = item ? el("button", { type: "button", class: "quiet close", "aria-label": "Back to the overview", onclick: () => view.select(null) }, "×") : null;
  byId("details").replaceChildren(...[close, ...content.flat(3)].filter(Boolean));
  byId("details").scrollTop = 0;
  byId("said").textContent = item ? `${item.kind} ${item.label}${item.children ? (item.isOpen ? ", open" : ", closed") : ""}` : "";
}

// The graph and its tools.

function paintLegend() {
  const overlay = OVERLAYS[view.overlay], legend = byId("legend");
  const key = `${view.overlay} ${view.by} ${view.isDark} ${view.showState}`;
  if (legend.dataset.key === key) return;
  legend.dataset.key = key;
  if (overlay.amount) {
    const sample = el("span", { class: "ramp" });
    legend.replaceChildren(el("span", {}, `${overlay.label}: few`), sample, el("span", {}, `many of ${overlay.shown(view.amountOf(view.tree.root))}`));
    return;
  }
  const counts = view.countsOf(view.tree.root).filter(([own]) => own !== NEUTRAL);
  const entries = counts.slice(0, 8).map(([own, count]) => {
    const swatch = el("i", { "aria-hidden": "true" });
    swatch.style.background = view.bar({ hue: hueOf(own), strength: 1 });
    return el("span", { title: `${overlay.name(own)}: ${plural(count, "node")}` }, swatch, el("span", { class: "clip" }, overlay.name(own)), el("b", {}, shownCount(count)));
  });
  if (counts.length > 8) entries.push(el("span", { class: "muted" }, `${shownCount(counts.length - 8)} more`));
  if (!counts.length) entries.push(el("span", { class: "muted" }, `${overlay.label}: none here`));
  legend.replaceChildren(...entries);
}

function buildTools() {
  const group = (by, label) => el("button", { type: "button", "aria-pressed": String(view.by === by), "data-by": by, onclick: () => {
    view.by = by;
    view.rebuild();
    view.fit();
  } }, label);
  const colour = el("select", { "aria-label": "Colour by", id: "overlay" }, Object.entries(OVERLAYS).map(([name, overlay]) => el("option", { value: name }, overlay.label)));
  colour.addEventListener("change", () => view.setOverlay(colour.value));
  const state = el("input", { type: "checkbox", id: "weights" });
  state.addEventListener("change", () => { view.showState = state.checked; view.rebuild(); view.fit(); });
  const tool = (label, title, act) => el("button", { type: "button", title, "aria-label": title, onclick: act }, label);
  byId("tools").replaceChildren(
    el("span", { class: "joined", role: "group", "aria-label": "Group by" }, group("region", "Regions"), group("module", "Modules")),
    el("label", {}, "Colour ", colour), el("label", {}, state, " Weights"),
    el("span", { class: "joined" }, tool("−", "Zoom out", () => view.zoom(0.8)), tool("+", "Zoom in", () => view.zoom(1.25)), tool("Fit", "Show everything", () => view.showAll())),
    tool("Collapse", "Close all groups", () => view.collapseAll()));
}

function afterDraw(drawn) {
  for (const button of document.querySelectorAll("[data-by]")) button.setAttribute("aria-pressed", String(drawn.by === button.dataset.by));
  const weights = byId("weights");
  if (weights) weights.checked = drawn.showState;
  if (view) paintLegend();
}

let view = null;
view = new GraphView(byId("graph"), showDetails, afterDraw);
whenRecoloured.push(() => { view.readColors(); view.draw(); });
buildTools();
showDetails(null);

// Regions.

function buildRegions(panel) {
  if (!regions.length) { panel.append(el("p", { class: "empty" }, "This plan has no regions.")); return; }
  const place = new Map(data.region_order.map((region, at) => [region, at]));
  const rows = regions.map((region, at) => ({ ...region, at, order: place.get(at) })).sort((one, other) => one.order - other.order);
  const most = (name) => rows.reduce((found, row) => Math.max(found, row[name] || 0), 0);
  const number = (name, title, shown, hint_) => ({ name: title, title: hint_, isNumber: true, value: (row) => row[name], shown, searched: () => "" });
  const bar = (name, title, shown, hint_) => ({ ...number(name, title, shown, hint_), cell: (row) => barCell(row[name], most(name), shown) });
  const hasSaved = rows.some((row) => row.saved_bytes !== null);
  const columns = [
    { name: "region", value: (row) => row.name, cell: (row) => regionLink(row.at) },
    number("nodes", "nodes", shownCount), { ...number("inputs", "in", shownCount, "values that cross into it"), value: (row) => row.inputs.length },
    { ...number("outputs", "out", shownCount, "values that cross out of it"), value: (row) => row.outputs.length },
    bar("bytes_in", "bytes in", shownBytes), bar("bytes_out", "bytes out", shownBytes), bar("flops", "FLOPs", shownFlops),
    ...(hasSaved ? [number("saved_bytes", "saved", shownBytes, "saved for backward without the treatment"), number("saved_bytes_after", "saved after", shownBytes, "saved for backward with it"),
      number("recomputed_flops", "recomputed", shownFlops, "FLOPs that the backward recomputes")] : []),
    { name: "treatment", value: (row) => row.treatment, class: "clip" }, { name: "label", value: (row) => row.label, class: "clip" },
    { name: "body", value: (row) => data.bodies[row.body].name, class: "clip", cell: (row) => {
      const calls = data.bodies[row.body].regions.length;
      return calls > 1 ? `${data.bodies[row.body].name} ×${calls}` : el("span", { class: "muted" }, "its own");
    } },
  ];
  const table = new Table(columns, rows, { label: "Regions", one: "region", filter: "Filter regions", chosen: (row) => goToRegion(row.at) });
  panel.append(costStrip(rows), ...table.elements());
}

// What each region has of the whole, side by side in the order in which they run.
function costStrip(rows) {
  const costs = { flops: ["FLOPs", shownFlops], nodes: ["nodes", shownCount], bytes_in: ["bytes in", shownBytes], bytes_out: ["bytes out", shownBytes], saved_bytes_after: ["saved for backward", shownBytes] };
  const known = Object.keys(costs).filter((name) => rows.some((row) => row[name]));
  const strip = el("div", { class: "strip", role: "img" }), total = el("span", { class: "muted" });
  const select = el("select", { "aria-label": "Cost by region" }, known.map((name) => el("option", { value: name }, costs[name][0])));
  const paint = () => {
    const name = select.value, [title, shown] = costs[name];
    const sum = rows.reduce((all, row) => all + (row[name] || 0), 0) || 1;
    const large = rows.filter((row) => row[name] / sum > 0.001), rest = sum - large.reduce((all, row) => all + row[name], 0);
    strip.replaceChildren(...large.map((row) => {
      const part = el("button", { type: "button", title: `${row.name}: ${shown(row[name])}, ${(100 * row[name] / sum).toFixed(1)} %`, onclick: () => goToRegion(row.at) }, row[name] / sum > 0.06 ? row.name : "");
      part.style.flexGrow = row[name];
      part.style.background = view.tint({ hue: hueOf(row.at), strength: 1.15 }, 1);
      return part;
    }));
    if (rest > 0 && large.length < rows.length) {
      const part = el("span", { title: `others: ${shown(rest)}` });
      part.style.flexGrow = rest;
      strip.append(part);
    }
    strip.setAttribute("aria-label", `${title} by region`);
    total.textContent = `${shown(sum)} in all regions`;
  };
  select.addEventListener("change", paint);
  whenRecoloured.push(paint);
  paint();
  return el("div", { class: "cost" }, el("div", { class: "above" }, el("label", {}, "Cost by region ", select), total), strip);
}

// Bodies, nodes outside, checks.

function buildBodies(panel) {
  if (!data.bodies.length) { panel.append(el("p", { class: "empty" }, "This plan has no regions, so no bodies.")); return; }
  const rows = data.bodies.map((body) => ({ ...body, calls: body.regions.length, flops: body.regions.reduce((sum, at) => sum + (regions[at].flops || 0), 0) }));
  const columns = [
    { name: "body", value: (row) => row.name },
    { name: "calls", isNumber: true, value: (row) => row.calls, shown: shownCount, searched: () => "" },
    { name: "nodes", isNumber: true, value: (row) => row.nodes, shown: shownCount, searched: () => "" },
    { name: "FLOPs in all calls", isNumber: true, value: (row) => row.flops, shown: shownFlops, searched: () => "" },
    { name: "regions", value: (row) => row.regions.length, searched: (row) => row.regions.map((at) => regions[at].name).join(" "), class: "wide",
      cell: (row) => el("span", {}, row.regions.slice(0, 8).map((at) => [regionLink(at), " "]).flat(), row.regions.length > 8 ? el("span", { class: "muted" }, `${row.regions.length - 8} more`) : null) },
  ];
  const repeated = rows.filter((row) => row.calls > 1);
  const saved = rows.reduce((sum, row) => sum + row.nodes * (row.calls - 1), 0);
  panel.append(el("p", { class: "lead" }, repeated.length
    ? `${plural(rows.length, "distinct body", "distinct bodies")} for ${plural(regions.length, "region")}: a treatment that compiles each body once compiles ${plural(saved, "node")} fewer.`
    : `${plural(rows.length, "distinct body", "distinct bodies")}; none is repeated.`));
  panel.append(...new Table(columns, rows, { label: "Distinct bodies", one: "body", filter: "Filter bodies" }).elements());
}

function buildOutside(panel) {
  if (!data.excluded.length) panel.append(el("p", { class: "lead" }, "Every operator is in a region."));
  for (const group of data.excluded) {
    const operators = Object.entries(group.operators).sort((one, other) => other[1] - one[1]);
    const lead = group.kind === "refused" ? `refused by ${group.by}: ${group.why}` : group.kind === "excluded" ? group.why : `${group.kind}: ${group.why}`;
    panel.append(el("details", { class: "reason" }, el("summary", {}, el("b", { class: "number" }, shownCount(group.count)), ` ${lead}`),
      el("p", { class: "muted" }, operators.slice(0, 20).map(([name, count]) => `${name} ${count}`).join(", "))));
  }
  const outside = [];
  for (let node = 0; node < NODE_COUNT; node++) {
    if (nodes.region[node] < 0 && !copiesOf.has(node) && !has(node, "state") && !["placeholder", "output"].includes(opOf(node))) outside.push(node);
  }
  if (!outside.length) return;
  const columns = [
    { name: "node", value: (node) => nodes.name[node], cell: nodeLink }, { name: "operator", value: (node) => text(nodes.target[node]), class: "clip" },
    { name: "module", value: modulePath, class: "clip" },
    { name: "why it is outside", class: "wide", value: (node) => (nodes.reason[node] >= 0 ? data.reasons[nodes.reason[node]].text : has(node, "mode toggle") ? "it only switches a mode" : "no reason given") },
  ];
  panel.append(...new Table(columns, outside, { label: "Nodes outside every region", one: "node", filter: "Filter nodes", chosen: (node) => goToNode(node) }).elements());
}

function buildChecks(panel) {
  const checked = data.verification;
  const table = (label, heads, rows) => el("table", { class: "data", "aria-label": label }, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", { class: "wide" }, cell ?? ""))))));
  panel.append(section("Verification",
    checked === null ? el("p", { class: "muted" }, "No comparison was given; pass comparison=partita.compare(program, plan.apply(), args).")
      : el("p", { class: checked.equal ? "good" : "bad" }, checked.equal ? `Nothing differs in ${plural(checked.calls, "call")}.` : `${plural(checked.differences.length, "difference")} in ${plural(checked.calls, "call")}.`),
    checked && checked.raised ? el("p", {}, `The original raised in ${plural(checked.raised, "call")}.`) : null,
    checked && checked.differences.length ? table("Differences", ["kind", "where", "call", "detail"], checked.differences.map((one) => [one.kind, one.where, one.when, one.detail])) : null,
    checked ? checked.notes.map((note) => el("p", { class: "muted" }, `Note: ${note}`)) : null));
  const place = (name) => (regionByName().has(name) ? regionLink(regionByName().get(name)) : name);
  panel.append(section("Failures", data.failures.length
    ? table("Failures", ["region", "backend", "node", "reason"], data.failures.map((one) => [place(one.region), one.backend, nodeByName().has(one.node) ? nodeLink(nodeByName().get(one.node)) : one.node, one.reason]))
    : el("p", { class: "muted" }, "No region failed to compile so far.")));
  if (data.compilations.length) panel.append(section("Compiled functions", table("Compiled functions", ["region", "function"], data.compilations.map((one) => [place(one.region), compiledLine(one)]))));
}

// Memory.

function buildMemory(panel) {
  const memory = data.memory;
  if (memory === null) {
    panel.append(el("p", { class: "empty" }, "No timeline was given; pass memory=, a memory plan of partita.memory, its picture or its timeline."));
    return;
  }
  const canvas = el("canvas", { id: "timeline", tabindex: "0", role: "img", "aria-label": `Memory over the step: ${memory.headline}` });
  const tip = el("p", { class: "tip", "aria-live": "polite" });
  const line = new TimelineView(canvas, tip, memory, goToNode);
  whenRecoloured.push(() => line.paint());
  const key = (color, name) => el("span", {}, el("i", { class: color }), name);
  const used = new Set(memory.planned.moments.phase.map((phase) => text(phase)));
  const { planned } = memory;
  panel.append(el("p", { class: "lead" }, memory.headline), memory.title ? el("p", { class: "muted" }, memory.title) : "",
    canvas, el("div", { class: "legend static" }, key("planned", "planned"), memory.plain ? key("plain", memory.plain_name) : null,
      planned.resident_bytes ? key("resident", "allocated throughout") : null, PHASES.filter((phase) => used.has(phase)).map((phase) => key(phase, phase))), tip,
    section("At the peak", el("table", { class: "data small", "aria-label": "What is allocated at the peak" },
      el("thead", {}, el("tr", {}, ["bytes", "times", "what", "module", "segment"].map((head, at) => el("th", { scope: "col", class: at < 2 ? "number" : null }, head)))),
      el("tbody", {}, [[planned.resident_bytes, "", "allocated throughout"], [planned.gradient_bytes, "", "gradients and results so far"]].filter(([bytes]) => bytes).map((row) => peakRow(row)),
        planned.occupants.slice(0, 40).map((one) => peakRow([one.bytes, one.count, one.node || one.operator || "an input", one.path, one.segment]))))));
}

function peakRow([bytes, count, what, path, segment]) {
  const node = nodeByName().get(what);
  return el("tr", {}, el("td", { class: "number" }, shownBytes(bytes)), el("td", { class: "number" }, count === "" ? "" : shownCount(count)),
    el("td", {}, node === undefined ? what : nodeLink(node)), el("td", {}, path || ""), el("td", {}, segment || ""));
}

// Tabs.

const TABS = [["graph", "Graph"], ["regions", "Regions", regions.length], ["bodies", "Bodies", data.bodies.length],
  ["outside", "Outside", data.excluded.reduce((sum, group) => sum + group.count, 0)], ["memory", "Memory"], ["checks", "Checks", data.failures.length + (data.verification ? data.verification.differences.length : 0)]];
const builders = { regions: buildRegions, bodies: buildBodies, outside: buildOutside, memory: buildMemory, checks: buildChecks };
const built = new Set(["graph"]);
let shownTab = "graph";

function build(name) {
  if (built.has(name)) return;
  built.add(name);
  builders[name](byId(`panel-${name}`));
}

function showTab(name) {
  shownTab = name;
  for (const [other] of TABS) {
    const isShown = other === name, tab = byId(`tab-${other}`);
    byId(`panel-${other}`).hidden = !isShown;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
  }
  build(name);
  if (name === "graph") view.resize();
}

const tabs = byId("tabs");
TABS.forEach(([name, label, count]) => tabs.append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => showTab(name) },
  label, count ? el("span", { class: name === "checks" ? "badge bad" : "badge" }, shownCount(count)) : null)));
tabs.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = TABS.findIndex(([name]) => name === shownTab), [next] = TABS[(at + step + TABS.length) % TABS.length];
  showTab(next);
  byId(`tab-${next}`).focus();
});
showTab("graph");
window.addEventListener("beforeprint", () => { for (const [name] of TABS) build(name); });

// Search.

const search = byId("search"), results = byId("results");
const searched = lazily(() => {
  const targets = data.texts.map((entry) => entry.toLowerCase());
  return { names: nodes.name.map((name) => name.toLowerCase()), targets, paths: data.modules.map(([path]) => targets[path]), regions: regions.map((region) => `${region.name} ${region.label ?? ""}`.toLowerCase()) };
});
const MOST_MATCHES = 40;
let matches = [], chosen = -1;

function find(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean), found = [];
  if (!words.length) return found;
  const known = searched();
  known.regions.forEach((own, region) => { if (found.length < 12 && words.every((word) => own.includes(word))) found.push({ region }); });
  const exact = nodeByName().get(query);
  if (exact !== undefined) found.unshift({ node: exact });
  const starts = [], contains = [];
  for (let node = 0; node < NODE_COUNT && contains.length < 400; node++) {
    if (node === exact) continue;
    const name = known.names[node], path = nodes.module[node] < 0 ? "" : known.paths[nodes.module[node]], target = known.targets[nodes.target[node]];
    if (!words.every((word) => name.includes(word) || target.includes(word) || path.includes(word))) continue;
    (name.startsWith(words[0]) ? starts : contains).push({ node });
  }
  return found.concat(starts, contains).slice(0, MOST_MATCHES);
}

function showMatches() {
  matches = find(search.value.trim());
  chosen = matches.length ? 0 : -1;
  const isOpen = search.value.trim() !== "";
  results.replaceChildren(...matches.map((match, at) => {
    const [name, told] = match.region !== undefined ? [regions[match.region].name, "region"]
      : [nodes.name[match.node], [text(nodes.target[match.node]), modulePath(match.node)].filter(Boolean).join(" · ")];
    const option = el("li", { role: "option", id: `match-${at}`, "aria-selected": String(at === chosen) }, el("span", { class: "name" }, name), el("span", { class: "muted clip" }, told));
    option.addEventListener("pointerdown", (event) => { event.preventDefault(); take(at); });
    return option;
  }));
  if (isOpen && !matches.length) results.replaceChildren(el("li", { class: "muted" }, "Nothing has this name."));
  results.hidden = !isOpen;
  search.setAttribute("aria-expanded", String(isOpen));
  mark();
}

function mark() {
  [...results.children].forEach((option, at) => option.setAttribute("aria-selected", String(at === chosen)));
  if (chosen >= 0) { search.setAttribute("aria-activedescendant", `match-${chosen}`); results.children[chosen].scrollIntoView({ block: "nearest" }); } else search.removeAttribute("aria-activedescendant");
}

function closeSearch() {
  results.hidden = true;
  search.setAttribute("aria-expanded", "false");
}

function take(at) {
  const match = matches[at];
  if (!match) return;
  closeSearch();
  if (match.region !== undefined) goToRegion(match.region); else goToNode(match.node);
  byId("graph").focus({ preventScroll: true });
}

search.addEventListener("input", showMatches);
search.addEventListener("focus", () => { if (search.value.trim()) showMatches(); });
search.addEventListener("blur", closeSearch);
search.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" && matches.length) { chosen = (chosen + 1) % matches.length; mark(); }
  else if (event.key === "ArrowUp" && matches.length) { chosen = (chosen + matches.length - 1) % matches.length; mark(); }
  else if (event.key === "Enter") take(chosen);
  else if (event.key === "Escape") { search.value = ""; closeSearch(); search.blur(); byId("graph").focus({ preventScroll: true }); }
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea")) return;
  event.preventDefault();
  search.focus();
  search.select();
});

// For the console, and for scripts that drive the page.
window.partita = { data, view, explain, showTab, goToNode, goToRegion };
