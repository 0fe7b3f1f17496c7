"""vLLM's flags that aserve has not: which of them ask for what is so anyway, and which for what there is not.

The first kind is left out with a line that says why, so that a command line written for vLLM goes on working. The
second is refused. A flag whose value changes nothing (`--pipeline-parallel-size 1`) is of the first kind.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

NOT_NEEDED: Final = "not needed"
NOT_YET: Final = "not supported yet"
ELSEWHERE: Final = "has another name here"


class Foreign(NamedTuple):
    """A flag that aserve has not.

    verdict: of the three above. why: what a person is told after it. takes_value: whether a word follows it.
    neutral: values with which it changes nothing.
    """

    verdict: str
    why: str
    takes_value: bool = True
    neutral: tuple[str, ...] = ()

    def is_harmless(self, value: str | None) -> bool:
        """Whether leaving it out changes nothing."""
        return self.verdict == NOT_NEEDED or (value is not None and value.lower() in self.neutral)


ONE_PROCESS: Final = "one process plans, and --tensor-parallel-size alone splits a model"
TEXT_ONLY: Final = "models take text alone"
TLS: Final = "put a proxy in front that speaks TLS"


def _switches(verdict: str, why: str, *names: str) -> dict[str, Foreign]:
    return {name: Foreign(verdict, why, takes_value=False) for name in names}


def _values(verdict: str, why: str, *names: str, neutral: tuple[str, ...] = ()) -> dict[str, Foreign]:
    return {name: Foreign(verdict, why, neutral=neutral) for name in names}


FOREIGN: Final[Mapping[str, Foreign]] = {
    **_values(NOT_YET, ONE_PROCESS, "pipeline-parallel-size", neutral=("1",)),
    **_values(NOT_YET, ONE_PROCESS, "data-parallel-size", "decode-context-parallel-size", "nnodes", neutral=("1",)),
    **_values(NOT_YET, ONE_PROCESS, "data-parallel-rank", "data-parallel-address", "data-parallel-backend"),
    **_values(NOT_YET, ONE_PROCESS, "data-parallel-rpc-port", "data-parallel-size-local", "node-rank", "master-addr"),
    **_values(NOT_YET, ONE_PROCESS, "distributed-executor-backend", "master-port", neutral=("uni", "mp")),
    **_values(NOT_YET, ONE_PROCESS, "api-server-count", neutral=("1",)),
    **_switches(NOT_YET, ONE_PROCESS, "enable-expert-parallel", "enable-eplb", "enable-dbo", "headless"),
    **_switches(NOT_NEEDED, ONE_PROCESS, "disable-frontend-multiprocessing", "disable-custom-all-reduce"),
    **_switches(NOT_NEEDED, "every prompt is computed in pieces", "enable-chunked-prefill"),
    **_switches(NOT_NEEDED, "the next step is planned while the last one runs", "async-scheduling"),
    **_values(NOT_NEEDED, "the next step is planned while the last one runs", "num-scheduler-steps"),
    **_switches(NOT_NEEDED, "there is one block manager", "use-v2-block-manager"),
    **_values(NOT_NEEDED, "blocks are hashed by SHA-256", "prefix-caching-hash-algo"),
    **_values(NOT_NEEDED, "a step takes pieces of as many prompts as fit", "max-num-partial-prefills"),
    **_values(NOT_NEEDED, "--long-prefill-token-threshold bounds them", "max-long-partial-prefills"),
    **_values(NOT_NEEDED, "models are not compiled by torch.compile", "compilation-config"),
    **_values(NOT_NEEDED, "graphs are captured by need", "cuda-graph-sizes", "max-seq-len-to-capture"),
    **_values(NOT_NEEDED, "graphs are captured by need", "cudagraph-capture-sizes", "max-cudagraph-capture-size"),
    **_switches(NOT_NEEDED, "kernels are chosen by the device", "disable-cascade-attn"),
    **_values(NOT_NEEDED, "kernels are chosen by the device", "attention-backend", "model-impl"),
    **_values(NOT_NEEDED, "llguidance enforces structures", "guided-decoding-backend", "structured-outputs-config"),
    **_switches(NOT_NEEDED, "calls are read where a request has tools", "enable-auto-tool-choice"),
    **_switches(NOT_NEEDED, "thoughts are read where the model has any", "enable-reasoning"),
    **_values(NOT_NEEDED, "it is told by the template", "chat-template-content-format"),
    **_values(NOT_NEEDED, "tokenizer.json is read as it is", "tokenizer-mode"),
    **_values(NOT_NEEDED, "config.json is read as it is", "config-format"),
    **_switches(NOT_NEEDED, "texts of requests are never logged", "disable-log-requests", "enable-log-requests"),
    **_values(NOT_NEEDED, "texts of requests are never logged", "max-log-len"),
    **_switches(NOT_NEEDED, "every answer has X-Request-Id", "enable-request-id-headers"),
    **_switches(NOT_NEEDED, "there is /openapi.json, and no page of it", "disable-fastapi-docs"),
    **_values(NOT_NEEDED, "/metrics has all of them", "show-hidden-metrics-for-version"),
    **_values(NOT_NEEDED, "weights are read one tensor after another", "max-parallel-loading-workers"),
    **_values(NOT_NEEDED, "adapters are kept in the model's type", "lora-dtype", neutral=("auto",)),
    **_values(NOT_NEEDED, "no adapter of today needs it", "lora-extra-vocab-size"),
    **_values(NOT_NEEDED, "--log-level says what is logged", "uvicorn-log-level"),
    **_switches(NOT_NEEDED, "--log-level warning keeps to what is wrong", "disable-log-stats"),
    **_switches(NOT_NEEDED, "--log-level warning keeps to what is wrong", "disable-uvicorn-access-log"),
    **_values(ELSEWHERE, "--runner and --convert", "task"),
    **_values(ELSEWHERE, "--kv-cache-memory-bytes", "num-gpu-blocks-override"),
    **_values(ELSEWHERE, "--speculative-config", "speculative-model", "num-speculative-tokens"),
    **_values(ELSEWHERE, "--hf-overrides", "rope-scaling", "rope-theta"),
    **_values(ELSEWHERE, "--revision, which is the tokenizer's too", "tokenizer-revision", "code-revision"),
    **_values(ELSEWHERE, "the environment variable HF_TOKEN", "hf-token"),
    **_values(ELSEWHERE, "--config", "config-file"),
    **_switches(NOT_YET, "keys and values of fp8 have no scales", "calculate-kv-scales"),
    **_values(NOT_YET, "weights are on one device", "cpu-offload-gb", neutral=("0", "0.0")),
    **_values(NOT_YET, "the KV cache belongs to one process", "kv-transfer-config", "kv-events-config"),
    **_values(NOT_YET, "the KV cache belongs to one process", "kv-offloading-size", "kv-offloading-backend"),
    **_values(NOT_YET, TEXT_ONLY, "limit-mm-per-prompt", "mm-processor-kwargs", "allowed-local-media-path"),
    **_values(NOT_YET, TEXT_ONLY, "media-io-kwargs", "mm-encoder-tp-mode", "mm-processor-cache-gb"),
    **_switches(NOT_YET, TEXT_ONLY, "enable-prompt-embeds", "interleave-mm-strings", "skip-mm-profiling"),
    **_values(NOT_YET, TLS, "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers"),
    **_switches(NOT_YET, TLS, "enable-ssl-refresh"),
    **_switches(NOT_YET, "the tokenizer is always there", "skip-tokenizer-init"),
    **_switches(NOT_YET, "windows are those of the model", "disable-sliding-window"),
    **_switches(NOT_YET, "weights stay where they are", "enable-sleep-mode"),
    **_switches(NOT_YET, "each rank has its part of an adapter's layers, as of the model's", "fully-sharded-loras"),
    **_switches(NOT_YET, "see /metrics", "enable-server-load-tracking", "enable-layerwise-nvtx-tracing"),
    **_values(NOT_YET, "see /metrics", "otlp-traces-endpoint", "collect-detailed-traces"),
    **_values(NOT_YET, "answers are the assistant's", "response-role", neutral=("assistant",)),
    **_values(NOT_YET, "see --generation-config", "override-generation-config"),
    **_values(NOT_YET, "mount aserve.http.create_app in an application of yours", "middleware"),
    **_values(NOT_YET, "see docs/design.md for where code goes", "logits-processors", "tool-parser-plugin"),
    **_values(NOT_YET, "see docs/design.md for where code goes", "worker-cls", "worker-extension-cls"),
    **_values(NOT_YET, "see docs/design.md for where code goes", "additional-config", "scheduler-cls"),
    **_values(NOT_YET, "--log-format json is for collectors", "log-config-file"),
}
"""By name, without its dashes."""

SHORT: Final[Mapping[str, str]] = {
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-asc": "api-server-count",
    "-O": "compilation-config",
}


class Sorted(NamedTuple):
    """words: the command line without vLLM's flags. left_out, refused: a line about each of these."""

    words: list[str]
    left_out: tuple[str, ...]
    refused: tuple[str, ...]


def sort_out(words: Sequence[str], known: Iterable[str]) -> Sorted:
    """Take the flags of the table out of a command line. known: options of aserve, which stay."""
    stays = set(known)
    kept: list[str] = []
    left_out: list[str] = []
    refused: list[str] = []
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        option, equals, value = word.partition("=")
        flag = None if option in stays else find(option)
        if flag is None:
            kept.append(word)
            continue
        given = value if equals else None
        if given is None and flag.takes_value and pending and not pending[-1].startswith("-"):
            given = pending.pop()
        told = f"{option}: {flag.verdict}: {flag.why}"
        (left_out if flag.is_harmless(given) else refused).append(told)
    return Sorted(kept, tuple(left_out), tuple(refused))


def find(option: str) -> Foreign | None:
    """The entry of an option as it is typed; None for what the table does not have."""
    if option in SHORT:
        return FOREIGN[SHORT[option]]
    if not option.startswith("--"):
        return None
    name = option.removeprefix("--").replace("_", "-")
    if name not in FOREIGN and name.startswith("no-"):
        return FOREIGN.get(name.removeprefix("no-"))
    return FOREIGN.get(name)
