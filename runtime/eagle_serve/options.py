"""What a server is started with: address, names, security, and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a request, in bytes, seconds and counts; tests lower them.

    head_s: time to send the head of a request. body_bytes, body_s: size of a body and the time to send it. depth: of
    nested JSON. connections: open at once; more are answered with 503. unread_s: a client that reads nothing for so
    long is cancelled. ping_s: longest silence of a stream; look_s: how often one without news looks at the queue and
    at what was read of its prompt. grace_s: what running requests get after a signal. states: texts
    whose keys and values are kept."""

    head_s: int = 10
    body_bytes: int = 4 * MEBIBYTE
    body_s: float = 30.0
    depth: int = 64
    messages: int = 1024
    schema_bytes: int = 1 << 16
    connections: int = 256
    unread_s: float = 60.0
    ping_s: float = 10.0
    look_s: float = 0.25
    grace_s: float = 10.0
    states: int = 16


@dataclass(frozen=True, slots=True)
class Options:
    """How a server behaves.

    aliases: names of the model besides the bundle folder's. strict_model: refuse requests for other names. queue:
    requests that may wait. parallel: requests that decode at once; None takes engine.AT_ONCE where one
    forward pass verifies the trees of several, else 1. max_tokens: the most tokens of an answer, whatever a request
    asks for; None for what the context holds. tool_format: how the model writes calls of
    tools, a name of eagle_runtime.text.call_formats; None for what its chat template says. api_key: asked of every
    request if it is given. allowed_hosts: values of the Host header besides loopback names, with or without a port.
    allowed_origins: web origins whose pages may call the server."""

    aliases: tuple[str, ...] = ()
    strict_model: bool = False
    queue: int = 16
    parallel: int | None = 1
    max_tokens: int | None = None
    tool_format: str | None = None
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    log_content: bool = False
    limits: Limits = field(default_factory=Limits)
