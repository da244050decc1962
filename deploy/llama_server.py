"""Runs one real llama.cpp server in the foreground, for the demo and for tests.

Needs the package ``xllamacpp`` (llama.cpp's own HTTP server inside one wheel). Prints ``READY
<address>`` when the model is loaded; stops on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from typing import Any


def main() -> int:
    options = read_options()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = start(options)
    print(f"READY {server.listening_address}", flush=True)
    # A timed wait: signal handlers only run while the main thread executes Python code.
    while not stop.wait(0.2):
        pass
    del server  # its destructor closes the port and joins the C++ threads
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a llama.cpp server in the foreground.")
    parser.add_argument("--model", required=True, help="path of a .gguf file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=2, help="requests run at once")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of context, for all slots")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alias", default="smollm2", help="the name clients ask for")
    parser.add_argument("--embeddings", action="store_true", help="serve /v1/embeddings too")
    parser.add_argument("--reranking", action="store_true", help="serve /v1/rerank only")
    parser.add_argument("--api-key", help="ask clients for this key")
    parser.add_argument("--sleep", type=int, help="unload the model after so many idle seconds")
    return parser.parse_args()


def start(options: argparse.Namespace) -> Any:
    """Load the model and listen. Raises: RuntimeError, from llama.cpp, when it cannot."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = [options.alias]
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.ctx
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.n_threads_http = max(8, 4 * options.slots)
    params.use_jinja = True
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    if options.embeddings:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    if options.reranking:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    if options.api_key:
        params.api_keys = [options.api_key]
    if options.sleep:
        params.sleep_idle_seconds = options.sleep
    return xllamacpp.Server(params)


if __name__ == "__main__":
    sys.exit(main())
