// The parts of the report beside the graph, each made when it is first shown.

const numberColumn = (name, value, shown, extra) =>
  ({ name, isNumber: true, value, shown, searched: () => "", ...extra });

// Regions.

function buildRegions(panel) {
  if (!regions.length) {
    panel.append(el("p", { class: "empty" }, "This plan has no regions."));
    return;
  }
  const rows = data.region_order.map((at) => ({ ...regions[at], at }));
  const options = { label: "Regions", one: "region", filter: "Filter regions", chosen: (row) => goToRegion(row.at) };
  panel.append(costStrip(rows), ...new Table(regionColumns(rows), rows, options).elements());
}

function regionColumns(rows) {
  const own = (key, name, shown, title) => numberColumn(name, (row) => row[key], shown, { title });
  const bar = (key, name, shown, dynamic) => {
    const most = rows.reduce((found, row) => Math.max(found, row[key] || 0), 0);
    return { ...own(key, name, shown), cell: (row) => barCell(row[key], most, traced(shown, row[dynamic])) };
  };
  const saved = [
    own("saved_bytes", "saved", shownBytes, "saved for backward without the treatment"),
    own("saved_bytes_after", "saved after", shownBytes, "saved for backward with the treatment"),
    own("recomputed_flops", "recomputed", shownFlops, "FLOPs that the backward recomputes"),
  ];
  return [
    { name: "region", value: (row) => row.name, cell: (row) => regionLink(row.at) },
    own("nodes", "nodes", shownCount),
    numberColumn("in", (row) => row.inputs.length, shownCount, { title: "values that cross into it" }),
    numberColumn("out", (row) => row.outputs.length, shownCount, { title: "values that cross out of it" }),
    bar("bytes_in", "bytes in", shownBytes, "dynamic_in"),
    bar("bytes_out", "bytes out", shownBytes, "dynamic_out"),
    bar("flops", "FLOPs", shownFlops),
    ...(rows.some((row) => row.saved_bytes !== null) ? saved : []),
    { name: "treatment", value: (row) => row.treatment, class: "clip" },
    { name: "label", value: (row) => row.label, class: "clip" },
    { name: "body", value: (row) => data.bodies[row.body].name, class: "clip", cell: bodyCell },
  ];
}

function bodyCell(row) {
  const body = data.bodies[row.body], calls = body.regions.length;
  return calls > 1 ? `${body.name} ×${calls}` : el("span", { class: "muted" }, "its own");
}

// What each region has of the whole, side by side in the order in which they run.
function costStrip(rows) {
  const costs = { flops: ["FLOPs", shownFlops], nodes: ["nodes", shownCount], bytes_in: ["bytes in", shownBytes],
    bytes_out: ["bytes out", shownBytes], saved_bytes_after: ["saved for backward", shownBytes] };
  const known = Object.keys(costs).filter((name) => rows.some((row) => row[name]));
  const strip = el("div", { class: "strip", role: "group" }), total = el("span", { class: "muted" });
  const options = known.map((name) => el("option", { value: name }, costs[name][0]));
  const select = el("select", { "aria-label": "Cost by region" }, options);
  const paint = () => {
    const [title, shown] = costs[select.value];
    const sum = rows.reduce((all, row) => all + (row[select.value] || 0), 0);
    strip.replaceChildren(...stripParts(rows, select.value, sum, shown));
    strip.setAttribute("aria-label", `${title} by region`);
    total.textContent = `${shown(sum)} in all regions`;
  };
  select.addEventListener("change", paint);
  whenRecoloured.push(paint);
  paint();
  const above = el("div", { class: "above" }, el("label", {}, "Cost by region ", select), total);
  return el("div", { class: "cost" }, above, strip);
}

function stripParts(rows, name, sum, shown) {
  const large = rows.filter((row) => row[name] / sum > 0.001);
  const parts = large.map((row) => {
    const share = row[name] / sum, title = `${row.name}: ${shown(row[name])}, ${(100 * share).toFixed(1)} %`;
    const named = { type: "button", title, "aria-label": title, onclick: () => goToRegion(row.at) };
    const part = el("button", named, share > 0.06 ? row.name : "");
    part.style.flexGrow = row[name];
    part.style.background = view.tint({ hue: hueOf(row.at), strength: 1.15 }, 1);
    return part;
  });
  const rest = sum - large.reduce((all, row) => all + row[name], 0);
  if (rest > 0 && large.length < rows.length) {
    const part = el("span", { title: `others: ${shown(rest)}` });
    part.style.flexGrow = rest;
    parts.push(part);
  }
  return parts;
}

// Bodies.

function buildBodies(panel) {
  if (!data.bodies.length) {
    panel.append(el("p", { class: "empty" }, "This plan has no regions, so no bodies."));
    return;
  }
  const flopsOf = (body) => body.regions.reduce((sum, at) => sum + (regions[at].flops || 0), 0);
  const rows = data.bodies.map((body) => ({ ...body, calls: body.regions.length, flops: flopsOf(body) }));
  const again = rows.reduce((sum, row) => sum + row.nodes * (row.calls - 1), 0);
  const told = `${plural(rows.length, "distinct body", "distinct bodies")} for ${plural(regions.length, "region")}`;
  panel.append(el("p", { class: "lead" }, again
    ? `${told}: a treatment that compiles each body once compiles ${plural(again, "node")} fewer.`
    : `${told}; none is repeated.`));
  const columns = [
    { name: "body", value: (row) => row.name },
    numberColumn("calls", (row) => row.calls, shownCount),
    numberColumn("nodes", (row) => row.nodes, shownCount),
    numberColumn("FLOPs in all calls", (row) => row.flops, shownFlops),
    { name: "regions", value: (row) => row.calls, searched: namesOfRegions, class: "wide", cell: callersCell },
  ];
  if (rows.some((row) => row.difference)) {
    columns.push({ name: "difference", value: nearlyEqual, class: "wide" });
  }
  const options = { label: "Distinct bodies", one: "body", several: "bodies", filter: "Filter bodies" };
  panel.append(...new Table(columns, rows, options).elements());
}

const namesOfRegions = (body) => body.regions.map((at) => regions[at].name).join(" ");

const nearlyEqual = (body) => (body.difference ? `like ${body.like}, but ${body.difference}` : "");

function callersCell(body) {
  const shown = body.regions.slice(0, 8).flatMap((at) => [regionLink(at), " "]);
  const more = body.regions.length - 8;
  return el("span", {}, shown, more > 0 ? el("span", { class: "muted" }, `${shownCount(more)} more`) : null);
}

// Nodes outside every region.

function buildOutside(panel) {
  if (!data.excluded.length) panel.append(el("p", { class: "lead" }, "Every operator is in a region."));
  panel.append(...data.excluded.map(reasonDetails));
  const outside = [];
  for (let node = 0; node < NODE_COUNT; node++) {
    if (nodes.region[node] < 0 && has(node, "operator")) outside.push(node);
  }
  if (!outside.length) return;
  const columns = [
    { name: "node", value: (node) => nodes.name[node], cell: nodeLink },
    { name: "operator", value: (node) => text(nodes.target[node]), class: "clip" },
    { name: "module", value: modulePath, class: "clip" },
    { name: "why it is outside", value: whyOutside, class: "wide" },
  ];
  const options = { label: "Nodes outside every region", one: "node", filter: "Filter nodes", chosen: goToNode };
  panel.append(...new Table(columns, outside, options).elements());
}

function whyOutside(node) {
  return nodes.reason[node] >= 0 ? data.reasons[nodes.reason[node]].text : "no reason given";
}

function reasonDetails(group) {
  const leads = { refused: `refused by ${group.by}: `, excluded: "" };
  const lead = leads[group.kind] ?? `${group.kind}: `;
  const operators = Object.entries(group.operators).sort((one, other) => other[1] - one[1]).slice(0, 20);
  return el("details", { class: "reason" },
    el("summary", {}, el("b", { class: "number" }, shownCount(group.count)), ` ${lead}${group.why}`),
    el("p", { class: "muted" }, operators.map(([name, count]) => `${name} ${count}`).join(", ")));
}

// Checks.

function plainTable(label, heads, rows) {
  const row = (cells) => el("tr", {}, cells.map((cell) => el("td", { class: "wide" }, cell ?? "")));
  return el("table", { class: "data", "aria-label": label }, headRow(...heads), el("tbody", {}, rows.map(row)));
}

function buildChecks(panel) {
  const place = (name) => (regionByName().has(name) ? regionLink(regionByName().get(name)) : name);
  const nodeNamed = (name) => (nodeByName().has(name) ? nodeLink(nodeByName().get(name)) : name);
  const { failures, compilations } = data;
  const failed = failures.map((one) => [place(one.region), one.backend, nodeNamed(one.node), one.reason]);
  const compiled = compilations.map((one) => [place(one.region), compiledLine(one)]);
  panel.append(verificationSection(), section("Failures", failures.length
    ? plainTable("Failures", ["region", "backend", "node", "reason"], failed)
    : el("p", { class: "muted" }, "No region failed to compile so far.")));
  if (compiled.length) {
    panel.append(section("Compiled functions", plainTable("Compiled functions", ["region", "function"], compiled)));
  }
}

function verificationSection() {
  const checked = data.verification;
  if (checked === null) {
    const how = "No comparison was given; pass comparison=partita.compare(program, plan.apply(), args).";
    return section("Verification", el("p", { class: "muted" }, how));
  }
  const { differences, notes } = checked, calls = plural(checked.calls, "call");
  const rows = differences.map((one) => [one.kind, one.where, one.when, one.detail]);
  return section("Verification",
    checked.equal ? el("p", { class: "good" }, `Nothing differs in ${calls}.`)
      : el("p", { class: "bad" }, `${plural(differences.length, "difference")} in ${calls}.`),
    checked.raised ? el("p", {}, `The original raised in ${plural(checked.raised, "call")}.`) : null,
    rows.length ? plainTable("Differences", ["kind", "where", "call", "detail"], rows) : null,
    notes.map((note) => el("p", { class: "muted" }, `Note: ${note}`)));
}

// Memory.

function buildMemory(panel) {
  const { memory } = data;
  if (memory === null) {
    const how = "No timeline was given; pass memory=, a memory plan of partita.memory, its picture or its timeline.";
    panel.append(el("p", { class: "empty" }, how));
    return;
  }
  const label = `Memory over the step: ${memory.headline}`;
  const canvas = el("canvas", { id: "timeline", tabindex: "0", role: "img", "aria-label": label });
  const tip = el("p", { class: "tip", "aria-live": "polite" });
  const line = new TimelineView(canvas, tip, memory, goToNode);
  whenRecoloured.push(() => line.paint());
  panel.append(el("p", { class: "lead" }, memory.headline));
  if (memory.title) panel.append(el("p", { class: "muted" }, memory.title));
  panel.append(canvas, timelineLegend(memory), tip, peakSection(memory.planned));
}

function timelineLegend(memory) {
  const used = new Set(memory.planned.moments.phase.map(text));
  const key = (color, name) => el("span", {}, el("i", { class: color }), name);
  return el("div", { class: "legend static" },
    key("planned", "planned"),
    memory.plain ? key("plain", memory.plain_name) : null,
    memory.planned.resident_bytes ? key("resident", "allocated throughout") : null,
    PHASES.filter((phase) => used.has(phase)).map((phase) => key(phase, phase)));
}

function peakSection(planned) {
  const known = [
    [planned.resident_bytes, "", "allocated throughout"],
    [planned.gradient_bytes, "", "gradients and results so far"],
  ];
  const occupants = planned.occupants.slice(0, 40)
    .map((one) => [one.bytes, one.count, one.node || one.operator || "an input", one.path, one.segment]);
  const rows = [...known.filter(([bytes]) => bytes), ...occupants].map(peakRow);
  return section("At the peak", el("table", { class: "data small", "aria-label": "What is allocated at the peak" },
    headRow("bytes", "times", "what", "module", "segment"), el("tbody", {}, rows)));
}

function peakRow([bytes, count, what, path, segment]) {
  const node = nodeByName().get(what);
  return el("tr", {},
    el("td", { class: "number" }, shownBytes(bytes)),
    el("td", { class: "number" }, count === "" ? "" : shownCount(count)),
    el("td", {}, node === undefined ? what : nodeLink(node)), el("td", {}, path || ""), el("td", {}, segment || ""));
}
