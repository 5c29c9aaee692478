// The official client for Node: its requests under one Idempotency-Key while the router that computes them is killed.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { get } from 'node:http'
import OpenAI from 'openai'
import { MODEL, check, rejected } from './harness.mjs'

const URL = process.env.CHECK_DYING_URL, CONTROL = process.env.CHECK_DYING_CONTROL
/** Tokens of an answer, and those delivered before the router is killed in the middle of it. */
const TOKENS = Number(process.env.CHECK_DYING_TOKENS), BEFORE = Number(process.env.CHECK_DYING_BEFORE)
const asked = {
  model: MODEL, messages: [{ role: 'user', content: 'Tell me of a river.' }], max_tokens: TOKENS,
  temperature: 1, seed: 5, ignore_eos: true,
}

/** What the control says to a command, which takes as long as it takes. */
function told(command) {
  return new Promise((resolve, reject) => {
    get(`${CONTROL}/${command}`, async (answer) => {
      let said = ''
      for await (const part of answer) said += part
      if (answer.statusCode === 200) resolve(Number(said))
      else reject(new Error(`${command}: ${said}`))
    }).on('error', reject)
  })
}

const key = () => ({ 'Idempotency-Key': randomUUID() })

/** A client whose connections are its own and are not kept: an open one is the way to the router that lived. */
function client(more = {}) {
  const made = new OpenAI({ baseURL: `${URL}/v1`, apiKey: 'none', maxRetries: 6, timeout: 60_000, defaultHeaders: { connection: 'close' } })
  return Object.assign(made, more)
}

async function killed(command, request) {
  await told('ready')
  const [answer] = await Promise.all([request(), told(command)])
  return answer
}

/** The other router computed the rest of one answer, and no more. */
async function wentOn() {
  const tokens = await told('tokens')
  assert(tokens > 0 && tokens < TOKENS - BEFORE / 2, `${tokens} tokens`)
  assert.equal(await told('takeovers'), 1)
}

async function whole(headers = {}, more = {}) {
  return (await client(more).chat.completions.create(asked, { headers })).choices[0].message.content
}

/** The text of a stream; one that breaks is asked for again under the same key. To Node's fetch a connection that was not
 * to be kept may break at any time: the stream ends, without a reason why it is finished. */
async function streamed(headers) {
  for (let tries = 0; tries < 6; tries++) {
    let text = '', finished = false
    try {
      for await (const chunk of await client().chat.completions.create({ ...asked, stream: true }, { headers })) {
        text += chunk.choices[0]?.delta.content ?? ''
        finished ||= chunk.choices[0]?.finish_reason != null
      }
      if (finished) return text
    } catch (error) {
      const broke = error instanceof OpenAI.APIConnectionError || error.message === 'terminated'
      if (!broke) throw error
    }
  }
  assert.fail('every stream broke')
}

check('a whole answer goes on at another router', async () => {
  const expected = await whole()
  assert.equal(await killed('kill', () => whole(key())), expected)
  await wentOn()
})

check('a stream goes on at another router', async () => {
  const expected = await whole()
  assert.equal(await killed('kill', () => streamed(key())), expected)
  await wentOn()
})

check('keys that the client makes itself', async () => {
  const expected = await whole()
  assert.equal(await killed('kill', () => whole({}, { idempotencyHeader: 'Idempotency-Key' })), expected)
  await wentOn()
})

check('a router that dies before the first token changes nothing', async () => {
  const expected = await whole()
  for (const request of [whole, streamed]) {
    assert.equal(await killed('kill_early', () => request(key())), expected)
  }
})

check('what has ended is sent again and not computed', async () => {
  await told('ready')
  const headers = key()
  assert.equal(await whole(headers), await whole(headers))
  const error = await rejected(OpenAI.UnprocessableEntityError, streamed(headers))
  assert.equal(error.code, 'idempotency_key_reused')
  assert.equal(await told('tokens'), TOKENS)
})
