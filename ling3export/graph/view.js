// The page of `graph view`: the graph, tables, search and keys. view_charts.js has the plots.
"use strict";
const $ = (id) => document.getElementById(id), SVG = "http://www.w3.org/2000/svg";
const pages = JSON.parse($("data").textContent);
const sum = (list, value) => list.reduce((total, one) => total + value(one), 0);
const scaled = (value, steps, unit) => { let step = 0, rest = Math.abs(value || 0);
  while (rest >= 1000 && step < steps.length - 1) { rest /= 1000; step += 1; }
  const digits = rest >= 100 || step === 0 && Number.isInteger(rest) ? 0 : rest >= 10 ? 1 : 2;
  return `${value < 0 ? "−" : ""}${rest.toFixed(digits)} ${steps[step]}${unit}`; };
const show = { seconds: (v) => scaled(v * 1e9, ["n", "µ", "m", ""], "s"),
  bytes: (v) => scaled(v, ["", "k", "M", "G"], "B"), flops: (v) => scaled(v, ["", "k", "M", "G", "T"], "FLOP"),
  change: (v) => (v > 0 ? "+" : "") + show[page.timed ? "seconds" : "bytes"](v) };
const NAMES = { seconds: "Time", bytes: "Bytes", flops: "FLOPs", change: "Change" };
const words = (by) => by === "flops" ? "FLOPs" : NAMES[by].toLowerCase();
const HUES = { embed: 255, norm: 110, kda: 30, mla: 200, router: 300, experts: 150, shared_expert: 175, dense_mlp: 75,
  logits: 335, sample: 10, state: 230, other: 270 }, KINDS = Object.keys(HUES);  // in the order of the model
let page, tree, metric, leaves, query = "", cursor = -1, chosen = null, zoom;

function put(parent, tag, attributes = {}, text = null) {
  const node = parent instanceof SVGElement || tag === "svg" ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value); else node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  parent.append(node); return node;
}
const tone = (kind) => `--h:${HUES[kind] ?? 270}`;
const clear = (node) => { node.replaceChildren(); return node; };
const value = (op, by = metric) => by === "seconds" && op.overlapped ? 0 : op[by] || 0;
const total = (node, by = metric) => node.sums[by] ??= sum(node.leaves, (leaf) => leaf.share * value(leaf.op, by));
const shorten = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;

// The tree: steps of each operation, and the operation as its leaf.
function branch(parent, label, key) {
  parent.index ??= new Map();
  let node = parent.index.get(key);
  if (!node) { node = { label, parent, kids: [], leaves: [], sums: {}, id: parent.id + "/" + key };
    parent.index.set(key, node); parent.kids.push(node); }
  return node;
}
function grow(steps) {
  const root = { label: "program", parent: null, kids: [], leaves: [], sums: {}, id: "" }, all = [];
  page.operations.forEach((op, place) => { for (const [path, share, layer] of steps(op)) {
    let node = root;
    const chain = [root];
    for (const step of path) chain.push(node = branch(node, step, step));
    const id = `${node.id}/#${place}`;
    const leaf = { label: op.name, op, place, share, layer, parent: node, kids: [], sums: {}, id };
    node.kids.push(leaf); leaf.leaves = [leaf]; all.push(leaf);
    for (const one of chain) one.leaves.push(leaf);
  } });
  return [root, all];
}
const byLayer = (op) => (op.layers || [null]).map((layer) => [
  [...(layer === null ? [] : [`layer ${layer}`]), op.kind, ...op.path], 1 / (op.layers || [0]).length, layer]);
function prepare() {
  page.index = new Map(page.operations.map((op, place) => [op.name, place]));
  page.users = page.operations.map(() => []);
  page.operations.forEach((op, place) => { for (const name of op.operands || [])
    if (page.index.has(name)) page.users[page.index.get(name)].push(place); });
  page.timed = page.operations.some((op) => op.seconds);
  for (const change of page.difference?.changes || []) {
    const op = page.operations[page.index.get(change.after)];
    if (op) op.change = page.timed ? change.seconds : change.bytes_weights + change.bytes_state + change.bytes_other;
  }
  [tree, leaves] = grow(byLayer);
  const middle = (node) => node.leaves[node.leaves.length >> 1].place;
  const first = Math.min(...leaves.filter((leaf) => leaf.layer !== null).map((leaf) => leaf.place));
  // The model's order: the embedding and what runs before the layers, the layers by number, what comes after them.
  const early = (node) => node.label === "embed" || node.leaves[0].place < first && node.label !== "other";
  const order = (node) => node.leaves[0].layer ?? (early(node) ? -1 : 1e6 + node.leaves[0].place);
  const arrange = (node) => {
    const kinds = node.parent === tree && node.layered ? (kid) => KINDS.indexOf(kid.label) : middle;
    const at = node === tree ? order : kinds;
    node.kids.sort((a, b) => at(a) - at(b));
    node.kids.forEach(arrange);
  };
  for (const node of tree.kids) node.layered = node.leaves[0].layer !== null;
  arrange(tree); tree.open = true;
  page.instances = page.operations.map(() => []);
  for (const leaf of leaves) page.instances[leaf.place].push(leaf);
  page.kinds = KINDS.filter((kind) => page.operations.some((op) => op.kind === kind));
  zoom = page.map = grow((op) => [[[op.kind, ...op.path], 1]])[0];
}

// The graph: boxes in the order of the data flow; an open box holds the boxes and edges inside it.
function edges(node) {
  const own = new Map(node.kids.map((kid, place) => [kid, place])), pairs = new Map();
  const inside = (leaf) => { while (leaf && leaf.parent !== node) leaf = leaf.parent; return leaf; };
  if (node === tree) return node.kids.slice(1).map((_, place) => [place, place + 1]);
  for (const leaf of node.leaves) for (const name of leaf.op.operands || []) {
    const source = page.instances[page.index.get(name)]?.find((one) => one.layer === leaf.layer && inside(one));
    if (!source) continue;
    const from = own.get(inside(source)), to = own.get(inside(leaf));
    if (from !== to) pairs.set(`${from} ${to}`, [from, to]);
  }
  return [...pairs.values()];
}
const BOX = { w: 230, h: 32, gap: 14, pad: 12, head: 30 };
function place(node, columns) {
  if (!node.open || !node.kids.length) { node.w = node.parent === tree ? BOX.wide : BOX.w; node.h = BOX.h; return; }
  node.edges ??= edges(node);
  const rank = node.kids.map((_, number) => node === tree ? number : 0);
  if (node !== tree) for (const [from, to] of node.edges.slice().sort((a, b) => a[1] - b[1]))
    if (from < to) rank[to] = Math.max(rank[to], rank[from] + 1);
  const rows = [];
  for (let level = 0; level <= Math.max(...rank); level++) {
    const row = node.kids.filter((_, number) => rank[number] === level);
    for (let start = 0; start < row.length; start += columns) rows.push(row.slice(start, start + columns));
  }
  node.kids.forEach((kid) => place(kid, Math.max(1, columns - 1)));
  const widths = rows.map((row) => sum(row, (kid) => kid.w + BOX.gap) - BOX.gap);
  node.w = Math.max(BOX.w, ...widths) + 2 * BOX.pad + 16;
  let y = node === tree ? BOX.pad : BOX.head + 6;
  rows.forEach((row, number) => { let x = (node.w - widths[number]) / 2;
    for (const kid of row) { kid.x = x; kid.y = y; x += kid.w + BOX.gap; }
    y += Math.max(...row.map((kid) => kid.h)) + BOX.gap; });
  node.h = y - BOX.gap + BOX.pad;
}
function fill(node) {
  const level = node.op ? "op" : node.id.split("/").length, most = page.most[level] ||= Math.max(1e-30,
    ...everything(tree).filter((one) => (one.op ? "op" : one.id.split("/").length) === level)
      .map((one) => Math.abs(total(one))));
  const heat = Math.sqrt(Math.abs(total(node)) / most), end = total(node) < 0 ? "--cool" : "--hot";
  return `color-mix(in oklab, var(${end}) ${(100 * heat).toFixed(1)}%, var(--cold))`;
}
const everything = (node) => [node, ...node.kids.flatMap(everything)];
const seen = (node) => [node, ...(node.open ? node.kids.flatMap(seen) : [])];
function draw(node, parent) {
  const group = put(parent, "g", { transform: `translate(${node.x || 0},${node.y || 0})` });
  if (node !== tree) {
    const hits = query ? sum(node.leaves, (leaf) => leaf.match ? 1 : 0) : 0, open = node.open && node.kids.length;
    group.setAttribute("role", "treeitem"); group.setAttribute("tabindex", node === page.focus ? 0 : -1);
    group.setAttribute("class", `${hits ? "match" : ""} ${node === chosen ? "on" : ""}`); group.dataset.id = node.id;
    if (node.kids.length) group.setAttribute("aria-expanded", !!open);
    group.node = node; node.shown = group;
    put(group, "rect", { class: "box", width: node.w, height: node.h, rx: 6,
      style: `fill:${open ? "transparent" : fill(node)}` });
    const amount = total(node) ? show[metric](total(node)) : "–", mark = node.op ? "" : open ? "▾ " : "▸ ";
    const kinds = node.layered ? " · " + ["kda", "mla", "experts", "dense_mlp"].filter((kind) =>
      node.index.has(kind)).join(", ") : "";
    if (node.layered && !open) {
      const size = (kid) => Math.abs(total(kid)), whole = sum(node.kids, size) || 1;
      let x = 8;
      for (const kid of node.kids) {
        const width = (node.w - 16) * size(kid) / whole;
        put(group, "rect", { class: "tone", style: tone(kid.label), x, y: node.h - 7, width, height: 3.5 });
        x += width;
      }
    }
    const name = `${mark}${node.label.split("/").at(-1)}${kinds}${hits && node.kids.length ? ` (${hits})` : ""}`;
    put(group, "text", { x: 10, y: 18 }, shorten(name, (node.w - 24) / 6.9 - amount.length));
    put(group, "text", { x: node.w - 10, y: 18, "text-anchor": "end" }, amount);
    put(group, "title", {}, `${node.op ? node.op.scope || node.label : node.label + kinds}\n${amount}`);
  }
  if (!node.open) return;
  const under = put(group, "g");
  node.kids.forEach((kid) => draw(kid, group));
  const right = Math.max(...node.kids.map((kid) => kid.x + kid.w));
  for (const [from, to] of node.edges || []) {
    const a = node.kids[from], b = node.kids[to], y = a.y + a.h, x = a.x + a.w / 2, on = a === chosen || b === chosen;
    const between = node.kids.some((kid) => kid !== a && kid !== b && kid.y >= y && kid.y + kid.h <= b.y);
    const side = right + 24;
    put(under, "path", { class: `edge ${on ? "on" : ""}`, d: b.y >= y && !between
      ? `M${x},${y} C${x},${y + 10} ${b.x + b.w / 2},${b.y - 10} ${b.x + b.w / 2},${b.y}`
      : `M${a.x + a.w},${a.y + 15} C${side},${a.y + 15} ${side},${b.y + 15} ${b.x + b.w},${b.y + 15}` });
  }
}
function render() {
  const box = $("graph"), { scrollTop, scrollLeft } = box, narrow = box.clientWidth < 520;
  BOX.w = narrow ? Math.max(190, box.clientWidth - 130) : 230;
  BOX.wide = narrow ? box.clientWidth - 60 : 420;
  page.most = {}; page.focus ??= tree.kids[0];
  place(tree, narrow ? 1 : 3);
  const svg = put(clear(box), "svg", { width: tree.w, height: tree.h, role: "tree", "aria-label": "Layers" });
  draw(tree, svg);
  box.scrollTop = scrollTop; box.scrollLeft = scrollLeft;
  svg.addEventListener("click", (event) => { const node = event.target.closest("[role=treeitem]")?.node;
    if (node) { toggle(node); choose(node); } });
  svg.addEventListener("keydown", move);
}
const toggle = (node) => { if (node.kids.length) node.open = !node.open; };
function choose(node, reveal = false) {
  chosen = page.focus = node;
  if (reveal) for (let up = node.parent; up; up = up.parent) up.open = true;
  render(); describe(node);
  node.shown.focus({ preventScroll: true });
  if (reveal) { const at = node.shown.getBoundingClientRect(), box = $("graph"), frame = box.getBoundingClientRect();
    box.scrollTop += at.top - frame.top - box.clientHeight / 3; box.scrollLeft += at.left - frame.left - 20; }
}
function move(event) {
  const list = seen(tree).slice(1), at = list.indexOf(page.focus), node = page.focus;
  const unfolded = () => { node.open = true; return node; }, folded = () => { node.open = false; return node; };
  const toggled = () => { toggle(node); return node; };
  const next = {
    ArrowDown: () => list[at + 1], ArrowUp: () => list[at - 1], Home: () => list[0], End: () => list.at(-1),
    ArrowRight: () => !node.kids.length ? node : node.open ? node.kids[0] : unfolded(),
    ArrowLeft: () => node.open ? folded() : node.parent === tree ? node : node.parent,
    Enter: toggled, " ": toggled,
  }[event.key];
  if (!next) return;
  event.preventDefault(); event.stopPropagation();
  const goal = next();
  if (goal) { choose(goal); goal.shown.querySelector("text").scrollIntoView({ block: "nearest" }); }
}
function describe(node) {
  const aside = clear($("detail")), op = node.op;
  put(aside, "h3", {}, node.label);
  const list = put(aside, "dl");
  const row = (name, text) => { put(list, "dt", {}, name); return put(list, "dd", {}, text); };
  for (const by of page.metrics) {
    const share = by === "change" ? 0 : total(node, by) / total(tree, by);
    row(words(by), show[by](total(node, by)) + (share ? ` · ${(100 * share).toFixed(1)} %` : ""));
  }
  if (!op) {
    row("operations", `${new Set(node.leaves.map((leaf) => leaf.place)).size}`);
    const parts = (node === tree ? page.map : node).kids.slice().sort((a, b) => total(b) - total(a)).slice(0, 14);
    for (const kid of parts) {
      const bar = row(shorten(kid.label, 24), ""), kind = kid.id.split("/").find((step) => step in HUES);
      const width = Math.max(0, 100 * total(kid) / (total(parts[0]) || 1));
      put(bar, "i", { class: "tone", style: `${tone(kind)};width:${width}px` });
      bar.append(show[metric](total(kid)));
    }
    return;
  }
  const facts = [["opcode", op.opcode], ["work", op.work], ["layer kind", op.kind], ["scope", op.scope],
    ["fused", op.fused?.join(", ")], ["layers", op.layers?.join(", ")], ["result", op.shapes],
    ["runs", `${+(op.runs || 0).toFixed(3)} in a call`], ["time from", op.source], ["bound by", op.bound],
    ["moved", op.moved && show.bytes(op.moved)], ["custom call", op.target],
    ["overlapped", op.overlapped && "runs at the same time as other operations"],
    ["weights", op.weights?.join(", ")]];
  for (const [name, text] of facts) if (text) row(name, text);
  const users = page.users[node.place].map((at) => page.operations[at].name);
  for (const [name, names] of [["reads", op.operands || []], ["read by", users]]) {
    if (!names.length) continue;
    const cell = row(name, "");
    for (const one of names.slice(0, 30)) {
      const at = page.index.get(one);
      if (at === undefined) put(cell, "div", {}, one);
      else put(cell, "button", { onclick: () => pick(at, node.layer) }, one);
    }
  }
}
function pick(at, layer) {
  const same = page.instances[at];
  choose(same.find((one) => one.layer === layer) || same[0], true);
}

// A table: lines of [cells, what a click does, title of the first cell]. Columns of words are flush left.
function rows(table, head, lines) {
  clear(table);
  const top = put(put(table, "thead"), "tr"), body = put(table, "tbody"), wordy = (text) => /^[a-z(]/.test(text);
  head.forEach((name, at) => {
    const left = !at || lines.some(([cells]) => wordy(cells[at]));
    put(top, "th", left ? { class: "text" } : {}, name);
  });
  for (const [cells, act, title] of lines) {
    const onkeydown = (event) => { if (event.key === "Enter") act(); };
    const line = put(body, "tr", act ? { tabindex: 0, onclick: act, onkeydown } : {});
    put(line, "td", { class: "name", title: title || cells[0] }, cells[0]);
    for (const text of cells.slice(1)) put(line, "td", { class: wordy(text) ? "text" : "" }, text);
  }
}
function table() {
  const cost = (op) => Math.abs(value(op)), moving = page.operations.some((op) => op.moved);
  const shown = page.operations.map((op, place) => [op, place]).filter(([, place]) =>
    page.instances[place][0].match || !query).sort((a, b) => cost(b[0]) - cost(a[0]));
  $("count").textContent = `${shown.length} of ${page.operations.length}`
    + (shown.length > 50 ? ", the largest 50" : "");
  const layers = (op) => !op.layers ? "" : op.layers.length > 3 ? `${op.layers.length} layers` : op.layers.join(", ");
  const cells = (op) => [op.name, op.kind, layers(op), op.work, op.seconds ? show.seconds(op.seconds) : "",
    show.bytes(op.bytes), op.flops ? show.flops(op.flops) : "", op.bound || "",
    ...(moving ? [op.moved ? show.bytes(op.moved) : ""] : [])];
  const head = ["operation", "layer kind", "layers", "work", "time", "bytes", "FLOPs", "bound by"];
  rows($("table"), moving ? [...head, "moved"] : head,
    shown.slice(0, 50).map(([op, place]) => [cells(op), () => pick(place), op.scope]));
}
function changes() {
  const data = page.difference;
  $("changes").hidden = !data;
  if (!data) return;
  const share = `${(100 * data.unmatched_share).toFixed(1)} % of the operations have no partner`;
  $("pair").textContent = `${data.before} → ${data.after}${data.equal ? ": equal" : `; ${share}`}`;
  const COSTS = { seconds: ["time", show.seconds], flops: ["FLOPs", show.flops], bytes_weights: ["weights", show.bytes],
    bytes_state: ["state", show.bytes], bytes_other: ["other", show.bytes], collective_bytes: ["moved", show.bytes] };
  const names = Object.keys(COSTS), head = names.map((name) => COSTS[name][0]);
  const signed = (name, cost) => cost ? (cost > 0 ? "+" : "") + COSTS[name][1](cost) : "";
  const costs = (one) => names.map((name) => signed(name, one[name]));
  const step = ([before, after]) => (after || 0) - (before || 0);
  const whole = Object.fromEntries(names.map((name) => [name, step(data.totals[name])]));
  const all = { layer_kind: "all", operation_kind: "", changes: data.changes.length, ...whole };
  rows($("rows"), ["layer kind", "work", "changes", ...head], [all, ...data.rows.slice(0, 14)].map((one) =>
    [[one.layer_kind, one.operation_kind, `${one.changes}`, ...costs(one)]]));
  const text = (one) => `${one.before} ${one.after} ${one.scope} ${one.layer_kind}`.toLowerCase();
  const listed = data.changes.filter((one) => text(one).includes(query)).slice(0, 15);
  rows($("list"), ["operation", "change", "kind", ...head], listed.map((one) => {
    const at = page.index.get(one.after), cells = [one.after || one.before, one.kind, one.layer_kind || "other"];
    return [[...cells, ...costs(one)], at === undefined ? null : () => pick(at), one.scope];
  }));
}
function search() {
  query = $("search").value.trim().toLowerCase(); cursor = -1;
  for (const leaf of leaves) {
    const { name, scope, opcode, kind, work, shapes, target, weights = [] } = leaf.op;
    const layer = leaf.layer === null ? "" : `layer ${leaf.layer} `;
    const texts = [name, scope, opcode, kind, work, shapes, target, layer, ...weights];
    leaf.match = query !== "" && texts.some((text) => text?.toLowerCase().includes(query));
  }
  page.hits = leaves.filter((leaf) => leaf.match);
  $("matches").textContent = query ? `${new Set(page.hits.map((leaf) => leaf.place)).size} found` : "";
  render(); table(); changes();
}
function next(step) {
  if (!page.hits?.length) return;
  cursor = (cursor + step + page.hits.length) % page.hits.length;
  choose(page.hits[cursor], true); $("search").focus({ preventScroll: true });
}
function fold() {
  for (const node of everything(tree)) node.open = node === tree;
  page.focus = tree.kids[0];
  render();
}
function colour(by) {
  metric = by;
  for (const button of $("metrics").children) button.setAttribute("aria-pressed", button.dataset.by === by);
  $("scale").textContent = `coloured by ${words(by)}`
    + { seconds: `: ${page.source}`, change: ": warm is more, cool is less", bytes: "", flops: "" }[by];
  render(); map(); table(); describe(chosen || tree);
}
function open(number) {
  page = pages[number]; chosen = null;
  query = $("search").value = $("matches").textContent = "";
  prepare();
  document.title = `${page.cell} · ${page.target}`;
  clear($("title")).append(page.cell);
  put($("title"), "small", {}, `${page.target}, ${page.form} program`);
  page.metrics = [...(page.timed ? ["seconds"] : []), "bytes", "flops", ...(page.difference ? ["change"] : [])];
  const totals = clear($("totals"));
  const item = (name, text) => {
    const pair = put(totals, "div");
    put(pair, "dt", {}, name);
    put(pair, "dd", {}, text);
  };
  for (const by of page.metrics) if (by !== "change") item(NAMES[by], show[by](total(tree, by)));
  item("Collectives", show.bytes(sum(page.operations, (op) => op.moved || 0)));
  if (page.peak) item("Peak memory", show.bytes(page.peak));
  item("Operations", page.operations.length.toLocaleString("en"));
  clear($("metrics"));
  page.metrics.forEach((by) => put($("metrics"), "button", { "data-by": by, onclick: () => colour(by) }, NAMES[by]));
  changes(); colour(page.difference && !page.difference.equal ? "change" : page.metrics[0]); memory(); roofline();
}
$("search").addEventListener("input", search);
$("search").addEventListener("keydown", (event) => { if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") { $("search").value = ""; search(); } });
$("fold").addEventListener("click", fold);
$("up").addEventListener("click", () => { zoom = page.map; map(); });
addEventListener("keydown", (event) => {
  if (/INPUT|SELECT/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { event.preventDefault(); $("search").focus(); }
  else if (event.key === "f") fold();
  else if (event.key === "Escape") { $("search").value = ""; search(); }
  else if (page.metrics[event.key - 1]) colour(page.metrics[event.key - 1]);
});
addEventListener("resize", () => { render(); map(); });
$("cell").hidden = pages.length === 1;
pages.forEach((one, at) => put($("cell"), "option", { value: at }, one.cell));
$("cell").addEventListener("change", (event) => open(+event.target.value));
open(0);
document.body.dataset.ready = "1";
