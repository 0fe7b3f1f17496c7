"""Beam search as one would write it first: whole sequences, every continuation of every beam, no memory of the past."""

from collections.abc import Iterable, Sequence

from aserve.core.layout import Window
from aserve.core.params import BeamParams
from tests.fakes import scores_of, seen_by


def reference_beam_search(
    prompt: Sequence[int],
    params: BeamParams,
    *,
    num_returned: int,
    max_tokens: int,
    stop_ids: Iterable[int],
    vocabulary: range,
    min_tokens: int = 0,
    mark: int = 0,
    windows: Sequence[Window] = (None,),
) -> list[tuple[list[int], float]]:
    """The best answers over the fake model, best first: (tokens, summed log-probability)."""
    width, penalty = params.width, params.length_penalty
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int], float]] = []
    for length in range(1, max_tokens + 1):
        grown = []
        for logprob, answer in beams:
            context = [(position, token, mark) for position, token in enumerate((*prompt, *answer))]
            for token in vocabulary:
                if not (token in stop_ids and length <= min_tokens):
                    score = scores_of(seen_by(context, windows), vocabulary, token, 0).logprob
                    grown.append((logprob + score, [*answer, token]))
        grown.sort(key=lambda beam: -beam[0])
        for logprob, answer in grown[:width]:
            if answer[-1] in stop_ids or length == max_tokens:
                finished.append((logprob / length**penalty, answer, logprob))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis[0])[:width]
        beams = [beam for beam in grown if beam[1][-1] not in stop_ids][:width]
        if not beams:
            break
        if len(finished) == width:
            reach = max_tokens if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or beams[0][0] / reach**penalty <= finished[-1][0]:
                break
    finished += finished[-1:] * (num_returned - len(finished))
    return [(answer, logprob) for _, answer, logprob in finished[:num_returned]]
