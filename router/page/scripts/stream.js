// Answers of the API as streams that survive a broken connection and the router behind it.

/** How long a broken stream is taken up again, and how long a request is sent again that got no answer, in ms. */
const RESUME_MS = 30_000, RESEND_MS = 10_000;
/** Longest silence of a stream whose events have ids, in ms: such a stream gets a comment twice a second. */
const SILENCE_MS = 4000;
const PAUSE_MS = 250;

function authorized(headers = {}) {
  return at('key').value ? { ...headers, authorization: `Bearer ${at('key').value}` } : headers;
}

/** The server's own words for what went wrong. */
async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** An answer's events, over all connections: { id, event }, where `event` is the parsed data.
 *
 * body: of the request, or null to take up the answer behind the event `last`. Raises an Error; its `status` is the
 * server's. `told` hears of `route(name)` and `broken()`. */
async function* answerEvents({ body, last = '', signal, told }) {
  const key = randomName(), started = performance.now();
  let until = 0;
  for (;;) {
    try {
      const response = await request(body, last, key, signal);
      if (!response.ok) {
        const final = response.status < 500 || !last;
        throw Object.assign(new Error(await reason(response)), { status: response.status, final });
      }
      told.route(response.headers.get('x-kvferry-route'));
      for await (const { id, data } of serverEvents(response, signal)) {
        last = id ?? last;
        until = 0;
        if (data === '[DONE]') return;
        yield { id: last, event: JSON.parse(data) };
      }
      throw new Error('The connection broke off.');
    } catch (error) {
      until ||= last ? performance.now() + RESUME_MS : started + RESEND_MS;
      if (signal.aborted || error.final || performance.now() > until) throw error;
      told.broken();
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      signal.throwIfAborted();
    }
  }
}

/** A request is computed once under its key, so that it can be sent again. What has begun is asked for by its name. */
async function request(body, last, key, signal) {
  const headers = authorized({ accept: 'text/event-stream' });
  if (!last) {
    Object.assign(headers, { 'content-type': 'application/json', 'idempotency-key': key });
    return fetch('v1/chat/completions', { method: 'POST', headers, body: JSON.stringify(body), signal });
  }
  const name = encodeURIComponent(last.split(':')[0]);
  return fetch(`v1/chat/completions/${name}`, { headers: { ...headers, 'last-event-id': last }, signal });
}

/** Each event of a response: its id and its data. */
async function* serverEvents(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '', named = false;
  try {
    for (;;) {
      const { value, done } = await (named ? within(reader.read(), SILENCE_MS) : reader.read());
      signal.throwIfAborted();
      if (done) return;
      const parts = (rest + value).split('\n\n');
      rest = parts.pop();
      for (const part of parts) {
        const field = (name) => part.split('\n').find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
        named ||= field('id') !== undefined;
        if (field('data')) yield { id: field('id'), data: field('data') };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What the promise resolves to, or an Error if it takes longer. */
function within(promise, milliseconds) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error('The server fell silent.')), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** Takes one event into a turn; `now` is Date.now(). Raises an Error for an event that tells of one. */
function takeEvent(turn, event, now) {
  if (event.error) throw Object.assign(new Error(event.error.message), { final: true });
  turn.usage = event.usage ?? turn.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: older, reasoning = older, tool_calls: calls } = choice.delta;
  if (content || reasoning || calls) {
    turn.last = now;
    turn.first ??= now;
  }
  if (reasoning) turn.reasoning = (turn.reasoning ?? '') + reasoning;
  if (content || calls) turn.thought ??= now;
  if (content) turn.text += content;
  for (const call of calls ?? []) takeCall(turn, call);
  turn.end = choice.finish_reason ?? turn.end;
}

function takeCall(turn, { index, id, function: given }) {
  turn.calls ??= [];
  const call = turn.calls[index] ??= { id: '', name: '', arguments: '' };
  call.id = id ?? call.id;
  call.name += given?.name ?? '';
  call.arguments += given?.arguments ?? '';
}
