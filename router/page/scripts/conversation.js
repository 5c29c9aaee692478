// A conversation is a tree of turns, so that an edited question or another answer leaves the earlier one in reach.
// turns[n] = { id: n, parent, role, text, … }; `leaf` names the turn at the end of the path that is shown.

/** Most images of a request, and their characters; the router takes 16 MiB as a whole. */
const MAX_SENT_IMAGES = 32, MAX_SENT_CHARS = 14 * 2 ** 20;

function newConversation(settings) {
  const now = Date.now();
  return { id: randomName(), title: '', created: now, updated: now, model: '', settings, turns: [], leaf: -1 };
}

/** Adds a turn behind `parent` (-1: a first one), and shows it. */
function addTurn(conversation, parent, turn) {
  const added = { id: conversation.turns.length, parent, text: '', ...turn };
  conversation.turns.push(added);
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  if (!conversation.title && added.role === 'user') conversation.title = titleOf(added);
  return added;
}

function titleOf({ text, images }) {
  const line = text.trim().split('\n')[0].trim();
  return line ? shortened(line, 80) : images?.length ? 'Image' : 'Untitled';
}

function shortened(text, length) {
  const characters = Array.from(text.slice(0, 2 * length));
  return characters.length > length ? `${characters.slice(0, length - 1).join('')}…` : characters.join('');
}

/** The turns that are shown, first one first. */
function pathOf(conversation) {
  const path = [];
  for (let id = conversation.leaf; id >= 0; id = conversation.turns[id].parent) path.unshift(conversation.turns[id]);
  return path;
}

function siblingsOf(conversation, turn) {
  return conversation.turns.filter((each) => each.parent === turn.parent);
}

/** Shows the path over this turn to the latest one behind it. */
function showTurn(conversation, turn) {
  let leaf = turn;
  for (let next = turn; next; next = conversation.turns.findLast((each) => each.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

/** Where a new question goes: behind the last turn, or in place of a question that got no answer. */
function parentOfNext(conversation) {
  const last = conversation.turns[conversation.leaf];
  if (last?.role !== 'assistant' || last.text || last.calls?.length) return conversation.leaf;
  return conversation.turns[last.parent].role === 'user' ? conversation.turns[last.parent].parent : last.parent;
}

/** The messages of the path, as the API takes them, with the images of the turns in `seen`. */
function messagesOf(conversation, system, seen) {
  const messages = system ? [{ role: 'system', content: system }] : [];
  const path = pathOf(conversation);
  path.forEach((turn, place) => {
    if (turn.role === 'user') messages.push({ role: 'user', content: contentOf(turn, seen.has(turn)) });
    else if (turn.role === 'tool') messages.push(...turn.results.map(toolMessage));
    else if (turn.text || turn.calls?.length) {
      messages.push(answerOf(turn));
      if (turn.calls?.length && path[place + 1] && path[place + 1].role !== 'tool') {
        messages.push(...turn.calls.map(({ id }) => toolMessage({ id, text: 'No result was given.' })));
      }
    }
  });
  return messages;
}

/** The turns whose images go along: the latest ones, as far as a request holds them. */
function turnsSeen(conversation) {
  const seen = new Set();
  let count = 0, size = 0;
  for (const turn of pathOf(conversation).reverse()) {
    count += turn.images?.length ?? 0;
    size += turn.images?.reduce((sum, url) => sum + url.length, 0) ?? 0;
    if (count > MAX_SENT_IMAGES || size > MAX_SENT_CHARS) break;
    if (turn.images?.length) seen.add(turn);
  }
  return seen;
}

function contentOf({ text, images }, isSeen) {
  if (!images?.length) return text;
  if (!isSeen) return `(${images.length} ${images.length === 1 ? 'image' : 'images'}, not shown again) ${text}`.trim();
  const parts = images.map((url) => ({ type: 'image_url', image_url: { url } }));
  return text ? [...parts, { type: 'text', text }] : parts;
}

function answerOf({ text, reasoning, calls }) {
  const message = { role: 'assistant', content: text };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls?.length) {
    message.tool_calls = calls.map(({ id, name, arguments: given }) => (
      { id, type: 'function', function: { name, arguments: given } }));
  }
  return message;
}

function toolMessage({ id, text }) {
  return { role: 'tool', tool_call_id: id, content: text };
}

/** The path as a Markdown document. */
function markdownOf(conversation) {
  const parts = [`# ${conversation.title || 'Conversation'}`];
  if (conversation.settings.system) parts.push('## System', conversation.settings.system);
  for (const turn of pathOf(conversation)) {
    parts.push(`## ${{ user: 'You', tool: 'Tool results' }[turn.role] ?? turn.model ?? 'Assistant'}`);
    if (turn.images?.length) parts.push(`(${turn.images.length} images)`);
    if (turn.text) parts.push(turn.text);
    for (const call of turn.calls ?? []) parts.push(`\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``);
    for (const result of turn.results ?? []) parts.push(`\`\`\`\n${result.text}\n\`\`\``);
  }
  return `${parts.join('\n\n')}\n`;
}

/** About how much a conversation takes, in characters. */
function sizeOf(conversation) {
  const texts = ({ text, reasoning = '', images = [], calls = [], results = [] }) => text.length + reasoning.length
    + [...images, ...calls.map((each) => each.arguments), ...results.map((each) => each.text)]
      .reduce((sum, each) => sum + each.length, 200);
  return conversation.turns.reduce((sum, turn) => sum + texts(turn), JSON.stringify(conversation.settings).length);
}
