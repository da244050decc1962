"""langchain-openai against a router: URL KEY; prints what it made of it."""

import json
import sys

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
# The test's backend calls tools next.
told["tools"] = [c["args"] for c in model.bind_tools([weather]).invoke("Hello").tool_calls]
print(json.dumps(told))
