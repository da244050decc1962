// npm @anthropic-ai/sdk against a router: URL KEY; prints what it made of it.
// What the test's backend does is told by each request's words.
import Anthropic, { APIError, NotFoundError } from "@anthropic-ai/sdk";

const [url, key] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, authToken: key, apiKey: null });
const told = {};
const ask = (content, more = {}) => ({
  model: "m",
  max_tokens: 20,
  messages: [{ role: "user", content }],
  ...more,
});
const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", input_schema: PARAMETERS }];
const callsOf = (message) => message.content.map((c) => [c.id, c.name, c.input]);

const message = await client.messages.create(ask("Hello"));
told["chat"] = [message.content[0].text, message.stop_reason, message.usage.output_tokens];
told["stream"] = await client.messages.stream(ask("Hello")).finalText();
told["tools"] = callsOf(await client.messages.create(ask("use tools", { tools })));
told["tools stream"] = callsOf(
  await client.messages.stream(ask("use tools", { tools })).finalMessage(),
);
const [, data] = process.env.DATA_URL.split(",");
const source = { type: "base64", media_type: "image/png", data };
const look = [{ type: "text", text: "look" }, { type: "image", source }];
told["vision"] = (await client.messages.create(ask(look))).content[0].text;
told["count"] = (
  await client.messages.countTokens({ model: "m", messages: ask("Hello").messages })
).input_tokens;
told["models"] = (await client.models.list()).data.map((model) => model.id);
try {
  await client.messages.create(ask("Hello", { model: "x" }));
} catch (error) {
  told["unknown model"] = error instanceof NotFoundError && error.error.error.type;
}
for (const status of [429, 503]) {
  const began = Date.now();
  const answer = await client.messages.create(ask(`busy ${status}`));
  told[`waits after ${status}`] = [answer.content[0].text, Date.now() - began >= 3000];
}
try {
  await client.messages.create(ask("Hello", { model: "full" }));
} catch (error) {
  told["hopeless"] = [error.status, error.error.error.type];
}
let before = "";
try {
  for await (const event of await client.messages.create(ask("break", { stream: true })))
    before += event.delta?.text ?? "";
} catch (error) {
  told["broken"] = [before, error instanceof APIError && error.message.includes("Backend a")];
}
const endless = await client.messages.create(ask("endless", { stream: true }));
for await (const event of endless) if (event.delta?.text) endless.controller.abort();
told["cancelled"] = endless.controller.signal.aborted;
console.log(JSON.stringify(told));
