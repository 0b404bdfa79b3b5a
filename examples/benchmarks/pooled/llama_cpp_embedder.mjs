// Embeddings by llama.cpp, one text after the other, as node-llama-cpp has them; started by peer_embedder.py:
//
//     node llama_cpp_embedder.mjs PEERS/llama.cpp/node_modules MODEL.gguf THREADS

import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [modules, modelPath, threads] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(path.join(modules, "node-llama-cpp", "dist", "index.js")));
const llama = await getLlama({gpu: false, build: "never", progressLogs: false, maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
const context = await model.createEmbeddingContext({contextSize: 513, batchSize: 513, threads: Number(threads)});
console.log("ready");
for await (const line of readline.createInterface({input: process.stdin})) {
    const vectors = [];
    for (const ids of JSON.parse(line)) {
        const {vector} = await context.getEmbeddingFor(ids);
        const norm = Math.hypot(...vector);
        vectors.push(...vector.map((each) => each / norm));
    }
    console.log(Buffer.from(Float32Array.from(vectors).buffer).toString("base64"));
}
