// The npm packages `ai` and `@ai-sdk/openai` with images: by the chat API and by responses, whole and in streams.
// Run with node in a folder where the packages are installed; LOCKSTEP_URL and LOCKSTEP_API_KEY say where the mesh is.

import assert from 'node:assert/strict';
import { imported, key, run, url, versionOf } from '../checks.mjs';
import { found, numTokens, pictures, question } from './pictures.mjs';

const { generateText, streamText } = await imported('ai');
const { createOpenAI } = await imported('@ai-sdk/openai');
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });

// The model by this API, asked about each picture: as bytes, and as a data URL.
async function ask(model) {
  const { name, answers } = await found();
  for (const [which, data] of Object.entries(pictures)) {
    for (const image of [Buffer.from(data, 'base64'), `data:image/png;base64,${data}`]) {
      const content = [{ type: 'text', text: question }, { type: 'image', image }];
      const asked = {
        model: model(name), maxOutputTokens: numTokens, maxRetries: 0, temperature: 0, messages: [{ role: 'user', content }],
      };
      assert.equal((await generateText(asked)).text, answers[which]);
      let text = '';
      for await (const part of streamText(asked).textStream) text += part;
      assert.equal(text, answers[which]);
    }
  }
}

const checks = {
  chats: () => ask((name) => provider.chat(name)),
  responses: () => ask((name) => provider.responses(name)),
};

await run(`@ai-sdk/openai ${versionOf('@ai-sdk/openai')} with ai ${versionOf('ai')}`, checks);
