"""OpenAI's Python client."""

# mypy: ignore-errors
from openai import OpenAI
from report import ASK, FUNCTION, MODEL, SCHEMA, TOOL, URL, WEATHER, fits, refused, report

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
chats = client.chat.completions
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


def stream():
    chunks = list(chats.create(model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return said and chunks[-1].usage.completion_tokens


def stop():
    said = chats.create(model=MODEL, messages=ASK, temperature=0, max_tokens=40).choices[0].message.content
    cut = chats.create(model=MODEL, messages=ASK, temperature=0, max_tokens=40, stop=[said[3:6]])
    return cut.choices[0].message.content == said[: said.index(said[3:6])] and cut.choices[0].finish_reason == "stop"


def tools():
    said = chats.create(model=MODEL, messages=WEATHER, tools=[TOOL], tool_choice="required", temperature=0)
    call = said.choices[0].message.tool_calls[0]
    back = [*WEATHER, said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = chats.create(model=MODEL, messages=back, tools=[TOOL], tool_choice="none", max_tokens=20)
    return fits(call.function.arguments) and after.choices[0].message.content


def tools_streamed():
    asked = {"model": MODEL, "messages": WEATHER, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    deltas = [
        c.delta.tool_calls[0] for k in chats.create(**asked, stream=True) for c in k.choices if c.delta.tool_calls
    ]
    return deltas[0].id and fits("".join(d.function.arguments or "" for d in deltas if d.index == 0))


def responses_tools():
    tool = {"type": "function", **FUNCTION, "strict": True}
    said = client.responses.create(model=MODEL, input=WEATHER, tools=[tool], tool_choice="required", temperature=0)
    return fits(said.output[0].arguments)


def responses_stream():
    events = list(client.responses.create(model=MODEL, input="Say hello.", stream=True, max_output_tokens=20))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return said == events[-1].response.output_text != ""


report(
    {
        "chat": lambda: chats.create(model=MODEL, messages=ASK).choices[0].message.content,
        "stream": stream,
        "stop": stop,
        "tools": tools,
        "tools streamed": tools_streamed,
        "JSON schema": lambda: fits(
            chats.create(model=MODEL, messages=ASK, response_format=FORM).choices[0].message.content
        ),
        "responses": lambda: client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=9).output_text,
        "responses streamed": responses_stream,
        "responses, tools": responses_tools,
        "completions": lambda: client.completions.create(model=MODEL, prompt="One, two,", max_tokens=8).choices[0].text,
        "embeddings refused": lambda: refused(lambda: client.embeddings.create(model=MODEL, input="x"), "embeddings"),
        "model list": lambda: MODEL in [model.id for model in client.models.list()],
        "errors": lambda: refused(
            lambda: chats.create(model=MODEL, messages=ASK, temperature=-1), "temperature", "400"
        ),
    }
)
