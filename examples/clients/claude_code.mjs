// Claude Code, the npm package `@anthropic-ai/claude-code`, run once without its terminal, in a home of its own.

import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { key, url } from './checks.mjs';

const TIMEOUT = 300_000; // milliseconds

// Its home and the folder that it works in.
export const folder = mkdtempSync(join(tmpdir(), 'claude-code-'));
process.on('exit', () => rmSync(folder, { recursive: true, force: true }));

// Run it once; all the JSON that it prints. `more` goes into the body of its requests, `input` to its
// standard input; `most` tokens of an answer.
export function claude(model, flags, { more = {}, apiKey = key, input = '', most = 80 } = {}) {
  const env = {
    PATH: process.env.PATH,
    HOME: folder,
    ANTHROPIC_BASE_URL: url,
    ANTHROPIC_API_KEY: apiKey,
    ANTHROPIC_MODEL: model,
    ANTHROPIC_SMALL_FAST_MODEL: model,
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: String(most),
    CLAUDE_CODE_EXTRA_BODY: JSON.stringify(more),
    CLAUDE_CODE_MAX_RETRIES: '0',
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1',
    DISABLE_TELEMETRY: '1',
    DISABLE_AUTOUPDATER: '1',
    DISABLE_ERROR_REPORTING: '1',
  };
  const command = ['-p', '--output-format', 'stream-json', '--verbose', ...flags];
  return new Promise((done, failed) => {
    const child = spawn(resolve('node_modules/.bin/claude'), command, {
      cwd: folder, env, stdio: [input ? 'pipe' : 'ignore', 'pipe', 'pipe'],
    });
    const timer = setTimeout(() => child.kill('SIGKILL'), TIMEOUT);
    let out = '', err = '';
    child.stdout.on('data', (text) => (out += text));
    child.stderr.on('data', (text) => (err += text));
    child.on('error', failed);
    child.stdin?.end(input);
    child.on('close', (status) => {
      clearTimeout(timer);
      try {
        const events = out.trim().split('\n').map((line) => JSON.parse(line));
        done({ events, status, result: events.at(-1) });
      } catch {
        failed(new Error(`claude ended with ${status}:\n${out}${err}`));
      }
    });
  });
}

export function promptTokens({ usage }) {
  return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
}

export function blocks(events, role, type) {
  const turns = events.filter((event) => event.type === role && Array.isArray(event.message?.content));
  return turns.flatMap((event) => event.message.content).filter((block) => block.type === type);
}
