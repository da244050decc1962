"""Forms, put together by hand."""

from __future__ import annotations

KIND = "multipart/form-data; boundary=XX"


def part(name: str, value: bytes, filename: str = "", more: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"{named}\r\n{more}\r\n'
    return head.encode() + value + b"\r\n"


MODEL = part("model", b"m")
SOUND = part("file", b"\x00\xff\r\n--X\r\n" * 3, "a.wav", "Content-Type: audio/wav\r\n")
END = b"--XX--\r\n"
