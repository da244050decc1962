"""Bodies that no request may have."""

from __future__ import annotations

from typing import Any

HELLO = [{"role": "user", "content": "Hello"}]

MALFORMED = {
    "empty": b"",
    "blank": b"  \n",
    "half": b'{"model": "m"',
    "text": b"hello",
    "array": b"[]",
    "string": b'"x"',
    "number": b"7",
    "null": b"null",
    "trailing": b'{"model": "m"} x',
    "single quotes": b"{'model': 'm'}",
    "NaN": b'{"model": "m", "temperature": NaN}',
    "invalid UTF-8 in a value": b'{"model": "m", "user": "\xff"}',
    "invalid UTF-8 in a key": b'{"\xc3\x28": 1}',
    "overlong UTF-8": b'{"model": "\xc0\xaf"}',
    "byte order mark": b'\xef\xbb\xbf{"model": "m"}',
    "UTF-16": '{"model": "m"}'.encode("utf-16"),
    "over-deep": b'{"model": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "over-deep objects": b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
    "lone surrogate as model": b'{"model": "\\ud800"}',
    "number of 10,000 digits": b'{"model": "m", "prompt": "x", "messages": [{"role": "user"}], '
    b'"input": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
}

#: Fields that spoil a chat request, and the one that is named in the refusal.
WRONG_TYPED: dict[str, tuple[dict[str, Any], str]] = {
    "model is a number": ({"model": 7}, "model"),
    "model is null": ({"model": None}, "model"),
    "model is empty": ({"model": ""}, "model"),
    "model is too long": ({"model": "m" * 301}, "model"),
    "messages is a text": ({"messages": "hello"}, "messages"),
    "messages is null": ({"messages": None}, "messages"),
    "messages is empty": ({"messages": []}, "messages"),
    "a message is a text": ({"messages": ["hello"]}, "messages"),
    "a message without a role": ({"messages": [{"content": "x"}]}, "messages"),
    "a role that is a number": ({"messages": [{"role": 1, "content": "x"}]}, "messages"),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    "content is an object": ({"messages": [{"role": "user", "content": {}}]}, "messages"),
    "a part is a text": ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
    "a part without a type": ({"messages": [{"role": "user", "content": [{}]}]}, "messages"),
    "stream is a text": ({"stream": "true"}, "stream"),
    "stream is a number": ({"stream": 1}, "stream"),
    "stream_options is a list": ({"stream_options": []}, "stream_options"),
    "include_usage is a text": ({"stream_options": {"include_usage": "yes"}}, "stream_options"),
    "max_tokens is a text": ({"max_tokens": "16"}, "max_tokens"),
    "max_tokens is a boolean": ({"max_tokens": True}, "max_tokens"),
    "max_tokens is negative": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens is a fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "n is zero": ({"n": 0}, "n"),
    "tools is an object": ({"tools": {}}, "tools"),
    "response_format is a text": ({"response_format": "json"}, "response_format"),
    "prompt_cache_key is a number": ({"prompt_cache_key": 5}, "prompt_cache_key"),
}
