// Blocks of Markdown: { kind, line, … }, where `line` is the first line. HTML is text.

/** Deepest nesting of quotes and lists that is shown. */
const MAX_BLOCK_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|\s*$| )/;
const HEADING = /^ {0,3}(#{1,6})(?:\s|$)/;
const QUOTE = /^ {0,3}> ?/;
const FORMULAS = { '\\[': '\\]', $$: '$$' };

function parseBlocks(text, depth = 0) {
  const lines = text.split('\n'), blocks = [];
  let line = 0;
  while (line < lines.length) {
    if (!lines[line].trim()) {
      line += 1;
      continue;
    }
    const begin = line;
    const { end, ...block } = blockAt(lines, line, depth);
    blocks.push({ ...block, line: begin });
    line = end;
  }
  return blocks;
}

function blockAt(lines, line, depth) {
  const text = lines[line];
  if (FENCE.test(text)) return fence(lines, line);
  if (HEADING.test(text)) return heading(text, line);
  if (isRule(text)) return { kind: 'rule', end: line + 1 };
  if (isFormula(text)) return formula(lines, line);
  if (isTable(lines, line)) return table(lines, line);
  if (depth < MAX_BLOCK_DEPTH) {
    if (QUOTE.test(text)) return quote(lines, line, depth);
    if (ITEM.test(text)) return list(lines, line, depth);
  }
  return paragraph(lines, line, depth);
}

/** Whether the line begins something else than the next line of a paragraph. */
function interrupts(lines, line, depth) {
  const text = lines[line];
  if (!text.trim() || FENCE.test(text) || HEADING.test(text) || isRule(text) || isTable(lines, line)) return true;
  if (isFormula(text)) return true;
  if (depth >= MAX_BLOCK_DEPTH) return false;
  const item = ITEM.exec(text);
  return QUOTE.test(text) || Boolean(item && item[3] && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1));
}

function paragraph(lines, line, depth) {
  let end = line + 1;
  while (end < lines.length && !interrupts(lines, end, depth)) end += 1;
  return { kind: 'paragraph', text: lines.slice(line, end).map((each) => each.trim()).join('\n'), end };
}

function fence(lines, line) {
  const [, mark, info] = FENCE.exec(lines[line]);
  const indent = lines[line].indexOf(mark);
  let end = line + 1;
  while (end < lines.length && !closesFence(lines[end], mark)) end += 1;
  const code = lines.slice(line + 1, end).map((each) => dedent(each, indent));
  return { kind: 'code', language: info.trim().split(/\s/)[0], text: code.join('\n'), end: end + 1 };
}

function closesFence(text, mark) {
  const bare = text.trim();
  return bare.length >= mark.length && bare === mark[0].repeat(bare.length) && !text.startsWith('    ');
}

function heading(text, line) {
  const level = HEADING.exec(text)[1].length;
  const bare = text.trim().slice(level).trim();
  let end = bare.length;
  while (bare[end - 1] === '#') end -= 1;
  const closed = end === 0 || /\s/.test(bare[end - 1]);
  return { kind: 'heading', level, text: (closed ? bare.slice(0, end) : bare).trim(), end: line + 1 };
}

function isRule(text) {
  return !text.startsWith('    ') && /^(?:-{3,}|\*{3,}|_{3,})$/.test(text.replace(/[ \t]/g, ''));
}

/** A formula of its own begins with its mark, and ends with the line that has the other one at its end. */
function isFormula(text) {
  const bare = text.trim(), close = FORMULAS[bare.slice(0, 2)], at = close ? bare.indexOf(close, 2) : -1;
  return close !== undefined && (at < 0 || at === bare.length - 2);
}

function formula(lines, line) {
  const close = FORMULAS[lines[line].trim().slice(0, 2)];
  let end = line;
  if (lines[line].trim().indexOf(close, 2) < 0) {
    do end += 1; while (end < lines.length && !lines[end].trimEnd().endsWith(close));
  }
  return { kind: 'formula', text: lines.slice(line, end + 1).map((each) => each.trim()).join('\n'), end: end + 1 };
}

function quote(lines, line, depth) {
  let end = line;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(line, end).map((each) => each.replace(QUOTE, ''));
  return { kind: 'quote', blocks: parseBlocks(inner.join('\n'), depth + 1), end };
}

/** Items may be indented less than CommonMark asks for, as models write them: two columns make a list's child. */
function list(lines, line, depth) {
  const first = ITEM.exec(lines[line]), ordered = /\d/.test(first[2]), items = [];
  let end = line, next = line, loose = false;
  while (next < lines.length && continuesList(lines[next], first)) {
    loose ||= next > end;
    const found = ITEM.exec(lines[next]), width = found[0].length;
    end = itemEnd(lines, next, found, depth);
    const rest = lines.slice(next + 1, end), columns = shift(rest, width, indentOf(found));
    const inner = [lines[next].slice(width), ...rest.map((each) => dedent(each, columns))];
    items.push(parseBlocks(inner.join('\n'), depth + 1));
    next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
  }
  return { kind: 'list', ordered, start: ordered ? parseInt(first[2], 10) : 1, loose, items, end };
}

function continuesList(text, first) {
  const found = ITEM.exec(text);
  return Boolean(found) && found[2].at(-1) === (/\d/.test(first[2]) ? first[2].at(-1) : first[2])
    && found[1].length < first[1].length + 2 && !isRule(text);
}

/** The line behind an item: its text goes on over indented lines, and over others that begin nothing. */
function itemEnd(lines, line, found, depth) {
  const indent = indentOf(found);
  let end = line + 1, filled = end;
  while (end < lines.length) {
    const text = lines[end];
    if (!text.trim()) {
      end += 1;
      continue;
    }
    const inside = spacesOf(text) >= indent;
    if (!inside && (filled < end || ITEM.test(text) || interrupts(lines, end, depth))) break;
    end += 1;
    filled = end;
  }
  return filled;
}

/** The least indentation of what belongs to an item. */
function indentOf(found) {
  return Math.min(found[0].length, found[1].length + 2);
}

/** By how many columns the lines of an item move: all alike, so that lists in it keep their order. */
function shift(lines, width, indent) {
  const spaces = lines.filter((each) => each.trim()).map(spacesOf).filter((count) => count >= indent);
  return spaces.reduce((least, count) => Math.min(least, count), width);
}

function spacesOf(text) {
  return text.length - text.trimStart().length;
}

function dedent(text, columns) {
  return text.slice(Math.min(columns, spacesOf(text)));
}

function isTable(lines, line) {
  const head = lines[line], rule = lines[line + 1];
  if (!rule || !head.includes('|') || !/^[\s|:-]+$/.test(rule) || !rule.includes('-')) return false;
  return cells(rule).every((each) => /^:?-+:?$/.test(each)) && cells(rule).length === cells(head).length;
}

function table(lines, line) {
  const side = (rule) => (rule.endsWith(':') ? (rule.startsWith(':') ? 'center' : 'right') : '');
  const sides = cells(lines[line + 1]).map(side);
  const fit = (row) => sides.map((_, column) => row[column] ?? '');
  let end = line + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes('|')) end += 1;
  const rows = lines.slice(line + 2, end).map((each) => fit(cells(each)));
  return { kind: 'table', sides, head: fit(cells(lines[line])), rows, end };
}

/** The cells of a row; bars behind a backslash or inside code belong to the text. */
function cells(row) {
  const found = [''];
  let code = false;
  for (let place = 0; place < row.length; place += 1) {
    const bar = row[place] === '\\' && row[place + 1] === '|';
    if (bar) place += 1;
    if (row[place] === '`') code = !code && row.indexOf('`', place + 1) > 0;
    if (row[place] === '|' && !bar && !code) found.push('');
    else found[found.length - 1] += row[place];
  }
  const trimmed = found.map((each) => each.trim());
  if (!trimmed[0]) trimmed.shift();
  if (trimmed.length && !trimmed.at(-1)) trimmed.pop();
  return trimmed;
}
