// Two pictures, and what the mesh itself answers about them, for npm scripts of clients that send images.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { Skipped, key, servedModel, url } from '../checks.mjs';

// PNG files of 32 x 32 pixels in base64, by name.
export const pictures = JSON.parse(readFileSync(new URL('pictures.json', import.meta.url)));
export const question = 'What is this?';
export const numTokens = 24;

// Greedy answers about each picture, of chats that no client had its hands on, and the model's name.
export async function found() {
  const served = await servedModel();
  if (!served.input_modalities?.includes('image')) throw new Skipped('the mesh has no model that takes images');
  const answers = {};
  for (const [name, data] of Object.entries(pictures)) {
    const image = { type: 'image_url', image_url: { url: `data:image/png;base64,${data}` } };
    const content = [{ type: 'text', text: question }, image];
    const answer = await fetch(`${url}/v1/chat/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json', authorization: `Bearer ${key}` },
      body: JSON.stringify({
        model: served.id, max_tokens: numTokens, temperature: 0, messages: [{ role: 'user', content }],
      }),
    });
    assert(answer.ok, await answer.clone().text());
    answers[name] = (await answer.json()).choices[0].message.content;
  }
  assert.notEqual(answers.stripes, answers.ramp, 'the pictures make no difference');
  return { name: served.id, answers };
}
