// What the npm scripts of this folder share: where the mesh is, and named checks that are run one after another.
// They run with node in a folder where their packages are installed.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const require = createRequire(process.cwd() + '/');

export const url = process.env.LOCKSTEP_URL ?? 'http://127.0.0.1:8000';
export const key = process.env.LOCKSTEP_API_KEY || 'none';
export const limitedKey = process.env.LOCKSTEP_LIMITED_KEY;
export const messages = [{ role: 'user', content: 'Who was at the ball?' }];
export const schema = {
  type: 'object',
  properties: {
    city: { type: 'string', enum: ['London', 'Bath', 'Meryton'] },
    days: { type: 'integer', minimum: 1, maximum: 9 },
  },
  required: ['city', 'days'],
  additionalProperties: false,
};

// A call as models write it for the parser `hermes`: the shipped model was never trained to call tools. With this
// expression its answer is one all the same, and finding the call in it is left to the parser.
export const callRegex =
  '<tool_call>\\n\\{"name": "weather", "arguments": \\{"city": "(London|Bath)", "days": [1-9]\\}\\}\\n</tool_call>';

// Why a check makes no sense here.
export class Skipped extends Error {}

export async function imported(name) {
  return import(pathToFileURL(require.resolve(name)).href);
}

export function versionOf(name) {
  return JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
}

export async function servedModel() {
  return (await (await fetch(`${url}/v1/models`, { headers: { 'x-api-key': key } })).json()).data[0];
}

export function checkWeather(given) {
  const found = typeof given === 'string' ? JSON.parse(given) : given;
  assert.deepEqual(Object.keys(found).sort(), ['city', 'days']);
  assert(schema.properties.city.enum.includes(found.city));
  assert(found.days >= 1 && found.days <= 9);
}

export async function needsToolParser() {
  const answer = await fetch(`${url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', authorization: `Bearer ${key}` },
    body: JSON.stringify({ messages, max_tokens: 1, tools: [{ type: 'function', function: { name: 'f' } }] }),
  });
  if (answer.status === 400) {
    throw new Skipped('start the mesh with --enable-auto-tool-choice --tool-call-parser hermes');
  }
}

export async function idle() {
  for (let tries = 0; tries < 900; tries++) {
    if ((await (await fetch(`${url}/load`)).json()).server_load === 0) return;
    await new Promise((done) => setTimeout(done, 100));
  }
  assert.fail('still running after 90 s');
}

// Run all checks, say how each went, and exit with 1 if one failed. `client` is only printed.
export async function run(client, checks) {
  let failed = 0, skipped = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`${client}: ok    ${name}`);
    } catch (error) {
      if (error instanceof Skipped) {
        skipped++;
        console.log(`${client}: skip  ${name}: ${error.message}`);
      } else {
        failed++;
        console.log(`${client}: FAIL  ${name}\n${error.stack}`);
      }
    }
  }
  const passed = Object.keys(checks).length - failed - skipped;
  console.log(`${client}: ${passed} passed, ${failed} failed, ${skipped} skipped`);
  process.exit(failed ? 1 : 0);
}
