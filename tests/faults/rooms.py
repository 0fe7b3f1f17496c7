"""The fault points of rooms that not every server has: adapters, structures, tools, drafts; the device; the door.

Of what pools, and of what is kept: kept_rooms.py; of what records: recorded_rooms.py.
"""

from dataclasses import replace

from aserve import engine, texts
from aserve.adapters import Adapters
from aserve.constraints import calls, lark
from aserve.constraints.compiler import Compiler
from aserve.constraints.matcher import Compiled, MatcherConstraint
from aserve.constraints.thinking import BoundedThinking, Budget, ThinkingConstraint
from aserve.drafting.draft_model import DraftModelProposer
from aserve.engine import Engine
from aserve.engine_loop import EngineLoop
from aserve.http import doorman, inspector
from aserve.http.direct import DirectLine
from aserve.http.doorman import Doorman
from aserve.http.openai import adapters as adapter_routes
from aserve.http.openai import chat
from aserve.http.openai.speech import Speech
from aserve.kv_cache.paged_cache import PagedCache
from aserve.mailbox import Keeper, Mailbox
from aserve.models.lora import LoraLayers
from aserve.observe import explainer, mirror
from aserve.observe.explainer import Explainer
from aserve.observe.mirror import Mirror
from aserve.observe.observer import Observer
from aserve.observe.viewer import Viewer
from aserve.preparation import Preparer
from aserve.runner import adapters, batch, masks, readback, sampler, scoring, step
from aserve.runner.adapters import AdapterSlots
from aserve.runner.batch import BatchBuilder
from aserve.runner.controls import ControlTable
from aserve.runner.device import CpuDevice
from aserve.runner.draft_model import DraftModel
from aserve.runner.kv_store import KVStore, Pages
from aserve.runner.masks import MaskMaker, PendingMasks
from aserve.runner.readback import Readback
from aserve.runner.rows import RowTable
from aserve.runner.steady import SteadyBuilder
from aserve.runner.step import EagerStep
from aserve.runner.swapper import BlockMover
from aserve.runner.threads import StepThreads
from aserve.scheduler.adapter_places import AdapterPlaces
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.foresight import Foresight
from aserve.scheduler.readings import Readings
from aserve.server import door
from aserve.server.connections import Connections
from aserve.server.door import Doors
from aserve.server.http1 import Http1
from aserve.structures import Structures
from aserve.tenants import Tenants
from aserve.text.formats.parser import Parser
from aserve.texts import Texts
from tests.faults.computed_world import ComputedWorld
from tests.faults.door_world import DoorWorld, Wire
from tests.faults.explained_world import ExplainedWorld
from tests.faults.guided_world import GuidedWorld
from tests.faults.kept_rooms import KEPT
from tests.faults.points import FAILING, LOST, POINTS, Point, at, of
from tests.faults.recorded_rooms import RECORDED
from tests.faults.small_world import SmallWorld
from tests.faults.watched_world import WatchedWorld

GUIDED = (
    # Adapters.
    Point("adapter routes", at((adapter_routes, "parse"))),
    Point("adapters using", at((Adapters, "using"))),
    Point("adapters keeping", at((Adapters, "keeping"))),
    Point("adapters add", at((Adapters, "add"))),
    Point("adapters remove", at((Adapters, "remove"))),
    Point("adapters known", at((Adapters, "__contains__"))),
    Point("adapter place", at((Adapters, "_place"))),
    Point("adapter reader", lambda world: [(world.adapters._reader, "submit")]),
    Point("store load", of("store", "load")),
    Point("store drop", of("store", "drop")),
    Point("places settle", at((AdapterPlaces, "settle")), of_nobody=True),
    Point("places allows", at((AdapterPlaces, "allows")), of_nobody=True),
    Point("places admitted", at((AdapterPlaces, "admitted")), of_nobody=True),
    # Structures, and what they force.
    Point("structures compiled", at((Structures, "compiled"))),
    Point("structures bounded", at((Structures, "bounded"))),
    Point("budget made", at((Budget, "__init__"))),
    Point("budget after", at((Budget, "after")), of_nobody=True),
    Point("budget forced", at((Budget, "forced")), of_nobody=True),
    Point("bounded constraint", at((BoundedThinking, "constraint")), of_nobody=True),
    Point("bounded after", at((BoundedThinking, "after")), of_nobody=True),
    Point("bounded going on", at((BoundedThinking, "going_on"))),
    Point("bounded advance", at((ThinkingConstraint, "advance")), of_nobody=True),
    Point("bounded masks", at((ThinkingConstraint, "masks")), of_nobody=True),
    Point("bounded forced", at((ThinkingConstraint, "forced")), of_nobody=True),
    Point("thoughts begun", at((Texts, "begins_thought"))),
    Point("thoughts before", at((Texts, "thoughts_before"))),
    Point("thoughts named", at((calls, "thoughts_named"), (lark, "thoughts_named"))),
    Point("calls named", at((calls, "calls_named"))),
    Point("compiler made", at((Compiler, "__init__"))),
    Point("compiler compiled", at((Compiler, "compiled"))),
    Point("structure constraint", at((Compiled, "constraint")), of_nobody=True),
    Point("structure after", at((Compiled, "after")), of_nobody=True),
    Point("constraint advance", at((MatcherConstraint, "advance")), of_nobody=True),
    Point("constraint masks", at((MatcherConstraint, "masks")), of_nobody=True),
    Point("constraint forced", at((MatcherConstraint, "forced")), of_nobody=True),
    Point("foresight made", at((Foresight, "__init__"))),
    Point("foresight forced", at((Foresight, "forced")), of_nobody=True),
    Point("foresight forget", at((Foresight, "forget")), of_nobody=True, failing_steps=FAILING),
    # Tools.
    Point("tools use", at((chat, "tool_use"))),
    Point("reading of", at((chat, "reading_of"))),
    Point("reading enforced", at((chat, "enforced"))),
    Point("texts format", at((Texts, "format"))),
    Point("texts parsers", at((Texts, "parsers"))),
    Point("format chosen", at((texts, "answer_format"))),
    Point("format of thoughts", at((texts, "thought_markers"))),
    Point("parser chosen", at((texts, "parser_of"))),
    Point("special tokens", of("tokenizer", "token_strings")),
    Point("parser made", at((Parser, "__init__"))),
    Point("parser feed", at((Parser, "feed"))),
    Point("parser finish", at((Parser, "finish"))),
    Point("speech delta", at((Speech, "delta"))),
    Point("speech message", at((chat, "message_of"))),
    # Drafts.
    Point("drafter adopt", at((Drafter, "adopt"))),
    Point("drafter forget", at((Drafter, "forget"))),
    Point("drafter rewind", at((Drafter, "rewind")), of_nobody=True, failing_steps=FAILING),
    Point("drafter drafts", at((Drafter, "drafts_for")), of_nobody=True),
    Point("drafter steps", at((Drafter, "steps")), of_nobody=True),
    Point("cache reserve_most", at((PagedCache, "reserve_most")), of_nobody=True),
    Point("drafter verified", at((Drafter, "verified")), of_nobody=True),
    Point("proposer propose", at((DraftModelProposer, "propose")), of_nobody=True),
    Point("proposer steps", at((DraftModelProposer, "steps")), of_nobody=True),
    Point("proposer seconds", at((DraftModelProposer, "seconds")), of_nobody=True),
    Point("proposer forget", at((DraftModelProposer, "forget"))),
)

COMPUTED = (
    # The runner, in its thread. A fault in a step of many is nobody's.
    Point("runner submit", lambda world: [(world.runner._worker, "submit")], of_caller=True),
    Point("device stepping", at((CpuDevice, "stepping")), of_nobody=True),
    Point("device upload", at((CpuDevice, "upload")), of_nobody=True),
    Point("device download", at((CpuDevice, "download")), of_nobody=True),
    Point("device release", at((CpuDevice, "release")), of_nobody=True, failing_steps=FAILING, may_end_engine=LOST),
    Point("threads of", at((StepThreads, "of")), of_nobody=True),
    Point("rows stage", at((RowTable, "stage")), of_nobody=True),
    Point("rows apply", at((RowTable, "apply")), of_nobody=True),
    Point("rows samplings", at((RowTable, "samplings")), of_nobody=True),
    Point("controls set_up", at((ControlTable, "set_up")), of_nobody=True),
    Point("controls batch", at((ControlTable, "batch")), of_nobody=True),
    Point("batch build", at((BatchBuilder, "build")), of_nobody=True),
    Point("steady build", at((SteadyBuilder, "build")), of_nobody=True),
    Point("step execute", at((EagerStep, "execute")), of_nobody=True),
    Point("step sample", at((step, "sample_next")), of_nobody=True),
    Point("step scores", at((scoring, "score_sampled"), (step, "score_prompt")), of_nobody=True),
    Point("model forward", of("model", "forward"), of_nobody=True),
    Point("model logits", of("model", "logits"), of_nobody=True),
    Point("ops sample", of("ops", "sample"), of_nobody=True),
    Point("ops mask_logits", of("ops", "mask_logits"), of_nobody=True),
    Point("readback made", at((Readback, "__init__")), of_nobody=True),
    Point("readback result", at((Readback, "result")), of_nobody=True),
    Point("mover move", at((BlockMover, "move")), of_nobody=True),
    Point("store scrub", at((KVStore, "scrub")), of_nobody=True, failing_steps=FAILING),
    Point("pages take_next", at((Pages, "take_next")), of_nobody=True),
    # Masks, adapters and drafts of a step.
    Point("masks start", at((MaskMaker, "start")), of_nobody=True),
    Point("masks made", at((PendingMasks, "made")), of_nobody=True),
    Point("masks told", at((masks, "_tell")), of_nobody=True),
    Point("slots read", at((AdapterSlots, "read"))),
    Point("slots drop", at((AdapterSlots, "drop"))),
    Point("slots batch", at((AdapterSlots, "batch")), of_nobody=True),
    Point("slots of", at((AdapterSlots, "slots_of")), of_nobody=True),
    Point("adapter inspected", at((adapters, "inspect_adapter"))),
    Point("layers read", at((LoraLayers, "read"))),
    Point("layers put", at((LoraLayers, "put")), of_nobody=True),
    Point("draft model make", at((DraftModel, "make")), of_nobody=True),
    Point("drafts uploaded", at((batch, "upload_drafts")), of_nobody=True),
    Point("drafts filled in", at((batch, "fill_in")), of_nobody=True),
    Point("drafts counted", at((sampler, "count_accepted")), of_nobody=True),
    Point("drafts newest", at((sampler, "newest")), of_nobody=True),
    Point("drafts with history", at((sampler, "with_history")), of_nobody=True),
    Point("drafts recorded", at((sampler, "record_accepted")), of_nobody=True),
    Point("drafts landed", at((readback, "counting_places")), of_nobody=True),
)

DOOR = (
    # Whatever fails there, the long way says the same.
    Point("doorman objection", at((Doorman, "objection")), of_nobody=True),
    Point("doorman together", at((Doorman, "together")), of_nobody=True),
    Point("doorman refuse", at((Doorman, "refuse")), of_nobody=True),
    Point("doorman left", at((Doorman, "left")), of_nobody=True),
    Point("doorman log", at((doorman, "log_access")), of_nobody=True),
    Point("doorman tenants", at((Tenants, "turned_away")), of_caller=True),
    Point("door plain", at((door, "plain_request")), of_nobody=True),
    Point("door stamped", at((door, "_stamp")), of_nobody=True),
    Point("door framed", at((Doors, "framed")), of_nobody=True),
    Point("connections touch", at((Connections, "touch")), cuts=True),
    Point("connections mark", at((Connections, "mark")), cuts=True),
    Point("line asked for", at((DirectLine, "is_requested_by")), cuts=True),
    Point("line connect", at((DirectLine, "connect")), cuts=True),
    Point("line disconnect", at((DirectLine, "disconnect")), cuts=True),
    Point("connection bytes", at((Http1, "handle")), cuts=True),
    Point("connection write", at((Wire, "write")), cuts=True),
)

SMALL = (
    # Memory that is short.
    Point("cache can_fork", at((PagedCache, "can_fork")), of_nobody=True),
    Point("cache num_cached", at((PagedCache, "num_cached")), of_nobody=True),
    Point("cache swap_out", at((PagedCache, "swap_out")), of_nobody=True),
    Point("cache swap_in", at((PagedCache, "swap_in")), of_nobody=True),
    Point("cache host moves", at((PagedCache, "take_host_moves")), of_nobody=True),
    Point("cache free_host", at((PagedCache, "free_host")), of_nobody=True, failing_steps=FAILING),
    Point("cache rewind", at((PagedCache, "rewind")), of_nobody=True, failing_steps=FAILING),
    Point("cache distrust_host", at((PagedCache, "distrust_host")), of_nobody=True, failing_steps=FAILING),
)

WATCHED = (
    # Somebody looks on: what fails there is nobody's.
    Point("observer planned", at((Observer, "planned")), of_nobody=True),
    Point("observer published", at((Observer, "published")), of_nobody=True),
    Point("observer looked", at((Observer, "looked")), of_nobody=True),
    Point("observer taken_back", at((Observer, "taken_back")), of_nobody=True, failing_steps=FAILING),
    Point("observer clock", at((Observer, "now_us"))),
    Point("observer viewer", at((Observer, "viewer"))),
    Point("observer snapshot", at((Observer, "snapshot"))),
    Point("viewer news", at((Viewer, "news"))),
    Point("viewer offer", at((Viewer, "offer")), of_nobody=True),
    Point("mirror change", at((Mirror, "change"))),
    Point("mirror follow", at((Mirror, "follow")), of_nobody=True),
    Point("mirror meet", at((Mirror, "meet")), of_nobody=True),
    Point("mirror cards", at((mirror, "card_of")), of_nobody=True),
    Point("readings sequence", at((Readings, "sequence")), of_nobody=True),
    Point("readings who decode", at((Readings, "all_who_decode")), of_nobody=True),
    Point("mirror still", at((Mirror, "num_noted")), of_nobody=True),
    Point("readings noting", at((Readings, "note"))),
    Point("readings noted", at((Readings, "take_noted"))),
    Point("readings blocks", at((Readings, "take_blocks"))),
    Point("readings moved", at((Readings, "take_moved")), of_nobody=True),
    Point("cache noting", at((PagedCache, "note_hashes"))),
    Point("feed at length", at((inspector, "at_length")), of_nobody=True),
    Point("feed made", at((inspector, "Feed"))),
    Point("feed hello", at((inspector.Feed, "hello"))),
    Point("feed events", at((inspector.Feed, "events"))),
)

EXPLAINED = (
    # All ask where their time went: an answer may come without that, and with nothing else missing.
    Point("explain begins", at((Observer, "explain")), of_nobody=True),
    Point("explain ends", at((Observer, "leave")), of_nobody=True),
    Point("explain asked", at((Observer, "explanation")), of_nobody=True),
    Point("explain answer", at((Engine, "explanation")), of_nobody=True),
    Point("explain plan", at((Explainer, "planned")), of_nobody=True),
    Point("explain landed", at((Explainer, "landed")), of_nobody=True),
    Point("explain taken_back", at((Explainer, "taken_back")), of_nobody=True, failing_steps=FAILING),
    Point("explain prefix", at((explainer, "prefix_of")), of_nobody=True),
    Point("explain found", at((Observer, "find"))),
    Point("readings of a request", at((Readings, "of_request")), of_nobody=True),
    Point("readings ahead", at((Readings, "num_ahead")), of_nobody=True),
    Point("cache evictions", at((PagedCache, "was_evicted")), of_nobody=True),
)

LATER = (
    # Of every server: what came later to rooms that have points.
    Point("terms new", at((engine, "new_terms"))),
    Point("terms of branches", at((engine, "branch_terms"))),
    Point("generates", at((engine, "check_generates"))),
    Point("prompt ids", at((engine, "prompt_ids"))),
    Point("prompt room", at((texts, "check_room"))),
    Point("engine check_room", at((Engine, "check_room"))),
    Point("engine defaults", at((Engine, "default_params"))),
    Point("engine encode_chat", at((Engine, "encode_chat"))),
    Point("engine token_bytes", at((Engine, "token_bytes"))),
    Point("engine token_strings", at((Engine, "token_strings"))),
    Point("tokenizer count", of("tokenizer", "count")),
    Point("template unread", of("template", "unread")),
    Point("loop abort", at((EngineLoop, "abort"))),
    Point("cache hashes", at((PagedCache, "prompt_hashes"))),
    Point("cache rebase", at((PagedCache, "rebase"))),
    Point("loop open", at((EngineLoop, "open"))),
    Point("loop fork", at((EngineLoop, "fork"))),
    Point("loop request", at((EngineLoop, "request"))),
    Point("preparer", at((Preparer, "prepared"))),
    Point("texts encode", at((Texts, "encode"))),
    Point("texts encode_chat", at((Texts, "encode_chat"))),
    Point("texts decode", at((Texts, "decode"))),
    Point("mailbox shortcut", at((Mailbox, "shortcut"))),
    Point("mailbox left", at((Mailbox, "leave"))),
    Point("keeper made", at((Keeper, "__init__"))),
)

ALL_POINTS = (
    *POINTS,
    *LATER,
    *(replace(point, world=GuidedWorld) for point in GUIDED),
    *(replace(point, world=ComputedWorld) for point in COMPUTED),
    *(replace(point, world=SmallWorld) for point in SMALL),
    *(replace(point, world=DoorWorld) for point in DOOR),
    *(replace(point, world=WatchedWorld) for point in WATCHED),
    *(replace(point, world=ExplainedWorld) for point in EXPLAINED),
    *KEPT,
    *RECORDED,
)
