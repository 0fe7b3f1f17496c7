"""`vllm bench serve`, in vLLM's own environment: a run at each endpoint, and what it counts, as JSON.

URL is of a server that generates, URL_POOLING of one that pools; TOKENIZER is a folder.
"""

import argparse
import contextlib
import json
import sys

from vllm.benchmarks.serve import add_cli_args, main

URL, URL_POOLING, TOKENIZER = sys.argv[1:]
SAMPLED = ("--logprobs", "2", "--temperature", "0.5", "--top-k", "10", "--min-p", "0.1", "--repetition-penalty", "1.1")
RUNS = {
    "completions": ("openai", URL, "/v1/completions"),
    "completions, sampled": ("openai", URL, "/v1/completions", *SAMPLED),
    "chat": ("openai-chat", URL, "/v1/chat/completions", "--num-warmups", "2", "--max-concurrency", "2"),
    "responses": ("openai-responses", URL, "/v1/responses"),
    "embeddings": ("openai-embeddings", URL_POOLING, "/v1/embeddings"),
    "pooling": ("vllm-pooling", URL_POOLING, "/pooling"),
}
COUNTED = ("completed", "failed", "total_input_tokens", "total_output_tokens")


def run(backend, url, endpoint, *more):
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    arguments = (
        *("--backend", backend, "--base-url", url, "--endpoint", endpoint, "--tokenizer", TOKENIZER),
        *("--model", "demo", "--num-prompts", "8", "--input-len", "32", "--output-len", "16", "--disable-tqdm"),
        *more,
    )
    result = main(parser.parse_args(arguments))
    return {name: result.get(name) for name in COUNTED}


with contextlib.redirect_stdout(sys.stderr):
    found = {name: run(*how) for name, how in RUNS.items()}
print(json.dumps(found))
