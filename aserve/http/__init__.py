"""The OpenAI face of an engine: requests, answers and errors as HTTP and server-sent events.

Knows the engine's public methods; has heard of neither the scheduler nor the runner. `create_app` is what to import.
"""

from aserve.http.app import create_app
from aserve.http.doorman import Doorman
from aserve.http.keys import Keyring
from aserve.http.options import AppOptions
from aserve.http.sse import StreamLimits

__all__ = ["AppOptions", "Doorman", "Keyring", "StreamLimits", "create_app"]
