"""The worker at work: a thread reads orders, the main thread carries out those that use the model, one by one."""

from __future__ import annotations

import dataclasses
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from eagle_runtime.app.conversation import Conversation
from eagle_runtime.app.eagle_model import EagleModel
from eagle_runtime.app.result import Piece, Result
from eagle_runtime.app.turn import AwaitedTurn
from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import BusyError, EagleError, RequestError
from eagle_runtime.commands.worker_order import ACTIONS, Id, LineError, Order, read_order, settings_of, taken
from eagle_runtime.commands.worker_pipes import LONGEST, Writer

PROTOCOL = 1  # of docs/worker.md
MOST_QUEUED = MOST_CONVERSATIONS = 256  # a parent that asks for more has lost count
OF_CHAT = ("tools", "template_kwargs", "tool_format")
OF_TURN = ("tool_choice", "parallel_tool_calls")
GOES_ON = ("message", "results", "prompt", "regenerate")


class PendingOrder(AwaitedTurn):
    """An order that waits or runs."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order


class Service:
    """One model and its conversations, for one parent."""

    def __init__(self, model: EagleModel, writer: Writer, memory_limit: int | None) -> None:
        self._model = model
        self._writer = writer
        self._memory_limit = memory_limit
        self._conversations: dict[str, Conversation] = {}
        self._opened = 0
        self._jobs: dict[Id, PendingOrder] = {}  # that wait or run
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[PendingOrder | None] = queue.SimpleQueue()
        self._ending = False

    def run(self, lines: Iterator[bytes | None]) -> None:
        """Serve until the lines end, or `shutdown` comes; both end the running answer after its step."""
        threading.Thread(target=self._read, args=(lines,), name="eagle-reader", daemon=True).start()
        while (job := self._queue.get()) is not None and not self._writer.broken:
            self._guarded(job.order.id, lambda job=job: self._carry_out(job))  # type: ignore[misc]
            with self._lock:
                self._jobs.pop(job.order.id, None)
        for chat in self._conversations.values():
            chat.close()
        self._writer.flush()

    # The reader's thread

    def _read(self, lines: Iterator[bytes | None]) -> None:
        try:
            for line in lines:
                if line is None:
                    self._fail(None, "line", f"the line has more than {LONGEST >> 20} MiB and was left out; send less")
                elif line.strip():
                    self._guarded(None, lambda line=line: self._take(line))  # type: ignore[misc]
                if self._ending or self._writer.broken:
                    break
        finally:
            with self._lock:
                self._ending = True
                jobs = list(self._jobs.values())
            for job in jobs:
                job.cancel()
            self._writer.stop_waiting()
            self._queue.put(None)

    def _take(self, line: bytes) -> None:
        order = read_order(line)
        quick: dict[str, Callable[[Order], dict[str, Any]]] = {
            "hello": self._hello, "status": self._status, "cancel": self._cancel, "count_tokens": self._count_tokens,
            "shutdown": self._shutdown,
        }  # fmt: skip
        with self._lock:
            if order.id in self._jobs:
                raise LineError(f"id {short_repr(order.id)} is in use; take another one for each line")
            waiting = len(self._jobs)
            if order.op not in quick and waiting < MOST_QUEUED:
                self._jobs[order.id] = PendingOrder(order)
        if order.op in quick:
            self._guarded(order.id, lambda: self._done(order.id, quick[order.op](order)))
        elif waiting >= MOST_QUEUED:
            self._fail(order.id, "queue_full", f"{MOST_QUEUED} orders wait already; wait for one to end")
        else:
            self._send(order.id, "accepted", queued=waiting)
            self._queue.put(self._jobs[order.id])

    def _hello(self, order: Order) -> dict[str, Any]:
        model = self._model
        limits = {"line_bytes": LONGEST, "queued": MOST_QUEUED, "conversations": MOST_CONVERSATIONS}
        hello = {
            "protocol": PROTOCOL, "backend": model.backend, "notice": model.notice, "context": model.context,
            "text": model.text.available, "chat": model.text.chat, "vocab_size": model.manifest.target.vocab_size,
            "method": model.default_method,
            "limits": {**limits, "memory_bytes": self._memory_limit},
        }  # fmt: skip
        self._send(order.id, "hello", **hello)
        return {}

    def _status(self, order: Order) -> dict[str, Any]:
        with self._lock:
            waiting = len(self._jobs)
        conversations = {
            name: {"rows": chat.kv_rows, "bytes": chat.kv_bytes, "kv_status": chat.kv_status, "room": chat.room}
            for name, chat in list(self._conversations.items())
        }
        memory = dataclasses.asdict(self._model.memory())
        self._send(order.id, "status", orders=waiting, memory=memory, conversations=conversations)
        return {}

    def _cancel(self, order: Order) -> dict[str, Any]:
        target = order.arguments.get("target")
        with self._lock:
            job = self._jobs.get(target) if isinstance(target, str | int) else None
        if job is not None:
            job.cancel()
        return {"cancelled": job is not None}

    def _count_tokens(self, order: Order) -> dict[str, Any]:
        return {"tokens": self._model.count_tokens(_prompt(order.arguments))}

    def _shutdown(self, order: Order) -> dict[str, Any]:
        self._ending = True
        return {}

    # The main thread

    def _carry_out(self, job: PendingOrder) -> None:
        order = job.order
        if job.cancelled:
            self._done(order.id, {"text": "", "token_ids": [], "finish_reason": "cancelled"})
        elif order.op == "conversation":
            self._done(order.id, self._converse(order.arguments))
        else:
            self._generate(job)

    def _generate(self, job: PendingOrder) -> None:
        arguments, own = job.order.arguments, None
        settings = settings_of(arguments)

        def read(count: int, total: int) -> None:
            self._send(job.order.id, "prefill", done=count, total=total)

        try:
            if "conversation" in arguments:
                chat = self._named(arguments)
                settings |= taken(arguments, "tools", *OF_TURN)
            else:
                prompt = _prompt(arguments)
                given = prompt[:-1] if "messages" in arguments else ()
                chat = own = self._model.conversation(given, **taken(arguments, *OF_CHAT))
                settings |= taken(arguments, *OF_TURN)
                arguments = {"message": prompt[-1]} if "messages" in arguments else {"prompt": prompt}
            if sum(name in arguments for name in GOES_ON) != 1:
                raise RequestError(f"a conversation goes on with one of {', '.join(GOES_ON)}; give one")
            if "results" in arguments:
                turn = chat.send_results(arguments["results"], on_prefill=read, **settings)
            elif "message" in arguments:
                turn = chat.send(arguments["message"], on_prefill=read, **settings)
            elif "prompt" in arguments:
                turn = chat.complete(arguments["prompt"], on_prefill=read, **settings)
            else:
                turn = chat.regenerate(on_prefill=read, **settings)
            with job.begin(turn):
                for piece in turn:
                    self._show(job, piece, settings.get("logprobs"))
        finally:
            if own is not None:
                own.close()

    def _show(self, job: PendingOrder, piece: Piece, logprobs: int | None) -> None:
        if piece.tokens:
            self._writer.wait_for_reader(lambda: job.cancelled)
            more: dict[str, Any] = (
                {} if logprobs is None else {"logprobs": [{"logprob": t.logprob, "top": t.top} for t in piece.tokens]}
            )
            if piece.parts:
                more["parts"] = [dataclasses.asdict(part) for part in piece.parts]
            drafted = [token.drafted for token in piece.tokens]
            self._send(job.order.id, "piece", text=piece.text, tokens=list(piece.token_ids), drafted=drafted, **more)
        if piece.result is not None:
            self._done(job.order.id, _result(piece.result))

    def _converse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        action = arguments.get("action", "")
        if action not in ACTIONS:
            raise RequestError(f"action is {short_repr(action)}, but must be one of {', '.join(ACTIONS)}")
        if wrong := sorted(set(arguments) - {"action"} - ACTIONS[action]):
            raise RequestError(f"{action} takes no {wrong[0]}; it takes {', '.join(sorted(ACTIONS[action]))}")
        if missing := sorted({"path", "index", "content", "to"} & ACTIONS[action] - set(arguments)):
            raise RequestError(f"{action} needs {missing[0]}")
        if action in ("open", "load", "fork") and len(self._conversations) >= MOST_CONVERSATIONS:
            raise BusyError(f"{MOST_CONVERSATIONS} conversations are open; close one")
        if action == "open":
            given = {"messages": (), **taken(arguments, "messages", *OF_CHAT)}
            return self._added(self._model.conversation(given.pop("messages"), **given))
        if action == "load":
            return self._added(self._model.load_conversation(arguments["path"]))
        chat, name = self._named(arguments), arguments["conversation"]
        if action == "fork":
            return self._added(chat.fork())
        if action == "close":
            del self._conversations[name]
            chat.close()
            return {"conversation": name}
        more: dict[str, Any] = {}
        if action == "edit":
            chat.edit(arguments["index"], arguments["content"])
        elif action == "rollback":
            chat.rollback(to=arguments["to"])
        else:
            more["bytes"] = chat.save(arguments["path"], **taken(arguments, "kv", "max_bytes"))
        return {**_state(name, chat), **more}

    def _added(self, chat: Conversation) -> dict[str, Any]:
        self._opened += 1
        name = f"c{self._opened}"
        self._conversations[name] = chat
        return _state(name, chat)

    def _named(self, arguments: dict[str, Any]) -> Conversation:
        name = arguments.get("conversation", "")
        if name not in self._conversations:
            raise RequestError(f"there is no conversation {short_repr(name)}; open one")
        return self._conversations[name]

    # Events

    def _guarded(self, order_id: Id | None, work: Callable[[], None]) -> None:
        """Call `work`; whatever it raises becomes the order's error."""
        try:
            work()
        except LineError as error:
            self._fail(error.id, error.code, str(error))
        except EagleError as error:
            self._fail(order_id, error.code, str(error))
        except MemoryError:
            self._fail(order_id, "memory_limit", "the memory is full; end other programs, or use a shorter text")
        except Exception as error:
            traceback.print_exc()
            self._fail(order_id, "internal", f"{type(error).__name__}: {error}; standard error says more")

    def _fail(self, order_id: Id | None, code: str, message: str) -> None:
        self._send(order_id, "error", code=code, message=message)

    def _done(self, order_id: Id, result: dict[str, Any]) -> None:
        self._send(order_id, "done", result=result)

    def _send(self, order_id: Id | None, event: str, **more: Any) -> None:
        self._writer.put({"id": order_id, "event": event, **more})


def _prompt(arguments: dict[str, Any]) -> Any:
    """The prompt or the messages. Raises RequestError."""
    if ("prompt" in arguments) == ("messages" in arguments):
        raise RequestError("give one of prompt, messages and conversation")
    prompt = arguments["prompt"] if "prompt" in arguments else arguments["messages"]
    if "messages" in arguments and not prompt:
        raise RequestError("messages are empty; give at least one")
    return prompt


def _result(result: Result) -> dict[str, Any]:
    usage = {**dataclasses.asdict(result.usage), "ttft_s": result.usage.ttft_s}
    return {**result.as_data(), "usage": usage, "seed": result.seed}


def _state(name: str, chat: Conversation) -> dict[str, Any]:
    return {
        "conversation": name, "messages": len(chat.messages), "tokens": len(chat.token_ids), "room": chat.room,
        "kv_status": chat.kv_status,
    }  # fmt: skip
