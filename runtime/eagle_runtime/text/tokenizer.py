"""Text in and out: the bundle's tokenizer and chat template (tokenizers and jinja2, imported when first needed)."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eagle_runtime.base.arguments import checked_ids, short_repr
from eagle_runtime.base.errors import BundleError, RequestError, TemplateError, first_line, is_panic
from eagle_runtime.base.files import TEXT_BYTES, parse_json, read_plain
from eagle_runtime.text.detokenizer import TextStream, Vocabulary

if TYPE_CHECKING:
    import tokenizers

    from eagle_runtime.text.chat_template import ChatTemplate

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Message = Mapping[str, Any]
Reader = Callable[[str], "bytes | None"]  # name of a file -> its content; None where there is none


class Text:
    """Tokenizer of a bundle. Ids pass through untouched, so a bundle without a tokenizer still decodes."""

    def __init__(self, bundle: Path, read: Reader | None = None) -> None:
        """read: gives the files' content, each asked for once; of a bundle `manifest.read_text_file`, which gives what
        is listed alone. None reads a folder that is not a bundle, as a checkpoint's. Raises BundleError."""
        self._bundle = bundle
        self._path = bundle / "tokenizer.json"
        read = read or functools.partial(_read_from, bundle)
        self._tokenizer = _load_tokenizer(self._path, read("tokenizer.json"))
        self._vocabulary = None if self._tokenizer is None else Vocabulary(self._tokenizer, str(self._path))
        self._template = read("chat_template.jinja")
        self._tool_template = read("chat_template.tool_use.jinja")
        self._config = read("tokenizer_config.json")
        self.available = self._tokenizer is not None  # whether text can be encoded and decoded
        self.chat = self.available and self._template is not None  # whether chat messages can be encoded
        self._compiled: dict[str, ChatTemplate] = {}  # by their sources, when first needed

    def tokenizer_json(self) -> str | None:
        """Returns the content of a tokenizer.json, without truncation and padding; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.to_str()

    def ids_of_tokens(self) -> dict[str, int] | None:
        """Returns the id of every token, added ones too; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.get_vocab()

    def encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        """Text as it stands, chat messages through the chat template, or ids as given -> ids. Raises RequestError."""
        if isinstance(prompt, str):
            return self._encoded(prompt, "the prompt", special=True)
        try:
            items = None if isinstance(prompt, Mapping | bytes | bytearray) else list(prompt)
        except TypeError:
            items = None
        if items is None:
            raise RequestError(
                f"the prompt is {short_repr(prompt)}, but must be text, a list of token ids, or a list of chat messages"
            )
        messages = [item for item in items if isinstance(item, Mapping)]
        if messages and len(messages) < len(items):
            raise RequestError("the prompt mixes chat messages and ids; give one kind")
        if messages:
            self._required()
            return self.encode_rendered(self.render(messages))
        return checked_ids("the prompt", items)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids -> their text, as transformers decodes them. Raises RequestError for ids that the tokenizer lacks."""
        ids, tokenizer = checked_ids("token_ids", token_ids), self._required()
        if wrong := [token for token in ids if not 0 <= token < 1 << 32 or tokenizer.id_to_token(token) is None]:
            raise RequestError(f"token_ids holds {short_repr(wrong[0])}, which the tokenizer does not have")
        with _errors_of(self._path, "cannot decode"):
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def template_source(self, *, tools: bool) -> str:
        """The text of the chat template, for chats with tools or without, which may be the same. Raises TemplateError,
        and BundleError for what is not text."""
        path, content = self._template_of(tools)
        if content is None:
            raise TemplateError(f"{self._bundle} has no chat_template.jinja; pass text or ids instead of messages")
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{path} cannot be read as UTF-8 text ({error}); export the bundle again") from None

    def template(self, *, tools: bool) -> ChatTemplate:
        """The chat template, ready to render. Raises what template_source raises, and TemplateError for one that is not
        Jinja."""
        return self._ready(self._template_of(tools)[0], self.template_source(tools=tools))

    def _ready(self, path: Path, source: str) -> ChatTemplate:
        """The template of a source, compiled once. path: for errors. Raises TemplateError."""
        if source not in self._compiled:
            from jinja2 import TemplateSyntaxError

            from eagle_runtime.text.chat_template import ChatTemplate

            try:
                self._compiled[source] = ChatTemplate(source)
            except Exception as error:  # Jinja's, or of Python's compiler, which has limits of its own
                where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
                raise TemplateError(
                    f"{path} is not a template that can be read ({where}{first_line(error)}); correct it"
                ) from None
        return self._compiled[source]

    def _template_of(self, tools: bool) -> tuple[Path, bytes | None]:
        """Path and content of a template."""
        if tools and self._tool_template is not None:
            return self._bundle / "chat_template.tool_use.jinja", self._tool_template
        return self._bundle / "chat_template.jinja", self._template

    def specials_in(self, texts: Iterable[str]) -> dict[str, int]:
        """The special tokens that stand in texts, with their ids; of two in the same place the longer one."""
        if self._tokenizer is None:
            return {}
        known = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        found = {special for text in texts for special in known if special in text}
        inner = {a for a in found for b in found if a != b and a in b}
        return {special: known[special] for special in found - inner}

    def token_named(self, token_id: int) -> str | None:
        """The token of an id as the tokenizer lists it; None for an id that it lacks."""
        known = self._tokenizer is not None and 0 <= token_id < 1 << 32
        return self._tokenizer.id_to_token(token_id) if known else None  # type: ignore[union-attr]

    def special_id(self, text: str) -> int | None:
        """The id of a special token by its content; None for any other text."""
        token_id = self._tokenizer.token_to_id(text) if self._tokenizer is not None else None
        if token_id is None or self._vocabulary is None or self._vocabulary.token(token_id) is not None:
            return None
        return int(token_id)

    def encode_rendered(self, rendered: str) -> list[int]:
        """The ids of a prompt that the chat template made. Raises RequestError."""
        self._required()
        return self._encoded(rendered, "the prompt that the chat template made", special=False)

    def encode_after(self, rest: str) -> list[int] | None:
        """The ids of a text that follows another one, if they do not depend on it: if it begins with a special token.
        None otherwise. Raises RequestError."""
        if not any(rest.startswith(token) for token in self._separators):
            return None
        return self.encode_rendered(rest)

    @functools.cached_property
    def _separators(self) -> list[str]:
        """Special tokens that leave the text before them as it is, and are found whatever that is."""
        added = self._required().get_added_tokens_decoder().values()
        return [token.content for token in added if token.special and not token.lstrip and not token.single_word]

    def stream(self, prompt: Sequence[int]) -> TextStream | None:
        """A decoder of what follows the prompt, as it comes; None without a tokenizer."""
        return TextStream(self._vocabulary, prompt) if self._vocabulary is not None else None

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """What each token of a whole text completes of it, special ones as they are written; "" without a tokenizer."""
        stream = self.stream([])
        if stream is None or self._vocabulary is None:
            return [""] * len(token_ids)
        texts = [self._vocabulary.special(token) or stream.feed([token]) for token in token_ids]
        return [*texts[:-1], *(text + stream.finish() for text in texts[-1:])]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> str:
        """Chat messages -> the prompt of the bundle's chat template, as transformers' apply_chat_template makes it.

        tools: their descriptions as dicts. template_kwargs: further variables of the template, as enable_thinking or
        documents. add_generation_prompt: end where an answer begins. continue_final: end within the final message
        instead, for an answer that goes on with it. Raises TemplateError naming the template, whatever goes wrong in
        it, and BundleError for a broken tokenizer_config.json."""
        path, source = self._template_of(bool(tools))[0], self.template_source(tools=bool(tools))
        template = self._ready(path, source)
        from jinja2 import TemplateError as JinjaError

        from eagle_runtime.text.chat_template import OverrunError
        from eagle_runtime.text.messages import cut_at_mark, keyword_data, mark_end, message_data, tool_data

        variables = {
            "messages": message_data(messages),
            "tools": tool_data(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final,
            **_special_tokens(self._bundle / "tokenizer_config.json", self._config),
            **keyword_data(template_kwargs),
        }
        final = mark_end(variables["messages"], source) if continue_final else None
        try:
            prompt = template.render(variables)
        except OverrunError as error:
            raise TemplateError(f"{path} was stopped: {error}; correct the template") from None
        except JinjaError as error:
            raise TemplateError(f"{path} refuses the messages: {first_line(error)}") from None
        except Exception as error:  # a template may raise whatever Python does
            raise TemplateError(f"{path} fails on the messages ({type(error).__name__}: {first_line(error)})") from None
        return prompt if final is None else cut_at_mark(prompt, final)

    def _encoded(self, text: str, what: str, *, special: bool) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer puts around it or without."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{what} holds half a character (a surrogate, {short_repr(text[error.start])}) at position "
                f"{error.start}; give text in UTF-8"
            ) from None
        with _errors_of(self._path, "cannot encode"):
            return list(self._required().encode(text, add_special_tokens=special).ids)

    def _required(self) -> tokenizers.Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{self._bundle} has no tokenizer.json; pass token ids instead of text")
        return self._tokenizer


def _read_from(folder: Path, name: str) -> bytes | None:
    path = folder / name
    try:
        return read_plain(path, TEXT_BYTES[name])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror})") from None


def _load_tokenizer(path: Path, content: bytes | None) -> tokenizers.Tokenizer | None:
    """The tokenizer in a file's content, without its truncation and padding, which are for training (transformers
    leaves them out too); None without a file. It is tried once, since some files only fail in use."""
    if content is None:
        return None
    import tokenizers

    with _errors_of(path, "is not a tokenizer that 'tokenizers' reads:"), _silent_panics():
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        with contextlib.suppress(Exception):  # it may know no such letter
            tokenizer.encode("a b")
        with contextlib.suppress(Exception):
            tokenizer.decode([0, 1])
        return tokenizer


@contextlib.contextmanager
def _errors_of(path: Path, failed: str) -> Iterator[None]:
    """Whatever the library raises within the block becomes a BundleError."""
    try:
        yield
    except (BundleError, RequestError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):  # the library raises bare Exception, and panics
            raise
        raise BundleError(f"{path} {failed} ({first_line(error)}); export the bundle again") from None


@contextlib.contextmanager
def _silent_panics() -> Iterator[None]:
    """What a library in Rust writes on stderr before it raises a panic is dropped; all else that is written there
    meanwhile comes after the block. Windows has no such way, nor has a process that may write no file: there it is
    shown."""
    aside = _aside()
    try:
        if aside is None:
            raise OSError
        kept = os.dup(2)
    except OSError:  # no stderr
        yield
        return
    panicked = False
    with aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            aside.seek(0)
            while not panicked and (piece := aside.read(1 << 16)):
                os.write(2, piece)


def _aside() -> IO[bytes] | None:
    """A file without a name: in memory where the system has such files, else in the folder for temporary ones."""
    if sys.platform == "win32":
        return None
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            return os.fdopen(os.memfd_create("stderr"), "w+b")
    with contextlib.suppress(OSError):
        return tempfile.TemporaryFile()
    return None


def _special_tokens(path: Path, content: bytes | None) -> dict[str, str]:
    """The special tokens of tokenizer_config.json that transformers gives to chat templates. path: for errors. Raises
    BundleError."""
    if content is None:
        return {}
    config = parse_json(content, path, BundleError, "export the bundle again")
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
