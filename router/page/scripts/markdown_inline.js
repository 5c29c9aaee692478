// Inline Markdown as a tree: strings, and elements { tag, children, href?, kind? }. Each step is linear in the text.

/** Longest block whose marks are read, in characters; the marks of longer ones are shown as text. */
const MAX_INLINE_CHARS = 20_000;
/** Longest address of a link, in characters. */
const MAX_ADDRESS_CHARS = 2048;
/** Deepest nesting of emphasis and links that is shown. */
const MAX_INLINE_DEPTH = 12;
const SAFE_SCHEMES = ['http:', 'https:', 'mailto:'];
const PUNCTUATION = /[\p{P}\p{S}]/u;
const BARE_ADDRESS = /https?:\/\/[^\s<>"`\\^{|}]+/iy;

/** The address in its normal form, or null unless it is absolute and its scheme is harmless. */
function safeAddress(text) {
  if (text.length > MAX_ADDRESS_CHARS) return null;
  try {
    const url = new URL(text);
    return SAFE_SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function parseInline(text) {
  return text.length > MAX_INLINE_CHARS ? [text] : new InlineParser(text).parse();
}

class InlineParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.items = [];       // the tree so far; opening marks stand in it as strings
    this.open = { '*': [], _: [], '~': [] };
    this.brackets = [];
    this.missing = {};     // code marks, by length, that have no partner further on
  }

  parse() {
    const steps = {
      '\\': () => this.escape(), '`': () => this.code(), '*': () => this.emphasis(), _: () => this.emphasis(),
      '~': () => this.emphasis(), '[': () => this.bracket(), '!': () => this.image(), ']': () => this.link(),
      '<': () => this.address(), $: () => this.math('$$', '$$'), h: () => this.bare(), H: () => this.bare(),
      '\n': () => this.add({ tag: 'br', children: [] }, 1),
    };
    while (this.at < this.text.length) {
      const step = steps[this.text[this.at]];
      if (!step || !step()) this.plain();
    }
    return this.items;
  }

  /** Appends an item that spans this many characters. */
  add(item, length) {
    this.items.push(item);
    this.at += length;
    return true;
  }

  plain() {
    let end = this.at + 1;
    while (end < this.text.length && !'\\`*_~[]!<$hH\n'.includes(this.text[end])) end += 1;
    this.add(this.text.slice(this.at, end), end - this.at);
  }

  escape() {
    if (this.math('\\(', '\\)') || this.math('\\[', '\\]')) return true;
    const next = this.text[this.at + 1];
    return next !== undefined && next <= '~' && PUNCTUATION.test(next) && this.add(next, 2);
  }

  /** Formulas are shown as they are written, so that no mark inside them is taken for emphasis. */
  math(begin, end) {
    if (!this.text.startsWith(begin, this.at) || this.missing[end] <= this.at) return false;
    const stop = this.text.indexOf(end, this.at + 2);
    if (stop < 0) {
      this.missing[end] = this.at;
      return false;
    }
    return this.add({ tag: 'code', kind: 'math', children: [this.text.slice(this.at, stop + 2)] }, stop + 2 - this.at);
  }

  code() {
    const mark = runOf(this.text, this.at);
    if (this.missing[mark.length] <= this.at) return this.add(mark, mark.length);
    for (let end = this.at + mark.length; end < this.text.length; end += 1) {
      if (this.text[end] !== '`') continue;
      const other = runOf(this.text, end);
      if (other.length === mark.length) {
        const inner = this.text.slice(this.at + mark.length, end).replaceAll('\n', ' ');
        const padded = inner.startsWith(' ') && inner.endsWith(' ') && inner.trim();
        return this.add({ tag: 'code', children: [padded ? inner.slice(1, -1) : inner] }, end + mark.length - this.at);
      }
      end += other.length - 1;
    }
    this.missing[mark.length] = this.at;
    return this.add(mark, mark.length);
  }

  /** A run of marks closes what it can, and the rest opens where it can. */
  emphasis() {
    const mark = this.text[this.at], run = runOf(this.text, this.at);
    const { opens, closes } = flanks(this.text, this.at, run.length);
    this.at += run.length;
    let count = run.length;
    if (mark === '~' && count !== 2) return this.add(run, 0);
    while (closes && count > 0) {
      const opener = this.open[mark].at(-1);
      if (!opener || (opener.closes || opens) && (opener.count + count) % 3 === 0 && count % 3) break;
      const used = Math.min(2, opener.count, count);
      this.wrap(opener, mark === '~' ? 'del' : used === 2 ? 'strong' : 'em', used);
      count -= used;
    }
    if (count === 0) return true;
    if (opens) this.open[mark].push({ at: this.items.length, count, closes });
    return this.add(mark.repeat(count), 0);
  }

  wrap(opener, tag, used) {
    const children = this.items.splice(opener.at + 1);
    this.forget(opener.at + 1);
    opener.count -= used;
    this.items[opener.at] = this.items[opener.at].slice(used);
    if (opener.count === 0) Object.values(this.open).forEach((each) => each.at(-1) === opener && each.pop());
    this.items.push({ tag, children });
  }

  /** Opening marks behind this item are text from now on. */
  forget(from) {
    for (const marks of [...Object.values(this.open), this.brackets]) {
      while (marks.length && marks.at(-1).at >= from) marks.pop();
    }
  }

  bracket() {
    this.brackets.push({ at: this.items.length });
    return this.add('[', 1);
  }

  image() {
    if (this.text[this.at + 1] !== '[') return false;
    this.brackets.push({ at: this.items.length });
    return this.add('![', 2);
  }

  /** A closing bracket makes a link of what is behind its opening one. Images become links: nothing is loaded. */
  link() {
    const opener = this.brackets.pop(), found = opener && linkTarget(this.text, this.at + 1);
    const address = found ? safeAddress(found.address) : null;
    if (!address) return this.add(']', 1);
    const [mark, ...children] = this.items.splice(opener.at);
    this.forget(opener.at);
    const shown = children.length ? children : [found.address];
    return this.add({ tag: 'a', href: address, children: mark === '![' ? ['image: ', ...shown] : shown },
      found.end - this.at);
  }

  address() {
    const end = this.text.slice(this.at, this.at + MAX_ADDRESS_CHARS).indexOf('>');
    const inner = end > 1 ? this.text.slice(this.at + 1, this.at + end) : '';
    const address = /^[a-z]+:[^\s<]+$/i.test(inner) ? safeAddress(inner) : null;
    return address !== null && this.add({ tag: 'a', href: address, children: [inner] }, end + 1);
  }

  bare() {
    BARE_ADDRESS.lastIndex = this.at;
    const found = /\w/.test(this.text[this.at - 1] ?? '') ? null : BARE_ADDRESS.exec(this.text);
    if (!found) return false;
    let shown = found[0].replace(/[*_~]+$/, '').replace(/[.,:;!?'"\]]{1,9}$/, '');
    if (shown.endsWith(')') && !balanced(shown)) shown = shown.slice(0, -1);
    const address = safeAddress(shown);
    return address !== null && this.add({ tag: 'a', href: address, children: [shown] }, shown.length);
  }
}

/** The address in brackets that begins here, and where they end: `(address)`, `(<address>)` or `(address "title")`. */
function linkTarget(text, from) {
  if (text[from] !== '(') return null;
  const begin = text[from + 1] === '<' ? from + 2 : from + 1;
  let end = begin;
  for (let depth = 0; end < begin + MAX_ADDRESS_CHARS && end < text.length; end += 1) {
    if (text[end] === '(') depth += 1;
    else if (text[end] === ')') depth -= 1;
    if (depth < 0 || /[\s<>]/.test(text[end])) break;
  }
  const rest = /^>?(?:\s{1,9}"[^"\n]{0,200}")?\s{0,9}\)/.exec(text.slice(end, end + 256));
  return rest && { address: text.slice(begin, end), end: end + rest[0].length };
}

/** The run of equal characters that begins here. */
function runOf(text, from) {
  let end = from + 1;
  while (text[end] === text[from]) end += 1;
  return text.slice(from, end);
}

function balanced(text) {
  return text.split('(').length === text.split(')').length;
}

/** Whether a run of marks may open and close emphasis, by what stands on both sides of it. */
function flanks(text, from, length) {
  const before = text[from - 1] ?? ' ', after = text[from + length] ?? ' ';
  const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
  const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
  if (text[from] !== '_') return { opens: left, closes: right };
  return { opens: left && (!right || PUNCTUATION.test(before)), closes: right && (!left || PUNCTUATION.test(after)) };
}
