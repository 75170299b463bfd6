"""EagleModel: a bundle, loaded and ready to decode. What applications use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from eagle_runtime.app.batch import batch
from eagle_runtime.app.conversation import Conversation
from eagle_runtime.app.result import Piece, Result
from eagle_runtime.app.slots import Memory
from eagle_runtime.app.turn import Turn
from eagle_runtime.app.turns import Prompt, Turns
from eagle_runtime.base.arguments import checked_int
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import Float
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.core.counters import Counters
from eagle_runtime.core.head import HeadOfText
from eagle_runtime.core.rounds import Wish
from eagle_runtime.drafting.cost_model import Costs
from eagle_runtime.drafting.methods import NO_HEAD, default_method
from eagle_runtime.opening.backends import PassedOver
from eagle_runtime.opening.datastore_file import with_datastore
from eagle_runtime.opening.draft_bundle import folders_of, with_draft_bundles
from eagle_runtime.opening.exact_rows import RowCheck
from eagle_runtime.opening.habits_file import HabitsFile
from eagle_runtime.opening.hub_bundle import bundle_folder
from eagle_runtime.opening.loading import Progress, open_bundle
from eagle_runtime.opening.opened import OpenBundle
from eagle_runtime.text.answer_form import ChatPrompt, chat_prompt, has_heads
from eagle_runtime.text.tokenizer import Message, Text
from eagle_runtime.text.tools import ToolUse

if TYPE_CHECKING:
    from typing import Unpack

    from eagle_runtime.app.settings import Settings


class EagleModel:
    """A loaded bundle: target, head if it has one, their caches, tokenizer.

    Any thread may call any method; a model decodes one text at a time.

    - Calls of `generate` from several threads wait for each other and run in order of arrival.
    - A stream holds the model from its first piece until it ends, is closed or dropped. Meanwhile other threads get a
      BusyError, since the stream may never end. A newer generation in the stream's own thread (the one that asked for a
      piece last) ends it: the next piece then raises RequestError. `score` is such a stream.
    - Twins decode at the same time, step by step in order of arrival. The caller's own code runs between steps, also
      on_cycle; only a `drafter` of the caller's runs within a step.
    - `close` waits for the running step. All later calls raise ClosedError, on twins too, and so does every call in a
      process that was forked after the model was loaded."""

    def __init__(self, bundle: OpenBundle) -> None:
        """Use `EagleModel.load`."""
        self._turns = Turns(bundle)

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        backend: str = "auto",
        context: int | None = None,
        threads: int | None = None,
        check_hashes: bool | Literal["once"] = True,
        kv_budget: int | None = None,
        draft_bundle: str | Path | Sequence[str | Path] | None = None,
        datastore: str | Path | None = None,
        habits: str | Path | None = None,
        on_progress: Progress | None = None,
    ) -> EagleModel:
        """Load a bundle: a folder, or the id of one on the hub (OWNER/NAME[@REVISION], extra hub; hub_bundle.py).

        backend: one of backends.BACKENDS, or "auto" for the first of them that the bundle was made for and that works
        on this machine. context: tokens of prompt and output that the caches hold; None takes the model's limit, on a
        CPU as far as a quarter of the free memory goes, on a GPU at most 4096. threads: of a forward pass on the CPU;
        None takes the number of physical cores, or what a container's quota pays for. check_hashes: compare the SHA-256
        of every file that the backend reads (a second per gigabyte); "once" leaves out files that were compared before
        and did not change. on_progress: called with a stage ("hash", "load", "warm"), what is done of it, and all of
        it; it may raise. "warm" takes longest in the first start on a GPU, which compiles kernels. kv_budget: bytes for
        the keys and values of all conversations on the CPU; None takes a quarter of the memory that is free, and one
        full context at least. draft_bundle: a bundle of the same vocabulary whose target drafts with method
        "draft-model", the default then; or several, whose trees "specinfer" merges, the default then. datastore: a
        text, or JSONL, that is indexed (stage "index"); "lookup" and "eagle+lookup" find matches there too. habits: a
        file of what method "recycling" learns (habits_file.py).

        Raises BundleError, BackendError, RequestError; gives a FidelityWarning for one that differs too much from its
        source model."""
        folder = bundle_folder(bundle)
        kept = None if habits is None else HabitsFile(Path(habits), folder)
        opened = open_bundle(folder, backend, context, threads, check_hashes, kv_budget, on_progress)
        opened = with_draft_bundles(opened, folders_of(draft_bundle), check_hashes, kv_budget)
        return cls(with_datastore(opened, datastore, on_progress).with_habits_of(kept))

    def twin(self) -> EagleModel:
        """Returns a model on the same engines with caches of its own, so that two generations may alternate step by
        step, in one thread or in several. Twins share what was learned of costs and drafts; closing one closes all.
        Raises RequestError on backends of GPUs, whose engines are tied to one cache."""
        if not self.has_twins:
            raise RequestError(f"a model on {self.backend} has no twins; load the bundle once more")
        return EagleModel(self._turns.bundle.with_new_caches())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an EagleModel is not copied, nor sent to another process; load the bundle there, or call twin()"
        )

    @property
    def has_twins(self) -> bool:
        """Whether the backend has caches for several texts: on CPUs."""
        return self._turns.bundle.on_cpu

    @property
    def joins_texts(self) -> bool:
        """Whether the trees of generations that run at once, on twins or in conversations, are verified in one forward
        pass; else they take turns."""
        return self._turns.engines.rounds.joins

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself: sizes, precisions, files, the certificate."""
        return self._turns.bundle.manifest

    @property
    def text(self) -> Text:
        """The tokenizer and the chat template."""
        return self._turns.bundle.text

    @property
    def context(self) -> int:
        """Tokens of prompt and output that the caches hold."""
        return self._turns.bundle.context

    @property
    def threads(self) -> int | None:
        """Threads of a forward pass on the CPU."""
        return self._turns.bundle.threads

    @property
    def backend(self) -> str:
        """The backend in use."""
        return self._turns.bundle.backend

    @property
    def passed_over(self) -> PassedOver:
        """(backend, reason) for each one that "auto" tried before it."""
        return self._turns.bundle.passed_over

    @property
    def notice(self) -> str | None:
        """A warning, also logged, if "auto" runs engine files of the bundle, or its portable graph although it has a
        native one."""
        return self._turns.bundle.notice

    @property
    def row_check(self) -> RowCheck | None:
        """Whether rows of a quantised target are exact on this CPU (exact_rows)."""
        return self._turns.bundle.row_check

    def counters(self) -> Counters | None:
        """Returns what was counted of the GPU's work since the bundle was loaded: copies, forward passes, waits. None
        where it is not counted: on the backends cpu and cuda."""
        return self._turns.engines.sessions[0].counters()

    @property
    def head(self) -> HeadOfText:
        """The draft head. Raises RequestError for a bundle without one."""
        self._turns.engines.check()
        if self._turns.bundle.head is None:
            raise RequestError(NO_HEAD)
        return self._turns.bundle.head

    @property
    def default_method(self) -> str:
        """The method of a request that names neither method nor tree."""
        return default_method(self._turns.bundle.loaded).name

    def generate(self, prompt: Prompt, **settings: Unpack[Settings]) -> Result:
        """Decode to the end and return the result; settings as in `stream`."""
        with self._stream(prompt, settings, streamed=False) as pieces:  # it ends by itself, so others may wait for it
            for piece in pieces:
                if piece.result is not None:
                    return piece.result
        raise AssertionError("a stream ends with a result")

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the ids of a prompt, given as to `stream`: text with the special tokens that the tokenizer puts
        around it, chat messages through the bundle's template. Raises RequestError."""
        return self._turns.encode(prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Raises RequestError for ids outside the vocabulary, or without a tokenizer."""
        return self.text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def count_tokens(self, prompt: Prompt) -> int:
        """Returns the number of tokens of a prompt, given as to `stream`. Raises RequestError."""
        return len(self.encode(prompt))

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Turn:
        """Decode piece by piece.

        prompt: text, token ids, chat messages ({"role", "content"} dicts, for the bundle's template), or what
        `chat_prompt` made of them with tools. The settings:

        - max_new_tokens (256): the output also ends where the context is full. min_new_tokens (0): no end-of-sequence
          or stop token is drawn, and no stop string counts, before so many. stop: a string or up to 16, before which
          the text ends. stop_token_ids: end the output, as do the model's end-of-sequence ids unless ignore_eos.
        - logprobs: record the log-probability of each token, and of so many of the likeliest (0 to 20).
        - prompt_logprobs: the same for the prompt's tokens (Result.prompt), which are all read for it.
        - constraint: a Constraint that the text follows; it ends where nothing may come after it. Drafts keep to it,
          but for those of a drafter of your own. form: of the answer to a chat (`chat_prompt`), with its tools.
        - prediction: text, or ids, that the output may repeat; n-gram matches are looked for there first.
        - on_cycle: called with each Cycle after its verification. on_prefill: called with the tokens of a long prompt
          that are read so far, and all of them, after each chunk but the last.

        What drafts changes the speed, not the output. method: one of drafting.methods, which say what they draft and
        when they are taken for None. tree, total_token, depth, draft_top_k: see manifest.TreeDefaults; None takes the
        bundle's, and a dynamic tree if total_token or depth is given. Costs (see `costs`) size a cost-aware tree.
        tree may also be a TreeShape, drafter a core.drafter.Drafter of your own, new per call.

        How tokens are sampled: sampling, a SamplingParams, or its fields as keyword settings, as temperature=0.7; a
        field may be set in one of the two. Without `sampling`, fields that are not set or None are the model's own
        (`manifest.sampling`). seed: None takes that of `sampling`, or a random one, which the figures report.

        Raises RequestError and ClosedError at once; pieces raise these too, and BusyError."""
        return self._stream(prompt, settings, streamed=True)

    def _stream(self, prompt: Prompt, settings: Settings, *, streamed: bool) -> Turn:
        """streamed: as in Lease."""
        self._turns.engines.check()
        ids, merged = self._asked(prompt, settings)
        return self._turns.alone(ids, merged, streamed=streamed)

    def fitting(self, prompt: Prompt) -> list[int]:
        """Returns the ids of a prompt that fits the context. prompt: as for `stream`. Raises RequestError."""
        return self._turns.ids(prompt)

    def check(self, prompt: Prompt, **settings: Unpack[Settings]) -> list[int]:
        """Check a request without answering it; returns the ids of its prompt. Raises at once what a turn of `stream`,
        `batch` or a conversation would raise: RequestError, ContextError, MemoryLimitError, ClosedError."""
        return self._checked(prompt, settings)[0]

    def _checked(self, prompt: Prompt, settings: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Returns the ids of a request's prompt and its settings. Raises as `check` does."""
        self._turns.engines.check()
        ids, merged = self._asked(prompt, settings)
        self._turns.slots.check(len(ids), self.context)
        self._turns.check(ids, merged)
        return ids, merged

    def _asked(self, prompt: Prompt, settings: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """The ids of a prompt that fits the context, and the settings. Where an answer to chat messages would show its
        heads, they have its form. Raises RequestError, ContextError."""
        if settings.get("form") is not None:
            return self._turns.ids(prompt), dict(settings)
        if (
            isinstance(prompt, list | tuple)
            and prompt
            and all(isinstance(item, Mapping) for item in prompt)
            and has_heads(self.text)
        ):
            prompt = self.chat_prompt([item for item in prompt if isinstance(item, Mapping)])
        form = prompt.form if isinstance(prompt, ChatPrompt) else None
        return self._turns.ids(prompt), {**settings, "form": form}

    def conversation(
        self,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_format: str | None = None,
    ) -> Conversation:
        """Returns a conversation, which reads of each turn what is new.

        messages: to begin with. tools: that each answer may call, as OpenAI's API describes them. template_kwargs:
        further variables for the bundle's chat template. tool_format: a name of text.call_formats; None for the one
        that the template speaks of. Raises RequestError, ClosedError."""
        self._turns.engines.check()
        return Conversation(
            self._turns, messages, tools=tools, template_kwargs=template_kwargs, tool_format=tool_format
        )

    def chat_prompt(
        self,
        messages: Sequence[Message],
        use: ToolUse | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_format: str | None = None,
    ) -> ChatPrompt:
        """Returns the prompt of a chat without a conversation, with the form of its answer, for `stream`. Arguments and
        errors as in `conversation`; use: of tools."""
        return chat_prompt(self.text, messages, use, template_kwargs=template_kwargs, tool_format=tool_format)

    def load_conversation(self, path: str | Path) -> Conversation:
        """Returns the conversation in a file that `Conversation.save` wrote.

        Its rows are taken where bundle, engine and processor are the same; else `kv_status` says why not, and the next
        turn reads the text again. Raises ConversationFileError, which leaves model and file alone, and ClosedError."""
        self._turns.engines.check()
        return Conversation.load(self._turns, path)

    def batch(
        self, requests: Iterable[Prompt | Mapping[str, Any]], *, width: int = 8, **settings: Any
    ) -> Iterator[tuple[int, Piece]]:
        """Answer several requests at once; yields (number of the request, piece) as pieces come. The last piece of each
        has its result.

            for number, piece in model.batch(["def f(", "def g("], max_new_tokens=64): ...

        requests: prompts, or mappings with "prompt" and settings of `stream` of its own; settings: of all others.
        width: requests that run at once. Every text is the one that the request gets alone. Backend native verifies
        the trees of all in one forward pass; cpu takes turns; engines of GPUs answer one after the other. What prompts
        that run at once have in common at their beginning is read once.

        Raises RequestError, ContextError, MemoryLimitError and ClosedError at once, for any of the requests; the
        iteration raises what a stream raises, which ends the other answers, as leaving it does."""
        self._turns.engines.check()
        width = checked_int("width", width, 1) if self.has_twins else 1
        asked = []
        for one in requests:
            own = {"prompt": one} if not isinstance(one, Mapping) else dict(one)
            if "prompt" not in own:
                raise RequestError("a request of a batch has no 'prompt'")
            asked.append(self._checked(own.pop("prompt"), {**settings, **own}))
        return batch(self._turns, asked, width)

    def grant(self, wishes: Sequence[Wish]) -> None:
        """Grant wishes of turns that one thread reads by their `events`, as `batch` does; in one forward pass where the
        backend joins texts. Raises ClosedError."""
        self._turns.engines.rounds.serve(wishes)

    def score(self, tokens: Sequence[int], first: int = 0) -> Iterator[Float]:
        """Yields the target's logits after tokens[first], tokens[first + 1], ... in arrays [R, V]. Holds the model as a
        stream does. Raises RequestError and ClosedError; pieces also raise BusyError."""
        self._turns.engines.check()
        checked = self._turns.ids(tokens)
        first = checked_int("first", first, 0)
        return self._turns.score(checked, first)

    def costs(self) -> Costs:
        """Returns what forward passes cost on this machine, as learned from the passes of this model's generations and
        of earlier runs with this bundle, backend and machine, or else estimated from the models' shapes."""
        self._turns.engines.check()
        return self._turns.bundle.costs.latest()

    def memory(self) -> Memory:
        """Returns what the model takes of the memory."""
        return self._turns.memory()

    def close(self) -> None:
        """Free the engines when the running step is over; a second call does nothing. Unfinished generations raise
        ClosedError at their next step. It may be called from anywhere: another thread, on_cycle, between two pieces, a
        signal handler, a forked process (where it frees nothing)."""
        self._turns.close()

    def __enter__(self) -> EagleModel:
        self._turns.engines.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
