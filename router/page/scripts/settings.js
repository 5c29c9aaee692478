// The settings of a conversation: texts of the dialog's fields, and what they become in a request.

/** Fields of the dialog, by the names that the API gives them, and what a first conversation has in them. */
const FIELDS = {
  system: '', temperature: '0.2', top_p: '', max_tokens: '1024', seed: '', reasoning_effort: '', tool_choice: '',
  tools: '', more: '',
};
const NUMBERS = ['temperature', 'top_p', 'max_tokens', 'seed'];
const EXAMPLE_TOOL = {
  name: 'get_weather',
  description: 'The weather at a place.',
  parameters: { type: 'object', properties: { place: { type: 'string' } }, required: ['place'] },
};

function shownSettings() {
  return Object.fromEntries(Object.keys(FIELDS).map((name) => [name, at(name).value.trim()]));
}

function showSettings(settings) {
  for (const [name, first] of Object.entries(FIELDS)) at(name).value = settings[name] ?? first;
  checkSettings();
  sumSettings();
}

/** The settings that the last conversation had, for the next one. */
function lastSettings() {
  try {
    return { ...FIELDS, ...JSON.parse(readKept('localStorage', 'kvferry-settings') ?? '{}') };
  } catch {
    return { ...FIELDS };
  }
}

function keepSettings(settings) {
  writeKept('localStorage', 'kvferry-settings', JSON.stringify(settings));
}

function jsonOf(text, field) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`not JSON: ${error.message}`), { field });
  }
}

/** Tools as the API takes them, of a list or a single one, wrapped or bare, with OpenAI's or Anthropic's names. */
function toolsOf(text) {
  if (!text) return [];
  const given = jsonOf(text, 'tools');
  return (Array.isArray(given) ? given : [given]).map((tool, place) => {
    const { name, description, parameters, input_schema: schema, ...rest } = tool?.function ?? tool ?? {};
    if (typeof name !== 'string' || !name) {
      throw Object.assign(new Error(`each tool needs a name; number ${place + 1} has none`), { field: 'tools' });
    }
    const { type, ...others } = rest;
    const extra = tool.function ? rest : others;
    return { type: 'function', function: { name, description, parameters: parameters ?? schema, ...extra } };
  });
}

/** The fields of a request; raises an Error with `field` for a text that says nothing.
 *
 * resulted: results of tools are the last message, so no further call is forced. */
function requestFields(settings, resulted = false) {
  const fields = {};
  for (const name of NUMBERS) {
    if (settings[name] === '') continue;
    fields[name] = Number(settings[name]);
    if (!Number.isFinite(fields[name])) throw Object.assign(new Error('not a number'), { field: name });
  }
  if (settings.reasoning_effort) fields.reasoning_effort = settings.reasoning_effort;
  const tools = toolsOf(settings.tools);
  if (tools.length) fields.tools = tools;
  if (tools.length && settings.tool_choice && !resulted) fields.tool_choice = settings.tool_choice;
  const more = settings.more ? jsonOf(settings.more, 'more') : {};
  if (typeof more !== 'object' || more === null || Array.isArray(more)) {
    throw Object.assign(new Error('not a JSON object'), { field: 'more' });
  }
  return { ...fields, ...more };
}

/** Says beside each field what is wrong with it; returns whether nothing is. */
function checkSettings() {
  const settings = shownSettings();
  let sound = true;
  for (const field of ['tools', 'more', ...NUMBERS]) {
    let fault = at(field).validity?.badInput ? 'not a number' : '';
    try {
      requestFields({ ...FIELDS, [field]: settings[field] });
    } catch (error) {
      fault = error.message;
    }
    const told = at(`${field}-fault`);
    if (told) told.textContent = fault && fault[0].toUpperCase() + fault.slice(1);
    at(field).setAttribute('aria-invalid', String(Boolean(fault)));
    sound &&= !fault;
  }
  return sound;
}

/** Shows beside the button what differs from a plain question. */
function sumSettings() {
  const settings = shownSettings(), parts = [];
  if (settings.system) parts.push('system prompt');
  if (settings.temperature) parts.push(`temperature ${settings.temperature}`);
  try {
    const count = toolsOf(settings.tools).length;
    if (count) parts.push(count === 1 ? '1 tool' : `${count} tools`);
  } catch {
    parts.push('tools with a mistake');
  }
  at('settings-sum').textContent = parts.join(' · ');
}
