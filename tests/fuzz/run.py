"""Look for bytes that a parser does not agree with itself or an independent one about.

    python -m tests.fuzz.run requests|responses|streams|bodies|forms [options of libFuzzer]

What has been of use is kept in .fuzz/, what fails in .fuzz/TARGET-…: mend it, and put those bytes
into tests/fuzz/corpus/TARGET/, which test_corpus.py goes through.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import atheris

FOUND = Path(".fuzz")
CORPUS = Path(__file__).parent / "corpus"

#: New ways through these are what the search goes by. Parsers in C are not seen; h11 stands
#: in for that of HTTP.
LOOKED_INTO = [
    "h11",
    "python_multipart",
    "mindrouter.gateway.protocol",
    "mindrouter.gateway.wire",
    "mindrouter.gateway.client",
    "mindrouter.gateway.events",
    "mindrouter.gateway.requests",
    "mindrouter.gateway.dialects",
    "mindrouter.gateway.surfaces",
    "backends.connection",
    "backends.incoming",
    "backends.opening",
    "backends.response",
]


def main() -> None:
    program, target, *options = sys.argv
    os.environ["DJANGO_SETTINGS_MODULE"] = "mindrouter.settings"
    os.environ["MINDROUTER_DATA"] = tempfile.mkdtemp(prefix="mindrouter-fuzz-")
    import django

    with atheris.instrument_imports(include=LOOKED_INTO):
        django.setup()
        check = import_module(f"tests.fuzz.{target}").check
    known = FOUND / target
    known.mkdir(parents=True, exist_ok=True)
    words = f"-dict={CORPUS / 'words.dict'}"
    prefix = f"-artifact_prefix={FOUND}/{target}-"
    folders = [str(known), str(CORPUS / target)]
    atheris.Setup([program, words, prefix, "-max_len=600", *options, *folders], check)
    atheris.Fuzz()


main()
