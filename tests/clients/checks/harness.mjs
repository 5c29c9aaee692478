// Runs a client's checks under Node, from the folder that holds its packages:
//   CHECK_URL=http://127.0.0.1:8000 CHECK_MODEL=name node harness.mjs FILE...
// A file of checks imports `check`, `URL` and `MODEL`. Each check is one line of JSON on stdout.

import assert from 'node:assert/strict'

export const URL = process.env.CHECK_URL
export const MODEL = process.env.CHECK_MODEL
const CHECK_MS = 1000 * Number(process.env.CHECK_SECONDS ?? 60)
const checks = []

/** Register an async function that throws when the check fails. */
export function check(name, run) {
  checks.push([name, run])
}

/** What `promise` is rejected with; fails when it is not, or with another class than `kind`. */
export async function rejected(kind, promise) {
  let value
  try {
    value = await promise
  } catch (error) {
    assert(error instanceof kind, `${error?.constructor?.name}: ${error?.message}, not ${kind.name}`)
    return error
  }
  assert.fail(`nothing thrown, ${kind.name} expected: ${JSON.stringify(value)?.slice(0, 200)}`)
}

function late() {
  return new Promise((_, reject) => {
    setTimeout(() => reject(new Error(`the check took more than ${CHECK_MS / 1000} s`)), CHECK_MS).unref()
  })
}

// Not awaited here: the files import this module, which must have ended for that.
async function main(files) {
  for (const file of files) await import(`./${file}`)
  for (const [name, run] of checks) {
    const began = performance.now()
    let error = ''
    try {
      await Promise.race([run(), late()])
    } catch (thrown) {
      error = String(thrown?.stack ?? thrown).slice(0, 600) || 'thrown'
    }
    const seconds = Math.round(performance.now() - began) / 1000
    console.log(JSON.stringify({ name, ok: !error, seconds, error }))
  }
  process.exit(0)
}

main(process.argv.slice(2))
