// npm ollama against a router: URL KEY; prints what it made of it.
// What the test's backend does is told by each request's words.
import { Ollama } from "ollama";

const [url, key] = process.argv.slice(2);
const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
const told = {};
const ask = (content, more = {}) => ({ model: "m", messages: [{ role: "user", content }], ...more });
const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters: PARAMETERS } }];

const chat = await client.chat(ask("Hello"));
told["chat"] = [chat.message.content, chat.done_reason, chat.eval_count];
const said = async (parts) => {
  let text = "";
  for await (const part of parts) text += part.message?.content ?? part.response;
  return text;
};
told["stream"] = await said(await client.chat(ask("Hello", { stream: true })));
told["generate"] = await said(await client.generate({ model: "m", prompt: "Hello", stream: true }));
const used = (await client.chat(ask("use tools", { tools }))).message.tool_calls;
told["tools"] = used.map((call) => [call.function.name, call.function.arguments]);
const [, data] = process.env.DATA_URL.split(",");
const look = [{ role: "user", content: "look", images: [data] }];
told["vision"] = (await client.chat({ model: "m", messages: look })).message.content;
const format = { type: "object", properties: { age: { type: "integer" } }, required: ["age"] };
told["schema"] = JSON.parse((await client.chat(ask("age", { format }))).message.content);
told["embeddings"] = (await client.embed({ model: "m", input: "a" })).embeddings;
told["models"] = (await client.list()).models.map((model) => model.name);
try {
  await client.chat(ask("Hello", { model: "x" }));
} catch (error) {
  told["unknown model"] = [error.status_code, error.error];
}
try {
  await client.chat(ask("busy 429"));
} catch (error) {
  told["busy"] = error.status_code;
}
let before = "";
try {
  for await (const part of await client.chat(ask("break", { stream: true })))
    before += part.message.content;
} catch (error) {
  told["broken"] = [before, error.message.includes("Backend a")];
}
const endless = await client.chat(ask("endless", { stream: true }));
try {
  for await (const part of endless) if (part.message.content) endless.abort();
} catch (error) {
  told["cancelled"] = error.name;
}
console.log(JSON.stringify(told));
