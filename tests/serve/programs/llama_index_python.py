"""LlamaIndex's OpenAILike."""

# mypy: ignore-errors
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from report import MODEL, SCHEMA, URL, fits, refused, report

ASKED = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
model = OpenAILike(**ASKED, is_chat_model=True, is_function_calling_model=True, temperature=0, max_tokens=60)
plain = OpenAILike(**ASKED, is_chat_model=False, max_tokens=8)
ASK = [ChatMessage(role="user", content="Say hello in five words.")]
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


def weather(city: str, days: int) -> str:
    """Tells the weather."""
    return "rain"


def stop():
    said = model.chat(ASK).message.content
    return model.chat(ASK, stop=[said[3:6]]).message.content == said[: said.index(said[3:6])]


def calls(answer):
    return [call.tool_name for call in model.get_tool_calls_from_response(answer)] == ["weather"]


TOOLS = {
    "tools": [FunctionTool.from_defaults(weather)],
    "user_msg": "Weather in Rome for 3 days?",
    "tool_required": True,
}
report(
    {
        "chat": lambda: model.chat(ASK).message.content,
        "stream": lambda: "".join(chunk.delta or "" for chunk in model.stream_chat(ASK)),
        "stop": stop,
        "tools": lambda: calls(model.chat_with_tools(**TOOLS, allow_parallel_tool_calls=False)),
        "tools streamed": lambda: calls(list(model.stream_chat_with_tools(**TOOLS))[-1]),
        "JSON schema": lambda: fits(model.chat(ASK, response_format=FORM).message.content),
        "completions": lambda: plain.complete("One, two,").text,
        "errors": lambda: refused(lambda: model.chat(ASK, temperature=-1), "temperature"),
    }
)
