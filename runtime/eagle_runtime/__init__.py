"""Decode with an EAGLE draft head, emitting exactly what the target alone would have emitted.

    from eagle_runtime import EagleModel
    with EagleModel.load("bundle/") as model:
        print(model.generate("def fib(n):", max_new_tokens=64).text)

Read core/generate.py first: it is the loop. The names below are imported when they are first used, so that importing
the package, or one name of it, is quick.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_runtime.app.conversation import Conversation as Conversation
    from eagle_runtime.app.eagle_model import EagleModel as EagleModel
    from eagle_runtime.app.result import Piece as Piece
    from eagle_runtime.app.result import Result as Result
    from eagle_runtime.app.result import Stop as Stop
    from eagle_runtime.app.result import Token as Token
    from eagle_runtime.app.result import Usage as Usage
    from eagle_runtime.app.settings import Settings as Settings
    from eagle_runtime.app.slots import Memory as Memory
    from eagle_runtime.app.turn import Turn as Turn
    from eagle_runtime.base.errors import BackendError as BackendError
    from eagle_runtime.base.errors import BundleError as BundleError
    from eagle_runtime.base.errors import BusyError as BusyError
    from eagle_runtime.base.errors import ClosedError as ClosedError
    from eagle_runtime.base.errors import ConstraintError as ConstraintError
    from eagle_runtime.base.errors import ContextError as ContextError
    from eagle_runtime.base.errors import ConversationFileError as ConversationFileError
    from eagle_runtime.base.errors import EagleError as EagleError
    from eagle_runtime.base.errors import EagleWarning as EagleWarning
    from eagle_runtime.base.errors import MemoryLimitError as MemoryLimitError
    from eagle_runtime.base.errors import RequestError as RequestError
    from eagle_runtime.base.errors import TemplateError as TemplateError
    from eagle_runtime.base.tree import Tree as Tree
    from eagle_runtime.bundle.fidelity import FidelityWarning as FidelityWarning
    from eagle_runtime.core.drafter import Drafter as Drafter
    from eagle_runtime.core.generate import Cycle as Cycle
    from eagle_runtime.core.rounds import Wish as Wish
    from eagle_runtime.drafting.shapes import DynamicTree as DynamicTree
    from eagle_runtime.drafting.shapes import StaticTree as StaticTree
    from eagle_runtime.drafting.shapes import TreeShape as TreeShape
    from eagle_runtime.sampling.constraint import Constraint as Constraint
    from eagle_runtime.sampling.params import SamplingParams as SamplingParams
    from eagle_runtime.text.answer_form import AnswerForm as AnswerForm
    from eagle_runtime.text.answer_form import ChatPrompt as ChatPrompt
    from eagle_runtime.text.answer_reader import Part as Part
    from eagle_runtime.text.tools import ToolUse as ToolUse

# Module -> the public names that it defines: the imports above, for Python.
_DEFINED = {
    "app.conversation": "Conversation",
    "app.eagle_model": "EagleModel",
    "app.result": "Piece Result Stop Token Usage",
    "app.settings": "Settings",
    "app.slots": "Memory",
    "app.turn": "Turn",
    "base.errors": "BackendError BundleError BusyError ClosedError ConstraintError ContextError ConversationFileError "
    "EagleError EagleWarning MemoryLimitError RequestError TemplateError",
    "base.tree": "Tree",
    "bundle.fidelity": "FidelityWarning",
    "core.drafter": "Drafter",
    "core.generate": "Cycle",
    "core.rounds": "Wish",
    "drafting.shapes": "DynamicTree StaticTree TreeShape",
    "sampling.constraint": "Constraint",
    "sampling.params": "SamplingParams",
    "text.answer_form": "AnswerForm ChatPrompt",
    "text.answer_reader": "Part",
    "text.tools": "ToolUse",
}
_MODULES = {name: module for module, names in _DEFINED.items() for name in names.split()}

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the application asks

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Returns a public name's value, which is imported now."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
