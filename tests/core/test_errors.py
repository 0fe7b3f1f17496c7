"""Every error crosses to another process, or is copied, as it is."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest

from aserve.core.errors import AserveError, NonFiniteLogitsError, StepFailedError
from aserve.http.errors import HttpError
from aserve.http.shapes import UnknownFieldError

SAMPLES = {str: "what", int: 3, float: 2.5, str | None: "field", dict: {"a": [1]}}


def kinds(root=AserveError):
    """All of aserve's classes of errors that are imported here."""
    return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]


def sample(kind):
    """One that is made of samples of what it takes."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return kind(*(SAMPLES.get(parameter.annotation, {"x": "y"}) for parameter in parameters))


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind.__module__.startswith("aserve.")])
@pytest.mark.parametrize(
    "again",
    [
        *(lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_an_error_is_pickled_and_copied_with_all_that_it_has(kind, again):
    """The fault: those that make their own message could not be, or came back with it twice."""
    error = sample(kind)
    error.add_note("seen twice")
    other = again(error)
    assert type(other) is kind
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
    assert other is not error


def test_those_that_are_tried_are_all_kinds_and_more():
    assert {StepFailedError, NonFiniteLogitsError, HttpError, UnknownFieldError} < set(kinds())


def test_an_error_comes_out_of_another_process():
    program = (
        "import pickle, sys; from aserve.core.errors import StepFailedError;"
        "sys.stdout.buffer.write(pickle.dumps(StepFailedError('RuntimeError', 'abc')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    error = pickle.loads(done.stdout)
    assert (error.fault_id, str(error)) == ("abc", str(StepFailedError("RuntimeError", "abc")))
