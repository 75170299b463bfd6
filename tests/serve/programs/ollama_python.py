"""Ollama's Python client."""

# mypy: ignore-errors
import json

from ollama import Client
from report import ASK, MODEL, SCHEMA, TOOL, URL, WEATHER, fits, refused, report

client = Client(host=URL)


def stop():
    said = client.chat(MODEL, ASK, options={"temperature": 0, "num_predict": 40}).message.content
    cut = client.chat(MODEL, ASK, options={"temperature": 0, "num_predict": 40, "stop": [said[3:6]]})
    return cut.message.content == said[: said.index(said[3:6])] and cut.done_reason == "stop"


def stream():
    lines = list(client.chat(MODEL, ASK, stream=True))
    return "".join(line.message.content for line in lines) and lines[-1].done and lines[-1].eval_count


def called(lines):
    return [call for line in lines for call in line.message.tool_calls or ()]


def tools():
    said = client.chat(MODEL, WEATHER, tools=[TOOL], options={"temperature": 0, "num_predict": 60})
    calls = called([said])
    back = [*WEATHER, said.message, {"role": "tool", "tool_name": "weather", "content": "rain"}]
    return client.chat(MODEL, back, tools=[TOOL], options={"num_predict": 20}) and all(
        fits(c.function.arguments) for c in calls
    )


def tools_streamed():
    lines = list(client.chat(MODEL, WEATHER, tools=[TOOL], stream=True, options={"temperature": 0, "num_predict": 60}))
    return lines[-1].done and all(fits(call.function.arguments) for call in called(lines))


def json_object():
    """An object, or its beginning where the length ends it, as it does with a model of random weights."""
    said = client.generate(MODEL, "Say a.", format="json", options={"seed": 2, "num_predict": 60})
    begins = said.response.startswith("{")
    return begins and (said.done_reason == "length" or isinstance(json.loads(said.response), dict))


report(
    {
        "chat": lambda: client.chat(MODEL, ASK, options={"num_ctx": 2048, "seed": 1}).message.content,
        "stream": stream,
        "stop": stop,
        "tools": tools,
        "tools streamed": tools_streamed,
        "JSON schema": lambda: fits(client.chat(MODEL, ASK, format=SCHEMA).message.content),
        "JSON": json_object,
        "generate": lambda: client.generate(MODEL, "Say hello.", options={"num_predict": 8}).response,
        "generate streamed": lambda: "".join(line.response for line in client.generate(MODEL, "Hello", stream=True)),
        "load": lambda: client.generate(MODEL).done_reason == "load",
        "embeddings refused": lambda: refused(lambda: client.embed(MODEL, "x"), "embeddings"),
        "model list": lambda: f"{MODEL}:latest" in [model.model for model in client.list().models],
        "show": lambda: "completion" in client.show(MODEL).capabilities and client.ps().models,
        "errors": lambda: refused(lambda: client.chat(MODEL, ASK, options={"temperature": -1}), "temperature", "400"),
    }
)
