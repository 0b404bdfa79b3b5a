// Claude Code, the npm package `@anthropic-ai/claude-code`, without its terminal: answers, streams, tools, sessions.
// Run with node in a folder where the package is installed; LOCKSTEP_URL and LOCKSTEP_API_KEY say where the mesh is.
//
// Its own instructions are more than the context of the shipped model: most checks give it other instructions and one
// tool. The last one takes all of them, where the model has the room.

import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Skipped, idle, key, needsToolParser, run, servedModel, versionOf } from './checks.mjs';
import { blocks, claude as runOnce, folder, promptTokens } from './claude_code.mjs';

const NUM_TOKENS_OF_ALL = 8_000; // and 15,000 more where a template shows the definitions of its tools

const served = await servedModel();
const note = join(folder, 'note.txt');
writeFileSync(note, 'Mr. Bingley was at the ball.\n');
// A model that is cut short is asked to go on, again and again; this one ends soon.
const brief = { structured_outputs: { regex: '[A-Z][a-z ]{20,60}\\.' } };
const few = ['--system-prompt', 'You are Jane Austen.'];

const claude = (prompt, flags, options) => runOnce(served.id, [prompt, ...flags], options);

const checks = {
  async answers() {
    const { events, result, status } = await claude('Who was at the ball?', [...few, '--tools', ''], { more: brief });
    assert.equal(status, 0, JSON.stringify(result));
    assert.equal(result.is_error, false);
    assert(result.result.length > 0);
    assert.equal(result.result, blocks(events, 'assistant', 'text').map((block) => block.text).join(''));
    assert(promptTokens(result) > 50, 'the whole prompt is counted');
  },

  async streams() {
    const flags = [...few, '--tools', '', '--include-partial-messages'];
    const { events, result } = await claude('Who danced?', flags, { more: brief });
    assert.equal(result.is_error, false, JSON.stringify(result));
    const deltas = events
      .filter(({ event }) => event?.type === 'content_block_delta' && event.delta.type === 'text_delta')
      .map(({ event }) => event.delta.text);
    assert(deltas.length > 5);
    assert.equal(deltas.join(''), result.result);
  },

  async schemas() {
    const more = { structured_outputs: { choice: ['Mr. Darcy', 'Mr. Bingley'] } };
    const { result } = await claude('Who was at the ball?', [...few, '--tools', ''], { more });
    assert(more.structured_outputs.choice.includes(result.result), result.result);
  },

  // The shipped model was never trained to call tools: its answer is forced into the form of a call, each turn.
  async toolsAreCalledAndTheirResultsSentBack() {
    await needsToolParser();
    const path = note.replaceAll('.', '\\.');
    const regex = `<tool_call>\\n\\{"name": "Read", "arguments": \\{"file_path": "${path}"\\}\\}\\n</tool_call>`;
    const flags = [...few, '--tools', 'Read', '--max-turns', '2'];
    const { events } = await claude('Read my note.', flags, { more: { structured_outputs: { regex } } });
    const calls = blocks(events, 'assistant', 'tool_use');
    assert.deepEqual(calls.map(({ name, input }) => [name, input.file_path])[0], ['Read', note]);
    const [result] = blocks(events, 'user', 'tool_result');
    assert.equal(result.tool_use_id, calls[0].id);
    assert.match(JSON.stringify(result.content), /Bingley was at the ball/);
    const turns = events.filter(({ type }) => type === 'assistant');
    assert(promptTokens(turns.at(-1).message) > promptTokens(turns[0].message), 'the result was sent back');
  },

  async sessionsGoOn() {
    const first = await claude('Who was at the ball?', [...few, '--tools', ''], { more: brief });
    const flags = [...few, '--tools', '', '--resume', first.result.session_id];
    const second = await claude('And who danced?', flags, { more: brief });
    assert.equal(second.result.is_error, false, JSON.stringify(second.result));
    assert(promptTokens(second.result) > promptTokens(first.result) + 20, 'it has the first answer before it');
  },

  async errors() {
    const { result, status } = await claude('Hello', [...few, '--tools', '', '--model', 'nobody']);
    assert.notEqual(status, 0);
    assert.equal(result.is_error, true);
    assert.match(result.result, /nobody/);
    if (key !== 'none') {
      const stranger = await claude('Hello', [...few, '--tools', ''], { apiKey: 'wrong' });
      assert.equal(stranger.result.is_error, true);
    }
    await idle();
  },

  // Each run is a session of its own; what both prompts begin with is taken from the cache.
  async allOfItsInstructionsAndTools() {
    if (served.max_model_len < NUM_TOKENS_OF_ALL) {
      throw new Skipped(`the model's context is ${served.max_model_len} tokens, this takes ${NUM_TOKENS_OF_ALL}`);
    }
    const first = await claude('Who was at the ball?', [], { more: brief });
    assert.equal(first.result.is_error, false, JSON.stringify(first.result));
    const second = await claude('And who danced?', [], { more: brief });
    assert.equal(second.result.is_error, false, JSON.stringify(second.result));
    const cached = second.result.usage.cache_read_input_tokens;
    assert(cached > 1000 || cached === 0, `only ${cached} tokens came from the cache`); // 0: at a mesh that does not tell
    console.log(`claude-code: ${promptTokens(second.result)} tokens, of which ${cached} came from the cache`);
  },
};

await run(`claude-code ${versionOf('@anthropic-ai/claude-code')}`, checks);
