"""Ready pieces of code for each client. PURE: the site's address and a model in, texts out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

KEY = "YOUR_KEY"


@dataclass(frozen=True, slots=True)
class Snippet:
    name: str
    hint: str  # what to install or where it goes
    text: str


def snippets(url: str, model: str) -> list[Snippet]:
    """``url`` without a slash at its end."""
    return [
        Snippet(name, hint, write(url, model).strip() + "\n") for name, hint, write in _SNIPPETS
    ]


def _openai(url: str, model: str) -> str:
    return f"""
from openai import OpenAI

client = OpenAI(base_url={url + "/v1"!r}, api_key="{KEY}")
answer = client.chat.completions.create(
    model={model!r},
    messages=[{{"role": "user", "content": "Hello"}}],
)
print(answer.choices[0].message.content)
"""


def _anthropic(url: str, model: str) -> str:
    return f"""
from anthropic import Anthropic

client = Anthropic(base_url={url!r}, api_key="{KEY}")
answer = client.messages.create(
    model={model!r},
    max_tokens=200,
    messages=[{{"role": "user", "content": "Hello"}}],
)
print(answer.content[0].text)
"""


def _ollama(url: str, model: str) -> str:
    return f"""
from ollama import Client

client = Client(host={url!r}, headers={{"Authorization": "Bearer {KEY}"}})
answer = client.chat(
    model={model!r},
    messages=[{{"role": "user", "content": "Hello"}}],
)
print(answer.message.content)
"""


def _curl(url: str, model: str) -> str:
    quoted = model.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    return f"""
curl {url}/v1/chat/completions \\
  -H "Authorization: Bearer {KEY}" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{quoted}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
"""


def _langchain(url: str, model: str) -> str:
    return f"""
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url={url + "/v1"!r}, api_key="{KEY}", model={model!r})
print(chat.invoke("Hello").content)
"""


def _open_webui(url: str, model: str) -> str:
    return f"""
docker run -p 3000:8080 \\
  -e OPENAI_API_BASE_URL={url}/v1 \\
  -e OPENAI_API_KEY={KEY} \\
  ghcr.io/open-webui/open-webui:main
"""


_SNIPPETS: tuple[tuple[str, str, Callable[[str, str], str]], ...] = (
    ("curl", "any shell", _curl),
    ("OpenAI", "pip install openai", _openai),
    ("Anthropic", "pip install anthropic", _anthropic),
    ("Ollama", "pip install ollama", _ollama),
    ("LangChain", "pip install langchain-openai", _langchain),
    ("Open WebUI", "or: Settings, Connections, OpenAI API", _open_webui),
)
