"""openai 1.x and anthropic 0.x against a router: URL KEY; prints what they made of it."""

import json
import sys

import anthropic
import openai

url, key = sys.argv[1:]
told = {}
one = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
two = anthropic.Anthropic(base_url=url, api_key=key)
HELLO = [{"role": "user", "content": "Hello"}]

chat = one.chat.completions.create(model="m", messages=HELLO)
told["chat"] = [chat.choices[0].message.content, chat.usage.total_tokens]
chunks = one.chat.completions.create(model="m", messages=HELLO, stream=True)
told["stream"] = "".join(c.choices[0].delta.content or "" for c in chunks)
told["embeddings"] = one.embeddings.create(model="m", input="a").data[0].embedding
told["models"] = [model.id for model in one.models.list()]
told["responses"] = one.responses.create(model="m", input="Hello").output_text
try:
    one.chat.completions.create(model="x", messages=HELLO)
except openai.NotFoundError as error:
    told["unknown model"] = error.code
message = two.messages.create(model="m", max_tokens=20, messages=HELLO, temperature=0)
told["message"] = [message.content[0].text, message.stop_reason, message._request_id is not None]
with two.messages.stream(model="m", max_tokens=20, messages=HELLO) as stream:
    told["message stream"] = "".join(stream.text_stream)
told["count"] = two.messages.count_tokens(model="m", messages=HELLO).input_tokens
try:
    two.messages.create(model="x", max_tokens=20, messages=HELLO)
except anthropic.NotFoundError as error:
    told["unknown model of anthropic"] = error.body["error"]["type"]
# The test's backend breaks the next answer off.
try:
    for chunk in one.chat.completions.create(model="m", messages=HELLO, stream=True):
        told["before the break"] = chunk.choices[0].delta.content or ""
except openai.APIError as error:
    told["broken"] = "Backend a" in error.message
print(json.dumps(told))
