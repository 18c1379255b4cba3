"""Stand-ins for what several test files need: tiny samples and a server that answers like vLLM."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from specmill.params import Prepare
from specmill.samples import Sample, make_sample
from specmill.server import Server


def sample(
    prompt: list[int],
    answer: list[int],
    *,
    category: str = "coding",
    split: str = "train",
    turn: int = 0,
) -> Sample:
    """A sample of these ids; what else it holds does not matter."""
    return make_sample(
        prompt,
        answer,
        category=category,
        source="tests",
        split=split,
        turn=turn,
        text=f"answer {answer}",
        finish_reason="stop",
    )


def prepare_section(**changes: Any) -> Prepare:
    """A section `prepare` of two files that are not there, with some keys changed."""
    values: dict[str, Any] = {
        "dataset": "file:train.jsonl",
        "bench": "file:bench.jsonl",
        "bench_per_category": 20,
        "max_rows": None,
        "responses": "verifier",
        "strict": False,
        "limit": 30,
        "heldout": 5,
        "max_tokens": 16,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "chat_template_kwargs": {},
        "seed": 17,
    }
    return Prepare(**(values | changes))


@dataclass(frozen=True)
class FakeServer(Server):
    """A FakeVllm that is served."""

    fake: "FakeVllm | None" = None

    def pause(self) -> None:
        assert self.fake
        self.fake.paused = True

    def resume(self) -> None:
        assert self.fake
        self.fake.paused = False


class _Http(ThreadingHTTPServer):
    request_queue_size = 128  # a full queue drops connections, which are tried again a second later


class FakeVllm:
    """Answers over HTTP in vLLM's format. Token ids of a text are its UTF-8 bytes.

    A chat that ends with `x` is answered `re: x`; its prompt reads `<role>content` throughout. A
    completion of ids `[..., n]` is streamed as `[n + 1, n + 2]`, then `[n + 3]`, and moves the
    engine's counters as 2 drafts of `k` tokens do of which positions 0 and 1 are accepted 2 and 1
    times and no others, in 3 engine steps. Where a completion asks for log probabilities, it gets
    those of `likely`. While it is paused every completion fails.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        """Bodies of the requests, in order of arrival."""
        self.keys: set[str | None] = set()
        """Authorization headers seen."""
        self.fail_after: int | None = None
        """Requests answered before every further one fails with status 500."""
        self.refused: str | None = None
        """A chat that ends with this text is longer than the context."""
        self.omitted: set[str] = set()
        """Names left out of the answers of chats."""
        self.hold: tuple[str, threading.Event] | None = None
        """A chat that ends with this text is answered only once the event is set."""
        self.stream: list[str] | None = None
        """Lines sent instead of the usual completion."""
        self.metrics: str | None = None
        """Text sent instead of the usual counters."""
        self.k = 3
        """Tokens of each draft that the usual counters tell of."""
        self.likely: dict[int, float] = {}
        """Log probabilities of the next token, by its id."""
        self.paused = False
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def serve(self, log: Path = Path("no.log")) -> Iterator[Server]:
        """Listen on a free port of 127.0.0.1."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, fake.exposition().encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.requests.append(body)
                    fake.keys.add(self.headers["Authorization"])
                    failed = fake.fail_after is not None and len(fake.requests) > fake.fail_after
                if failed or fake.paused:
                    error = {"error": {"message": "the fake is tired", "code": 500}}
                    self._send(500, json.dumps(error).encode())
                elif fake.refused and fake.refused == body.get("messages", [{}])[-1].get("content"):
                    message = "This model's maximum context length is 64 tokens."
                    error = {"error": {"message": message, "code": 400}}
                    self._send(400, json.dumps(error).encode())
                elif self.path == "/v1/chat/completions":
                    self._send(200, json.dumps(fake.chat(body["messages"])).encode())
                elif "logprobs" in body:
                    self._send(200, json.dumps(fake.top_logprobs()).encode())
                else:
                    lines = fake.stream or completion_lines(body["prompt"])
                    self._send(200, "".join(f"{line}\n\n" for line in lines).encode())

            def _send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        with _Http(("127.0.0.1", 0), Handler) as http:
            thread = threading.Thread(target=http.serve_forever, args=(0.01,))
            thread.start()
            try:
                url = f"http://127.0.0.1:{http.server_port}"
                yield FakeServer(url, "secret", log, 1.25, fake=self)
            finally:
                http.shutdown()
                thread.join()

    def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply to a conversation."""
        asked = messages[-1]["content"]
        if self.hold is not None:
            text, event = self.hold
            if asked == text:
                assert event.wait(20)
            else:
                event.set()
        answer = f"re: {asked}"
        prompt = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        choice = {
            "message": {"content": answer},
            "finish_reason": "stop",
            "token_ids": list(answer.encode()),
        }
        reply = {"choices": [choice], "prompt_token_ids": list(prompt.encode())}
        for name in self.omitted:
            (choice if name in choice else reply).pop(name)
        return reply

    def top_logprobs(self) -> dict[str, Any]:
        """The reply to a completion that asks for the likeliest tokens, named by their ids."""
        likely = {f"token_id:{token}": value for token, value in self.likely.items()}
        return {"choices": [{"logprobs": {"top_logprobs": [likely]}}]}

    def exposition(self) -> str:
        """What `/metrics` says after the completions so far."""
        if self.metrics is not None:
            return self.metrics
        done = len(self.requests)
        accepted = [2, 1, *[0] * self.k][: self.k]
        values = {
            "vllm:spec_decode_num_drafts_total{": 2,
            "vllm:spec_decode_num_draft_tokens_total{": 2 * self.k,
            "vllm:spec_decode_num_accepted_tokens_total{": sum(accepted),
        } | {
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}",': times
            for position, times in enumerate(accepted)
        }
        lines: list[str] = []
        for name, each in values.items():
            family = name.partition("{")[0]
            if f"# TYPE {family} counter" not in lines:
                lines.append(f"# TYPE {family} counter")
            lines.append(f'{name}engine="0"}} {float(each * done)}')
        lines.append("# TYPE vllm:iteration_tokens_total histogram")
        lines.append(f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {3.0 * done}')
        lines.append(f'vllm:iteration_tokens_total_count{{engine="0"}} {3.0 * done}')
        lines.append(f'vllm:iteration_tokens_total_sum{{engine="0"}} {3.0 * done}')
        return "\n".join(lines) + "\n"


def chunk(token_ids: list[int], finish_reason: str | None = None) -> str:
    """One line of a streamed completion."""
    choice = {"index": 0, "text": "", "token_ids": token_ids, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}"


def completion_lines(prompt: list[int]) -> list[str]:
    """The usual stream: two tokens, then one, then the usage, which comes without a choice."""
    last = prompt[-1]
    return [
        chunk([last + 1, last + 2]),
        chunk([last + 3], "length"),
        'data: {"choices": [], "usage": {"completion_tokens": 3}}',
        "data: [DONE]",
    ]
