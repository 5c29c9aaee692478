// Markdown on the page, as elements that are made one by one.

const HEADINGS = ['h3', 'h4', 'h5', 'h6', 'h6', 'h6'];  // below the heading of a turn

/** Shows a text that may grow. What stands above its last two blocks is not touched again. */
class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.text = '';
    this.from = 0;    // where the blocks begin that may still change
    this.open = [];   // these blocks: { source, block, node }
  }

  show(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) {
      this.parent.replaceChildren();
      this.from = 0;
      this.open = [];
    }
    this.text = text;
    const tail = text.slice(this.from), blocks = parseBlocks(tail);
    const shown = blocks.map((block, place) => this.replaced(block, this.open[place]));
    this.open.slice(blocks.length).forEach((each) => each.node.remove());
    const settled = Math.max(0, blocks.length - 2);
    if (settled) this.from += startOfLine(tail, blocks[settled].line);
    this.open = shown.slice(settled);
  }

  replaced(block, old) {
    const { line, ...content } = block;
    const source = JSON.stringify(content);
    if (old?.source === source) return old;
    if (old && block.kind === 'code' && old.block.kind === 'code' && old.block.language === block.language) {
      old.node.querySelector('code').textContent = block.text;
      return { source, block, node: old.node };
    }
    const node = renderBlock(null, block);
    if (old) old.node.replaceWith(node);
    else this.parent.append(node);
    return { source, block, node };
  }
}

function startOfLine(text, line) {
  let start = 0;
  for (; line > 0; line -= 1) start = text.indexOf('\n', start) + 1;
  return start;
}

function renderBlock(parent, block) {
  switch (block.kind) {
    case 'heading': return renderInline(make(parent, HEADINGS[block.level - 1], '', '', { dir: 'auto' }), block.text);
    case 'rule': return make(parent, 'hr');
    case 'formula': return make(parent, 'pre', 'formula', block.text, { tabindex: '0' });
    case 'code': return renderCode(parent, block);
    case 'table': return renderTable(parent, block);
    case 'list': return renderList(parent, block);
    case 'quote': {
      const quote = make(parent, 'blockquote', '', '', { dir: 'auto' });
      block.blocks.forEach((each) => renderBlock(quote, each));
      return quote;
    }
    default: return renderInline(make(parent, 'p', '', '', { dir: 'auto' }), block.text);
  }
}

function renderCode(parent, { language, text }) {
  const figure = make(parent, 'figure', 'code', '', { 'aria-label': `Code${language ? `: ${language}` : ''}` });
  const caption = make(figure, 'figcaption');
  make(caption, 'span', '', language || 'text');
  const lines = make(figure, 'pre', '', '', { tabindex: '0' });
  const code = make(lines, 'code', '', text, { dir: 'ltr' });
  button(caption, 'Copy', (node) => copy(code.textContent, node), 'quiet', 'Copy code');
  return figure;
}

function renderTable(parent, { sides, head, rows }) {
  const frame = make(parent, 'div', 'scroll', '', { tabindex: '0', role: 'group', 'aria-label': 'Table' });
  const table = make(frame, 'table');
  const row = (section, tag, texts) => {
    const line = make(section, 'tr');
    texts.forEach((text, column) => renderInline(make(line, tag, sides[column], '', { dir: 'auto' }), text));
  };
  row(make(table, 'thead'), 'th', head);
  const body = make(table, 'tbody');
  rows.forEach((each) => row(body, 'td', each));
  return frame;
}

function renderList(parent, { ordered, start, loose, items }) {
  const list = make(parent, ordered ? 'ol' : 'ul', '', '', ordered && start !== 1 ? { start: String(start) } : {});
  for (const blocks of items) {
    const item = make(list, 'li', '', '', { dir: 'auto' });
    const apart = loose || blocks.filter((each) => each.kind === 'paragraph').length > 1;
    for (const block of blocks) {
      if (block.kind !== 'paragraph' || apart) renderBlock(item, block);
      else renderTask(item, block.text);
    }
  }
  return list;
}

/** The text of an item; `[ ]` and `[x]` in front of it become boxes. */
function renderTask(item, text) {
  const task = /^\[([ xX])\] /.exec(text);
  if (!task) return renderInline(item, text);
  const done = task[1] !== ' ';
  make(item, 'span', 'task', done ? '☑ ' : '☐ ', { role: 'img', 'aria-label': done ? 'done' : 'to do' });
  return renderInline(item, text.slice(4));
}

function renderInline(parent, text) {
  appendInline(parent, parseInline(text), 0);
  return parent;
}

function appendInline(parent, items, depth) {
  for (const item of items) {
    if (typeof item === 'string') parent.append(item);
    else if (depth === MAX_INLINE_DEPTH) parent.append(plainText(item));
    else {
      const link = { href: item.href, title: item.href, target: '_blank', rel: 'noopener noreferrer nofollow' };
      const node = make(parent, item.tag, item.kind, '', item.tag === 'a' ? link : {});
      appendInline(node, item.children, depth + 1);
    }
  }
}

/** The text of an item, over any depth. */
function plainText(item) {
  const parts = [], left = [item];
  while (left.length) {
    const next = left.pop();
    if (typeof next === 'string') parts.push(next);
    else left.push(...next.children.toReversed());
  }
  return parts.join('');
}
