// A decode loop of llama.cpp for llama_cpp.py: node llama_cpp.mjs MODEL.gguf CACHED THREADS TYPE. Each line "N" on standard
// input is answered by the milliseconds of N steps, as a JSON list.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [, , file, cached, threads, type] = process.argv;
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(process.env.NODE_LLAMA_CPP).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: +threads});
const model = await llama.loadModel({modelPath: file});
const small = type === "F16" ? {} : {experimentalKvCacheKeyType: type, experimentalKvCacheValueType: type, flashAttention: true};
const context = await model.createContext({contextSize: +cached + 512, batchSize: 512, threads: +threads, ...small});
const sequence = context.getSequence();
await sequence.evaluateWithoutGeneratingNewTokens(Array.from({length: +cached}, (_, i) => 300 + ((i * 7919) % 30000)));
console.log(JSON.stringify([]));
for await (const line of createInterface({input: process.stdin})) {
  const times = [];
  let before = performance.now();
  for await (const _ of sequence.evaluate([300], {temperature: 0, yieldEogToken: true})) {
    const now = performance.now();
    times.push(now - before);
    before = now;
    if (times.length >= +line) break;
  }
  console.log(JSON.stringify(times));
}
process.exit(0);
