"""The flags: how each is spelled, who reads its word, and what it does.

A flag is one row, and sets the field of its name, of `Options`, of `ServerOptions` or of `BatchOptions`. The names are
vLLM's where it has the same thing. Those of the other commands are in tool_flags.py.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from aserve.cli.words import (
    MAX_STORED,
    read_bool,
    read_choice,
    read_count,
    read_number,
    read_object,
    read_root,
    read_seconds,
    read_text,
    read_within,
)
from aserve.core.api_options import ApiOptions
from aserve.core.config import (
    DEVICES,
    DTYPES,
    GENERATION_CONFIGS,
    LOAD_FORMATS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
)
from aserve.core.pooling import CONVERT_KINDS, RUNNER_KINDS
from aserve.core.quantization import KV_CACHE_DTYPES, QUANTIZATIONS

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")


class ServerOptions(ApiOptions, frozen=True, kw_only=True):
    """What concerns the server and not the engine: what concerns its API, and"""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_key: tuple[str, ...] = ()
    api_keys_file: str | None = None
    shutdown_timeout: float = 30.0
    drain_delay: float = 0.0
    keepalive_timeout: float = 75.0
    client_header_timeout: float = 5.0
    max_body_bytes: int | None = None
    send_timeout: float = 30.0
    response_store: str | None = None
    response_store_bytes: int | None = None
    response_store_age: float = 30 * 24 * 3600.0
    log_level: str = "info"
    log_format: str = "text"
    dry_run: bool = False


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `aserve batch` reads and writes."""

    input_file: str = ""
    output_file: str = ""


class Flag(msgspec.Struct, frozen=True):
    """One option: its field's name, how a word is read, what stands for the word in the help, and what it does.

    many: takes several words. short: another way to type it.
    """

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    many: bool = False
    short: str | None = None

    @property
    def option(self) -> str:
        """As it is typed."""
        return "--" + self.name.replace("_", "-")


ENGINE_FLAGS: Final = (
    Flag("model", read_text, "FOLDER|ID", "a folder or a Hugging Face id; demo is the bundled demonstration model"),
    Flag(
        "runner",
        read_choice(RUNNER_KINDS),
        "|".join(RUNNER_KINDS),
        "generate text, or pool; auto is what the model is for",
    ),
    Flag(
        "convert",
        read_choice(CONVERT_KINDS),
        "|".join(CONVERT_KINDS),
        "what a model that generates is made to pool for; auto is what its folder says, or embed",
    ),
    Flag("hf_overrides", read_object, "JSON", "fields that replace those of config.json"),
    Flag("tokenizer", read_text, "FOLDER|ID", "a folder or id whose tokenizer replaces the model's own"),
    Flag("chat_template", read_text, "FILE", "a Jinja file that replaces the model's own chat template"),
    Flag(
        "tool_call_parser",
        read_text,
        "NAME",
        "how the model writes calls of tools; auto is what its chat template says",
    ),
    Flag(
        "reasoning_parser",
        read_text,
        "NAME",
        "how it writes thoughts; auto is what its chat template says, none is none",
    ),
    Flag("max_logprobs", int, "N", "likeliest tokens beside each that a request may ask for; -1 is the vocabulary"),
    Flag("revision", read_text, "NAME", "branch, tag or commit of a Hugging Face id"),
    Flag("download_dir", read_text, "FOLDER", "where Hugging Face files are cached"),
    Flag(
        "served_model_name", read_text, "NAME", "names that requests may give; the first is put into answers", many=True
    ),
    Flag("trust_remote_code", read_bool, "", "run Python code that comes with the model"),
    Flag(
        "load_format",
        read_choice(LOAD_FORMATS),
        "|".join(LOAD_FORMATS),
        "dummy makes random weights from config.json alone",
    ),
    Flag("dtype", read_choice(DTYPES), "|".join(DTYPES), "auto is the checkpoint's own"),
    Flag(
        "quantization",
        read_choice(tuple(QUANTIZATIONS)),
        "|".join(QUANTIZATIONS),
        "keep linear layers' weights as int8 (CPU) or fp8 (GPU): a scale for each output, or for each 128 or 32 inputs",
    ),
    Flag("device", read_choice(DEVICES), "|".join(DEVICES), "auto is cuda where there is one"),
    Flag(
        "generation_config",
        read_choice(GENERATION_CONFIGS),
        "|".join(GENERATION_CONFIGS),
        "whether generation_config.json sets sampling defaults",
    ),
    Flag("seed", int, "N", "of the dummy weights"),
    Flag("max_model_len", read_count, "N", "longest prompt and answer together, in tokens"),
    Flag("block_size", read_count, "N", "tokens in a block of the KV cache"),
    Flag(
        "tensor_parallel_size",
        read_count,
        "N",
        "processes that compute the model together, each with a part of every layer: on as many GPUs, or on a CPU",
        short="-tp",
    ),
    Flag("gpu_memory_utilization", read_number, "X", "share of the GPU's memory that aserve may use"),
    Flag("kv_cache_memory_bytes", read_count, "N", "size of the KV cache, instead of what profiling finds"),
    Flag(
        "kv_cache_dtype",
        read_choice(KV_CACHE_DTYPES),
        "|".join(KV_CACHE_DTYPES),
        "type of keys and values in the cache: auto is the model's; smaller ones hold more tokens; fp8 is for GPUs",
    ),
    Flag("swap_space", read_number, "X", "GiB of host memory for the blocks of preempted sequences"),
    Flag("max_num_seqs", read_count, "N", "sequences that run at once"),
    Flag("max_num_batched_tokens", read_count, "N", "tokens that a step computes at most"),
    Flag("watermark", read_number, "X", "share of the blocks kept free when a new sequence is admitted"),
    Flag("enable_prefix_caching", read_bool, "", "reuse the blocks of equal prompt beginnings"),
    Flag("enforce_eager", read_bool, "", "capture no CUDA graphs: launch every step kernel by kernel"),
    Flag("batch_invariant", read_bool, "", "on CUDA too, the same bits for a request in any batch, more slowly"),
    Flag(
        "preemption_mode",
        read_choice(PREEMPTION_MODES),
        "|".join(PREEMPTION_MODES),
        "how sequences give way when blocks run out; auto takes what is estimated to cost less",
    ),
    Flag(
        "scheduling_policy",
        read_choice(SCHEDULING_POLICIES),
        "|".join(SCHEDULING_POLICIES),
        "who runs first: the earlier; the lower priority number, which waiting makes up for; or in turn, by tenant",
    ),
    Flag(
        "step_timeout", read_number, "S", "seconds after which a step that has not landed ends the engine; 0 is never"
    ),
    Flag("long_prefill_token_threshold", read_count, "N", "tokens of one prompt that a step computes; 0 is no limit"),
    Flag(
        "scheduler_delay_factor",
        read_number,
        "X",
        "newcomers wait X times as long as the last step with prompts took, so that more come together",
    ),
    Flag(
        "target_itl_ms",
        read_number,
        "MS",
        "how long a step may take in which somebody decodes, prompts being computed in smaller pieces for it;"
        " 0 is any time (if not given: 2.5 times as long as without prompts on CUDA, 4 times on a CPU)",
    ),
    Flag(
        "max_num_queued_reqs",
        read_count,
        "N",
        "requests that may wait (serve: 4 times max-num-seqs, if not given); one more is refused with status 429",
    ),
    Flag(
        "metrics_prefix",
        read_text,
        "PREFIX",
        "what names of metrics begin with; vllm: for boards that were made for it",
    ),
    Flag("request_timeout", read_number, "SECONDS", "after which a request ends with what it has"),
    Flag(
        "speculative_config",
        read_object,
        "JSON",
        'guess tokens and verify several in a step: {"method": "ngram", "num_speculative_tokens": 5,'
        ' "prompt_lookup_min": 3, "prompt_lookup_max": 5}, or have a small model guess: {"model": FOLDER}',
    ),
    Flag("enable_lora", read_bool, "", "take adapters (LoRA), which requests name as their model"),
    Flag("lora_modules", read_text, "NAME=FOLDER", "adapters to load at the start, as PEFT saves them", many=True),
    Flag("max_loras", read_count, "N", "adapters that one step computes with (if not given: 8, or max-cpu-loras)"),
    Flag("max_lora_rank", read_count, "N", "of an adapter, at most"),
    Flag("max_cpu_loras", read_count, "N", "adapters in host memory (if not given: max-loras)"),
    Flag("lora_root", read_text, "FOLDER", "where POST /v1/load_lora_adapter finds adapters; without it nowhere"),
    Flag("record", read_text, "FILE", "write what comes, is planned and is sampled to this file, for aserve replay"),
    Flag("record_prompts", read_bool, "", "with the token ids of prompts, without which no replay can be checked"),
    Flag("record_logprobs", read_bool, "", "with the logprob of each sampled token, for which each is scored"),
    Flag("record_max_mb", read_count, "N", "millions of bytes after which the recording ends"),
)
SERVER_FLAGS: Final = (
    Flag("host", read_text, "ADDRESS", "address to listen on"),
    Flag("port", read_count, "N", "port to listen on; 0 picks a free one"),
    Flag("uds", read_text, "PATH", "a Unix socket to listen on, in place of host and port"),
    Flag("ssl_certfile", read_text, "FILE", "speak TLS, by this certificate and those of its authorities (PEM)"),
    Flag("ssl_keyfile", read_text, "FILE", "the certificate's private key, if it is not in the same file"),
    Flag("api_key", read_text, "KEY", "keys that requests must carry; none means open", many=True),
    Flag("api_keys_file", read_text, "FILE", "a YAML file of tenants with their keys and limits, read again at SIGHUP"),
    Flag("shutdown_timeout", read_seconds(), "SECONDS", "how long open requests get after SIGTERM and --drain-delay"),
    Flag("drain_delay", read_seconds(), "SECONDS", "how long requests are taken after SIGTERM, while /ready says 503"),
    Flag("keepalive_timeout", read_seconds(0.1), "SECONDS", "how long a connection may be idle"),
    Flag("client_header_timeout", read_seconds(0.1), "SECONDS", "how long a request's head may take"),
    Flag(
        "max_body_bytes",
        read_within(1, 2**31 - 1, "a number of bytes"),
        "N",
        "of a request (if not given: 3 Mi, and 8 for each token of the context, up to 8 Mi); one more is a 413",
    ),
    Flag("send_timeout", read_seconds(0.1), "SECONDS", "how long a client may take nothing of its answer"),
    Flag(
        "response_store",
        read_text,
        "FILE",
        "an SQLite file that keeps responses of /v1/responses (if not given: memory)",
    ),
    Flag(
        "response_store_bytes",
        read_within(1, MAX_STORED, "a number of bytes"),
        "N",
        "of responses that are kept, the oldest going first (if not given: 64 Mi in memory, 1 Gi in a file)",
    ),
    Flag("response_store_age", read_seconds(1.0, 1e9), "SECONDS", "how long a response is kept"),
    Flag("allowed_origins", read_text, "ORIGIN", "of web pages that browsers let ask (CORS); * is all", many=True),
    Flag("allowed_methods", read_text, "METHOD", "that such pages may use", many=True),
    Flag("allowed_headers", read_text, "HEADER", "that such pages may send", many=True),
    Flag("allow_credentials", read_bool, "", "let such pages send cookies and HTTP authentication"),
    Flag("root_path", read_root, "PATH", "what a proxy in front takes off the paths"),
    Flag("lenient", read_bool, "", "leave out fields that nobody knows, and tell in warnings, instead of a 400"),
    Flag("enable_force_include_usage", read_bool, "", "token counts in every chunk of every stream"),
    Flag("return_tokens_as_token_ids", read_bool, "", "tokens of logprobs as token_id:123, for all requests"),
    Flag("enable_tokenizer_info_endpoint", read_bool, "", "serve GET /tokenizer_info, which tells the chat template"),
    Flag("ui", read_bool, "", "serve pages for browsers: a chat at /"),
    Flag("batch_store", read_text, "FILE", "where uploaded files and batches are kept, in SQLite"),
    Flag(
        "batch_store_bytes",
        read_within(1, MAX_STORED, "a number of bytes"),
        "N",
        "of files and results, beyond which none is taken (if not given: 256 Mi in memory, 4 Gi in a file)",
    ),
    Flag(
        "idempotency_bytes",
        read_within(0, MAX_STORED, "a number of bytes"),
        "N",
        "of answers kept for requests with an Idempotency-Key; 0 keeps none",
    ),
    Flag("idempotency_age", read_seconds(1.0, 1e9), "SECONDS", "how long such an answer is kept"),
    Flag("log_level", read_choice(LOG_LEVELS), "|".join(LOG_LEVELS), "the least that is logged"),
    Flag("log_format", read_choice(LOG_FORMATS), "|".join(LOG_FORMATS), "how a line of the log is written"),
    Flag("dry_run", read_bool, "", "tell what would be served and how, as aserve doctor does, and end"),
)
BATCH_FLAGS: Final = (
    Flag("input_file", read_text, "FILE", "requests, a line of JSON each, as OpenAI's batches have them", short="-i"),
    Flag(
        "output_file",
        read_text,
        "FILE",
        "their answers; those that are in it already are not asked for again",
        short="-o",
    ),
)
