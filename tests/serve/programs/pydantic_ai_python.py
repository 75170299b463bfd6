"""Pydantic AI, by chats and by responses."""

# mypy: ignore-errors
import asyncio
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import MODEL, URL, refused, report

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
model, responses = OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)
SHORT = {"max_tokens": 120, "temperature": 0.0}  # a call takes 70 where tokens are bytes, as in tests


class Place(BaseModel):
    """A place. A model of random weights, as in tests, would never end an object that may have more properties."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 3]


def ask(of, question="Say hello.", **more):
    return Agent(of, retries=1, **more).run_sync(question, model_settings=SHORT).output


def place(of, form):
    return isinstance(ask(of, "Where? Rome, for 3 days.", output_type=form(Place)), Place)


async def streamed(of):
    async with Agent(of).run_stream("Say hello.", model_settings=SHORT) as answer:
        return "".join([piece async for piece in answer.stream_text(delta=True)])


def stop():
    said = ask(model)
    settings = {**SHORT, "stop_sequences": [said[3:6]]}
    return Agent(model).run_sync("Say hello.", model_settings=settings).output == said[: said.index(said[3:6])]


report(
    {
        "chat": lambda: ask(model),
        "stream": lambda: asyncio.run(streamed(model)),
        "stop": stop,
        "tools": lambda: place(model, ToolOutput),
        "JSON schema": lambda: place(model, NativeOutput),
        "responses": lambda: ask(responses),
        "responses streamed": lambda: asyncio.run(streamed(responses)),
        "responses, tools": lambda: place(responses, ToolOutput),
        "errors": lambda: refused(
            lambda: Agent(model).run_sync("x", model_settings={"temperature": -1}), "temperature"
        ),
    }
)
