"""The fault points of rooms that make vectors, and of those that keep something: responses, files, batches."""

from dataclasses import replace

from aserve import engine, texts, vectors
from aserve.engine import Engine
from aserve.http.batch import batches, files, lines
from aserve.http.batch import routes as batch_routes
from aserve.http.batch.batches import Batches
from aserve.http.batch.lines import LineRunner
from aserve.http.batch.turns import Turns
from aserve.http.openai.responses import background, create, keeping, later
from aserve.http.openai.responses.background import Job, Jobs
from aserve.http.openai.responses.keeping import Kept
from aserve.http.openai.responses.output import Output, Tokens
from aserve.http.openai.responses.wire import ResponseWire
from aserve.http.paging import Page
from aserve.http.pooling import classify, embeddings, fields, scores
from aserve.models.pooler_head import PoolerHead
from aserve.runner import encoder, pooling
from aserve.runner.encoder import EncoderRunner
from aserve.runner.pooling import PooledStep
from aserve.runner.readback import Readback
from aserve.runner.step import EagerStep
from aserve.stores.batches import BatchStore
from aserve.stores.database import Database
from aserve.stores.responses import SqliteStore
from aserve.tenants import Tenants
from aserve.text.stream import VectorStream
from aserve.texts import Texts
from aserve.vectors import Vectors
from tests.faults.batches_world import BatchesWorld
from tests.faults.points import LOST, Point, at, of
from tests.faults.pooled_world import EncodedWorld, HashEncoder, PooledWorld
from tests.faults.responses_world import ResponsesWorld
from tests.faults.vectors_world import ScoringWorld, VectorsWorld
from tests.faults.visits import Statements, StoreExecutor

VECTORS = (
    # A request of a model that pools, and its inputs.
    Point("pooling parse", at(*((module, "parse") for module in (embeddings, scores)))),
    Point("pooling settled", at(*((module, "settled") for module in (embeddings, scores)))),
    Point("pooling several", at((fields, "several"), (scores, "several"))),
    Point("pooling inputs", at((embeddings, "tokens_of"))),
    Point("pooling params", at((embeddings, "PoolingParams"), (scores, "PoolingParams"))),
    Point("pooling tasks", at((Vectors, "check_task"))),
    Point("pooling checked", at((Vectors, "check_pooling"))),
    Point("inputs encoded", at((Texts, "encode_inputs"))),
    Point("inputs tokenized", at((texts, "tokenized"))),
    Point("inputs of ids", at((texts, "cut_ids"))),
    Point("inputs checked", at((texts, "check_input"))),
    Point("tokenizer encode_all", of("tokenizer", "encode_all")),
    # From an input to its vector.
    Point("vectors pool_all", at((Vectors, "pool_all"))),
    Point("vectors pool", at((Vectors, "pool"))),
    Point("engine open_input", at((Engine, "open_input"))),
    Point("intake input", at((engine, "new_input"))),
    Point("vector stream", at((engine, "VectorStream"))),
    Point("vector push", at((VectorStream, "push"))),
    Point("vector activated", at((vectors, "activated"))),
    # The answer.
    Point("pooling pooled", at((embeddings, "pooled"), (scores, "pooled"))),
    Point("pooling usage", at((fields, "usage_of"), (scores, "usage_of"))),
    Point("pooling spelled", at((embeddings, "encoded"))),
    Point("pooling reply", at((embeddings, "reply"), (scores, "reply"))),
    Point("vectors cosine", at((vectors, "cosine"), (scores, "cosine"))),
    Point("vectors embed", at((Vectors, "embed"))),
    Point("vectors of pairs", at((Vectors, "score_pairs"))),
)

SCORES = (
    Point("pairs encoded", at((Texts, "encode_pairs"))),
    Point("pairs tokenized", at((texts, "tokenized"))),
    Point("pairs checked", at((Vectors, "check_scores_pairs"))),
    Point("classes parse", at((classify, "parse"))),
    Point("classes pooled", at((classify, "pooled"))),
    Point("classes reply", at((classify, "reply"))),
)

POOLED = (
    # A decoder's step, whose hidden states are pooled.
    Point("pooled step", at((PooledStep, "execute")), of_nobody=True),
    Point("pooled forward", at((EagerStep, "forward")), of_nobody=True),
    Point("pooled states kept", at((PooledStep, "_keep")), of_nobody=True),
    Point("pooled head", at((PoolerHead, "__call__")), of_nobody=True),
    Point("pooled marks", at((pooling, "marked")), of_nobody=True),
    Point("pooled readback", at((Readback, "result")), of_nobody=True),
)

ENCODED = (
    Point("encoder submit", lambda world: [(world.runner._worker, "submit")], of_caller=True),
    Point("encoder launch", at((EncoderRunner, "launch")), of_nobody=True),
    Point("encoder recover", at((EncoderRunner, "recover")), of_nobody=True, failing_steps=(2, 7), may_end_engine=LOST),
    Point("encoder step", at((EncoderRunner, "_result")), of_nobody=True),
    Point("encoder batches", at((encoder, "batches")), of_nobody=True),
    Point("encoder forward", at((HashEncoder, "__call__")), of_nobody=True),
    Point("encoder marks", at((encoder, "marked")), of_nobody=True),
    Point("encoder failed", at((encoder, "without_token")), of_nobody=True),
)

RESPONSES = (
    # From a request to a response.
    Point("responses parse", at((create, "parse_response"))),
    Point("responses tools", at((create, "tool_use_of"))),
    Point("responses params", at((create, "params_of"))),
    Point("responses items", at((create, "input_items"))),
    Point("responses messages", at((create, "messages_of"))),
    Point("responses reading", at((create, "reading_of"))),
    Point("responses head", at((create, "_head"))),
    Point("response wire made", at((ResponseWire, "__init__"))),
    Point("response wire opening", at((ResponseWire, "opening"))),
    Point("response wire queue", at((ResponseWire, "queue"))),
    Point("response wire delta", at((ResponseWire, "delta"))),
    Point("response wire frame", at((ResponseWire, "frame"))),
    Point("response wire end", at((ResponseWire, "end"))),
    Point("response wire whole", at((ResponseWire, "whole"))),
    Point("response wire cancel", at((ResponseWire, "cancel"))),
    Point("output made", at((Output, "__init__"))),
    Point("output feed", at((Output, "feed"))),
    Point("output end", at((Output, "end"))),
    Point("output tokens", at((Tokens, "add"))),
    # Kept, and asked for later.
    Point("kept keep", at((Kept, "keep"))),
    Point("kept response", at((Kept, "response"))),
    Point("kept history", at((Kept, "history"))),
    Point("kept items", at((Kept, "items"))),
    Point("kept forget", at((Kept, "forget"))),
    Point("kept read", at((keeping, "_read"))),
    Point("later routes", at((later, "tenant_of"))),
    Point("later page", at((Page, "of"))),
    Point("later followed", at((create, "followed"), (later, "followed"))),
    # In the background.
    Point("jobs start", at((Jobs, "start"))),
    Point("jobs running", at((Jobs, "running"))),
    Point("jobs followable", at((Jobs, "followable"))),
    Point("jobs forget", at((Jobs, "forget"))),
    Point("job made", at((Job, "__init__"))),
    Point("job begun", at((Job, "start"))),
    Point("job cancel", at((Job, "cancel"))),
    Point("job follow", at((Job, "follow"))),
    Point("job generate", at((Job, "_generate"))),
    Point("job opens", at((background, "open_all"))),
    Point("job events", at((background.Events, "of"))),
    Point("tenants staying", at((Tenants, "staying"))),
    # The store, and the thread and statements in which it works.
    Point("response store put", at((SqliteStore, "put"))),
    Point("response store get", at((SqliteStore, "get"))),
    Point("response store delete", at((SqliteStore, "delete"))),
    Point("response store thread", at((StoreExecutor, "submit"))),
    Point("response store evict", at((SqliteStore, "_evict"))),
    Point("response store execute", at((Statements, "execute"))),
    Point("response store commit", at((Statements, "commit"))),
)

BATCHES = (
    # Files.
    Point("files parts", at((files, "parts_of"))),
    Point("files new", at((files, "new_file"), (files, "_card"))),
    Point("files tenant", at((files, "tenant_of"))),
    Point("files found", at((files, "file_of"), (batch_routes, "file_of"))),
    # Batches, from their making to their end.
    Point("batch fields", at((batch_routes, "converted"))),
    Point("batch create", at((Batches, "create"))),
    Point("batch told", at((Batches, "told"))),
    Point("batch cancel", at((Batches, "cancel"))),
    Point("batch advance", at((Batches, "_advance"))),
    Point("batch parsed", at((batches, "_parsed"))),
    Point("batch lines", at((Batches, "_run_lines"))),
    Point("batch turn", at((Turns, "take"))),
    Point("batch turn over", at((Turns, "give_back"))),
    Point("batch line room", at((Tenants, "has_room_for_line"))),
    Point("batch guilty", at((Batches, "_give_up_guilty"))),
    Point("batch suspects", at((Batches, "_run_suspects"))),
    Point("batch stopped", at((Batches, "_why_stopped"))),
    Point("batch finish", at((Batches, "_finish"))),
    Point("batch count", at((Batches, "_count"))),
    Point("batch move", at((Batches, "_move"))),
    Point("line read", at((batches, "line_of"))),
    Point("line run", at((LineRunner, "run"))),
    Point("line answer", at((LineRunner, "_answer"))),
    Point("line exchange", at((lines, "Exchange"))),
    Point("line tenants", at((Tenants, "answering_line"))),
    Point("line failed", at((batches, "failed_line"))),
    # The store, and the thread and statements in which it works.
    Point("batch store room", at((BatchStore, "check_room"))),
    Point("batch store add_file", at((BatchStore, "add_file"))),
    Point("batch store file", at((BatchStore, "file"))),
    Point("batch store files", at((BatchStore, "files"))),
    Point("batch store content", at((BatchStore, "content"))),
    Point("batch store delete_file", at((BatchStore, "delete_file"))),
    Point("batch store put_batch", at((BatchStore, "put_batch"))),
    Point("batch store suspects", at((BatchStore, "suspects"))),
    Point("batch store batches", at((BatchStore, "batches"))),
    Point("batch store add_result", at((BatchStore, "add_result"))),
    Point("batch store done", at((BatchStore, "done"))),
    Point("batch store results", at((BatchStore, "results"))),
    Point("batch store run", at((Database, "run"))),
    Point("batch store thread", at((StoreExecutor, "submit"))),
    Point("batch store execute", at((Statements, "execute"))),
    Point("batch store commit", at((Statements, "commit"))),
)

KEPT = (
    *(replace(point, world=VectorsWorld) for point in VECTORS),
    *(replace(point, world=ScoringWorld) for point in SCORES),
    *(replace(point, world=PooledWorld) for point in POOLED),
    *(replace(point, world=EncodedWorld) for point in ENCODED),
    *(replace(point, world=ResponsesWorld) for point in RESPONSES),
    *(replace(point, world=BatchesWorld) for point in BATCHES),
)
