// The page's controls, and how it begins.

const chat = new Chat(new Store());
const dictation = new Dictation();
let models = [];

async function findModels() {
  try {
    const response = await fetch('v1/models', { headers: authorized() });
    if (response.status === 401) askForKey();
    if (!response.ok) throw new Error(await reason(response));
    models = (await response.json()).data;
    at('trouble').textContent = '';
    const chosen = at('model').value || chat.current.model;
    at('model').replaceChildren();
    const talking = models.filter((model) => model.input_modalities?.includes('text') ?? true);
    for (const { id } of talking) make(at('model'), 'option', '', id);
    chooseModel(chosen);
  } catch (error) {
    at('trouble').textContent = `No models: ${error.message}`;
  }
}

function chooseModel(name) {
  if (models.some(({ id }) => id === name)) at('model').value = name;
  const model = models.find(({ id }) => id === at('model').value);
  allowImages(model?.input_modalities?.includes('image') ?? false);
  const hearing = models.filter(({ transcription }) => transcription);
  dictation.allow((hearing.includes(model) ? model : hearing[0])?.id ?? '');
}

function askForKey() {
  openSettings();
  at('key').focus();
}

function openSettings() {
  if (!at('settings').open) at('settings').showModal();
  checkSettings();
}

function send() {
  const text = at('ask').value.trim();
  if (opening) announce('The images are not ready yet.');
  if (chat.isWriting || opening || !(text || attached.length)) return;
  const images = attached;
  at('ask').value = '';
  attached = [];
  showAttached();
  fit();
  chat.ask(text, images);
}

/** Lets the field of the message grow with its text; styles bound it. */
function fit() {
  at('ask').style.height = 'auto';
  at('ask').style.height = `${at('ask').scrollHeight + 2}px`;
}

function listenToComposer() {
  at('form').addEventListener('submit', (event) => {
    event.preventDefault();
    if (chat.isWriting) chat.stop();
    else send();
  });
  at('ask').addEventListener('input', fit);
  at('ask').addEventListener('keydown', (event) => {
    if (sends(event)) {
      event.preventDefault();
      send();
    } else if (event.key === 'ArrowUp' && !at('ask').value) {
      const asked = chat.views.findLast((view) => view.turn.role === 'user');
      if (!asked || chat.isWriting) return;
      event.preventDefault();
      asked.edit();
    }
  });
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || at('settings').open) return;
    if (dictation.cancel()) return;
    if (isListing()) closeList();
    else if (chat.isWriting) chat.stop();
  });
  for (const node of document.querySelectorAll('#hint button')) {
    node.addEventListener('click', () => {
      at('ask').value = node.textContent;
      fit();
      at('ask').focus();
    });
  }
}

function closeList() {
  toggleList(false);
  at('open-list').focus();
}

function listenToList() {
  at('fresh').addEventListener('click', () => {
    toggleList(false);
    if (location.hash) location.hash = '';
    else chat.open('');
    at('ask').focus();
  });
  addEventListener('hashchange', () => {
    toggleList(false);
    if (location.hash !== '#ask') chat.open(location.hash.slice(1));
  });
  at('open-list').addEventListener('click', () => toggleList(true));
  at('close-list').addEventListener('click', closeList);
  at('shade').addEventListener('click', closeList);
  at('filter').addEventListener('input', () => chat.list());
  at('export').addEventListener('click', () => {
    download(`${fileName(chat.current.title)}.md`, 'text/markdown', markdownOf(chat.current));
  });
  at('export-all').addEventListener('click', () => exportAll(chat.store));
  confirmByLabel(at('delete-all'), () => chat.removeAll());
}

function listenToSettings() {
  at('open-settings').addEventListener('click', openSettings);
  at('close-settings').addEventListener('click', () => at('settings').close());
  at('settings').addEventListener('close', () => {
    sumSettings();
    keepSettings(shownSettings());
    at('ask').focus();
  });
  at('settings').addEventListener('input', checkSettings);
  at('settings').addEventListener('click', (event) => {
    if (event.target === at('settings')) at('settings').close();
  });
  at('example').addEventListener('click', () => {
    at('tools').value = JSON.stringify([EXAMPLE_TOOL], null, 2);
    checkSettings();
    at('tools').focus();
  });
  at('key').addEventListener('change', () => {
    writeKept('sessionStorage', 'kvferry-key', at('key').value);
    findModels();
  });
  at('key').addEventListener('keydown', (event) => {
    if (sends(event)) at('settings').close();
  });
}

document.addEventListener('visibilitychange', () => {
  if (document.hidden) return;
  chat.catchUp();
  findModels();
});
listenToComposer();
listenToList();
listenToSettings();
listenForImages();
at('dictate').addEventListener('click', () => dictation.press());
listenToScrolling();
at('model').addEventListener('change', () => chooseModel(at('model').value));
at('key').value = readKept('sessionStorage', 'kvferry-key') ?? '';
findModels();
chat.open(location.hash.slice(1));
