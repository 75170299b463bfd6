"""Decode with an EAGLE draft head, emitting exactly what the target alone would have emitted.

    from eagle_runtime import EagleModel
    with EagleModel.load("bundle/") as model:
        print(model.generate("def fib(n):", max_new_tokens=64).text)

Read generate.py first: it is the loop.
"""

import logging

from eagle_runtime.bundle.fidelity import FidelityWarning
from eagle_runtime.constraints.constraint import Constraint
from eagle_runtime.conversation import Conversation
from eagle_runtime.drafting.drafter import Drafter
from eagle_runtime.drafting.shapes import TreeShape
from eagle_runtime.eagle_model import EagleModel
from eagle_runtime.errors import (
    BackendError,
    BundleError,
    BusyError,
    ClosedError,
    ConstraintError,
    ContextError,
    ConversationFileError,
    EagleError,
    MemoryLimitError,
    RequestError,
    TemplateError,
)
from eagle_runtime.generate import Cycle
from eagle_runtime.result import Piece, Result, Stop, Token, Usage
from eagle_runtime.sampling import SamplingParams
from eagle_runtime.slots import Memory
from eagle_runtime.tree import Tree
from eagle_runtime.turn import Turn

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the application asks

__all__ = [
    "BackendError",
    "BundleError",
    "BusyError",
    "ClosedError",
    "Constraint",
    "ConstraintError",
    "ContextError",
    "Conversation",
    "ConversationFileError",
    "Cycle",
    "Drafter",
    "EagleError",
    "EagleModel",
    "FidelityWarning",
    "Memory",
    "MemoryLimitError",
    "Piece",
    "RequestError",
    "Result",
    "SamplingParams",
    "Stop",
    "TemplateError",
    "Token",
    "Tree",
    "TreeShape",
    "Turn",
    "Usage",
]
