// The official client for Node.

import assert from 'node:assert/strict'
import OpenAI, { toFile } from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { MODEL, URL, check, rejected } from './harness.mjs'

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: 'none', maxRetries: 0, timeout: 60_000 })
const messages = [{ role: 'user', content: 'Why is the sky blue?' }]
const brief = { model: MODEL, messages, max_tokens: 12, temperature: 0 }
const chat = (more = {}) => client.chat.completions.create({ ...brief, ...more })
const place = {
  type: 'object',
  properties: { city: { enum: ['London', 'Paris'] } },
  required: ['city'],
  additionalProperties: false,
}
const weather = { type: 'function', function: { name: 'weather', description: 'the weather', parameters: place } }
const response = { model: MODEL, input: 'Why is the sky blue?', max_output_tokens: 16, temperature: 0 }

async function collect(stream) {
  const all = []
  for await (const item of stream) all.push(item)
  return all
}
const textOf = (chunks) => chunks.flatMap((chunk) => chunk.choices).map((c) => c.delta?.content ?? '').join('')

check('models', async () => {
  const ids = (await client.models.list()).data.map((model) => model.id)
  assert(ids.includes(MODEL))
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL)
})

check('chat', async () => {
  const answer = await chat()
  assert.equal(answer.object, 'chat.completion')
  assert(answer.choices[0].message.content)
  assert.equal(answer.choices[0].finish_reason, 'length')
  assert.equal(answer.usage.completion_tokens, 12)
})

check('a stream with usage', async () => {
  const chunks = await collect(await chat({ stream: true, stream_options: { include_usage: true } }))
  assert.equal(chunks.at(-1).usage.completion_tokens, 12)
  assert.equal(textOf(chunks), (await chat()).choices[0].message.content)
})

check('the stream helper', async () => {
  let deltas = 0
  const stream = client.chat.completions.stream(brief).on('content', () => deltas++)
  assert((await stream.finalContent()).length > 0)
  assert(deltas > 1)
})

check('leaving a stream', async () => {
  const stream = await chat({ stream: true, max_tokens: 2000 })
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break
  assert((await chat()).choices.length)
})

check('aborting', async () => {
  const leaving = new AbortController()
  const answer = client.chat.completions.create({ ...brief, max_tokens: 2000 }, { signal: leaving.signal })
  setTimeout(() => leaving.abort(), 200)
  await rejected(OpenAI.APIUserAbortError, answer)
})

check('a timeout', async () => {
  await rejected(OpenAI.APIConnectionTimeoutError, client.chat.completions.create({ ...brief, max_tokens: 2000 }, { timeout: 50 }))
})

check('stop', async () => {
  const free = (await chat()).choices[0].message.content
  const word = free.split(' ')[3]
  const cut = (await chat({ stop: [word] })).choices[0]
  assert.equal(cut.finish_reason, 'stop')
  assert.equal(cut.message.content, free.slice(0, free.indexOf(word)))
})

check('seeds', async () => {
  const texts = []
  for (const seed of [7, 7, 8]) texts.push((await chat({ seed, temperature: 1.2 })).choices[0].message.content)
  assert.equal(texts[0], texts[1])
  assert.notEqual(texts[1], texts[2])
})

check('several choices', async () => {
  const answer = await chat({ n: 3, temperature: 1 })
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2])
})

check('logprobs', async () => {
  const entries = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content
  assert.equal(entries.length, 12)
  assert(entries.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 2))
})

check('unicode', async () => {
  const prompt = 'Übergröße 東京 🚲'
  const answer = await client.completions.create({ model: MODEL, prompt, echo: true, max_tokens: 0 })
  assert.equal(answer.choices[0].text, prompt)
})

check('completions', async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: ['Once', 'The'], max_tokens: 3 })
  assert.equal(answer.choices.length, 2)
  const chunks = await collect(await client.completions.create({ model: MODEL, prompt: 'Once', max_tokens: 3, stream: true }))
  assert(chunks.map((chunk) => chunk.choices[0]?.text ?? '').join(''))
})

check('bad requests', async () => {
  const error = await rejected(OpenAI.BadRequestError, chat({ temperature: -1 }))
  assert.equal(error.param, 'temperature')
  assert.equal(error.type, 'invalid_request_error')
})

check('unknown models', async () => {
  const error = await rejected(OpenAI.NotFoundError, chat({ model: 'no-such-model' }))
  assert.equal(error.code, 'model_not_found')
})

check('raw responses', async () => {
  const { data, response: raw, request_id: id } = await client.chat.completions.create(brief, { headers: { 'x-request-id': 'node-1' } }).withResponse()
  assert.equal(id, 'node-1')
  assert.match(raw.headers.get('x-kvferry-route'), /decode=/)
  assert(data.choices.length)
})

check('json schema', async () => {
  const person = z.object({ name: z.string().max(12), age: z.number().int(), mood: z.enum(['happy', 'sad']) })
  const format = zodResponseFormat(person, 'person')
  const answer = await client.chat.completions.parse({ ...brief, max_tokens: 200, response_format: format })
  assert.equal(typeof answer.choices[0].message.parsed.age, 'number')
})

check('json mode', async () => {
  const choice = (await chat({ response_format: { type: 'json_object' }, max_tokens: 200 })).choices[0]
  assert(choice.finish_reason === 'length' || typeof JSON.parse(choice.message.content) === 'object')
})

check('required tools', async () => {
  const choice = (await chat({ tools: [weather], tool_choice: 'required', max_tokens: 100 })).choices[0]
  assert.equal(choice.finish_reason, 'tool_calls')
  assert(['London', 'Paris'].includes(JSON.parse(choice.message.tool_calls[0].function.arguments).city))
})

check('streamed tools', async () => {
  const stream = client.chat.completions.stream({ ...brief, tools: [weather], tool_choice: 'required', max_tokens: 100 })
  const message = await stream.finalMessage()
  assert.equal(message.tool_calls[0].function.name, 'weather')
  JSON.parse(message.tool_calls[0].function.arguments)
})

check('runTools goes round', async () => {
  let asked = 0
  const runner = client.chat.completions.runTools(
    {
      ...brief,
      max_tokens: 100,
      tools: [{ type: 'function', function: { ...weather.function, parse: JSON.parse, function: () => { asked++; return 'clear' } } }],
      tool_choice: { type: 'function', function: { name: 'weather' } },
    },
    { maxChatCompletions: 2 },
  )
  await runner.done().catch((error) => assert.match(String(error), /maximum|ended without/i))
  assert(asked >= 1)
})

check('tool results in the history', async () => {
  const call = { id: 'call_1', type: 'function', function: { name: 'weather', arguments: '{"city": "Paris"}' } }
  const history = [...messages, { role: 'assistant', content: null, tool_calls: [call] }, { role: 'tool', tool_call_id: 'call_1', content: 'clear' }]
  assert((await chat({ messages: history, tools: [weather], tool_choice: 'none' })).choices[0].message.content)
})

check('embeddings', async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: ['one', 'two'] })
  assert.equal(answer.data.length, 2)
  const length = answer.data[0].embedding.reduce((sum, value) => sum + value * value, 0)
  assert(Math.abs(length - 1) < 1e-3)
})

check('responses', async () => {
  const answer = await client.responses.create(response)
  assert(answer.output_text)
  const next = await client.responses.create({ ...response, previous_response_id: answer.id })
  assert.equal(next.previous_response_id, answer.id)
  assert.equal((await client.responses.retrieve(answer.id)).id, answer.id)
  await client.responses.delete(answer.id)
  await rejected(OpenAI.NotFoundError, client.responses.retrieve(answer.id))
})

check('streamed responses', async () => {
  const events = await collect(await client.responses.create({ ...response, stream: true }))
  assert.equal(events[0].type, 'response.created')
  assert(['response.completed', 'response.incomplete'].includes(events.at(-1).type))
  const text = events.filter((event) => event.type === 'response.output_text.delta').map((event) => event.delta).join('')
  assert.equal(text, events.at(-1).response.output.flatMap((item) => item.content ?? []).map((part) => part.text).join(''))
})

check('responses call tools', async () => {
  const tool = { type: 'function', name: 'weather', parameters: place, strict: true }
  const answer = await client.responses.create({ ...response, max_output_tokens: 80, tools: [tool], tool_choice: 'required' })
  const call = answer.output.find((item) => item.type === 'function_call')
  assert(['London', 'Paris'].includes(JSON.parse(call.arguments).city))
})

check('files', async () => {
  const file = await client.files.create({ file: await toFile(Buffer.from('{"custom_id": "a"}\n'), 'a.jsonl'), purpose: 'batch' })
  assert.equal(await (await client.files.content(file.id)).text(), '{"custom_id": "a"}\n')
  assert((await client.files.delete(file.id)).deleted)
})

check('batches', async () => {
  const row = { custom_id: 'a', method: 'POST', url: '/v1/chat/completions', body: brief }
  const file = await client.files.create({ file: await toFile(Buffer.from(JSON.stringify(row)), 'a.jsonl'), purpose: 'batch' })
  let batch = await client.batches.create({ input_file_id: file.id, endpoint: '/v1/chat/completions', completion_window: '24h' })
  while (!['completed', 'failed'].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 100))
    batch = await client.batches.retrieve(batch.id)
  }
  assert.equal(batch.status, 'completed')
  const answer = JSON.parse(await (await client.files.content(batch.output_file_id)).text())
  assert.equal(answer.response.body.choices.length, 1)
})
