"""A glance at a large body: token ids that are too many are refused before they are decoded."""

from collections.abc import Mapping

import msgspec

from aserve.engine import AsyncEngine
from aserve.http.body import Glance, is_flat


def token_limits(engine: AsyncEngine) -> Glance:
    """Raises what the engine says to so many ids: `prompt`, unless it is to be truncated, and `tokens`."""

    def glance(members: Mapping[str, msgspec.Raw]) -> None:
        for name, check in (("prompt", engine.check_length), ("tokens", engine.check_num_decoded)):
            ids = bytes(members.get(name, b""))
            if is_flat(ids) and "truncate_prompt_tokens" not in members:
                check(range(ids.count(b",") + 1))

    return glance
