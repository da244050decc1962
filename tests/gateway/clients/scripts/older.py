"""openai 1.x and anthropic 0.x against a router: URL KEY; prints what they made of it.

What the test's backend does is told by each request's words.
"""

import json
import os
import sys
import time

import anthropic
import openai
from pydantic import BaseModel


class Age(BaseModel):
    age: int


url, key = sys.argv[1:]
told = {}
one = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
two = anthropic.Anthropic(base_url=url, api_key=key)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def ask(content, **more):
    return {"model": "m", "messages": [{"role": "user", "content": content}]} | more


def create(content, **more):
    return one.chat.completions.create(**ask(content, **more))


chat = create("Hello")
told["chat"] = [chat.choices[0].message.content, chat.usage.total_tokens]
chunks = create("Hello", stream=True)
told["stream"] = "".join(c.choices[0].delta.content or "" for c in chunks)
calls = create("use tools", tools=TOOLS).choices[0].message.tool_calls
told["tools"] = [[c.id, c.function.name, c.function.arguments] for c in calls]
create([{"type": "image_url", "image_url": {"url": os.environ["DATA_URL"]}}])
answer = one.beta.chat.completions.parse(**ask("age", response_format=Age))
told["schema"] = answer.choices[0].message.parsed.age
told["embeddings"] = one.embeddings.create(model="m", input="a").data[0].embedding
told["models"] = [model.id for model in one.models.list()]
told["responses"] = one.responses.create(model="m", input="Hello").output_text
try:
    create("Hello", model="x")
except openai.NotFoundError as error:
    told["unknown model"] = error.code
for status in (429, 503):
    began = time.monotonic()
    waited = create(f"busy {status}").choices[0].message.content
    told[f"waits after {status}"] = [waited, time.monotonic() - began >= 3]
try:
    create("Hello", model="full")
except openai.PermissionDeniedError as error:
    told["hopeless"] = [error.status_code, error.code]
try:
    for chunk in create("break", stream=True):
        told["before the break"] = chunk.choices[0].delta.content or ""
except openai.APIError as error:
    told["broken"] = "Backend a" in error.message
with create("endless", stream=True) as endless:
    next(endless)

message = two.messages.create(**ask("Hello", max_tokens=20, temperature=0))
told["message"] = [message.content[0].text, message.stop_reason, message._request_id is not None]
with two.messages.stream(**ask("Hello", max_tokens=20)) as stream:
    told["message stream"] = "".join(stream.text_stream)
tools = [{"name": "get_weather", "input_schema": PARAMETERS}]
used = two.messages.create(**ask("use tools", max_tokens=20, tools=tools)).content
told["message tools"] = [[call.id, call.name, call.input] for call in used]
messages = ask("Hello")["messages"]
told["count"] = two.messages.count_tokens(model="m", messages=messages).input_tokens
try:
    two.messages.create(**ask("Hello", model="x", max_tokens=20))
except anthropic.NotFoundError as error:
    told["unknown model of anthropic"] = error.body["error"]["type"]
try:
    with two.messages.stream(**ask("break", max_tokens=20)) as stream:
        for text in stream.text_stream:
            told["message before the break"] = text
except anthropic.APIError as error:
    told["message broken"] = "Backend a" in error.message
print(json.dumps(told))
