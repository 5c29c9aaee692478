// The official client for Node: images in chats and responses, transcriptions.

import assert from 'node:assert/strict'
import OpenAI, { toFile } from 'openai'
import { check, rejected } from './harness.mjs'

const MODEL = process.env.CHECK_SEEING_MODEL, PICTURES = JSON.parse(process.env.CHECK_PICTURES)
const client = new OpenAI({
  baseURL: `${process.env.CHECK_SEEING_URL}/v1`, apiKey: 'none', maxRetries: 0, timeout: 60_000,
})
const image = (url) => ({ type: 'image_url', image_url: { url, detail: 'low' } })
const ask = (...parts) => client.chat.completions.create({
  model: MODEL, max_tokens: 8, temperature: 0,
  messages: [{ role: 'user', content: [{ type: 'text', text: 'What is it?' }, ...parts] }],
})

check('images', async () => {
  const answers = [await ask(), await ask(image(PICTURES[0])), await ask(image(PICTURES[1]))]
  assert.equal(new Set(answers.map((answer) => answer.choices[0].message.content)).size, 3)
  assert(answers[0].usage.prompt_tokens < answers[1].usage.prompt_tokens)
})

check('images of responses', async () => {
  const answer = await client.responses.create({
    model: MODEL, max_output_tokens: 16, temperature: 0,
    input: [{ role: 'user', content: [
      { type: 'input_text', text: 'What is it?' }, { type: 'input_image', image_url: PICTURES[0], detail: 'auto' },
    ] }],
  })
  assert(answer.output_text)
})

check('an image that is cut off', async () => {
  const error = await rejected(OpenAI.BadRequestError, ask(image(PICTURES[0].slice(0, -3))))
  assert.equal(error.param, 'messages[0].content[1].image_url.url')
})

check('a transcription', async () => {
  const file = await toFile(Buffer.from(process.env.CHECK_SOUND, 'base64'), 'talk.wav')
  assert((await client.audio.transcriptions.create({ model: process.env.CHECK_HEARING_MODEL, file })).text)
})
