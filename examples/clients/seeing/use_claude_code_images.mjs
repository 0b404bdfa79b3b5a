// Claude Code, the npm package `@anthropic-ai/claude-code`, with images: in a turn of its user, and read from a file.
// Run with node in a folder where the package is installed; LOCKSTEP_URL and LOCKSTEP_API_KEY say where the mesh is.

import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { needsToolParser, run, versionOf } from '../checks.mjs';
import { blocks, claude, folder, promptTokens } from '../claude_code.mjs';
import { found, pictures, question } from './pictures.mjs';

const NUM_ROWS = 25; // placeholders of an image at the tiny model that is served for this
const few = ['--system-prompt', 'You look at pictures.'];
const brief = { structured_outputs: { regex: '[A-Z][a-z ]{20,60}\\.' } };

const checks = {
  async turnsWithPictures() {
    const { name } = await found();
    const flags = [...few, '--tools', '', '--input-format', 'stream-json'];
    const ask = async (...images) => {
      const sent = images.map((data) => ({ type: 'image', source: { type: 'base64', media_type: 'image/png', data } }));
      const content = [{ type: 'text', text: question }, ...sent];
      const input = JSON.stringify({ type: 'user', message: { role: 'user', content } }) + '\n';
      const { result, status } = await claude(name, flags, { more: brief, input });
      assert.equal(status, 0, JSON.stringify(result));
      assert.equal(result.is_error, false, JSON.stringify(result));
      return promptTokens(result);
    };
    const bare = await ask(), both = await ask(pictures.stripes, pictures.ramp);
    assert(both >= bare + 2 * NUM_ROWS, `${both} tokens with two pictures, ${bare} without`);
  },

  // The tiny model calls no tool by itself: its answer is forced into the form of a call, each turn.
  async picturesReadFromFiles() {
    const { name } = await found();
    await needsToolParser();
    const path = join(folder, 'picture.png');
    writeFileSync(path, Buffer.from(pictures.stripes, 'base64'));
    const call = `\\{"name": "Read", "arguments": \\{"file_path": "${path.replaceAll('.', '\\.')}"\\}\\}`;
    const regex = `<tool_call>\\n${call}\\n</tool_call>`;
    const flags = ['Read my picture.', ...few, '--tools', 'Read', '--max-turns', '2'];
    const { events } = await claude(name, flags, { more: { structured_outputs: { regex } }, most: 200 });
    const [result] = blocks(events, 'user', 'tool_result');
    assert.match(JSON.stringify(result), /"type":"image"/, JSON.stringify(result).slice(0, 600));
    const turns = events.filter(({ type }) => type === 'assistant');
    const first = promptTokens(turns[0].message), last = promptTokens(turns.at(-1).message);
    assert(last >= first + NUM_ROWS, `${first} tokens in the first turn, ${last} in the last`);
  },
};

await run(`claude-code ${versionOf('@anthropic-ai/claude-code')}`, checks);
