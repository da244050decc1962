"""litellm against a router: URL KEY; prints what it made of it, in three APIs.

What the test's backend does is told by each request's words.
"""

import json
import os
import sys
import time

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for a price list elsewhere
import litellm

url, key = sys.argv[1:]
told = {}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def ask(content, model="openai/m", **more):
    messages = [{"role": "user", "content": content}]
    base = f"{url}/v1" if model.startswith("openai/") else url
    return litellm.completion(model=model, messages=messages, api_base=base, api_key=key, **more)


def told_of(answer):
    return [answer.choices[0].message.content, answer.usage.total_tokens]


def said(stream):
    return "".join(part.choices[0].delta.content or "" for part in stream)


told["chat"] = told_of(ask("Hello"))
told["stream"] = said(ask("Hello", stream=True))
calls = ask("use tools", tools=TOOLS).choices[0].message.tool_calls
told["tools"] = [[c.id, c.function.name, c.function.arguments] for c in calls]
schema = {"name": "age", "schema": {"type": "object", "properties": {"age": {"type": "integer"}}}}
wanted = {"type": "json_schema", "json_schema": schema}
told["schema"] = json.loads(ask("age", response_format=wanted).choices[0].message.content)
embedded = litellm.embedding("openai/m", ["a"], api_base=f"{url}/v1", api_key=key)
told["embeddings"] = embedded.data[0]["embedding"]
image = {"type": "image_url", "image_url": {"url": os.environ["DATA_URL"]}}
ask([{"type": "text", "text": "look"}, image])
try:
    ask("Hello", "openai/x")
except litellm.NotFoundError as error:
    told["unknown model"] = error.status_code
began = time.monotonic()
waited = ask("busy 429", max_retries=2)
told["waits after 429"] = [waited.choices[0].message.content, time.monotonic() - began >= 3]
before = ""
try:
    for part in ask("break", stream=True):
        before += part.choices[0].delta.content or ""
except litellm.exceptions.MidStreamFallbackError as error:
    told["broken"] = [before, "Backend a" in str(error)]
told["message"] = told_of(ask("Hello", "anthropic/m"))
told["ollama chat"] = told_of(ask("Hello", "ollama_chat/m"))
told["ollama stream"] = said(ask("Hello", "ollama_chat/m", stream=True))
endless = ask("endless", stream=True)
next(endless)  # it cannot be closed: the end of the process does it
print(json.dumps(told))
