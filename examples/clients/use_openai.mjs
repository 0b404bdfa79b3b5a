// The npm package `openai`: completions, chat, responses; streams, tools, schemas, errors, cancellation.
// Run with node in a folder where the package is installed; LOCKSTEP_URL and LOCKSTEP_API_KEY say where the mesh is.

import assert from 'node:assert/strict';
import {
  checkWeather, idle, imported, key, limitedKey, messages, run, schema, servedModel, url, versionOf,
} from './checks.mjs';

const { default: OpenAI } = await imported('openai');
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 120_000 });
const opening = 'It is a truth universally acknowledged, that';
const tools = [{ type: 'function', function: { name: 'weather', parameters: schema, strict: true } }];
const model = (await servedModel()).id;

const checks = {
  async models() {
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async completionsAndTheirStreams() {
    const fixed = { model, prompt: opening, max_tokens: 20, seed: 1 };
    const whole = await client.completions.create(fixed);
    assert.equal(whole.usage.completion_tokens, 20);
    let text = '', usage;
    for await (const chunk of await client.completions.create({
      ...fixed, stream: true, stream_options: { include_usage: true },
    })) {
      text += chunk.choices[0]?.text ?? '';
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].text);
    assert.equal(usage.total_tokens, whole.usage.total_tokens);
  },

  async chatAndItsStreams() {
    const fixed = { model, messages, max_completion_tokens: 20, seed: 1 };
    const whole = await client.chat.completions.create(fixed);
    let text = '';
    for await (const chunk of await client.chat.completions.create({ ...fixed, stream: true })) {
      text += chunk.choices[0].delta.content ?? '';
    }
    assert.equal(text, whole.choices[0].message.content);
    const stream = client.chat.completions.stream(fixed);
    let again = '';
    stream.on('content', (delta) => (again += delta));
    assert.equal((await stream.finalChatCompletion()).choices[0].message.content, text);
    assert.equal(again, text);
  },

  async logprobs() {
    const answer = await client.chat.completions.create({
      model, messages, max_tokens: 3, logprobs: true, top_logprobs: 2,
    });
    assert.deepEqual(answer.choices[0].logprobs.content.map((entry) => entry.top_logprobs.length), [2, 2, 2]);
  },

  async parsed() {
    const answer = await client.chat.completions.parse({
      model, messages, max_tokens: 200,
      response_format: { type: 'json_schema', json_schema: { name: 'weather', schema, strict: true } },
    });
    checkWeather(answer.choices[0].message.content);
  },

  async toolsRequiredAndNamed() {
    for (const tool_choice of ['required', { type: 'function', function: { name: 'weather' } }]) {
      const answer = await client.chat.completions.create({
        model, messages, tools, tool_choice, max_tokens: 200, parallel_tool_calls: false,
      });
      checkWeather(answer.choices[0].message.tool_calls[0].function.arguments);
    }
    const stream = client.chat.completions.stream({
      model, messages, tools, tool_choice: 'required', max_tokens: 200, parallel_tool_calls: false,
    });
    const final = await stream.finalChatCompletion();
    checkWeather(final.choices[0].message.tool_calls[0].function.arguments);
  },

  async runToolsCallsFunctionsAndSendsResultsBack() {
    const asked = [];
    const runner = client.chat.completions.runTools({
      model, messages, max_tokens: 200, parallel_tool_calls: false,
      tool_choice: { type: 'function', function: { name: 'weather' } },
      tools: [{
        type: 'function',
        function: {
          name: 'weather', description: 'Of a city.', parameters: schema, parse: JSON.parse,
          function: (wanted) => (asked.push(wanted), 'rain'),
        },
      }],
    });
    await runner.done();
    asked.forEach(checkWeather);
    assert.equal(asked.length, 1);
  },

  async responses() {
    const fixed = { model, input: 'Who was at the ball?', temperature: 0, max_output_tokens: 12 };
    const answer = await client.responses.create(fixed);
    let text = '';
    for await (const event of await client.responses.create({ ...fixed, stream: true })) {
      if (event.type === 'response.output_text.delta') text += event.delta;
    }
    assert(text.length > 0);
    assert.equal(text, answer.output_text);
    const parsed = await client.responses.parse({
      model, input: 'Who was at the ball?', max_output_tokens: 200,
      text: { format: { type: 'json_schema', name: 'weather', schema, strict: true } },
    });
    checkWeather(parsed.output_text);
  },

  async errors() {
    const ask = (more) => () => client.chat.completions.create({ model, messages, max_tokens: 5, ...more });
    await assert.rejects(ask({ temperature: -1 }), OpenAI.BadRequestError);
    await assert.rejects(ask({ model: 'nobody' }), OpenAI.NotFoundError);
    await assert.rejects(() => client.embeddings.create({ model, input: 'She' }), OpenAI.BadRequestError);
    await assert.rejects(
      () => client.completions.create({ model, prompt: 'She', max_tokens: 1500, ignore_eos: true }, { timeout: 200 }),
      OpenAI.APIConnectionTimeoutError,
    );
    if (key !== 'none') {
      await assert.rejects(() => client.withOptions({ apiKey: 'wrong' }).models.list(), OpenAI.AuthenticationError);
    }
    if (limitedKey) {
      const limited = client.withOptions({ apiKey: limitedKey });
      const twice = async () => {
        for (const _ of [1, 2]) await limited.completions.create({ model, prompt: 'She', max_tokens: 1 });
      };
      await assert.rejects(twice, OpenAI.RateLimitError);
    }
  },

  async cancelled() {
    const stream = await client.completions.create({
      model, prompt: 'She', max_tokens: 1500, stream: true, ignore_eos: true,
    });
    for await (const _ of stream) break;
    const controller = new AbortController();
    const asked = client.completions.create(
      { model, prompt: 'She', max_tokens: 1500, ignore_eos: true }, { signal: controller.signal },
    );
    setTimeout(() => controller.abort(), 300);
    await assert.rejects(asked, OpenAI.APIUserAbortError);
    await idle();
  },
};

await run(`openai (npm) ${versionOf('openai')}`, checks);
