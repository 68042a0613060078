// Colours: what is shown by them, as one key for a node, or a number.

function hueOf(number) { return (212 + number * 137.5) % 360; }
const NEUTRAL = -1;
const TREATMENTS = [...new Set(regions.map((region) => region.treatment))];

const OVERLAYS = {
  region: { label: "Region", key: (node) => nodes.region[node], name: (key) => regions[key].name, ofOperators: true },
  treatment: {
    label: "Treatment",
    key: (node) => (nodes.region[node] < 0 ? -1 : TREATMENTS.indexOf(regions[nodes.region[node]].treatment)),
    name: (key) => TREATMENTS[key],
    ofOperators: true,
  },
  body: {
    label: "Distinct body",
    key: (node) => (nodes.region[node] < 0 ? -1 : regions[nodes.region[node]].body),
    name: (key) => data.bodies[key].name,
    ofOperators: true,
  },
  mode: { label: "Mode", key: (node) => nodes.mode[node] - 1, name: (key) => data.modes[key + 1], ofOperators: true },
  effects: {
    label: "Effects",
    key: (node) => EFFECTS.findLastIndex((name) => has(node, name)),
    name: (key) => EFFECTS[key],
  },
  half: {
    label: "Forward and backward",
    key: (node) => (has(node, "saved for backward") ? 2 : has(node, "backward") ? 1 : has(node, "forward") ? 0 : -1),
    name: (key) => ["forward", "backward", "saved for backward"][key],
  },
  flops: { label: "FLOPs", amount: (node) => nodes.flops[node] || 0, shown: shownFlops },
  bytes: { label: "Bytes of results", amount: (node) => nodes.bytes[node] || 0, shown: shownBytes },
};
if (data.kind !== "joint graph") delete OVERLAYS.half;
