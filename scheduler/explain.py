"""One decision in words: why it waited, why it went there, and what it cost.

PURE: values in, texts and tables out; no Django, no clock. The rules named are those of
docs/scheduling.md.
"""

from __future__ import annotations

NO_BREAK = "\N{NO-BREAK SPACE}"


def duration(seconds: float | None) -> str:
    """0.0032 as "3 ms", 12.41 as "12.4 s", 125 as "2 min 5 s", None as "–"."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f}{NO_BREAK}ms"
    if seconds < 99.95:
        return f"{seconds:.1f}{NO_BREAK}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}{NO_BREAK}min {rest}{NO_BREAK}s"
