"""From the tensors of a step to its StepResult: one download, then plain values. Knows no kernel and no row."""

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any

from aserve.core.plan import StepPlan, StepResult, TokenScores
from aserve.runner.batch import StepBatch
from aserve.runner.device import StepDevice
from aserve.runner.sampler import without_token
from aserve.runner.scoring import HostScores, prompt_scores, sampled_scores, tensors_of
from aserve.runner.step import StepOutput
from aserve.runner.verification import counting_places


class Readback:
    """A step's outputs on their way to the host. Made in the runner's thread; `result` may wait, in another.

    batch: None where nothing was scored.
    """

    def __init__(self, plan: StepPlan, batch: StepBatch | None, output: StepOutput, device: StepDevice) -> None:
        self._plan = plan
        self._sampled_targets = () if batch is None else batch.sampled_targets
        self._prompt_targets = None if batch is None else batch.prompt_targets
        self._has_drafts = output.num_accepted_S is not None
        tensors = [output.ids_N]
        for scores in output.scores:
            tensors += tensors_of(scores)
        if output.prompt_scores is not None:
            tensors += tensors_of(output.prompt_scores)
        if output.num_accepted_S is not None:
            tensors.append(output.num_accepted_S)
        self._has_vectors = output.vectors_NO is not None
        if output.vectors_NO is not None:
            tensors.append(output.vectors_NO)
        self._places = tuple(output.token_vectors)
        tensors += [vectors.reshape(-1) for vectors in output.token_vectors.values()]
        self._wait = device.download(tensors)

    def result(self) -> StepResult:
        """Wait for the outputs. Raises what the device raised."""
        arrays: Iterator[list[Any]] = iter(self._wait())
        token_ids = tuple(next(arrays))
        parts = [HostScores(*islice(arrays, 4)) for _ in self._sampled_targets]
        scores = sampled_scores(self._sampled_targets, token_ids, parts)
        prompts: tuple[tuple[TokenScores, ...], ...] = ()
        if self._prompt_targets is not None:
            prompts = prompt_scores(self._prompt_targets, HostScores(*islice(arrays, 4)))
        num_accepted: tuple[int, ...] = ()
        if self._has_drafts:
            num_accepted = tuple(next(arrays))
            places = counting_places(self._plan.slices, num_accepted)
            token_ids = tuple(token_ids[place] for place in places)
            scores = tuple(scores[place] for place in places) if scores else ()
        failed = without_token(self._plan, token_ids, num_accepted)
        vectors = [array("f", vector) for vector in next(arrays)] if self._has_vectors else []
        for place in self._places:
            vectors[place] = array("f", next(arrays))
        return StepResult(self._plan.step_id, token_ids, scores, prompts, failed, num_accepted, tuple(vectors))
