// One turn on the page: its text, reasoning, images, calls, figures and what can be done with it.

/** Shortest time from the first token to the last for which a speed is shown, in seconds; calls arrive at once. */
const MIN_SPAN_S = 0.05;
const ROLE_NAMES = { user: 'You', tool: 'Tool results' };

class TurnView {
  /** acts: { edit, regenerate, show, answer, siblings, isLast }, each of them given the turn. */
  constructor(parent, turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.element = make(parent, 'article', `turn ${turn.role}`);
    const name = ROLE_NAMES[turn.role] ?? (turn.model || 'Assistant');
    make(this.element, 'h2', '', name);
    this.thought = make(this.element, 'div');
    if (turn.images?.length) showImages(this.element, turn.images, null);
    this.said = make(this.element, 'div', 'said', '', { dir: 'auto' });
    this.markdown = turn.role === 'assistant' ? new MarkdownView(this.said) : null;
    this.calls = make(this.element, 'div', 'calls');
    this.broken = make(this.element, 'p', 'broken', 'The connection broke off. Reconnecting…');
    this.wrong = make(this.element, 'p', 'wrong', '', { role: 'alert' });
    this.foot = make(this.element, 'footer');
  }

  /** Shows the turn as it is now. writing: its answer is still on its way; isBroken: its connection broke off. */
  refresh(writing = false, isBroken = false) {
    const { turn } = this;
    this.refreshThought(writing);
    if (this.markdown) this.markdown.show(turn.text);
    else if (turn.role === 'user') this.said.textContent = turn.text;
    else this.said.replaceChildren(...turn.results.map((result) => this.result(result)));
    const waiting = writing && !turn.text && !turn.reasoning && !turn.calls?.length;
    this.said.hidden = !turn.text && !waiting && turn.role !== 'tool';
    this.said.classList.toggle('waiting', waiting);
    this.said.classList.toggle('writing', writing && !waiting);
    this.refreshCalls(writing);
    this.broken.hidden = !writing || !isBroken;
    this.wrong.hidden = !turn.error;
    if (this.wrong.textContent !== (turn.error ?? '')) this.wrong.textContent = turn.error ?? '';
    this.foot.hidden = writing || !this.said.isConnected;  // a question that is edited
    if (!writing) this.refreshFoot();
  }

  refreshThought(writing) {
    const { turn } = this;
    if (!turn.reasoning) return;
    if (!this.thinking) {
      const fold = make(this.thought, 'details', 'thought');
      this.summary = make(fold, 'summary');
      this.thinking = new MarkdownView(make(fold, 'div'));
    }
    const spent = turn.thought ? `Thought for ${seconds(turn.thought - turn.first)}` : 'Thought';
    this.summary.textContent = writing && !turn.thought ? 'Thinking…' : spent;
    this.thinking.show(turn.reasoning);
  }

  result({ name, text }) {
    const figure = make(null, 'figure', 'code', '', { 'aria-label': `Result of ${name}` });
    make(make(figure, 'figcaption'), 'span', '', name);
    make(figure, 'pre', '', text, { tabindex: '0', dir: 'auto' });
    return figure;
  }

  /** The calls of an answer. The last answer's calls can be answered. */
  refreshCalls(writing) {
    const { calls = [] } = this.turn, answerable = calls.length > 0 && !writing && this.acts.isLast(this.turn);
    const shown = JSON.stringify([calls, answerable]);
    if (shown === this.shownCalls) return;
    this.shownCalls = shown;
    this.calls.replaceChildren();
    const form = make(this.calls, 'form');
    const fields = calls.map((call) => {
      const section = make(form, 'section', 'call', '', { 'aria-label': `Call of ${call.name}` });
      make(make(section, 'h3', '', 'Calls '), 'code', '', call.name);
      make(section, 'pre', '', prettyJson(call.arguments), { tabindex: '0', dir: 'ltr' });
      if (!answerable) return null;
      const label = make(section, 'label', '', 'Result ');
      return make(label, 'textarea', '', '', { rows: '2', placeholder: 'What the tool returned' });
    });
    if (!answerable) return;
    make(form, 'button', 'main', fields.length === 1 ? 'Send the result' : 'Send the results', { type: 'submit' });
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      const results = calls.map(({ id, name }, place) => ({ id, name, text: fields[place].value }));
      this.acts.answer(this.turn, results);
    });
  }

  refreshFoot() {
    const { turn, acts } = this, siblings = acts.siblings(turn), place = siblings.indexOf(turn);
    const shown = JSON.stringify([siblings.length, turn.text.length, turn.usage, turn.end, turn.error]);
    if (shown === this.shownFoot) return;
    this.shownFoot = shown;
    this.foot.replaceChildren();
    const what = turn.role === 'user' ? 'question' : 'answer';
    if (turn.role === 'assistant') this.facts();
    const tools = make(this.foot, 'div', 'tools');
    if (siblings.length > 1) {
      const step = (by, label, name) => {
        const node = button(tools, label, () => acts.show(siblings[place + by]), 'quiet', name);
        node.disabled = !siblings[place + by];
      };
      step(-1, '‹', `Earlier version of this ${what}`);
      make(tools, 'span', 'count', `${place + 1} of ${siblings.length}`);
      step(1, '›', `Later version of this ${what}`);
    }
    if (turn.text) button(tools, 'Copy', (node) => copy(turn.text, node), 'quiet', `Copy this ${what}`);
    if (turn.role === 'user') button(tools, 'Edit', () => this.edit(), 'quiet', 'Edit this question');
    if (turn.role === 'assistant') {
      const label = turn.error ? 'Try again' : 'Regenerate';
      button(tools, label, () => acts.regenerate(turn), 'quiet', turn.error ? label : 'Regenerate this answer');
    }
  }

  facts() {
    const { turn } = this, list = make(this.foot, 'ul', 'facts', '', { 'aria-label': 'About this answer' });
    const fact = (value, what, title) => {
      const item = make(list, 'li', '', '', { title });
      make(item, 'b', '', value);
      if (what) item.append(` ${what}`);
    };
    if (turn.route) fact(nodesOf(turn.route), '', 'Nodes that computed it: prefill and decode');
    if (turn.usage) {
      const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = turn.usage;
      const reused = `${details?.cached_tokens ?? 0} of ${prompt}`;
      fact(reused, 'prompt tokens reused', 'Tokens of the prompt whose KV was there already');
      const spent = (turn.last - turn.first) / 1000;
      const speed = (output - 1) / spent;
      if (output > 1 && spent >= MIN_SPAN_S) fact(speed.toFixed(1), `tokens/s, ${output} total`, 'Speed behind the first token');
      else if (output > 1) fact(String(output), 'tokens', 'Tokens of the answer');
    }
    if (turn.first) fact(milliseconds(turn.first - turn.sent), 'TTFT', 'Time to first token');
    const { resumed } = turn;
    if (resumed) fact(String(resumed), resumed > 1 ? 'reconnects' : 'reconnect', 'The connection broke off, and the answer went on');
    const end = ENDS[turn.end] ?? turn.end;
    if (end && !['stop', 'tool_calls'].includes(end)) fact(end, 'ended it', 'Reason of the end');
    list.hidden = !list.firstChild;
  }

  /** Puts a field in place of the question; a changed one becomes another version of it. */
  edit() {
    const { turn } = this, form = make(null, 'form', 'edit');
    const field = make(form, 'textarea', '', '', { 'aria-label': 'Edit the question', rows: '3', dir: 'auto' });
    field.value = turn.text;
    const row = make(form, 'div', 'tools');
    make(row, 'button', 'main', 'Send', { type: 'submit' });
    const close = () => {
      form.replaceWith(this.said);
      this.foot.hidden = false;
      this.foot.querySelector('[aria-label="Edit this question"]').focus();
    };
    button(row, 'Cancel', close);
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text || turn.images?.length) this.acts.edit(turn, text);
    });
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') close();
      else if (sends(event)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.said.replaceWith(form);
    this.foot.hidden = true;
    field.focus();
  }
}

const ENDS = { length: 'max tokens' };

/** Whether a key sends what a field holds. Enter that ends the input of a Chinese or Japanese word does not. */
function sends(event) {
  return event.key === 'Enter' && !event.shiftKey && !event.isComposing;
}

/** What the header of the route says: nodes by role. */
function nodesOf(route) {
  const named = Object.fromEntries(route.split(' ').map((part) => part.split('=')));
  return [named.prefill, named.decode].filter((name) => name && name !== 'none').join(' → ');
}

function seconds(spent) {
  return `${(spent / 1000).toFixed(1)} s`;
}

function milliseconds(spent) {
  return spent < 10_000 ? `${Math.round(spent)} ms` : seconds(spent);
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
