"""By which names a model and its adapters are asked for."""

from aserve.core.errors import ModelNotFoundError
from aserve.engine import Engine
from aserve.http.errors import echo


def check_model(engine: Engine, model: str | None) -> str:
    """The name to answer with, which may be an adapter's. Raises `ModelNotFoundError` for one that is not served."""
    names = engine.info.names
    if model is None:
        return names[0]
    if model not in names and model not in engine.adapters:
        raise ModelNotFoundError(f"the model {echo(model)} is not served here; {echo(names[0])} is")
    return model


def adapter_of(engine: Engine, model: str) -> str | None:
    """Which adapter a name that was checked stands for; None for the model itself."""
    return None if model in engine.info.names else model
