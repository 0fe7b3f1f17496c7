"""Calls to a server, each of its own name: what they give back, or what they raise, as one line of JSON.

A program defines its calls with `@call` and ends with `run()`. One that fails is a test that fails, and the others are
told all the same.
"""

import asyncio
import inspect
import json

_calls = []


def call(function):
    """Of a function without arguments, or of an async one: all of them run on one event loop."""
    _calls.append(function)
    return function


def run():
    found = {}
    with asyncio.Runner() as runner:
        for function in _calls:
            try:
                given = function()
                found[function.__name__] = runner.run(given) if inspect.iscoroutine(given) else given
            except Exception as error:
                message = " ".join(part for part in (str(error), str(error.__cause__ or "")) if part)
                found[function.__name__] = {"raised": type(error).__name__, "message": message[:800]}
    print(json.dumps(found))
