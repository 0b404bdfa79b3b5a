// The npm package `@anthropic-ai/sdk`: messages, streams, tools, its tool runner and message threads, errors.
// Run with node in a folder where the package is installed; LOCKSTEP_URL and LOCKSTEP_API_KEY say where the mesh is.

import assert from 'node:assert/strict';
import {
  callRegex, checkWeather, idle, imported, key, limitedKey, messages, needsToolParser, run, schema, servedModel, url,
  versionOf,
} from './checks.mjs';

const { default: Anthropic } = await imported('@anthropic-ai/sdk');
const { betaTool } = await imported('@anthropic-ai/sdk/helpers/beta/json-schema');
const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 120_000 });
const model = (await servedModel()).id;
const weather = { name: 'weather', description: 'Of tomorrow.', input_schema: schema };
const forced = { structured_outputs: { regex: callRegex } };

// A tool for the package's own loop, and what it was asked.
function runnable() {
  const asked = [];
  const tool = betaTool({
    name: 'weather', description: 'Of a city.', inputSchema: schema, run: (input) => (asked.push(input), 'rain'),
  });
  return { asked, tool };
}

const checks = {
  async messagesAndTheirStreams() {
    const fixed = { model, messages, max_tokens: 20, seed: 1 };
    const whole = await client.messages.create(fixed);
    assert.equal(whole.usage.output_tokens, 20);
    assert.equal(whole.stop_reason, 'max_tokens');
    let text = '';
    const stream = client.messages.stream(fixed).on('text', (delta) => (text += delta));
    assert.equal((await stream.finalMessage()).content[0].text, whole.content[0].text);
    assert.equal(text, whole.content[0].text);
  },

  async tokensAreCounted() {
    const fixed = { model, messages, system: 'You are Jane Austen.' };
    const { input_tokens } = await client.messages.countTokens(fixed);
    const { usage } = await client.messages.create({ ...fixed, max_tokens: 1 });
    assert.equal(usage.input_tokens + usage.cache_read_input_tokens, input_tokens);
  },

  async toolsAnyAndNamed() {
    for (const choice of [{ type: 'any' }, { type: 'tool', name: 'weather' }]) {
      const answer = await client.messages.create({
        model, messages, max_tokens: 200, tools: [weather],
        tool_choice: { ...choice, disable_parallel_tool_use: true },
      });
      checkWeather(answer.content.find((block) => block.type === 'tool_use').input);
      assert.equal(answer.stop_reason, 'tool_use');
    }
  },

  // Without `thread: false` the runner sends only what is new, and all of it again when the thread is not there.
  async toolRunnerSendsTheWholeConversationAgain() {
    await needsToolParser();
    const { asked, tool } = runnable();
    const runner = client.beta.messages.toolRunner({
      model, messages, max_tokens: 100, tools: [tool], max_iterations: 3, ...forced,
    });
    const prompts = [];
    for await (const { usage } of runner) prompts.push(usage.input_tokens + usage.cache_read_input_tokens);
    assert.equal(prompts.length, 3);
    assert(prompts[0] < prompts[1] && prompts[1] < prompts[2], `a call was lost: ${prompts}`);
    assert.equal(asked.length, 3);
    asked.forEach(checkWeather);
  },

  async toolRunnerOfStreams() {
    await needsToolParser();
    const { asked, tool } = runnable();
    const runner = client.beta.messages.toolRunner({
      model, messages, max_tokens: 100, tools: [tool], max_iterations: 2, stream: true, ...forced,
    });
    let answers = 0;
    for await (const stream of runner) {
      const final = await stream.finalMessage();
      checkWeather(final.content.find((block) => block.type === 'tool_use').input);
      answers++;
    }
    assert.equal(answers, 2);
    assert(asked.length >= 1);
  },

  async messageThreads() {
    const thread = client.beta.messages.thread({ model, max_tokens: 5 });
    const first = await thread.send({ role: 'user', content: 'Who was at the ball?' });
    const second = await thread.send({ role: 'user', content: 'And who danced?' });
    const tokens = ({ usage }) => usage.input_tokens + usage.cache_read_input_tokens;
    assert(tokens(second) > tokens(first) + 5, 'the second turn has the first before it');
    const lost = client.beta.messages.create({
      model, messages, max_tokens: 5, thread: { type: 'continue', previous_message_id: first.id },
    });
    await assert.rejects(lost, (error) => error instanceof Anthropic.NotFoundError && error.errorCode === 'thread_not_found');
  },

  async errors() {
    const ask = (more) => () => client.messages.create({ model, messages, max_tokens: 5, ...more });
    await assert.rejects(ask({ temperature: -1 }), Anthropic.BadRequestError);
    await assert.rejects(ask({ mcp_servers: [{ type: 'url', url: 'http://x', name: 'x' }] }), Anthropic.BadRequestError);
    await assert.rejects(ask({ model: 'nobody' }), Anthropic.NotFoundError);
    if (key !== 'none') {
      await assert.rejects(() => client.withOptions({ apiKey: 'wrong' }).models.list(), Anthropic.AuthenticationError);
    }
    if (limitedKey) {
      const limited = client.withOptions({ apiKey: limitedKey });
      const twice = async () => {
        for (const _ of [1, 2]) await limited.messages.create({ model, messages, max_tokens: 1 });
      };
      await assert.rejects(twice, Anthropic.RateLimitError);
    }
  },

  async cancelled() {
    const stream = client.messages.stream({ model, messages, max_tokens: 1500, ignore_eos: true });
    for await (const _ of stream) break;
    stream.abort();
    await idle();
  },
};

await run(`@anthropic-ai/sdk ${versionOf('@anthropic-ai/sdk')}`, checks);
