"""Text in and out: the bundle's tokenizer and chat template (tokenizers and jinja2, imported when first needed)."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_runtime.errors import BundleError, RequestError
from eagle_runtime.plain_file import TEXT_BYTES, read_plain

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, Any]
Reader = Callable[[str], "bytes | None"]  # name of a file -> its content; None where there is none

CONTEXT = 8  # tokens of the prompt that may change how the first words after it are written


class Text:
    """Tokenizer of a bundle. Ids pass through untouched, so a bundle without a tokenizer still decodes."""

    def __init__(self, bundle: Path, read: Reader | None = None) -> None:
        """read: gives the files' content, each asked for once; of a bundle `manifest.read_text_file`, which gives what
        is listed alone. None reads a folder that is no bundle, as a checkpoint's. Raises BundleError."""
        self._bundle = bundle
        read = read or functools.partial(_read_from, bundle)
        self._tokenizer = _load_tokenizer(bundle / "tokenizer.json", read("tokenizer.json"))
        self._template = read("chat_template.jinja")
        self._config = read("tokenizer_config.json")

    @property
    def available(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._tokenizer is not None

    @property
    def chat(self) -> bool:
        """Whether chat messages can be encoded: the bundle has a template."""
        return self.available and self._template is not None

    def encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        """Text as it stands, chat messages through the chat template, or ids as given -> ids."""
        if isinstance(prompt, str):
            return list(self._required().encode(prompt).ids)
        messages = [item for item in prompt if isinstance(item, Mapping)]
        ids = [int(item) for item in prompt if not isinstance(item, Mapping)]
        if messages and ids:
            raise RequestError("the prompt mixes chat messages and ids; give one kind")
        if messages:
            return list(self._required().encode(self.render(messages), add_special_tokens=False).ids)
        return ids

    def stream(self, prompt: Sequence[int]) -> TextStream | None:
        """A decoder of what follows the prompt, as it comes; None without a tokenizer."""
        return TextStream(self._tokenizer, prompt) if self._tokenizer is not None else None

    def render(self, messages: Sequence[Message]) -> str:
        """Chat messages -> the prompt text of the bundle's chat template, ending where the answer begins."""
        path = self._bundle / "chat_template.jinja"
        if self._template is None:
            raise RequestError(f"{self._bundle} has no chat_template.jinja; pass text or ids instead of messages")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            template = environment.from_string(self._template.decode())
            return template.render(messages=list(messages), add_generation_prompt=True, **_special_tokens(self._config))
        except jinja2.TemplateError as error:
            raise RequestError(f"{path} refuses the messages: {error}") from None

    def _required(self) -> tokenizers.Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{self._bundle} has no tokenizer.json; pass token ids (--prompt-ids) instead of text")
        return self._tokenizer


class TextStream:
    """Turns tokens into text piece by piece, without special tokens.

    A character split over tokens is held back until it is whole. The prompt's end is decoded along, since some
    tokenizers drop the space before a text's first word."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._before = list(prompt[-CONTEXT:])
        self._stream = DecodeStream(ids=self._before, skip_special_tokens=True)
        self._tokens: list[int] = []
        self.text = ""  # all so far

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._tokens += tokens
        piece = "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        self.text += piece
        return piece

    def finish(self) -> str:
        """What is still held back when no more tokens come: characters that stayed incomplete."""
        before = self._tokenizer.decode(self._before)
        whole = self._tokenizer.decode(self._before + self._tokens)
        sent = before + self.text
        piece = whole[len(sent) :] if whole.startswith(sent) else ""
        self.text += piece
        return piece


def _read_from(folder: Path, name: str) -> bytes | None:
    path = folder / name
    try:
        return read_plain(path, TEXT_BYTES[name])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror})") from None


def _load_tokenizer(path: Path, content: bytes | None) -> tokenizers.Tokenizer | None:
    if content is None:
        return None
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception
        raise BundleError(f"{path} is no tokenizer that 'tokenizers' reads ({error})") from None


def _special_tokens(content: bytes | None) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json, as chat templates expect them."""
    if content is None:
        return {}
    config = json.loads(content.decode())
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
