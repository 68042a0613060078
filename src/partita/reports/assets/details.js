// Beside the graph: what is selected, explained; without a selection, the whole plan in a few numbers.

const MOST_LISTED = 60, MOST_CROSSINGS = 400;

const linkTo = (label, title, act) => el("button", { type: "button", class: "link name", title, onclick: act }, label);
const nodeLink = (node) => linkTo(nodes.name[node], text(nodes.target[node]), () => goToNode(node));
const regionLink = (region) => linkTo(regions[region].name, regions[region].treatment, () => goToRegion(region));

const fact = (name, ...value) => [el("dt", {}, name), el("dd", {}, ...value)];
const factIf = (condition, name, ...value) => (condition ? fact(name, ...value) : []);
const section = (title, ...content) => el("section", {}, el("h3", {}, title), ...content);

function headRow(...names) {
  const cell = (name) => el("th", { scope: "col", class: ["bytes", "times"].includes(name) ? "number" : null }, name);
  return el("thead", {}, el("tr", {}, names.map(cell)));
}

function listed(items, make) {
  const shown = items.slice(0, MOST_LISTED).map((item) => el("li", {}, make(item)));
  const more = items.length - MOST_LISTED;
  if (more > 0) shown.push(el("li", { class: "muted" }, `${shownCount(more)} more`));
  return el("ul", { class: "names" }, shown);
}

function nodeDetails(node) {
  const owner = nodes.region[node], effects = effectsOf(node);
  const inputs = Array.from(inputsOf().of(node)), users = Array.from(usersOf().of(node));
  const withValue = (other) => [nodeLink(other), " ", el("span", { class: "muted" }, text(nodes.value[other]))];
  return [
    el("h2", { class: "name" }, nodes.name[node]),
    el("p", { class: "muted" }, `${opOf(node)} ${text(nodes.target[node])}`),
    el("dl", {},
      fact("value", text(nodes.value[node]) || "not traced"),
      fact("bytes", traced(shownCount, has(node, "dynamic sizes"))(nodes.bytes[node])),
      factIf(nodes.flops[node], "FLOPs", shownCount(nodes.flops[node])),
      factIf(modulePath(node), "module", modulePath(node)),
      factIf(owner >= 0, "region", owner >= 0 ? regionLink(owner) : ""),
      fact("mode", data.modes[nodes.mode[node]]),
      factIf(effects.length, "effects", effects.join(", ")),
      factIf(has(node, "saved for backward"), "backward", "saved for backward")),
    whySection(explain(node)),
    inputs.length ? section(`Reads ${inputs.length}`, listed(inputs, withValue)) : null,
    users.length ? section(`Read by ${users.length}`, listed(users, withValue)) : null,
  ];
}

function whySection(told) {
  const paths = [["Cut from what is before by ", told.pathIn], ["Cut from what is after by ", told.pathOut]];
  const orders = [["Stays after", told.after], ["Stays before", told.before]];
  const steps = (path) => path.flatMap((step, at) => [at ? " → " : "", nodeLink(step)]);
  return section("Why it is here",
    el("p", {}, told.where),
    told.remarks.map((remark) => el("p", {}, remark)),
    paths.filter(([, path]) => path.length).map(([lead, path]) => el("p", {}, lead, steps(path))),
    orders.filter(([, others]) => others.length).map(([lead, others]) => el("div", {},
      el("p", {}, `${lead}, by memory, random numbers or side effects:`), listed(others, nodeLink))));
}

function regionDetails(at) {
  const region = regions[at], alike = data.bodies[region.body].regions;
  const failures = data.failures.filter((failure) => failure.region === region.name);
  const compiled = data.compilations.filter((one) => one.region === region.name);
  const saved = `${shownCount(region.saved_bytes)} bytes, ${shownCount(region.saved_bytes_after)} after`;
  return [
    el("h2", { class: "name" }, region.name),
    el("p", { class: "muted" }, region.treatment),
    el("dl", {},
      factIf(region.label !== null, "label", region.label),
      fact("nodes", shownCount(region.nodes)),
      fact("bytes in", traced(shownCount, region.dynamic_in)(region.bytes_in)),
      fact("bytes out", traced(shownCount, region.dynamic_out)(region.bytes_out)),
      fact("FLOPs", shownCount(region.flops)),
      factIf(region.saved_bytes !== null, "saved", saved),
      factIf(region.recomputed_flops !== null, "recomputed", `${shownCount(region.recomputed_flops)} FLOPs`)),
    failures.map((failure) => el("p", { class: "bad" }, `Runs eagerly: ${failureLine(failure)}`)),
    compiled.length ? section("Compiled", listed(compiled, compiledLine)) : null,
    borderSection("In", region.inputs),
    borderSection("Out", region.outputs),
    alike.length > 1 ? section(`Equal bodies ${alike.length}`, listed(alike, regionLink)) : null,
  ];
}

function failureLine(failure) {
  return `${failure.backend} failed${failure.node ? ` at ${failure.node}` : ""}: ${failure.reason}`;
}

function compiledLine(one) {
  const shared = one.shared_with === null ? `${one.seconds.toFixed(1)} s` : `shared with ${one.shared_with}`;
  const gradients = one.gradients ? " with gradients" : "";
  return `${one.backend} for (${one.inputs.join(", ")})${gradients}: ${one.loaded ? "loaded" : shared}`;
}

// What crosses a border: values that are computed, and weights, of which there are more than one wants to see at once.
function borderSection(title, crossings) {
  const weights = crossings.filter(([node]) => has(node, "state"));
  const others = crossings.filter(([node]) => !has(node, "state"));
  const total = weights.reduce((sum, [, , , bytes]) => sum + (bytes || 0), 0);
  const summary = el("summary", {}, `${plural(weights.length, "weight")}, ${shownBytes(total)}`);
  return section(`${title} ${crossings.length}`,
    others.length || !weights.length ? crossingTable(others) : null,
    weights.length ? el("details", {}, summary, crossingTable(weights)) : null);
}

function crossingTable(crossings) {
  if (!crossings.length) return el("p", { class: "muted" }, "Nothing.");
  const rows = crossings.slice(0, MOST_CROSSINGS).map(([node, place, value, bytes]) => el("tr", {},
    el("td", {}, nodeLink(node), place || ""), el("td", {}, text(value)),
    el("td", { class: "number" }, traced(shownBytes, has(node, "dynamic sizes"))(bytes))));
  const more = crossings.length - MOST_CROSSINGS;
  if (more > 0) rows.push(el("tr", {}, el("td", { colspan: 3, class: "muted" }, `${shownCount(more)} more`)));
  return el("table", { class: "data small" }, headRow("name", "value", "bytes"), el("tbody", {}, rows));
}

function groupDetails(item) {
  const inside = new Set();
  let bytes = 0, flops = 0;
  for (const node of view.tree.sequence.slice(item.start, item.end)) {
    bytes += nodes.bytes[node] || 0;
    flops += nodes.flops[node];
    if (nodes.region[node] >= 0) inside.add(nodes.region[node]);
  }
  return [
    el("h2", { class: "name" }, item.label),
    el("p", { class: "muted" }, view.subtitle(item)),
    el("dl", {},
      fact("nodes", shownCount(operatorsIn(view.tree.sequence.slice(item.start, item.end)))),
      fact("bytes of results", shownCount(bytes)),
      fact("FLOPs", shownCount(flops))),
    inside.size ? section(`Regions ${inside.size}`, listed([...inside], regionLink)) : null,
  ];
}

function overview() {
  const inRegions = regions.reduce((sum, region) => sum + region.nodes, 0);
  const flops = nodes.flops.reduce((sum, own) => sum + own, 0);
  const repeated = data.bodies.filter((body) => body.regions.length > 1).length;
  const { saved, memory, failures } = data;
  return [
    el("h2", {}, "Overview"),
    el("dl", {},
      fact("nodes", `${shownCount(NODE_COUNT)}, ${shownCount(data.operators)} of them operators`),
      fact("in regions", plural(inRegions, "operator")),
      fact("regions", shownCount(regions.length)),
      fact("distinct bodies", shownCount(data.bodies.length), repeated ? `, ${shownCount(repeated)} repeated` : ""),
      fact("FLOPs", shownFlops(flops)),
      saved ? fact("saved for backward", savedText(saved)) : [],
      memory ? fact("memory peak", shownBytes(memory.planned.peak_bytes)) : [],
      fact("verified", verifiedText()),
      factIf(failures.length, "failures", el("span", { class: "bad" }, shownCount(failures.length)))),
    data.remarks.length ? section("Remarks", data.remarks.map((remark) => el("p", {}, remark))) : null,
    el("section", { class: "keys" }, el("h3", {}, "Keys"),
      el("dl", {}, KEYS.flatMap(([key, does]) => fact(el("kbd", {}, key), does)))),
  ];
}

const KEYS = [["/", "search"], ["↓ ↑", "next, previous"], ["→ ←", "into a group, out of it"],
  ["Enter", "open, close"], ["Esc", "clear"], ["+ − 0", "zoom, show all"]];

const savedText = (saved) => `${shownBytes(saved.saved_bytes)}, ${shownBytes(saved.saved_bytes_after)} after`;

function verifiedText() {
  const checked = data.verification;
  if (checked === null) return "not in this report";
  if (checked.equal) return `nothing differs in ${plural(checked.calls, "call")}`;
  return el("span", { class: "bad" }, plural(checked.differences.length, "difference"));
}

function detailsOf(item) {
  if (!item) return overview();
  if (item.kind === "node") return nodeDetails(item.node);
  return item.kind === "region" ? regionDetails(item.region) : groupDetails(item);
}

function showDetails(item) {
  const back = { type: "button", class: "quiet close", "aria-label": "Back to the overview" };
  const close = item ? el("button", { ...back, onclick: () => view.select(null) }, "×") : null;
  byId("details").replaceChildren(...[close, ...detailsOf(item).flat(3)].filter(Boolean));
  byId("details").scrollTop = 0;
  const state = item && item.children ? (item.isOpen ? ", open" : ", closed") : "";
  byId("said").textContent = item ? `${item.kind} ${item.label}${state}` : "";
}
