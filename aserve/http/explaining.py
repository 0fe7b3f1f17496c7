"""x_aserve: what requests of all APIs may ask of aserve alone; and what their answers say of it.

"x_aserve": {"explain": true}     -->     "x_aserve": {"explanation": {...}}, where the token counts are
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aserve.edges import aside
from aserve.engine import Engine
from aserve.http.endpoint import Exchange
from aserve.http.shapes import check_names

_log = logging.getLogger(__name__)

Told = Mapping[str, Any]
"""Members of an answer's last object, besides those that its API has."""
NOTHING: Final[Told] = {}


class XAserve(msgspec.Struct, frozen=True):
    """x_aserve. explain: the answer says where its time went."""

    explain: bool | None = None


class Explained:
    """The explanations of a request's prompts. spent_s: what it took before the engine was asked."""

    def __init__(self, engine: Engine, spent_s: float) -> None:
        self.spent_s = spent_s
        self._engine = engine
        self._ids: dict[int, str] = {}
        self._found: dict[int, dict[str, Any] | None] = {}

    def opened(self, place: int, request_id: str) -> None:
        """The engine has taken a prompt, as that request."""
        self._ids[place] = request_id

    def ended(self, place: int) -> None:
        """A prompt's answer is over. What goes wrong here is told to the log, and ends no answer."""
        if place not in self._found:
            self._found[place] = None
            aside(_log, "explaining", self._ids[place], self._find, place)

    def _find(self, place: int) -> None:
        self._found[place] = msgspec.to_builtins(self._engine.explanation(self._ids[place]))

    def told(self) -> dict[str, Any]:
        """What the answer says, once that of all prompts is over: of one prompt, or a list of each one's."""
        for place in self._ids:
            self.ended(place)
        each = [self._found[place] for place in sorted(self._ids)]
        return {"x_aserve": {"explanation": each[0]} if len(each) == 1 else {"explanations": each}}


def explained_of(engine: Engine, exchange: Exchange, asked: XAserve | None) -> Explained | None:
    """Where explanations go, if the request asks for any."""
    return Explained(engine, exchange.record.age_s()) if asked is not None and asked.explain else None


def check_extension(raw: Mapping[str, Any], asked: XAserve | None) -> None:
    """Raise `InvalidRequestError` for a member of a request's x_aserve that nobody knows."""
    check_names(raw.get("x_aserve"), asked, "x_aserve")
