// Layered layout: boxes in rows so that edges point down, few of them cross, and neighbours are above each other.

const MOST_BENDS = 6000;

// `boxes` have a width and a height; `links` are pairs [from, to] of places in the list, `from` before `to`.
function layered(boxes, links, gapX, gapY) {
  const rank = ranksOf(boxes.length, links);
  const vertices = boxes.map((box, at) => vertexOf(box.width, rank[at], at));
  const trunks = new Map();
  const chains = links.map(([from, to]) => chainOf(vertices, trunks, from, to));
  const layers = [];
  for (const vertex of vertices) (layers[vertex.rank] = layers[vertex.rank] || []).push(vertex);
  for (const layer of layers) layer.forEach((vertex, place) => { vertex.place = place; });
  order(layers);
  align(layers, gapX);
  return placed(boxes, vertices, layers, links, chains, gapY);
}

// A box, or a bend of an edge, for which `box` is -1.
function vertexOf(width, rank, box) {
  return { width, rank, box, x: 0, up: [], down: [], place: 0 };
}

// Each box below all that it reads; one that may be lower is, where that makes its edges shorter or a row less crowded.
function ranksOf(count, links) {
  const rank = new Int32Array(count), ins = new Int32Array(count), outs = new Int32Array(count);
  const byTarget = links.slice().sort((one, other) => one[1] - other[1]);
  for (const [from, to] of byTarget) {
    rank[to] = Math.max(rank[to], rank[from] + 1);
    ins[to] += 1;
    outs[from] += 1;
  }
  const crowd = new Map();
  for (let at = 0; at < count; at++) crowd.set(rank[at], (crowd.get(rank[at]) || 0) + 1);
  const lowest = new Int32Array(count).fill(0x7fffffff);
  const bySource = links.slice().sort((one, other) => other[0] - one[0]);
  let next = 0, alone = 0;
  for (let at = count - 1; at >= 0; at--) {
    for (; next < bySource.length && bySource[next][0] === at; next++) {
      lowest[at] = Math.min(lowest[at], rank[bySource[next][1]] - 1);
    }
    const isShorter = ins[at] < outs[at] || (ins[at] === outs[at] && crowd.get(rank[at]) > 6);
    if (outs[at] && lowest[at] > rank[at] && isShorter) rank[at] = lowest[at];
    if (!outs[at] && !ins[at]) rank[at] = Math.floor(alone++ / 8);
  }
  return rank;
}

// The bends of an edge, one in every row between its ends, so that it has a way around the boxes. Edges from one box
// share theirs, as far as they go the same way: a value that every block reads is one line with branches.
function chainOf(vertices, trunks, from, to) {
  const first = vertices[from].rank + 1, last = vertices[to].rank - 1;
  if (!trunks.has(from)) trunks.set(from, [vertices[from]]);
  const trunk = trunks.get(from);
  for (let rank = first + trunk.length - 1; rank <= last; rank++) {
    if (vertices.length > MOST_BENDS && last - first > 3) return [vertices[from], vertices[to]];
    const bend = vertexOf(8, rank, -1);
    vertices.push(bend);
    joined(trunk[trunk.length - 1], bend);
    trunk.push(bend);
  }
  const chain = [...trunk.slice(0, last - first + 2), vertices[to]];
  joined(chain[chain.length - 2], vertices[to]);
  return chain;
}

function joined(above, below) {
  above.down.push(below);
  below.up.push(above);
}

function order(layers) {
  const settle = (layer, side) => {
    for (const vertex of layer) {
      const near = vertex[side];
      vertex.wish = near.length ? near.reduce((sum, other) => sum + other.place / sizeOf(other), 0) / near.length
        : vertex.place / layer.length;
    }
    layer.sort((one, other) => one.wish - other.wish || one.place - other.place);
    layer.forEach((vertex, place) => { vertex.place = place; });
  };
  const sizeOf = (vertex) => layers[vertex.rank].length;
  for (let turn = 0; turn < 6; turn++) {
    for (let at = 1; at < layers.length; at++) settle(layers[at], "up");
    for (let at = layers.length - 2; at >= 0; at--) settle(layers[at], "down");
  }
}

function align(layers, gapX) {
  for (const layer of layers) {
    let x = 0;
    for (const vertex of layer) { vertex.x = x + vertex.width / 2; x += vertex.width + gapX; }
    for (const vertex of layer) vertex.x -= (x - gapX) / 2;
  }
  for (let turn = 0; turn < 12; turn++) {
    const sides = turn > 5 ? ["up", "down"] : turn % 2 ? ["down"] : ["up"];
    const range = turn % 2 ? layers.slice().reverse() : layers;
    for (const layer of range) isotonic(layer, sides, gapX);
  }
}

// The places nearest to the wished ones that keep the order and the gaps: blocks of neighbours that push each other
// move together, to the mean of their wishes.
function isotonic(layer, sides, gapX) {
  const blocks = [];
  let offset = 0;
  layer.forEach((vertex, place) => {
    if (place) offset += (layer[place - 1].width + vertex.width) / 2 + gapX;
    let pull = 0, sum = 0;
    for (const side of sides) {
      for (const other of vertex[side]) {
        // A long edge is straight, and what is directly above each other is so on the page too.
        const strength = vertex.box < 0 && other.box < 0 ? 16 : vertex.box >= 0 && other.box >= 0 ? 8 : 0.1;
        pull += strength;
        sum += strength * other.x;
      }
    }
    const weight = pull || 0.2, wish = pull ? sum / pull : vertex.x;
    vertex.offset = offset;
    blocks.push({ sum: (wish - offset) * weight, weight, count: 1 });
    while (blocks.length > 1) {
      const last = blocks[blocks.length - 1], before = blocks[blocks.length - 2];
      if (before.sum / before.weight <= last.sum / last.weight) break;
      before.sum += last.sum;
      before.weight += last.weight;
      before.count += last.count;
      blocks.pop();
    }
  });
  let at = 0;
  for (const block of blocks) {
    for (let step = 0; step < block.count; step++, at++) layer[at].x = block.sum / block.weight + layer[at].offset;
  }
}

function placed(boxes, vertices, layers, links, chains, gapY) {
  let left = Infinity, right = -Infinity;
  for (const vertex of vertices) {
    left = Math.min(left, vertex.x - vertex.width / 2);
    right = Math.max(right, vertex.x + vertex.width / 2);
  }
  const tops = [], bottoms = [];
  let y = 0;
  layers.forEach((layer, rank) => {
    const height = layer.reduce((most, vertex) => Math.max(most, vertex.box < 0 ? 0 : boxes[vertex.box].height), 0);
    tops[rank] = y;
    bottoms[rank] = y + height;
    const crossing = layer.length > 10 ? Math.min(40, layer.length) : 0;
    y += height + gapY + crossing;
  });
  const corner = (vertex) => ({ x: vertex.x - vertex.width / 2 - left, y: tops[vertex.rank] });
  const at = vertices.slice(0, boxes.length).map(corner);
  const routes = chains.map((chain, link) => {
    const points = [];
    chain.forEach((vertex, step) => {
      const x = vertex.x - left;
      if (step === 0) points.push(x, tops[vertex.rank] + boxes[links[link][0]].height);
      else if (step === chain.length - 1) points.push(x, tops[vertex.rank]);
      else points.push(x, tops[vertex.rank], x, bottoms[vertex.rank]);
    });
    return points;
  });
  const height = layers.length ? bottoms[layers.length - 1] : 0;
  return { at, routes, width: boxes.length ? right - left : 0, height };
}
