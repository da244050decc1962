"""What requests cost that are not counted in tokens, in tokens (``docs/clients.md``).

They are only ever used where a backend does not report tokens itself.
"""

from __future__ import annotations

import math
import re
from typing import Any

from mindrouter.gateway.requests import MEDIA_TOKENS, MOST_TOKENS, estimate_tokens

#: Whisper's encoder makes 1500 positions of 30 seconds.
TOKENS_PER_SECOND_OF_AUDIO = 50
#: Of audio whose length is not told: between compressed speech and 16-bit samples at 16 kHz.
BYTES_PER_SECOND_OF_AUDIO = 16_000
#: A reader of 150 words in a minute.
LETTERS_PER_SECOND_OF_SPEECH = 15
#: An image of 1024 x 1024 then costs what OpenAI counts for one of medium quality.
PIXELS_PER_TOKEN = 1024
USUAL_PIXELS = 1024 * 1024

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def audio_tokens(seconds: float) -> int:
    return min(MOST_TOKENS, math.ceil(seconds * TOKENS_PER_SECOND_OF_AUDIO))


def audio_file_tokens(size: int) -> int:
    """Of audio of which only the bytes are known."""
    return audio_tokens(size / BYTES_PER_SECOND_OF_AUDIO)


def spoken_tokens(text: str) -> int:
    """Of the audio that a text becomes."""
    return audio_tokens(len(text) / LETTERS_PER_SECOND_OF_SPEECH)


def image_tokens(count: int, size: str | None) -> int:
    """Of images to be made; ``size`` as in "1024x1536", anything else is the usual one."""
    match = _SIZE.fullmatch(size or "")
    pixels = int(match[1]) * int(match[2]) if match else USUAL_PIXELS
    return min(MOST_TOKENS, count * math.ceil(pixels / PIXELS_PER_TOKEN))


def input_tokens(value: Any) -> int:
    """Of whatever texts are in a decoded value; an image in it counts as in a chat."""
    tokens, left = 0, [value]  # no recursion: a value may be nested as deeply as the decoder goes
    while left:
        part = left.pop()
        if isinstance(part, str):
            is_media = part.startswith("data:")
            tokens += MEDIA_TOKENS if is_media else estimate_tokens(len(part.encode()))
        elif isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        else:
            tokens += 1  # a token's number, or next to nothing
    return tokens


def pair_tokens(left: Any, right: Any) -> int:
    """Of texts that are compared: one with each of many, or each with its partner."""
    lefts = left if isinstance(left, list) else [left]
    rights = right if isinstance(right, list) else [right]
    once = input_tokens(lefts) + input_tokens(rights)
    if len(lefts) == 1:
        return once + input_tokens(lefts) * (len(rights) - 1)
    if len(rights) == 1:
        return once + input_tokens(rights) * (len(lefts) - 1)
    return once
