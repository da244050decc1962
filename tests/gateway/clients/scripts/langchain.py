"""langchain-openai against a router: URL KEY; prints what it made of it.

What the test's backend does is told by each request's words.
"""

import json
import os
import sys
import time

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, key = sys.argv[1:]
told = {}
model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="m")
answer = model.invoke("Hello")
told["chat"] = [answer.content, answer.usage_metadata["total_tokens"]]
told["stream"] = "".join(part.content for part in model.stream("Hello"))
embeddings = OpenAIEmbeddings(
    base_url=f"{url}/v1", api_key=key, model="m", check_embedding_ctx_length=False
)
told["embeddings"] = embeddings.embed_query("a")
responses = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="m", use_responses_api=True)
told["responses"] = responses.invoke("Hello").text
weather = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
told["tools"] = [c["args"] for c in model.bind_tools([weather]).invoke("use tools").tool_calls]
age = {"title": "age", "type": "object", "properties": {"age": {"type": "integer"}}}
told["schema"] = model.with_structured_output(age, method="json_schema").invoke("age")
image = {"type": "image_url", "image_url": {"url": os.environ["DATA_URL"]}}
model.invoke([HumanMessage([{"type": "text", "text": "look"}, image])])
try:
    ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="x").invoke("Hello")
except openai.NotFoundError as error:
    told["unknown model"] = error.code
began = time.monotonic()
told["waits after 429"] = [model.invoke("busy 429").content, time.monotonic() - began >= 3]
before = ""
try:
    for part in model.stream("break"):
        before += part.content
except openai.APIError as error:
    told["broken"] = [before, "Backend a" in error.message]
endless = model.stream("endless")
next(endless)
endless.close()
print(json.dumps(told))
