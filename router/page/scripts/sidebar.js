// The list of conversations: opening, searching, deleting, and files to keep.

/** How long a deleted conversation can be brought back, in ms. */
const UNDO_MS = 10_000;

async function showList(store, current, remove) {
  const wanted = at('filter').value.trim().toLowerCase();
  const heads = await store.heads();
  const shown = heads.filter(({ title }) => title.toLowerCase().includes(wanted));
  const focused = at('list').contains(document.activeElement) ? document.activeElement.id : '';
  at('list').replaceChildren();
  for (const head of shown) {
    const item = make(at('list'), 'li');
    make(item, 'a', '', head.title, {
      id: `open-${head.id}`, href: `#${head.id}`, title: head.title, dir: 'auto',
      'aria-current': head.id === current && 'page',
    });
    button(item, '×', () => remove(head), 'quiet', `Delete ${head.title}`);
  }
  if (focused) at(focused)?.focus();
  at('filter').hidden = heads.length < 8 && !wanted;
  at('empty').textContent = store.fault || (heads.length ? shown.length ? '' : 'No title matches.'
    : 'Conversations are kept in this browser only.');
  for (const id of ['export-all', 'delete-all']) at(id).hidden = !heads.length;
}

/** Shows the list over the page where there is no room beside it. */
function toggleList(open) {
  document.body.classList.toggle('listing', open);
  at('open-list').setAttribute('aria-expanded', String(open));
  if (open) at('fresh').focus();
}

function isListing() {
  return document.body.classList.contains('listing');
}

/** A line that goes away by itself, with something to do about it. */
function notice(text, label = '', act = null) {
  const line = at('notice');
  line.replaceChildren();
  make(line, 'span', '', text);
  const away = () => line.replaceChildren();
  if (act) {
    button(line, label, () => {
      away();
      act();
    });
  }
  button(line, 'Close', away);
  clearTimeout(notice.timer);
  notice.timer = setTimeout(away, UNDO_MS);
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 60) || 'conversation';
}

async function exportAll(store) {
  download('kvferry-conversations.json', 'application/json', JSON.stringify(await store.all(), null, 1));
}

/** A button that deletes everything asks once more by its own label. */
function confirmByLabel(node, act) {
  const label = node.textContent;
  node.addEventListener('click', () => {
    if (node.dataset.sure) act();
    else announce('Press again to delete all conversations.');
    node.dataset.sure = node.dataset.sure ? '' : 'yes';
    node.textContent = node.dataset.sure ? 'Really delete all?' : label;
  });
  node.addEventListener('blur', () => {
    node.dataset.sure = '';
    node.textContent = label;
  });
}
