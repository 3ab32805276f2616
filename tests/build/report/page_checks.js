// What is wrong with the figures and the text of the open page: a list of sentences, empty if nothing is.
(() => {
  const wrong = [];
  const rgb = (text) => {
    const parts = (text.match(/[\d.]+/g) || []).map(Number);
    return { r: parts[0], g: parts[1], b: parts[2], a: parts.length > 3 ? parts[3] : 1 };
  };
  const luminance = ({ r, g, b }) => {
    const linear = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = (one, two) => {
    const [low, high] = [luminance(one), luminance(two)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (colour && rgb(colour).a > 0) return rgb(colour);
    }
    return { r: 255, g: 255, b: 255 };
  };
  const inside = (box, frame) =>
    box.left >= frame.left - 0.5 && box.right <= frame.right + 0.5 && box.top >= frame.top - 0.5 &&
    box.bottom <= frame.bottom + 0.5;
  const meet = (one, two) =>
    one.left < two.right - 1 && two.left < one.right - 1 && one.top < two.bottom - 3 && two.top < one.bottom - 3;

  for (const figure of document.querySelectorAll("figure")) {
    const drawing = figure.querySelector("[data-marks]");
    if (!drawing) { wrong.push(`${figure.id}: no drawing`); continue; }
    const frame = drawing.getBoundingClientRect();
    if (frame.width < 100 || frame.height < 20) wrong.push(`${figure.id}: ${frame.width} by ${frame.height}`);
    if (!(drawing.getAttribute("aria-label") || "").trim()) wrong.push(`${figure.id}: no label`);
    const marks = [...drawing.querySelectorAll(".mark")];
    const drawn = marks.filter((mark) => {
      const box = mark.getBoundingClientRect();
      const colour = rgb(getComputedStyle(mark).backgroundColor);
      const visible = colour.a > 0 && contrast(colour, behind(drawing)) >= 3;
      return box.width > 0.3 && box.height > 0.3 && visible && inside(box, frame);
    });
    if (marks.length === 0 || drawn.length !== Number(drawing.dataset.marks)) {
      wrong.push(`${figure.id}: ${drawn.length} of ${drawing.dataset.marks} marks are drawn`);
    }
    const named = [...drawing.querySelectorAll("th, td:not(.track)")];
    const texts = named.map((text) => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([text, box], i) => {
      if (!inside(box, frame)) wrong.push(`${figure.id}: "${text}" is cut off`);
      for (const [other, there] of texts.slice(i + 1)) {
        if (meet(box, there)) wrong.push(`${figure.id}: "${text}" lies on "${other}"`);
      }
    });
  }
  for (const element of document.querySelectorAll("h1, h2, h3, p, li, a, th, td, caption, figcaption, .label")) {
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const ratio = contrast(rgb(style.color), behind(element));
    if (ratio < 4.5) wrong.push(`"${element.textContent.trim().slice(0, 30)}": contrast ${ratio.toFixed(2)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page is wider than its window");
  return wrong;
})()
