"""Sampling parameters that are one number a row: the table of them, from a request's parameters to the kernels.

`SamplingColumns` are read where a token is chosen (`Ops.sample`), `PenaltyColumns` where logits are changed before that
(`Ops.control_logits`). All that holds a number of each nests them, so that nothing between a request and a kernel names
one of them:

    SamplingParams        the fields of these names
    RowSampling           SamplingColumns[float]      one row's, in a plan
    rows, uploads         SamplingColumns[Array]      of R rows, on the host; of a step's N, on their way
    graphs, SamplingBatch SamplingColumns[Tensor]     of B buffers; of a step's S rows

So a parameter more is a field in `SamplingParams`, one here with its entry in the table, and one in the shape of HTTP
requests; and the kernels that read it.
"""

from typing import Final, Generic, NamedTuple, TypeVar

A = TypeVar("A")


class Column(NamedTuple):
    """dtype: of the column, as numpy spells it. neutral: the value that changes nothing; padding rows have it.

    is_filter: a row with another value makes the step run what leaves out unlikely tokens.
    """

    dtype: str
    neutral: float
    is_filter: bool = False


class SamplingColumns(NamedTuple, Generic[A]):
    """How a row's token is chosen; see `SamplingParams`. native/src/sampling.cpp has them in this order.

    temperature: 0 takes the likeliest. seed: of the random number, which is a function of seed and position alone.
    """

    temperature: A
    top_k: A
    top_p: A
    min_p: A
    seed: A


class PenaltyColumns(NamedTuple, Generic[A]):
    """How much tokens that came before change a row's logits. A row with another value than the neutral counts tokens.

    presence_penalty, frequency_penalty: subtracted from tokens generated so far, once and per occurrence (OpenAI).
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (CTRL, 2019).
    """

    presence_penalty: A
    frequency_penalty: A
    repetition_penalty: A


SAMPLING: Final = SamplingColumns(
    temperature=Column("float32", 0.0),
    top_k=Column("int32", 0, is_filter=True),
    top_p=Column("float32", 1.0, is_filter=True),
    min_p=Column("float32", 0.0, is_filter=True),
    seed=Column("int64", 0),
)
PENALTIES: Final = PenaltyColumns(
    presence_penalty=Column("float32", 0.0),
    frequency_penalty=Column("float32", 0.0),
    repetition_penalty=Column("float32", 1.0),
)
NEUTRAL: Final = SamplingColumns[float](*(column.neutral for column in SAMPLING))
"""Of a row that takes the likeliest of all tokens."""
NO_PENALTY: Final = PenaltyColumns[float](*(column.neutral for column in PENALTIES))
