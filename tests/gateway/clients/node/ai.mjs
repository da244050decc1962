// npm ai with @ai-sdk/openai-compatible against a router: URL KEY; prints what it made of it.
// What the test's backend does is told by each request's words.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, key] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "mindrouter",
  baseURL: `${url}/v1`,
  apiKey: key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("m");
const told = {};
const tools = { get_weather: tool({ inputSchema: z.object({ city: z.string() }) }) };
const callsOf = (calls) => calls.map((c) => [c.toolCallId, c.toolName, c.input]);
const quiet = { onError: () => {} };

const chat = await generateText({ model, prompt: "Hello" });
told["chat"] = [chat.text, chat.usage.totalTokens];
const stream = streamText({ model, prompt: "Hello" });
told["stream"] = [await stream.text, (await stream.usage).totalTokens];
told["tools"] = callsOf((await generateText({ model, prompt: "use tools", tools })).toolCalls);
told["tools stream"] = callsOf(await streamText({ model, prompt: "use tools", tools }).toolCalls);
const [, data] = process.env.DATA_URL.split(",");
const content = [
  { type: "text", text: "look" },
  { type: "image", image: data, mediaType: "image/png" },
];
told["vision"] = (await generateText({ model, messages: [{ role: "user", content }] })).text;
const output = Output.object({ schema: z.object({ age: z.number() }) });
told["schema"] = (await generateText({ model, prompt: "age", output })).output;
told["embeddings"] = (await embed({ model: provider.embeddingModel("m"), value: "a" })).embedding;
try {
  await generateText({ model: provider("x"), prompt: "Hello" });
} catch (error) {
  told["unknown model"] = [error.statusCode, error.isRetryable, error.message];
}
for (const status of [429, 503]) {
  const began = Date.now();
  const answer = await generateText({ model, prompt: `busy ${status}` });
  told[`waits after ${status}`] = [answer.text, Date.now() - began >= 3000];
}
const broken = [];
for await (const part of streamText({ model, prompt: "break", ...quiet }).fullStream) {
  if (part.type === "text-delta") broken.push(part.text);
  if (part.type === "error") broken.push(part.error.message.includes("Backend a"));
}
told["broken"] = broken;
const aborting = new AbortController();
const seen = [];
const endless = streamText({ model, prompt: "endless", abortSignal: aborting.signal, ...quiet });
for await (const part of endless.fullStream) {
  if (part.type === "text-delta") aborting.abort();
  seen.push(part.type);
}
told["cancelled"] = seen.at(-1);
console.log(JSON.stringify(told));
