// The plots of the page: the tree map, memory over program order, the roofline. They use what view.js defines.
const LARGE = ["", "k", "M", "G", "T", "P"];

// The tree map: squares by the share of the metric.
function squares(items, x, y, w, h, done) {
  const whole = sum(items, (item) => item.size);
  if (!items.length || whole <= 0) return;
  const scale = w * h / whole, short = Math.min(w, h);
  const worst = (row, area) => Math.max(...row.map((item) => {
    const side = area / short, other = item.size * scale / side;
    return Math.max(side / other, other / side);
  }));
  let row = [], area = 0, at = 0;
  while (at < items.length) { const more = items[at].size * scale;
    if (row.length && worst([...row, items[at]], area + more) > worst(row, area)) break;
    row.push(items[at]); area += more; at += 1; }
  const side = area / short;
  let along = 0;
  for (const item of row) { const length = item.size * scale / side;
    if (w >= h) done(item.node, x, y + along, side, length); else done(item.node, x + along, y, length, side);
    along += length; }
  if (w >= h) squares(items.slice(at), x + side, y, w - side, h, done);
  else squares(items.slice(at), x, y + side, w, h - side, done);
}
function map() {
  const width = Math.max(320, $("map").clientWidth), height = width < 600 ? 320 : 380, svg = clear($("map"));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const by = metric === "change" ? page.metrics[0] : metric;
  $("where").textContent = `Where the ${{ seconds: "time goes", bytes: "bytes go", flops: "FLOPs go" }[by]}`
    + (zoom === page.map ? "" : `: ${zoom.id.slice(1).replaceAll("/", " / ")}`);
  $("up").hidden = zoom === page.map;
  const items = (node) => node.kids.map((kid) => ({ node: kid, size: total(kid, by) }))
    .filter((item) => item.size > 0).sort((a, b) => b.size - a.size);
  const enter = (node) => () => { if (node.op) pick(node.place); else { zoom = node; map(); } };
  squares(items(zoom), 0, 0, width, height, (node, x, y, w, h) => {
    const group = put(svg, "a", { onclick: enter(node) });
    put(group, "title", {}, `${node.label}\n${show[by](total(node, by))}`);
    const style = `${tone(node.id.split("/")[1])};stroke:var(--paper);stroke-width:2`;
    put(group, "rect", { class: "tone", style, x, y, width: w, height: h });
    const label = w > 50 && h > 18, inset = label && h > 60 ? 22 : 0;
    if (inset) squares(items(node), x + 4, y + inset, w - 8, h - inset - 4, (kid, kx, ky, kw, kh) => {
      const inner = put(svg, "a", { onclick: enter(kid) });
      const thin = "fill:var(--card);fill-opacity:.35;stroke:var(--paper)";
      put(inner, "title", {}, `${node.label} / ${kid.label}\n${show[by](total(kid, by))}`);
      put(inner, "rect", { x: kx, y: ky, width: kw, height: kh, style: thin });
      const whole = `${kid.label}  ${show[by](total(kid, by))}`;
      const text = whole.length <= kw / 7 ? whole : shorten(kid.label, kw / 7);
      if (kw > 60 && kh > 18) put(inner, "text", { x: kx + 5, y: ky + 14, class: "soft" }, text);
    });
    const text = shorten(`${node.label}  ${show[by](total(node, by))}`, w / 6.6);
    if (label) put(group, "text", { x: x + 6, y: y + 15 }, text);
  });
  clear($("keys"));
  for (const kind of page.kinds) { const key = put($("keys"), "span", { class: "key" });
    put(key, "i", { class: "tone", style: tone(kind) }); key.append(kind); }
}

// A line of text in a plot.
const mark = (svg, x, y, text, anchor = "end") =>
  put(svg, "text", { class: "soft", x, y, "text-anchor": anchor }, text);
function memory() {
  const data = page.memory, svg = clear($("memory")), w = 520, h = 260;
  for (const id of ["point", "peak"]) clear($(id));
  svg.style.display = data?.points.length ? "" : "none";
  if (!data?.points.length) {
    $("point").textContent = "The artifact keeps no scheduled program of this cell.";
    return;
  }
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  const sizes = data.points.map((point) => point[1]), last = sizes.length - 1, most = Math.max(1, ...sizes);
  const x = (place) => 56 + (w - 60) * place / Math.max(1, last), y = (bytes) => h - 22 - (h - 44) * bytes / most;
  for (const size of [0, most / 2, most]) {
    put(svg, "line", { class: "axis", x1: 56, x2: w, y1: y(size), y2: y(size) });
    mark(svg, 52, y(size) + 4, show.bytes(size));
  }
  const line = sizes.map((size, place) => `L${x(place).toFixed(1)},${y(size).toFixed(1)}`).join("");
  const area = `M56,${y(0)}${line}L${x(last)},${y(0)}Z`;
  put(svg, "path", { d: area, style: "fill:var(--hot);fill-opacity:.55" });
  const at = Math.max(0, sizes.indexOf(most)), held = sum(data.inputs, (one) => one[1]);
  put(svg, "circle", { cx: x(at), cy: y(most), r: 4, style: "fill:var(--ink)" });
  mark(svg, 56, h - 4, "start", "start");
  mark(svg, w, h - 4, "end of the program");
  const words = (place) => `${data.points[place][0]}: ${show.bytes(sizes[place])} of temporaries, `
    + `${show.bytes(held)} of inputs`;
  const rest = () => { $("point").textContent = `Peak at ${words(at)}`; };
  rest();
  svg.onpointerleave = rest;
  svg.onpointermove = (event) => {
    const frame = svg.getBoundingClientRect(), along = (event.clientX - frame.left) / frame.width * w;
    const place = Math.round((along - 56) / (w - 60) * last);
    $("point").textContent = words(Math.min(last, Math.max(0, place)));
  };
  const tensors = [...data.inputs, ...data.at_peak].sort((a, b) => b[1] - a[1]).slice(0, 12);
  rows($("peak"), ["at the peak", "bytes", "what", "kind"], tensors.map(([name, bytes, what, shape, kind]) =>
    [[name, show.bytes(bytes), what, kind || ""], null, shape]));
}
function roofline() {
  const svg = clear($("roof")), w = 520, h = 260, text = $("rooftext");
  const points = page.operations.map((op, place) => ({ op, place })).filter(({ op }) => op.flops && op.seconds);
  if (!page.flops || !points.length) { svg.style.display = "none";
    text.textContent = !page.flops ? "The processor's limits are not known."
      : "No operation of this program has both FLOPs and a time."; return; }
  svg.style.display = "";
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  const reach = points.map(({ op }) => op.flops / op.seconds), ridge = page.flops / page.bandwidth;
  const own = points.filter(({ op }) => op.fed).map(({ op }) => op.flops / op.fed);
  const low = Math.floor(Math.log10(Math.min(...own, ridge / 10)));
  const high = Math.min(low + 7, Math.ceil(Math.log10(Math.max(...own, ridge * 10))));
  const top = Math.ceil(Math.log10(page.flops));
  const down = Math.max(top - 8, Math.floor(Math.log10(Math.min(...reach))) - 1);
  const x = (v) => 46 + (w - 60) * (Math.log10(v) - low) / (high - low);
  const y = (v) => 10 + (h - 44) * (top - Math.max(down, Math.log10(v))) / (top - down);
  const power10 = (power) => power < 3 ? `${+(10 ** power).toFixed(6)}`
    : 10 ** (power % 3) + LARGE[Math.floor(power / 3)];
  for (let power = down; power <= top; power++) {
    put(svg, "line", { class: "axis", x1: 46, x2: w - 14, y1: y(10 ** power), y2: y(10 ** power) });
    mark(svg, 42, y(10 ** power) + 4, power10(power));
  }
  for (let power = low; power <= high; power++)
    mark(svg, x(10 ** power), h - 18, power10(power), power === high ? "end" : "middle");
  mark(svg, w - 14, h - 2, "FLOPs a byte → FLOP/s ↑");
  const start = Math.max(10 ** low, 10 ** down / page.bandwidth);
  put(svg, "path", { d: `M${x(start)},${y(start * page.bandwidth)}L${x(ridge)},${y(page.flops)}H${w - 14}`,
      style: "fill:none;stroke:var(--ink);stroke-width:1.5" });
  const whole = total(tree, "seconds") || 1;
  for (const { op, place } of points.sort((a, b) => b.op.seconds - a.op.seconds)) {
    const link = put(svg, "a", { onclick: () => pick(place) });
    const cx = op.fed ? Math.min(w - 14, x(op.flops / op.fed)) : w - 14, cy = y(op.flops / op.seconds);
    const r = 2.5 + 30 * Math.sqrt(op.seconds / whole), style = `${tone(op.kind)};stroke:var(--soft);stroke-width:.5`;
    put(link, "circle", { class: "tone", style, cx, cy, r });
    put(link, "title", {}, `${op.name}\n${op.scope || op.kind}\n${show.seconds(op.seconds)}`);
  }
  const none = points.filter(({ op }) => !op.fed).length, share = sum(points, ({ op }) => op.seconds) / whole;
  text.textContent = `Limits: ${scaled(page.flops, LARGE, "FLOP/s")} and ${scaled(page.bandwidth, LARGE, "B/s")}. `
    + `${points.length} operations with FLOPs and times, ${(100 * share).toFixed(0)} % of the time.`
    + (none ? ` ${none} at the right edge use fast memory only.` : "")
    + (page.operations.some((op) => op.overlapped)
      ? " An operation above the roof has operands that prefetches brought before it started." : "");
}
