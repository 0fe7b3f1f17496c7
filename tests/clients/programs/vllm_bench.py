"""`vllm bench serve`, in vLLM's own environment: a run at each endpoint, and what it counts, as JSON.

URL is of a server that generates, URL_POOLING of one that pools; TOKENIZER is a folder.
"""

import argparse
import contextlib
import json
import sys

from vllm.benchmarks.serve import add_cli_args, main

URL, URL_POOLING, TOKENIZER = sys.argv[1:]
RUNS = {
    "openai": (URL, "/v1/completions"),
    "openai-chat": (URL, "/v1/chat/completions"),
    "openai-responses": (URL, "/v1/responses"),
    "openai-embeddings": (URL_POOLING, "/v1/embeddings"),
}
COUNTED = ("completed", "failed", "total_input_tokens", "total_output_tokens")


def run(backend, url, endpoint):
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    arguments = (
        *("--backend", backend, "--base-url", url, "--endpoint", endpoint, "--tokenizer", TOKENIZER),
        *("--model", "demo", "--num-prompts", "8", "--input-len", "32", "--output-len", "16", "--disable-tqdm"),
    )
    result = main(parser.parse_args(arguments))
    return {name: result.get(name) for name in COUNTED}


with contextlib.redirect_stdout(sys.stderr):
    found = {backend: run(backend, *where) for backend, where in RUNS.items()}
print(json.dumps(found))
