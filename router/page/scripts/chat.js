// What is on the page now: the open conversation, its turns, and the answers that are on their way.

/** How often an answer is kept while it comes, in ms, so that a page that is loaded again goes on with it. */
const KEEP_MS = 1000;

class Chat {
  constructor(store) {
    this.store = store;
    this.current = newConversation(lastSettings());
    this.views = [];
    this.running = new Map();  // by conversation: { conversation, turn, stop, kept, isBroken }
    this.tab = tabName();
    this.acts = {
      edit: (turn, text) => this.ask(text, turn.images, turn.parent),
      regenerate: (turn) => this.generate(turn.parent),
      answer: (turn, results) => this.answerCalls(turn, results),
      show: (turn) => this.showVersion(turn),
      siblings: (turn) => siblingsOf(this.current, turn),
      isLast: (turn) => this.current.leaf === turn.id,
    };
  }

  get isWriting() {
    return this.running.has(this.current.id);
  }

  /** Opens a kept conversation, or a new one. */
  async open(id) {
    this.wanted = id;
    const found = id && (this.running.get(id)?.conversation ?? await this.store.get(id));
    if (this.wanted !== id || (found && found.id === this.current.id && this.views.length)) return;
    this.enter(found || newConversation(lastSettings()));
  }

  /** Shows a conversation, and goes on with its answer if one was on its way. */
  enter(conversation) {
    this.current = conversation;
    showSettings(this.current.settings);
    chooseModel(this.current.model);
    this.views.forEach((view) => view.element.remove());
    this.views = [];
    this.show();
    scrollToEnd();
    this.takeUp();
    this.list();
  }

  /** Catches up with what other tabs of the browser did. */
  async catchUp() {
    await this.list();
    const kept = await this.store.get(this.current.id);
    if (kept && kept.updated > this.current.updated && !this.isWriting) this.enter(kept);
  }

  list() {
    return showList(this.store, this.current.id, (head) => this.remove(head));
  }

  /** Brings the turns on the page in line with the path: those that both begin with stay as they are. */
  show() {
    const path = pathOf(this.current);
    let same = 0;
    while (same < path.length && this.views[same]?.turn === path[same]) same += 1;
    this.views.splice(same).forEach((view) => view.element.remove());
    for (const turn of path.slice(same)) this.views.push(new TurnView(at('turns'), turn, this.acts));
    const entry = this.running.get(this.current.id);
    this.views.forEach((view) => view.refresh(view.turn === entry?.turn, entry?.isBroken));
    at('hint').hidden = path.length > 0;
    at('export').hidden = path.length === 0;
    document.title = this.current.title ? `${this.current.title} · kvferry` : 'kvferry';
    showBusy(this.isWriting);
  }

  showVersion(turn) {
    showTurn(this.current, turn);
    this.show();
    this.keep(this.current);
    const view = this.views.find((each) => each.turn === turn);
    (view.foot.querySelector('.tools button:not(:disabled)') ?? at('log')).focus();
  }

  /** Whether an answer is on its way, which has to end first; says so. */
  isBusy() {
    if (this.isWriting) notice('An answer is on its way. Stop it first, or wait for its end.');
    return this.isWriting;
  }

  /** Asks a question behind the turn `parent`. */
  ask(text, images, parent = parentOfNext(this.current)) {
    if (this.isBusy()) return;
    this.generate(addTurn(this.current, parent, { role: 'user', text, ...(images?.length ? { images } : {}) }).id);
  }

  answerCalls(turn, results) {
    if (this.isBusy()) return;
    this.generate(addTurn(this.current, turn.id, { role: 'tool', results }).id);
  }

  /** Lets the model answer the path to the turn `parent`. */
  async generate(parent) {
    const conversation = this.current;
    if (this.isBusy()) return;
    conversation.leaf = parent;
    conversation.model = at('model').value;
    conversation.settings = shownSettings();
    keepSettings(conversation.settings);
    const seen = takesImages() ? turnsSeen(conversation) : new Set();
    if (pathOf(conversation).some((turn) => turn.images?.length && !seen.has(turn))) {
      notice(takesImages() ? 'Earlier images are too many to be sent again.' : 'The model does not see the images.');
    }
    let body = null, fault = '';
    try {
      body = {
        model: conversation.model || undefined, messages: messagesOf(conversation, conversation.settings.system, seen),
        ...requestFields(conversation.settings, conversation.turns[parent].role === 'tool'), stream: true,
        stream_options: { include_usage: true },
      };
    } catch (error) {
      fault = `Settings, ${error.field}: ${error.message}`;
    }
    const turn = addTurn(conversation, parent, { role: 'assistant', model: conversation.model, sent: Date.now() });
    if (location.hash !== `#${conversation.id}`) history.pushState(null, '', `#${conversation.id}`);
    if (fault) turn.error = fault;
    else await this.write(conversation, turn, { body });
    if (fault) this.end(conversation, turn);
  }

  /** Goes on with an answer that was on its way when this tab was loaded again. */
  takeUp() {
    const turn = this.current.turns[this.current.leaf];
    if (!turn?.pending) return;
    const { event, tab } = turn.pending;
    if (tab === this.tab && !this.isWriting) this.write(this.current, turn, { body: null, last: event });
  }

  /** Shows an answer as it comes, until it is complete, stopped or lost. */
  async write(conversation, turn, { body, last }) {
    const control = new AbortController();
    const entry = { conversation, turn, stop: () => control.abort(), kept: Date.now(), isBroken: false };
    this.running.set(conversation.id, entry);
    this.show();
    scrollToEnd();
    if (document.activeElement === document.body) at('send').focus();
    announce('The model is answering.');
    const told = { route: (name) => { turn.route = name ?? turn.route; }, broken: () => this.reconnect(entry, true) };
    this.keep(conversation);
    try {
      for await (const { id, event } of answerEvents({ body, last, signal: control.signal, told })) {
        this.reconnect(entry, false);
        takeEvent(turn, event, Date.now());
        if (id) turn.pending = { event: id, tab: this.tab };
        this.draw(entry);
      }
    } catch (error) {
      if (control.signal.aborted) turn.end = 'you';
      else turn.error = error.message;
      if (error.status === 401) askForKey();
    }
    this.running.delete(conversation.id);
    this.end(conversation, turn);
  }

  /** Takes note that the connection broke off, or that the answer goes on. */
  reconnect(entry, isBroken) {
    if (isBroken === entry.isBroken) return;
    entry.isBroken = isBroken;
    if (!isBroken) entry.turn.resumed = (entry.turn.resumed ?? 0) + 1;
    announce(isBroken ? 'The connection broke off. Reconnecting.' : 'Reconnected.');
    this.draw(entry);
  }

  /** Draws with the screen, and keeps what came now and then. */
  draw(entry) {
    if (Date.now() - entry.kept > KEEP_MS) {
      entry.kept = Date.now();
      this.store.put(entry.conversation);
    }
    if (entry.drawing) return;
    entry.drawing = true;
    requestAnimationFrame(() => {
      entry.drawing = false;
      const view = this.views.at(-1);
      if (view?.turn !== entry.turn || !this.running.has(entry.conversation.id)) return;
      following(() => view.refresh(true, entry.isBroken));
    });
  }

  end(conversation, turn) {
    delete turn.pending;
    conversation.updated = Date.now();
    for (const call of turn.calls ?? []) call.id ||= `call_${randomName()}`;
    this.keep(conversation);
    if (conversation !== this.current) return;
    following(() => this.show());
    const [call] = turn.calls ?? [];
    const ended = call ? `The model calls ${call.name}.` : `Answer complete. ${shortened(turn.text, 1000)}`;
    announce(turn.error ? '' : ended);
    const idle = [document.body, at('send')].includes(document.activeElement);
    if (!idle || matchMedia('(pointer: coarse)').matches) return;  // no keyboard over a phone's answer
    (this.views.at(-1).calls.querySelector('textarea') ?? at('ask')).focus();
  }

  stop() {
    this.running.get(this.current.id)?.stop();
  }

  async keep(conversation) {
    await this.store.put(conversation);
    await this.list();
  }

  async removeAll() {
    for (const { stop } of this.running.values()) stop();
    for (const { id } of await this.store.heads()) await this.store.remove(id);
    location.hash = '';
    await this.open('');
    announce('All conversations are deleted.');
    at('fresh').focus();
  }

  /** Deletes a conversation, which can be brought back for a while. */
  async remove({ id, title }) {
    this.running.get(id)?.stop();
    const whole = await this.store.get(id);
    await this.store.remove(id);
    if (id === this.current.id) location.hash = '';
    await this.list();
    notice(`“${shortened(title, 40)}” is deleted.`, 'Undo', async () => {
      await this.store.restore(whole);
      await this.list();
      at(`open-${id}`)?.focus();
    });
    at('fresh').focus();
  }
}

function showBusy(busy) {
  at('send').textContent = busy ? 'Stop' : 'Send';
  at('send').setAttribute('aria-label', busy ? 'Stop the answer' : 'Send');
  at('log').setAttribute('aria-busy', String(busy));
}

/** The name of this tab, which a reload keeps: another tab must not go on with its answers. */
function tabName() {
  const name = readKept('sessionStorage', 'kvferry-tab') ?? randomName();
  writeKept('sessionStorage', 'kvferry-tab', name);
  return name;
}
