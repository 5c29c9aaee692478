// Vercel's AI SDK over its provider for OpenAI-compatible servers.

import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import { MODEL, URL, check, rejected } from './harness.mjs'

const kvferry = createOpenAICompatible({ name: 'kvferry', baseURL: `${URL}/v1`, includeUsage: true, supportsStructuredOutputs: true })
const model = kvferry(MODEL)
const base = { model, prompt: 'Why is the sky blue?', temperature: 0, maxRetries: 0, maxOutputTokens: 12 }
const weather = tool({
  description: 'the weather of a city',
  inputSchema: z.object({ city: z.enum(['London', 'Paris']) }),
  execute: async ({ city }) => `clear in ${city}`,
})

check('text', async () => {
  const { text, finishReason, usage } = await generateText(base)
  assert(text)
  assert.equal(finishReason, 'length')
  assert.equal(usage.outputTokens, 12)
  assert.equal(usage.totalTokens, usage.inputTokens + 12)
})

check('a system prompt and a history', async () => {
  const { text } = await generateText({
    ...base,
    prompt: undefined,
    system: 'Be terse.',
    messages: [
      { role: 'user', content: 'Hello' },
      { role: 'assistant', content: 'Hi' },
      { role: 'user', content: [{ type: 'text', text: 'Why is the sky blue?' }] },
    ],
  })
  assert(text)
})

check('a stream with usage and finish reason', async () => {
  const result = streamText(base)
  const parts = []
  for await (const part of result.textStream) parts.push(part)
  assert(parts.length > 1)
  assert.equal(parts.join(''), (await generateText(base)).text)
  assert.equal(await result.finishReason, 'length')
  assert.equal((await result.usage).outputTokens, 12)
})

check('cached tokens', async () => {
  const long = { ...base, prompt: 'one two three '.repeat(60) }
  await generateText(long)
  const { usage } = await generateText(long)
  assert((usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens) > 100)
})

check('stop sequences', async () => {
  const { text } = await generateText(base)
  const word = text.split(' ')[3]
  const cut = await generateText({ ...base, stopSequences: [word] })
  assert.equal(cut.finishReason, 'stop')
  assert(!cut.text.includes(word))
})

check('seeds', async () => {
  const hot = { ...base, temperature: 1.2, seed: 3 }
  assert.equal((await generateText(hot)).text, (await generateText(hot)).text)
})

check('an object', async () => {
  const schema = z.object({ name: z.string().max(12), age: z.number().int().max(120) })
  const { output } = await generateText({ ...base, maxOutputTokens: 200, output: Output.object({ schema }) })
  assert.equal(typeof output.age, 'number')
})

check('a streamed object', async () => {
  const schema = z.object({ name: z.string().max(12), old: z.boolean() })
  const result = streamText({ ...base, maxOutputTokens: 200, output: Output.object({ schema }) })
  let partial = 0
  for await (const _ of result.partialOutputStream) partial++
  assert(partial >= 1)
  assert.equal(typeof (await result.output).old, 'boolean')
})

check('a choice', async () => {
  const { output } = await generateText({ ...base, maxOutputTokens: 30, output: Output.choice({ options: ['yes', 'no'] }) })
  assert(['yes', 'no'].includes(output))
})

check('a required tool is called and executed', async () => {
  const { toolCalls, toolResults, finishReason } = await generateText({
    ...base, maxOutputTokens: 100, tools: { weather }, toolChoice: 'required',
  })
  assert.equal(finishReason, 'tool-calls')
  assert.equal(toolCalls[0].toolName, 'weather')
  assert.match(toolResults[0].output, /^clear in (London|Paris)$/)
})

check('a named tool is streamed', async () => {
  const result = streamText({ ...base, maxOutputTokens: 100, tools: { weather }, toolChoice: { type: 'tool', toolName: 'weather' } })
  const kinds = []
  for await (const part of result.fullStream) kinds.push(part.type)
  assert(kinds.includes('tool-input-delta'))
  assert(kinds.includes('tool-result'))
})

check('steps go on after a result', async () => {
  const { steps } = await generateText({
    ...base, maxOutputTokens: 100, tools: { weather }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'none' : 'required' }),
  })
  assert.equal(steps.length, 2)
  assert(steps[1].text)
})

check('embeddings', async () => {
  const { embeddings, usage } = await embedMany({ model: kvferry.embeddingModel(MODEL), values: ['one', 'two'] })
  assert.equal(embeddings.length, 2)
  assert(usage.tokens > 0)
})

check('completions', async () => {
  const { text } = await generateText({ ...base, model: kvferry.completionModel(MODEL) })
  assert(text)
})

check('errors', async () => {
  const error = await rejected(APICallError, generateText({ ...base, temperature: -1 }))
  assert.equal(error.statusCode, 400)
  assert.match(error.message, /temperature/)
  assert.equal(error.isRetryable, false)
})

check('aborting', async () => {
  const leaving = new AbortController()
  setTimeout(() => leaving.abort(), 200)
  await rejected(Error, generateText({ ...base, maxOutputTokens: 2000, abortSignal: leaving.signal }))
})
