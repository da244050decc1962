// npm openai against a router: URL KEY; prints what it made of it.
// What the test's backend does is told by each request's words.
import OpenAI, { APIError, NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
const told = {};
const ask = (content, more = {}) => ({ model: "m", messages: [{ role: "user", content }], ...more });
const create = (content, more) => client.chat.completions.create(ask(content, more));
const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters: PARAMETERS } }];
const callsOf = (message) => message.tool_calls.map((c) => [c.id, c.function.name, c.function.arguments]);

const chat = await create("Hello");
told["chat"] = [chat.choices[0].message.content, chat.usage.total_tokens];
const options = { stream: true, stream_options: { include_usage: true } };
let text = "";
let tokens = 0;
for await (const chunk of await create("Hello", options)) {
  text += chunk.choices[0]?.delta.content ?? "";
  tokens += chunk.usage?.total_tokens ?? 0;
}
told["stream"] = [text, tokens];
told["tools"] = callsOf((await create("use tools", { tools })).choices[0].message);
const streamed = client.chat.completions.stream(ask("use tools", { tools }));
told["tools stream"] = callsOf((await streamed.finalChatCompletion()).choices[0].message);
const image = { type: "image_url", image_url: { url: process.env.DATA_URL } };
told["vision"] = (await create([{ type: "text", text: "look" }, image])).choices[0].message.content;
const response_format = zodResponseFormat(z.object({ age: z.number() }), "age");
const parsed = await client.chat.completions.parse(ask("age", { response_format }));
told["schema"] = parsed.choices[0].message.parsed;
// It asks for base64 of its own accord.
told["embeddings"] = (await client.embeddings.create({ model: "m", input: "a" })).data[0].embedding;
told["models"] = (await client.models.list()).data.map((model) => model.id);
told["responses"] = (await client.responses.create({ model: "m", input: "Hello" })).output_text;
const events = client.responses.stream({ model: "m", input: "Hello" });
told["responses stream"] = (await events.finalResponse()).output_text;
try {
  await create("Hello", { model: "x" });
} catch (error) {
  told["unknown model"] = error instanceof NotFoundError && error.code;
}
for (const status of [429, 503]) {
  const began = Date.now();
  const answer = await create(`busy ${status}`);
  told[`waits after ${status}`] = [answer.choices[0].message.content, Date.now() - began >= 3000];
}
try {
  await create("Hello", { model: "full" });
} catch (error) {
  told["hopeless"] = [error.status, error.code];
}
try {
  for await (const chunk of await create("break", { stream: true }))
    told["before the break"] = chunk.choices[0].delta.content;
} catch (error) {
  told["broken"] = error instanceof APIError && error.message.includes("Backend a");
}
const endless = await create("endless", { stream: true });
for await (const chunk of endless)
  if (chunk.choices[0].delta.content) endless.controller.abort();
told["cancelled"] = endless.controller.signal.aborted;
console.log(JSON.stringify(told));
