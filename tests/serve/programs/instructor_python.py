"""Instructor, in its modes for OpenAI's API."""

# mypy: ignore-errors
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict
from report import MODEL, URL, refused, report


class Place(BaseModel):
    """A place. A model of random weights, as in tests, would never end an object that may have more properties."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 3]


def client(mode):
    return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)


def ask(mode, **more):
    asked = {"messages": [{"role": "user", "content": "Rome, for 3 days."}], "temperature": 0, "max_retries": 0, **more}
    return client(mode).chat.completions.create(model=MODEL, response_model=Place, **asked)


def streamed():
    asked = {"messages": [{"role": "user", "content": "Rome, for 3 days."}], "temperature": 0}
    pieces = client(instructor.Mode.TOOLS).chat.completions.create_partial(model=MODEL, response_model=Place, **asked)
    return list(pieces)[-1].city in ("Rome", "Oslo")


report(
    {
        "tools": lambda: ask(instructor.Mode.TOOLS),
        "tools streamed": streamed,
        "JSON schema": lambda: ask(instructor.Mode.JSON_SCHEMA),
        "responses, tools": lambda: ask(instructor.Mode.RESPONSES_TOOLS, max_retries=1),
        "errors": lambda: refused(lambda: ask(instructor.Mode.TOOLS, temperature=-1), "temperature"),
    }
)
