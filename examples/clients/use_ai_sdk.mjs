// The npm packages `ai` and `@ai-sdk/anthropic`: text, streams, tools over several steps, objects, errors.
// Run with node in a folder where the packages are installed; LOCKSTEP_URL and LOCKSTEP_API_KEY say where the mesh is.

import assert from 'node:assert/strict';
import {
  callRegex, checkWeather, idle, imported, key, needsToolParser, run, schema, servedModel, url, versionOf,
} from './checks.mjs';

const { APICallError, Output, generateText, jsonSchema, stepCountIs, streamText, tool } = await imported('ai');
const { createAnthropic } = await imported('@ai-sdk/anthropic');

// The provider has no field for what a body may hold beyond its own; its `fetch` is where others add it.
const withMore = (more) => createAnthropic({
  baseURL: `${url}/v1`, apiKey: key,
  fetch: (where, asked) => fetch(where, { ...asked, body: JSON.stringify({ ...JSON.parse(asked.body), ...more }) }),
});
const served = (await servedModel()).id;
const model = createAnthropic({ baseURL: `${url}/v1`, apiKey: key })(served);
const prompt = 'Who was at the ball?';
const fixed = { prompt, maxOutputTokens: 20, maxRetries: 0 };

function weather() {
  const asked = [];
  const tools = {
    weather: tool({
      description: 'Of a city.', inputSchema: jsonSchema(schema), execute: (input) => (asked.push(input), 'rain'),
    }),
  };
  return { asked, tools };
}

const checks = {
  async textAndItsStream() {
    const seeded = withMore({ seed: 1 })(served);
    const whole = await generateText({ ...fixed, model: seeded });
    assert.equal(whole.usage.outputTokens, 20);
    assert.equal(whole.finishReason, 'length');
    const stream = streamText({ ...fixed, model: seeded });
    let text = '';
    for await (const part of stream.textStream) text += part;
    assert(text.length > 0);
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).inputTokens, whole.usage.inputTokens);
  },

  async systemAndStops() {
    const answer = await generateText({
      ...fixed, model, maxOutputTokens: 400, system: 'You are Jane Austen.', stopSequences: ['.'],
    });
    assert.equal(answer.finishReason, 'stop');
  },

  async toolsRequiredAndNamed() {
    for (const toolChoice of ['required', { type: 'tool', toolName: 'weather' }]) {
      const { asked, tools } = weather();
      const answer = await generateText({
        ...fixed, model, maxOutputTokens: 200, tools, toolChoice,
        providerOptions: { anthropic: { disableParallelToolUse: true } },
      });
      assert.equal(answer.finishReason, 'tool-calls');
      checkWeather(answer.toolCalls[0].input);
      assert.deepEqual(asked, [answer.toolCalls[0].input]);
    }
  },

  async toolsOverSeveralSteps() {
    await needsToolParser();
    const forced = withMore({ structured_outputs: { regex: callRegex } })(served);
    for (const ask of [generateText, streamText]) {
      const { asked, tools } = weather();
      const answer = await ask({ ...fixed, model: forced, maxOutputTokens: 100, tools, stopWhen: stepCountIs(2) });
      const steps = await answer.steps;
      assert.equal(steps.length, 2);
      assert(steps[1].usage.inputTokens > steps[0].usage.inputTokens, 'the result was sent back');
      assert.equal(asked.length, 2);
      asked.forEach(checkWeather);
    }
  },

  async objects() {
    const answer = await generateText({
      ...fixed, model, maxOutputTokens: 200, output: Output.object({ schema: jsonSchema(schema) }),
    });
    checkWeather(answer.output);
  },

  async errors() {
    const ask = (more) => () => generateText({ ...fixed, model, ...more });
    const isStatus = (status) => (error) => APICallError.isInstance(error) && error.statusCode === status;
    await assert.rejects(ask({ maxOutputTokens: 10 ** 6 }), isStatus(400));
    await assert.rejects(ask({ model: createAnthropic({ baseURL: `${url}/v1`, apiKey: key })('nobody') }), isStatus(404));
    if (key !== 'none') {
      const stranger = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'wrong' });
      await assert.rejects(ask({ model: stranger(served) }), isStatus(401));
    }
  },

  async cancelled() {
    const controller = new AbortController();
    const stream = streamText({ ...fixed, model, maxOutputTokens: 1500, abortSignal: controller.signal });
    for await (const _ of stream.textStream) break;
    controller.abort();
    await idle();
  },
};

await run(`@ai-sdk/anthropic ${versionOf('@ai-sdk/anthropic')} with ai ${versionOf('ai')}`, checks);
