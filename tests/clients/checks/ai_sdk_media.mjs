// Vercel's AI SDK: images in messages.

import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, generateText, streamText } from 'ai'
import { check, rejected } from './harness.mjs'

const PICTURES = JSON.parse(process.env.CHECK_PICTURES)
const provider = createOpenAICompatible({ name: 'kvferry', baseURL: `${process.env.CHECK_SEEING_URL}/v1`, includeUsage: true })
const bytes = (url) => Uint8Array.from(Buffer.from(url.split(',')[1], 'base64'))
const asking = (...images) => ({
  model: provider(process.env.CHECK_SEEING_MODEL), temperature: 0, maxRetries: 0, maxOutputTokens: 8,
  messages: [{ role: 'user', content: [
    { type: 'text', text: 'What is it?' },
    ...images.map((image) => ({ type: 'image', image, mediaType: 'image/png' })),
  ] }],
})

check('images', async () => {
  const answers = [await generateText(asking()), ...await Promise.all(PICTURES.map((url) => generateText(asking(bytes(url)))))]
  assert.equal(new Set(answers.map(({ text }) => text)).size, 3)
  assert(answers[0].usage.inputTokens < answers[1].usage.inputTokens)
})

check('an image in a stream', async () => {
  const { text } = await generateText(asking(bytes(PICTURES[0])))
  let streamed = ''
  for await (const part of streamText(asking(bytes(PICTURES[0]))).textStream) streamed += part
  assert.equal(streamed, text)
})

check('what is no image', async () => {
  const error = await rejected(APICallError, generateText(asking(Uint8Array.of(1, 2, 3))))
  assert.equal(error.statusCode, 400)
})
