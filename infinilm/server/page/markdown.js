// Markdown as DOM nodes. Text enters the page through text nodes alone, so HTML in it stays text.

const MAX_DEPTH = 12; // of lists and quotes inside each other; deeper ones are plain paragraphs
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+(?=\S)|[ \t]*$)/;
const DELIMITER_ROW = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;

export function element(name, properties = {}, children = []) {
  const node = Object.assign(document.createElement(name), properties);
  for (const child of children) node.append(child);
  return node;
}

/** Shows a text that grows. Blocks that cannot change any more are left alone. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.shown = []; // the blocks from `settled` on: {kind, source, node}
    this.settled = 0; // where in the text the first of them starts
  }

  update(text) {
    const blocks = parseBlocks(text.replaceAll("\r\n", "\n").slice(this.settled).split("\n"));
    blocks.forEach((block, i) => this.#show(block, i));
    this.shown.splice(blocks.length).forEach((block) => block.node.remove());
    // An unfinished line may still turn out to belong to the block before it: two blocks stay open.
    const done = this.shown.splice(0, Math.max(0, this.shown.length - 2));
    if (done.length) this.settled += blocks[done.length].offset;
  }

  #show(block, i) {
    const before = this.shown[i];
    if (before?.kind === block.kind && before.source === block.source) return;
    if (before && grow(before, block)) return;
    const node = Object.assign(render(block), { dir: "auto" }); // from the right where its letters are
    if (before) before.node.replaceWith(node);
    else this.root.append(node);
    this.shown[i] = { ...block, node };
  }
}

/** A block that only grew keeps its nodes, with what the reader selected in them. Whether that could be */
function grow(before, block) {
  const { node, kind } = before;
  if (kind !== block.kind || before.head !== block.head) return false;
  if (kind === "code" && before.text && block.text.startsWith(before.text)) {
    node.querySelector("code").firstChild.appendData(block.text.slice(before.text.length));
  } else if (kind === "list") growParts(node, before.items, block.items, renderItem);
  else if (kind === "table") growParts(node.querySelector("tbody"), before.rows, block.rows, renderRow);
  else return false;
  Object.assign(before, block);
  return true;
}

function growParts(parent, before, parts, render) {
  let same = 0;
  while (same < Math.min(before.length, parts.length) && before[same].source === parts[same].source) same++;
  while (parent.children.length > same) parent.lastChild.remove();
  for (const part of parts.slice(same)) parent.append(render(part));
}

// --- blocks ------------------------------------------------------------------------------------------------

/** Lines to blocks {kind, source, offset, head, ...}: offset counts the characters before it; while head stays
 * the same, the parts that are there look the same. */
function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let offset = 0;
  for (let at = 0; at < lines.length; ) {
    const { block, next } = readBlock(lines, at, depth);
    const source = lines.slice(at, next).join("\n");
    if (block) blocks.push({ ...block, source, offset });
    offset += source.length + 1;
    at = next;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return { block: null, next: at + 1 };
  if (FENCE.test(line)) return readCode(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return { block: readHeading(heading), next: at + 1 };
  if (RULE.test(line)) return { block: { kind: "rule" }, next: at + 1 };
  if (isTable(lines, at)) return readTable(lines, at);
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  return readParagraph(lines, at, depth);
}

const readHeading = ([, marks, text]) => ({
  kind: "heading", level: marks.length, text: text.trim().replace(/[ \t]#+$/, ""),
});

function readCode(lines, at) {
  const [, indent, fence, info] = FENCE.exec(lines[at]);
  const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end++;
  const text = lines.slice(at + 1, end).map((line) => withoutIndent(line, indent.length)).join("\n");
  const language = info.trim().split(/\s/)[0];
  return { block: { kind: "code", head: language, language, text }, next: Math.min(end + 1, lines.length) };
}

function withoutIndent(line, count) {
  let start = 0;
  for (let width = 0; width < count && (line[start] === " " || line[start] === "\t"); start++) {
    width += line[start] === "\t" ? 4 : 1;
  }
  return line.slice(start);
}

const widthOf = (indent) => indent.replaceAll("\t", "    ").length;

const isTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") &&
  DELIMITER_ROW.test(lines[at + 1].trim()) && cells(lines[at]).length === cells(lines[at + 1]).length;

function readTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const names = cells(lines[at]);
  const align = cells(lines[at + 1]).map(alignment);
  const row = (source) => ({ source, align, texts: cells(source).slice(0, names.length) });
  const rows = lines.slice(at + 2, end).map(row);
  return { block: { kind: "table", head: lines[at] + lines[at + 1], names, align, rows }, next: end };
}

const cells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

const alignment = (cell) =>
  cell.startsWith(":") && cell.endsWith(":") ? "center" : cell.endsWith(":") ? "right" : "";

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { block: { kind: "quote", blocks: parseBlocks(inner, depth + 1) }, next: end };
}

function readList(lines, at, depth) {
  const isOrdered = /\d/.test(ITEM.exec(lines[at])[2]);
  const start = isOrdered ? parseInt(ITEM.exec(lines[at])[2], 10) : 1;
  const items = [];
  let isLoose = false;
  let next = at;
  while (next < lines.length) {
    const marker = ITEM.exec(lines[next]);
    if (!marker || RULE.test(lines[next]) || /\d/.test(marker[2]) !== isOrdered) break;
    const item = readItem(lines, next, marker, depth);
    items.push({ source: lines.slice(next, item.next).join("\n"), blocks: item.blocks });
    next = item.next;
    isLoose ||= item.isLoose;
  }
  for (const item of items) item.isLoose = isLoose;
  return { block: { kind: "list", head: `${start} ${isOrdered} ${isLoose}`, isOrdered, start, items }, next };
}

function readItem(lines, at, marker, depth) {
  const indent = widthOf(marker[1]);
  const inner = [lines[at].slice(marker[0].length)];
  let next = at + 1;
  let blank = 0;
  for (; next < lines.length; next++) {
    if (!lines[next].trim()) blank++;
    else if (!belongsToItem(lines[next], indent, marker[2].length + 1, blank)) break;
    else {
      for (; blank; blank--) inner.push("");
      inner.push(withoutIndent(lines[next], indent + marker[2].length + 1));
    }
  }
  const isLoose = blank > 0 && next < lines.length && ITEM.test(lines[next]);
  return { blocks: parseBlocks(inner, depth + 1), next: isLoose ? next : next - blank, isLoose };
}

/** Indented deeper than its marker, or the next line of a paragraph. */
function belongsToItem(line, markerIndent, markerWidth, blank) {
  const indent = widthOf(/^[ \t]*/.exec(line)[0]);
  if (indent >= markerIndent + Math.min(2, markerWidth)) return true;
  return !blank && !startsBlock(line);
}

const startsBlock = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end++;
  return { block: { kind: "paragraph", text: lines.slice(at, end).join("\n").trim() }, next: end };
}

function interrupts(lines, at, depth) {
  const isTooDeep = depth >= MAX_DEPTH && /^ {0,3}(?:[>*+-]|\d)/.test(lines[at]);
  return isTable(lines, at) || (startsBlock(lines[at]) && !isTooDeep);
}

// --- blocks to nodes ---------------------------------------------------------------------------------------

function render(block) {
  switch (block.kind) {
    case "heading": return element(`h${Math.min(6, block.level + 1)}`, {}, inline(block.text));
    case "rule": return element("hr");
    case "code": return renderCode(block);
    case "table": return renderTable(block);
    case "quote": return element("blockquote", {}, block.blocks.map(render));
    case "list": return renderList(block);
    default: return element("p", {}, inline(block.text));
  }
}

function renderCode({ language, text }) {
  const caption = [
    element("span", { textContent: language || "text" }),
    element("button", { type: "button", className: "copy", textContent: "Copy" }),
  ];
  const pre = element("pre", { tabIndex: 0 }, [element("code", { textContent: text })]);
  return element("figure", { className: "code" }, [element("figcaption", {}, caption), pre]);
}

function renderTable({ names, align, rows }) {
  const head = element("thead", {}, [renderRow({ texts: names, align }, "th")]);
  const table = element("table", {}, [head, element("tbody", {}, rows.map((row) => renderRow(row)))]);
  return element("div", { className: "table", tabIndex: 0 }, [table]);
}

const renderRow = ({ texts, align }, name = "td") =>
  element("tr", {}, texts.map((text, i) => element(name, { className: align[i] ?? "" }, inline(text))));

const renderList = ({ isOrdered, start, items }) =>
  element(isOrdered ? "ol" : "ul", isOrdered ? { start } : {}, items.map(renderItem));

const renderItem = ({ blocks, isLoose }) =>
  element("li", {}, blocks.flatMap((block, i) =>
    i === 0 && block.kind === "paragraph" && !isLoose ? inline(withBox(block.text)) : [render(block)]));

const withBox = (text) => text.replace(/^\[ \] /, "\u2610 ").replace(/^\[[xX]\] /, "\u2611 ");

// --- inline ------------------------------------------------------------------------------------------------

/** Text to nodes, in time linear in its length: code, links, emphasis, line breaks. */
function inline(text, mayLink = true) {
  return new Inline(text, mayLink).nodes();
}

const PLAIN = /^[^\\`[!*_~\nh<]*/; // what no mark can start in
const TARGET = /\( ?(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:[ \n]{1,3}(?:"[^"]*"|'[^']*'))? ?\)/;
const MAX_OPEN = 16; // emphasis inside emphasis; a longer run of marks than MAX_RUN is text
const MAX_RUN = 8;

class Inline {
  constructor(text, mayLink) {
    Object.assign(this, { text, mayLink, at: 0, plain: "", out: [], openers: [], missing: new Set() });
    this.closing = mayLink && text.includes("](") ? matchBrackets(text) : new Map();
  }

  nodes() {
    while (this.at < this.text.length) this.#step();
    this.#flush();
    return this.out.map((part) => part.run ?? part); // emphasis that never closed is text
  }

  #step() {
    const mark = this.text[this.at];
    if (mark === "\\") return this.#escape();
    if (mark === "`") return this.#code();
    if (mark === "[" && this.#link(this.at, this.at)) return;
    if (mark === "!" && this.text[this.at + 1] === "[" && this.#link(this.at, this.at + 1)) return;
    if (mark === "*" || mark === "_" || mark === "~") return this.#emphasis(mark);
    if (mark === "\n") return this.#push(element("br"), 1);
    if ((mark === "h" || mark === "<") && this.#address()) return;
    this.#take(1 + PLAIN.exec(this.text.slice(this.at + 1, this.at + 1001))[0].length);
  }

  #take(length) {
    this.plain += this.text.slice(this.at, this.at + length);
    this.at += length;
  }

  #push(node, length) {
    this.#flush();
    this.out.push(node);
    this.at += length;
  }

  #flush() {
    if (this.plain) this.out.push(this.plain);
    this.plain = "";
  }

  #escape() {
    const next = this.text[this.at + 1] ?? "";
    const isMark = /[!-/:-@[-`{-~]/.test(next);
    this.plain += isMark ? next : next === "\n" ? "" : "\\";
    this.at += isMark ? 2 : 1;
  }

  #code() {
    const ticks = /`+/y;
    ticks.lastIndex = this.at;
    const [run] = ticks.exec(this.text);
    const end = this.missing.has(run.length) ? -1 : endOfCode(this.text, this.at + run.length, run.length);
    if (end < 0) {
      this.missing.add(run.length);
      return this.#take(run.length);
    }
    const code = this.text.slice(this.at + run.length, end).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    const textContent = isPadded ? code.slice(1, -1) : code;
    this.#push(element("code", { textContent }), end + run.length - this.at);
  }

  /** [label](target): a link where the target is safe, else text. An image is a link too: nothing is loaded. */
  #link(start, bracket) {
    const close = this.closing.get(bracket);
    if (close === undefined || this.text[close + 1] !== "(") return false;
    const target = new RegExp(TARGET, "y");
    target.lastIndex = close + 1;
    const found = target.exec(this.text);
    const href = found && safeAddress(found[1] ?? found[2]);
    if (!href) return false;
    const label = this.text.slice(bracket + 1, close);
    this.#push(anchor(href, label ? inline(label, false) : [href]), target.lastIndex - start);
    return true;
  }

  /** https://... or <https://...> in the text itself; Chinese and Japanese marks end it as a space does */
  #address() {
    const before = this.text[this.at - 1] ?? " ";
    if (!this.mayLink || /\w/.test(before)) return false;
    const address = /<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>|https?:\/\/[^\s<>"`*“”\u3000-\u303f\uff00-\uff65]+/iy;
    address.lastIndex = this.at;
    const found = address.exec(this.text);
    const text = found && (found[1] ?? withoutTrailingMarks(found[0]));
    const href = text && safeAddress(text);
    if (!href) return false;
    this.#push(anchor(href, [text]), found[1] ? found[0].length : text.length);
    return true;
  }

  /** CommonMark's runs of marks: a closing one takes what stands since the nearest opening one like it. */
  #emphasis(mark) {
    let length = 1;
    while (this.text[this.at + length] === mark) length++;
    if (length > MAX_RUN || (mark === "~" && length !== 2)) return this.#take(length);
    const { canOpen, canClose } = flanking(this.text, this.at, length, mark);
    this.#flush();
    this.at += length;
    const left = canClose ? this.#close(mark, length) : length;
    if (!left) return;
    const part = { run: mark.repeat(left), mark };
    this.out.push(part);
    if (canOpen && this.openers.length < MAX_OPEN) this.openers.push(part);
  }

  /** How many marks of a closing run found no opening one */
  #close(mark, length) {
    while (length) {
      const at = this.openers.findLastIndex((opener) => opener.mark === mark);
      if (at < 0) break;
      this.openers.length = at + 1; // those above it stay text
      const size = this.openers[at].run.length >= 2 && length >= 2 ? 2 : 1;
      this.#wrap(this.openers[at], size);
      length -= size;
    }
    return length;
  }

  #wrap(opener, size) {
    const inside = this.out.splice(this.out.lastIndexOf(opener) + 1).map((part) => part.run ?? part);
    const name = opener.mark === "~" ? "del" : size === 2 ? "strong" : "em";
    opener.run = opener.run.slice(size);
    if (!opener.run) this.out.pop(), this.openers.pop();
    this.out.push(element(name, {}, inside));
  }
}

function endOfCode(text, from, length) {
  const ticks = /`+/g;
  ticks.lastIndex = from;
  for (let found; (found = ticks.exec(text)); ) if (found[0].length === length) return found.index;
  return -1;
}

/** Where each [ ends, code and escapes left out */
function matchBrackets(text) {
  const found = new Map();
  const open = [];
  const missing = new Set();
  const mark = /\\.|`+|[[\]]/gs;
  for (let at; (at = mark.exec(text)); ) {
    if (at[0] === "[") open.push(at.index);
    else if (at[0] === "]" && open.length) found.set(open.pop(), at.index);
    else if (at[0][0] === "`" && !missing.has(at[0].length)) {
      const end = endOfCode(text, mark.lastIndex, at[0].length);
      if (end < 0) missing.add(at[0].length);
      else mark.lastIndex = end + at[0].length;
    }
  }
  return found;
}

// CommonMark tells where a word ends by the space after it, which these scripts do not write.
const UNSPACED = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}\p{sc=Thai}]/u;

function flanking(text, at, length, mark) {
  const before = text[at - 1] ?? " ";
  const after = text[at + length] ?? " ";
  const isSpace = (c) => /\s/.test(c);
  const isMark = (c) => /[\p{P}\p{S}\p{Cs}]/u.test(c); // Cs: half of an emoji
  const isEdge = (c) => isSpace(c) || isMark(c) || UNSPACED.test(c);
  const left = !isSpace(after) && (!isMark(after) || isEdge(before));
  const right = !isSpace(before) && (!isMark(before) || isEdge(after));
  if (mark !== "_") return { canOpen: left, canClose: right };
  return { canOpen: left && (!right || isMark(before)), canClose: right && (!left || isMark(after)) };
}

function safeAddress(text) {
  const address = text.replace(/\\([!-/:-@[-`{-~])/g, "$1");
  return SAFE_LINK.test(address) && URL.canParse(address) ? address : null;
}

/** A sentence's end is not part of an address, nor is a bracket that it did not open. */
function withoutTrailingMarks(address) {
  const isOwn = (mark) => (mark === ")" ? address.includes("(") : !".,;:!?'_~]".includes(mark));
  let end = address.length;
  while (end && !isOwn(address[end - 1])) end--;
  return address.slice(0, end);
}

const anchor = (href, children) =>
  element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, children);
