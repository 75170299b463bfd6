"""LangChain's ChatOpenAI and OpenAI."""

# mypy: ignore-errors
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from report import FUNCTION, MODEL, SCHEMA, URL, fits, refused, report

ASKED = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
model = ChatOpenAI(**ASKED, temperature=0)
QUESTION = "What will the weather be in Rome for 3 days? Use the tool."
WITH_TOOLS = model.bind_tools([{"type": "function", "function": FUNCTION}], tool_choice="required")
FORM = {"title": "place", "description": "A place.", **SCHEMA}


def stop():
    said = model.bind(max_tokens=40).invoke("Say hello.").content
    return model.bind(max_tokens=40, stop=[said[3:6]]).invoke("Say hello.").content == said[: said.index(said[3:6])]


def tools_streamed():
    chunks = list(WITH_TOOLS.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return fits(whole.tool_calls[0]["args"])


def tools():
    said = WITH_TOOLS.invoke(QUESTION)
    call = said.tool_calls[0]
    back = [("user", QUESTION), said, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    return fits(call["args"]) and model.bind(max_tokens=20).invoke(back).content is not None


responses = ChatOpenAI(**ASKED, temperature=0, use_responses_api=True)
embeddings = OpenAIEmbeddings(**ASKED, check_embedding_ctx_length=False)
report(
    {
        "chat": lambda: model.invoke("Say hello.").content,
        "stream": lambda: "".join(chunk.content for chunk in model.stream("Say hello.")),
        "stop": stop,
        "tools": tools,
        "tools streamed": tools_streamed,
        "JSON schema": lambda: fits(model.with_structured_output(FORM, method="json_schema").invoke("Where?")),
        "JSON by a function": lambda: fits(
            model.with_structured_output(FORM, method="function_calling").invoke("Where?")
        ),
        "responses": lambda: responses.invoke("Say hello.").text,
        "responses streamed": lambda: "".join(chunk.text for chunk in responses.stream("Say hello.")),
        "responses, tools": lambda: fits(
            responses.bind_tools([{"type": "function", "function": FUNCTION}], tool_choice="required")
            .invoke(QUESTION)
            .tool_calls[0]["args"]
        ),
        "completions": lambda: OpenAI(**ASKED, max_tokens=8).invoke("One, two,"),
        "embeddings refused": lambda: refused(lambda: embeddings.embed_query("x"), "embeddings"),
        "errors": lambda: refused(lambda: ChatOpenAI(**ASKED, temperature=-1).invoke("x"), "temperature"),
    }
)
