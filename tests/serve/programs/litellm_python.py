"""LiteLLM, as a client of OpenAI's API."""

# mypy: ignore-errors
import litellm
from report import ASK, FUNCTION, MODEL, SCHEMA, TOOL, URL, WEATHER, fits, refused, report

litellm.suppress_debug_info = True
ASKED = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0, "max_retries": 0}
CALL = {**ASKED, "messages": WEATHER, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


def chat(**more):
    return litellm.completion(**{**ASKED, "messages": ASK, **more})


def stop():
    said = chat(temperature=0, max_tokens=40).choices[0].message.content
    return (
        chat(temperature=0, max_tokens=40, stop=said[3:6]).choices[0].message.content == said[: said.index(said[3:6])]
    )


def tools_streamed():
    whole = litellm.stream_chunk_builder(list(litellm.completion(**CALL, stream=True)))
    return fits(whole.choices[0].message.tool_calls[0].function.arguments)


def through_ollama():
    asked = {"model": f"ollama_chat/{MODEL}", "api_base": URL, "messages": ASK, "max_tokens": 9}
    return litellm.completion(**asked).choices[0].message.content


def responses_tools():
    tool = {"type": "function", **FUNCTION}
    said = litellm.responses(**ASKED, input="Weather in Rome?", tools=[tool], tool_choice="required", temperature=0)
    return fits(said.output[0].arguments)


report(
    {
        "chat": lambda: chat().choices[0].message.content,
        "stream": lambda: "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True)),
        "stop": stop,
        "tools": lambda: fits(litellm.completion(**CALL).choices[0].message.tool_calls[0].function.arguments),
        "tools streamed": tools_streamed,
        "JSON schema": lambda: fits(chat(response_format=FORM).choices[0].message.content),
        "responses": lambda: (
            litellm.responses(**ASKED, input="Say hello.", max_output_tokens=9).output[0].content[0].text
        ),
        "responses, tools": responses_tools,
        "through Ollama's API": through_ollama,
        "embeddings refused": lambda: refused(lambda: litellm.embedding(input="x", **ASKED), "embeddings"),
        "errors": lambda: refused(lambda: chat(temperature=-1), "temperature"),
    }
)
