"""Names of catalogue.py, for the tests that are to be moved to it."""

import catalogue
from catalogue import (
    EVERY_OP,
    EVERYDAY,
    PADDING,
    WITH_DROPOUT,
    WITH_GRADIENT,
    call_of,
    inputs_of,
    random_tensors,
    run,
    scalar,
)
from catalogue import VARIANTS as ALL

__all__ = ["ALL", "EVERYDAY", "EVERY_OP", "OPS", "PADDING", "WITHOUT_GRADIENT", "WITH_DROPOUT", "call_of", "inputs_of"]
__all__ += ["random_tensors", "run", "scalar"]

OPS = {name: ALL[name] for name in WITH_GRADIENT}
WITHOUT_GRADIENT = {name: ALL[name] for name in catalogue.WITHOUT_GRADIENT}
