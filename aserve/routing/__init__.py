"""Which of several replicas a request is sent to, and how many there should be. No clock, no I/O.

body --> keys_of --> Ask --> Router.choose --> Choice          at whoever stands in front of the replicas
Ledger --> ReplicaReport --> Router.reported                   what a replica holds and has to do, every few seconds
ReplicaLoad --> wanted_replicas                                how many replicas there should be
"""

from aserve.routing.keys import NO_KEYS, PromptKeys, keys_of, session_of
from aserve.routing.report import ReplicaLoad, ReplicaReport
from aserve.routing.router import Ask, Choice, Reason, Router, RouterOptions, RouterStatistics
from aserve.routing.scaling import ScalingOptions, ScalingState, wanted_replicas

__all__ = [
    "NO_KEYS",
    "Ask",
    "Choice",
    "PromptKeys",
    "Reason",
    "ReplicaLoad",
    "ReplicaReport",
    "Router",
    "RouterOptions",
    "RouterStatistics",
    "ScalingOptions",
    "ScalingState",
    "keys_of",
    "session_of",
    "wanted_replicas",
]
