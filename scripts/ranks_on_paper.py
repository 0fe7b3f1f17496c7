"""What tensor parallelism would bring on H200s, from rooflines: milliseconds a decoding step, and beside replicas.

    step = max(weights / memory bandwidth, arithmetic) / ranks + keys and values / bandwidth / ranks + the group's calls
    call = latency + 2 (N - 1) / N x bytes / bandwidth of the links          of which there are 2 a layer, and 3

Nothing here was measured by aserve: memory and arithmetic are what others measured on an H200 (4.3 TB/s, 790 TFLOP/s in
bfloat16), links and latencies are assumed (NVLink 4 at 360 of its 450 GB/s; an all_reduce in a captured graph).

    python scripts/ranks_on_paper.py
"""

from typing import NamedTuple

TB_PER_S = 4.3e12
FLOPS = 790e12
LINK_BYTES_PER_S = 360e9
LATENCY_S = {1: 0.0, 2: 8e-6, 4: 10e-6, 8: 14e-6}
MEMORY_BYTES = 141e9
USABLE = 0.9
CONTEXT = 1024
STREAMS = (1, 32, 256)


class Shape(NamedTuple):
    """A decoder. parameters: of its matrices, the head included and the embedding not."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_bytes_per_token: int

    @property
    def weight_bytes(self) -> float:
        """In bfloat16."""
        return 2 * self.parameters

    def step_s(self, ranks: int, streams: int) -> float:
        """Seconds of a step in which each of the streams gets a token."""
        reads = self.weight_bytes / ranks / TB_PER_S
        computes = 2 * streams * self.parameters / ranks / FLOPS
        keys = streams * CONTEXT * self.kv_bytes_per_token / ranks / TB_PER_S
        return max(reads, computes) + keys + self.group_s(ranks, streams)

    def group_s(self, ranks: int, streams: int) -> float:
        """Of which ranks wait for each other."""
        num_bytes = 2 * streams * self.hidden
        call_s = LATENCY_S[ranks] + 2 * (ranks - 1) / ranks * num_bytes / LINK_BYTES_PER_S
        return (2 * self.layers + 3) * call_s if ranks > 1 else 0.0

    def fits(self, ranks: int) -> bool:
        """Whether the weights leave a tenth for keys and values."""
        return self.weight_bytes / ranks < 0.9 * USABLE * MEMORY_BYTES

    def kv_tokens(self, ranks: int) -> float:
        """Tokens whose keys and values fit beside the weights, on all ranks together."""
        return ranks * (USABLE * MEMORY_BYTES - self.weight_bytes / ranks) / self.kv_bytes_per_token


SHAPES = (
    Shape("Llama-3.1-8B", 7.50e9, 32, 4096, 131_072),
    Shape("Llama-3.1-70B", 69.5e9, 80, 8192, 327_680),
)


def main() -> None:
    """Tables in Markdown."""
    for shape in SHAPES:
        print(f"\n{shape.name}: {shape.weight_bytes / 1e9:.0f} GB of weights, {CONTEXT} tokens of context\n")
        columns = [f"{streams} streams: ms, tokens/s (waiting for each other)" for streams in STREAMS]
        print(f"| H200s | {' | '.join(columns)} | tokens of KV |\n|---|{'---|' * (len(STREAMS) + 1)}")
        for ranks in LATENCY_S:
            if not shape.fits(ranks):
                print(f"| {ranks} | {' | '.join('does not fit' for _ in STREAMS)} | - |")
                continue
            cells = [cell(shape, ranks, streams) for streams in STREAMS]
            print(f"| {ranks} | {' | '.join(cells)} | {shape.kv_tokens(ranks) / 1e6:.2f} million |")
        for ranks in (2, 4, 8):
            print(break_even(shape, ranks))


def cell(shape: Shape, ranks: int, streams: int) -> str:
    """Of a table."""
    step_s, group_s = shape.step_s(ranks, streams), shape.group_s(ranks, streams)
    return f"{1e3 * step_s:.2f}, {streams / step_s:,.0f} ({group_s / step_s:.0%})"


def break_even(shape: Shape, ranks: int) -> str:
    """Up to how many streams on so many GPUs one model on all of them gives more tokens than a replica on each."""
    least = next((size for size in LATENCY_S if shape.fits(size)), None)
    if least is None or least >= ranks:
        return f"{ranks} GPUs: nothing to choose"
    replicas = ranks // least
    for per_replica in range(1, 4097):
        streams = replicas * per_replica
        if shape.step_s(least, per_replica) <= shape.step_s(ranks, streams):
            return f"{ranks} GPUs: {replicas} replicas on {least} each give more from {streams} streams on"
    return f"{ranks} GPUs: one model on all of them gives more at any number of streams"


if __name__ == "__main__":
    main()
