"""on_sigterm: what a replica does when its process is asked to end, in the place of Ray's own handler, which ends it.

A replica's code runs in a thread, and signals are handled in the main one, which is Ray's. Its handler is a closure
over a function that ray._private.worker looks up when the signal comes: that function is exchanged for ours. This is
the one place that touches what is private to Ray; where the name is gone, SIGTERM ends a replica as Ray has it.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

RAISER: Final = "raise_sys_exit_with_custom_error_message"
_log = logging.getLogger(__name__)


def on_sigterm(call: Callable[[], None], module: Any = None) -> bool:
    """Have `call` called in the main thread at the first SIGTERM; the second one ends the process. Whether it will be.

    module: which has the function; Ray's worker, if none is given.
    """
    module = import_module("ray._private.worker") if module is None else module
    original = getattr(module, RAISER, None)
    if original is None:
        _log.warning("SIGTERM will end this replica at once: Ray has no %s any more", RAISER)
        return False
    asked: list[bool] = []

    def asked_to_end(*arguments: Any, **options: Any) -> None:
        if asked:
            original(*arguments, **options)
        else:
            asked.append(True)
            call()

    setattr(module, RAISER, asked_to_end)
    return True
