// llama.cpp behind HTTP, started by llama_cpp_server.py:
//
//     node llama_cpp_server.mjs build/peers/llama.cpp/node_modules MODEL.gguf PORT THREADS CONTEXT SEQUENCES
//
// Answers streamed /v1/completions with token ids as prompts, greedily, SEQUENCES at once, which node-llama-cpp puts
// in one batch; others wait. Tokens that a prompt has in common with what its sequence had before are not computed again. All computing is llama.cpp's, as node-llama-cpp
// brings it compiled for this kind of processor. No text is made: `text` holds ids.

import http from "node:http";
import path from "node:path";
import {pathToFileURL} from "node:url";

const [modules, modelPath, port, threads, tokens, most] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(path.join(modules, "node-llama-cpp", "dist", "index.js")));
const CONTEXT = Number(tokens);
const BATCH = Math.min(CONTEXT, 2048); // as in llama.cpp itself

const llama = await getLlama({gpu: false, build: "never", progressLogs: false, maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    contextSize: CONTEXT, batchSize: BATCH, sequences: Number(most), threads: {ideal: Number(threads), min: Number(threads)},
});
const idle = Array.from({length: Number(most)}, () => context.getSequence());
const waiting = []; // for a sequence

async function* answer(sequence, prompt, count) {
    const held = sequence.contextTokens;
    let common = 0;
    while (common < Math.min(held.length, prompt.length - 1) && held[common] === prompt[common]) ++common;
    await sequence.eraseContextTokenRanges([{start: common, end: held.length}]);
    for await (const token of sequence.evaluate(prompt.slice(common), {temperature: 0, yieldEogToken: true})) {
        yield token;
        if (--count === 0) return;
    }
}

async function complete(request, response) {
    const parts = [];
    for await (const part of request) parts.push(part);
    const {prompt, max_tokens: count} = JSON.parse(Buffer.concat(parts));
    response.writeHead(200, {"Content-Type": "text/event-stream"});
    const send = (event) => response.write(`data: ${JSON.stringify(event)}\n\n`);
    const sequence = idle.pop() ?? await new Promise((resolve) => waiting.push(resolve));
    try {
        for await (const token of answer(sequence, prompt, count))
            send({choices: [{index: 0, text: ` ${token}`, finish_reason: null}]});
    } finally {
        const next = waiting.shift();
        if (next) next(sequence);
        else idle.push(sequence);
    }
    send({choices: [], usage: {prompt_tokens: prompt.length, completion_tokens: count}});
    response.end("data: [DONE]\n\n");
}

for await (const _ of answer(idle[0], Array(16).fill(5), 4)); // what is made at first use
http.createServer((request, response) => {
    request.socket.setNoDelay(true);
    if (request.method !== "POST") return void response.writeHead(200).end();
    complete(request, response).catch((error) => response.destroy(error));
}).listen(Number(port), "127.0.0.1");
