"""What requests need of a model: prompts as ids, checked settings, and answers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import time
from collections.abc import Generator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle_runtime import AnswerForm, Constraint, ConstraintError, EagleModel, Piece, RequestError, Wish
from eagle_serve.errors import ApiError, error_of
from eagle_serve.jobs import Job
from eagle_serve.metrics import Metrics
from eagle_serve.options import Options
from eagle_serve.prefixes import Prefixes
from eagle_serve.request import Prepared, Request

# The runtime's name of a setting -> the field that gave it, for errors.
FIELDS = {
    "constraint": "eagle.constraint",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "method": "eagle.method",
    "tree": "eagle.tree",
}
LIBRARIES = {  # backend -> distribution of its engine
    "cpu": "onnxruntime",
    "native": "onnxruntime",
    "cuda": "onnxruntime-gpu",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt-rtx",
}
AT_ONCE = 4  # requests, where their trees are verified in one forward pass


class Engine:
    """A loaded model as the server uses it. names: the model's name and its aliases. parallel: requests at once.
    own_penalty: the model's repetition penalty. prefixes: texts whose keys and values are kept."""

    def __init__(self, model: EagleModel, bundle: Path, options: Options, metrics: Metrics) -> None:
        """bundle: the folder that the model was loaded from. Raises BundleError, RequestError."""
        if (options.parallel or 1) > 1 and not model.has_twins:
            raise RequestError(f"requests cannot take turns on {model.backend}, whose caches are one; use --parallel 1")
        self.parallel = options.parallel or (AT_ONCE if model.joins_texts else 1)
        self.model = model
        self.names = (bundle.resolve().name, *options.aliases)
        self.created = int(time.time())
        self.own_penalty = model.manifest.sampling.repetition_penalty
        self._bundle = bundle
        self._options = options
        self._metrics = metrics
        self.prefixes = Prefixes(model, options.limits.states)
        self.token_text = functools.lru_cache(maxsize=4096)(self._token_text)

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the bundle's files."""
        files = "".join(f"{name}:{digest}\n" for name, digest in sorted(self.model.manifest.files.items()))
        return hashlib.sha256(files.encode()).hexdigest()

    @functools.cached_property
    def fingerprint(self) -> str:
        """What the answers of equal requests depend on: bundle, precision, backend, version."""
        precision = "-".join(dict.fromkeys(self.model.manifest.precision.values()))
        engine = f"{self.model.backend}-{_version(LIBRARIES[self.model.backend])}"
        return f"fp_{self.digest[:12]}_{precision}_{engine}_{_version('eagle-edge')}"

    def description(self, name: str) -> dict[str, Any]:
        """The model as `GET /v1/models` lists it."""
        model = self.model
        meta = {
            "context": model.context,
            "precision": dict(model.manifest.precision),
            "backend": model.backend,
            "chat": model.text.chat,
            "max_tokens": min(self._options.max_tokens or model.context, model.context - 1),
            "sampling": dataclasses.asdict(model.manifest.sampling),
            "kv_bytes": self.prefixes.kv_bytes,
            "kv_budget": model.memory().kv_budget,
        }
        return {"id": name, "object": "model", "created": self.created, "owned_by": "eagle-edge", "meta": meta}

    def prepare(self, request: Request) -> list[Prepared]:
        """Returns what answers a request, ready to decode: for each prompt its choices. Each choice has the seed after
        that of the one before, as in vLLM. Takes up to seconds. Raises ApiError, MemoryLimitError."""
        result: list[Prepared] = []
        for number, (ids, form) in enumerate(self.prompts(request)):
            settings = self._settings(request, ids, form)
            echo = self._echo(request.prompts[number]) if request.echo else ""
            for choice in range(request.choices):
                seed = {"seed": (settings["seed"] + choice) % 2**64} if "seed" in settings else {}
                result.append(Prepared(request, tuple(ids), {**settings, **seed}, len(result), not choice, echo))
        return result

    def _settings(self, request: Request, ids: list[int], form: AnswerForm | None) -> dict[str, Any]:
        """The runtime's settings for an answer to a prompt. Raises ApiError, MemoryLimitError."""
        room = self.model.context - len(ids)
        wanted = 1 if request.echoes_alone else request.max_tokens  # that one is not shown
        limits = (room, self._options.max_tokens, wanted)
        settings: dict[str, Any] = {**request.settings, "max_new_tokens": min(limit for limit in limits if limit)}
        if request.logprobs is not None:
            settings["logprobs"] = request.logprobs
            if request.echo:
                settings["prompt_logprobs"] = request.logprobs
        if form is not None and (form.thinks or form.use is not None):
            settings["form"] = form
        if request.grammar is not None:
            try:
                settings["constraint"] = Constraint.of(request.grammar.kind, request.grammar.value)
            except ConstraintError as error:
                raise error_of(error, request.grammar.param) from None
        if request.prediction is not None:
            settings["prediction"] = request.prediction
        try:
            self.model.check(ids, **settings)
        except ConstraintError as error:
            param = "tools" if request.tools else request.grammar.param if request.grammar else None
            raise error_of(error, param, self._bundle) from None
        except RequestError as error:
            raise _of_field(error_of(error, None, self._bundle), settings) from None
        return settings

    def prompts(self, request: Request) -> list[tuple[list[int], AnswerForm | None]]:
        """Returns the ids of a request's prompts, and the form of the answer to a chat. Raises ApiError."""
        try:
            if request.endpoint == "completions":
                prompts = (one if isinstance(one, str) else list(one) for one in request.prompts)
                return [(self.model.fitting(prompt), None) for prompt in prompts]
            if not self.model.text.chat:
                reason = "this model has no chat template; send a prompt to /v1/completions"
                raise ApiError(400, "template_error", reason, "messages")
            chat = self.model.chat_prompt(
                request.messages,
                request.tools,
                template_kwargs=request.template_kwargs,
                tool_format=self._options.tool_format,
            )
            return [(self.model.fitting(chat), chat.form)]
        except RequestError as error:
            raise error_of(error, "prompt" if request.endpoint == "completions" else "messages", self._bundle) from None

    def decode(self, job: Job) -> Generator[Piece | Wish, None, None]:
        """Yields the pieces of a job, and before them the wishes that they need (Turn.events). Raises what a turn
        raises."""
        prepared = job.prepared
        settings = {**prepared.settings, "on_cycle": job.note_cycle, "on_prefill": job.note_prefill}
        with self.prefixes.turn(prepared.ids, settings) as turn:
            job.begin(turn)
            for event in turn.events:
                if isinstance(event, Wish):
                    yield event
                    continue
                job.note_piece()
                if (result := event.result) is not None:
                    self._count(job, result.usage)
                    if result.finish_reason == "cancelled":
                        return
                yield event

    def _count(self, job: Job, usage: Any) -> None:
        metrics = self._metrics
        metrics.add("prompt_tokens", usage.prompt_tokens)
        metrics.add("cached_tokens", usage.cached_tokens)
        metrics.add("generated_tokens", usage.new_tokens)
        metrics.add("target_passes", usage.target_passes)
        metrics.add("accepted_drafts", job.accepted)
        if job.first is not None and usage.new_tokens:
            metrics.first_token(job.first)

    def _echo(self, prompt: str | Sequence[int]) -> str:
        """The text of a prompt, which an answer begins with."""
        return prompt if isinstance(prompt, str) else "".join(self.model.text.token_texts(prompt))

    def _token_text(self, token: int) -> str:
        """The text of one token alone, for the runners-up of a position."""
        stream = self.model.text.stream([])
        return f"token_id:{token}" if stream is None else stream.feed([token]) + stream.finish()


def _version(distribution: str) -> str:
    """The version of an installed package; "unknown" where it came otherwise, as with an operating system."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _of_field(error: ApiError, settings: Mapping[str, Any]) -> ApiError:
    """An error of a setting, with which its sentence begins, as one of the field that gave it."""
    first, _, rest = error.message.partition(" ")
    if first not in settings:
        return error
    field = FIELDS.get(first, first)
    said = f"{field} {rest}"
    for name in FIELDS.keys() & settings.keys() - {first}:
        said = re.sub(rf"\b{name}\b", FIELDS[name], said)
    return ApiError(error.status, error.code, said, field, error.headers)
