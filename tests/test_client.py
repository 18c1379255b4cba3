import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.stub_server import event
from specmill.client import Answer, Client, CompletionStream, TimedAnswer, run_closed_loop
from specmill.server import Server
from tests.fakes import FakeVllm, chunk

Result = TypeVar("Result")

# As vLLM 0.32 writes it: prometheus_client's exposition with one engine, a histogram whose own
# name ends in `_total`, and the creation time beside each counter.
EXPOSITION = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="verifier"} 1.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="verifier"} 120.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="verifier"} 1.7959626031961e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="verifier"} 240.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="verifier"} 50.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="verifier",position="0"} 41.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="verifier",position="1"} 9.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_created Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="verifier",position="0"} 1.79e+09
# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="verifier"} 100.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="verifier"} 130.0
vllm:iteration_tokens_total_count{engine="0",model_name="verifier"} 130.0
vllm:iteration_tokens_total_sum{engine="0",model_name="verifier"} 512.0
"""  # noqa: E501 - one line each, as they come


RECORDED = (Path(__file__).parent / "data/completion_stream.txt").read_bytes()
"""What vLLM 0.32 streamed for one completion under n-gram speculation."""
RECORDED_IDS = [
    [15486],
    [46494, 15107, 232, 227],
    [30, 198],
    [198],
    [57],
    [5248],
    [441],
    [2090],
    [732],
    [288],
]


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


def ask(fake: FakeVllm, work: Callable[[Client], Awaitable[Result]]) -> Result:
    async def asking() -> Result:
        with fake.serve() as server:
            async with Client(server, timeout_s=30) as client:
                return await work(client)

    return asyncio.run(asking())


def complete(fake: FakeVllm, *lines: str) -> TimedAnswer:
    fake.stream = list(lines)
    return ask(fake, lambda client: client.complete_timed([7, 8], {"max_tokens": 4}))


async def complete_pieces(
    pieces: Sequence[bytes], *, then: str = "end", timeout_s: float = 30
) -> TimedAnswer:
    """Ask a server that sends these pieces one by one, and then ends, breaks off or stalls."""
    released = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if pieces:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0.001)  # the client, in the same loop, reads what there is
        if then == "stall":
            await released.wait()
        elif then == "end":
            writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as http:
        port = http.sockets[0].getsockname()[1]
        server = Server(f"http://127.0.0.1:{port}", "key", Path("log"), 0.0)
        try:
            async with Client(server, timeout_s) as client:
                return await client.complete_timed([7, 8], {})
        finally:
            released.set()


def test_a_chat_returns_the_ids_of_prompt_and_answer(fake: FakeVllm) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = ask(fake, lambda client: client.chat(messages, {"temperature": 0.0}))
    assert answer == Answer(list(b"<user>Hi"), list(b"re: Hi"), "re: Hi", "stop")


def test_arguments_of_tool_calls_go_out_as_json_text_and_the_messages_stay_as_they_are(
    fake: FakeVllm,
) -> None:
    def called(arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "add", "arguments": arguments}
        return [
            {"role": "user", "content": "1+2?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": function},
                    {"id": "c2", "type": "function", "function": function},
                ],
            },
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
        ]

    messages = called({"a": 1, "b": "zwölf"})
    ask(fake, lambda client: client.chat(messages, {"tools": [{"type": "function"}]}))
    assert fake.requests == [
        {
            "model": "verifier",
            "messages": called('{"a": 1, "b": "zwölf"}'),
            "return_token_ids": True,
            "tools": [{"type": "function"}],
        }
    ]
    assert messages == called({"a": 1, "b": "zwölf"})


def test_a_chat_without_text_is_answered_with_no_text(fake: FakeVllm) -> None:
    fake.chat = lambda messages: {  # type: ignore[method-assign]
        "prompt_token_ids": [1],
        "choices": [{"message": {"content": None}, "token_ids": [2], "finish_reason": "stop"}],
    }
    answer = ask(fake, lambda client: client.chat([{"role": "user", "content": "Hi"}], {}))
    assert answer == Answer([1], [2], "", "stop")


def test_requests_carry_the_key_of_the_server(fake: FakeVllm) -> None:
    ask(fake, lambda client: client.chat([{"role": "user", "content": "Hi"}], {}))
    assert fake.keys == {"Bearer secret"}


def test_chunks_of_several_tokens_are_joined_in_order_and_their_sizes_kept(
    fake: FakeVllm,
) -> None:
    answer = complete(
        fake,
        chunk([]),  # vLLM's first chunk may carry the prompt ids and no token
        chunk([11, 12, 13]),
        chunk([14]),
        ": a comment, as a proxy may send",
        chunk([15, 16], "length"),
        'data: {"choices": [], "usage": {"completion_tokens": 6}}',
        "data: [DONE]",
    )
    assert answer.token_ids == [11, 12, 13, 14, 15, 16]
    assert answer.chunk_sizes == [3, 1, 2]
    assert answer.finish_reason == "length"


def test_every_chunk_with_tokens_has_one_time_after_sending(fake: FakeVllm) -> None:
    answer = complete(fake, chunk([]), chunk([11]), chunk([12], "stop"), "data: [DONE]")
    assert len(answer.chunk_times) == len(answer.chunk_sizes) == 2
    assert [answer.sent_at, *answer.chunk_times] == sorted([answer.sent_at, *answer.chunk_times])


def test_a_reason_that_comes_in_a_chunk_of_its_own_is_kept(fake: FakeVllm) -> None:
    answer = complete(fake, chunk([11]), chunk([], "stop"), chunk([]), "data: [DONE]")
    assert (answer.token_ids, answer.finish_reason) == ([11], "stop")


def test_a_completion_sends_exact_prompt_ids_and_asks_for_ids(fake: FakeVllm) -> None:
    ask(fake, lambda client: client.complete_timed([7, 8], {"max_tokens": 4, "temperature": 0.0}))
    assert fake.requests == [
        {
            "model": "verifier",
            "prompt": [7, 8],
            "stream": True,
            "return_token_ids": True,
            "max_tokens": 4,
            "temperature": 0.0,
        }
    ]


def test_a_stream_that_ends_early_is_an_error(fake: FakeVllm) -> None:
    with pytest.raises(RuntimeError, match="stream ended early, after 2 tokens"):
        complete(fake, chunk([11]), chunk([12]))
    with pytest.raises(RuntimeError, match="stream ended early, after 0 tokens"):
        complete(fake, chunk([], "stop"), "data: [DONE]")


def test_a_stream_without_token_ids_says_what_is_wrong(fake: FakeVllm) -> None:
    line = json.dumps({"choices": [{"text": "a", "finish_reason": None}]})
    with pytest.raises(RuntimeError, match="left the token ids out"):
        complete(fake, f"data: {line}", "data: [DONE]")


def events(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream, found in another way than the client does."""
    texts = [text.removeprefix("data: ") for text in stream.decode().split("\n\n")]
    return [json.loads(text) for text in texts if text not in ("", "[DONE]")]


def test_a_recorded_stream_cut_anywhere_keeps_its_ids_and_dates_each_chunk_by_its_end() -> None:
    assert not RECORDED.isascii()  # some cuts are inside a character
    ends = [at for at in range(len(RECORDED)) if RECORDED[at : at + 2] == b"\n\n"]
    chunks = [event["choices"][0]["token_ids"] for event in events(RECORDED)]
    assert chunks == RECORDED_IDS
    for cut in range(len(RECORDED) + 1):
        stream = CompletionStream()
        stream.take(RECORDED[:cut], 1.0)
        stream.take(RECORDED[cut:], 2.0)
        assert stream.ids == [token for ids in RECORDED_IDS for token in ids]
        assert stream.sizes == [len(ids) for ids in RECORDED_IDS]
        assert stream.times == [1.0 if end < cut else 2.0 for end in ends[: len(RECORDED_IDS)]]
        assert stream.finish_reason == "length"


def test_pieces_of_any_size_give_the_same_answer_over_a_connection() -> None:
    for size in (len(RECORDED), 400, 7):
        pieces = [RECORDED[at : at + size] for at in range(0, len(RECORDED), size)]
        answer = asyncio.run(complete_pieces(pieces))
        assert answer.token_ids == [token for ids in RECORDED_IDS for token in ids]
        assert answer.chunk_sizes == [len(ids) for ids in RECORDED_IDS]


def test_characters_that_end_a_line_elsewhere_do_not_end_an_event() -> None:
    text = "\u2028\u2029\x85\x0b\x0c\x1c"
    choice = {"text": text, "token_ids": [5], "finish_reason": "stop"}
    line = json.dumps({"choices": [choice]}, ensure_ascii=False)
    stream = CompletionStream()
    stream.take(f"data: {line}\n\n".encode(), 1.0)
    assert (stream.ids, stream.finish_reason) == ([5], "stop")


def test_comments_other_fields_and_carriage_returns_are_passed_over() -> None:
    lines = [": keep-alive", "event: message", "id: 7", chunk([11], "stop"), ":", "data: [DONE]"]
    stream = CompletionStream()
    stream.take("".join(f"{line}\r\n\r\n" for line in lines).encode(), 1.0)
    assert (stream.ids, stream.times, stream.finish_reason) == ([11], [1.0], "stop")


def test_an_event_that_is_no_json_is_quoted(fake: FakeVllm) -> None:
    with pytest.raises(RuntimeError, match="status 200: Internal Server Error"):
        complete(fake, "data: Internal Server Error")


def test_a_stream_that_breaks_off_or_stalls_is_named() -> None:
    pieces = [f"{chunk([11])}\n\n".encode()]
    with pytest.raises(RuntimeError, match=r"connection to the server broke.*logs/"):
        asyncio.run(complete_pieces(pieces, then="break"))
    for given in (pieces, []):
        with pytest.raises(RuntimeError, match=r"did not answer in runtime.request_timeout_s"):
            asyncio.run(complete_pieces(given, then="stall", timeout_s=0.1))


def test_requests_are_all_in_flight_at_once_and_keep_no_connection() -> None:
    heads: list[bytes] = []
    all_here = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        if len(heads) == 150:  # more than aiohttp keeps open by itself
            all_here.set()
        await all_here.wait()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + f"{chunk([11], 'stop')}\n\n".encode())
        writer.close()

    async def ask_all() -> list[TimedAnswer]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=150) as http:
            port = http.sockets[0].getsockname()[1]
            server = Server(f"http://127.0.0.1:{port}", "key", Path("log"), 0.0)
            async with asyncio.timeout(30), Client(server, 30) as client:
                requests = [client.complete_timed([7], {}) for _ in range(150)]
                return await asyncio.gather(*requests)

    assert [answer.token_ids for answer in asyncio.run(ask_all())] == [[11]] * 150
    assert all(b"connection: close\r\n" in head.lower() for head in heads)


def shape(value: Any) -> Any:
    """Names in order and types of a JSON value; a list is as its first member."""
    if isinstance(value, dict):
        return [(name, shape(member)) for name, member in value.items()]
    return [shape(value[0])] if isinstance(value, list) else type(value)


def test_the_benchmarks_stub_speaks_as_vllm_was_recorded() -> None:
    body = {"prompt": [1, 2], "return_token_ids": True}
    recorded = events(RECORDED)
    for spoken, like in (
        (event(body, 0, False), recorded[0]),
        (event(body, 1, True), recorded[-1]),
    ):
        (mine,) = events(spoken)
        assert shape(mine) == shape(like)


def test_a_proxy_of_the_environment_is_not_asked(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert complete(fake, chunk([11], "stop")).token_ids == [11]


def test_a_broken_connection_names_the_log_of_the_server() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", "key", Path("log"), 0.0)

    async def ask_nobody() -> None:
        async with Client(server, 5) as client:
            await client.chat([{"role": "user", "content": "?"}], {})

    with pytest.raises(RuntimeError, match=r"connection to the server broke.*logs/"):
        asyncio.run(ask_nobody())


def test_an_error_in_the_middle_of_a_stream_is_raised_with_its_message(fake: FakeVllm) -> None:
    error = json.dumps({"error": {"message": "engine died", "code": 500}})
    with pytest.raises(RuntimeError, match=r"engine died.*see its log in logs/"):
        complete(fake, chunk([11]), f"data: {error}", "data: [DONE]")


def test_an_error_status_is_raised_with_the_message_of_the_server(fake: FakeVllm) -> None:
    fake.fail_after = 0
    with pytest.raises(RuntimeError, match=r"status 500.*the fake is tired"):
        ask(fake, lambda client: client.chat([{"role": "user", "content": "Hi"}], {}))
    with pytest.raises(RuntimeError, match=r"status 500.*the fake is tired"):
        ask(fake, lambda client: client.complete_timed([7], {}))


def test_counters_are_read_from_the_exposition_of_vllm(fake: FakeVllm) -> None:
    fake.metrics = EXPOSITION
    assert ask(fake, lambda client: client.counters()) == {
        "num_drafts": 120,
        "num_draft_tokens": 240,
        "num_accepted_tokens": 50,
        "accepted_at_0": 41,
        "accepted_at_1": 9,
        "engine_steps": 130,
    }


def test_counters_of_several_copies_of_an_engine_are_added(fake: FakeVllm) -> None:
    fake.metrics = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 5.0
vllm:spec_decode_num_drafts_total{engine="1"} 7.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 4.0
"""
    assert ask(fake, lambda client: client.counters()) == {
        "num_drafts": 12,
        "accepted_at_0": 7,
        "accepted_at_1": 1,
    }


def test_counters_that_the_engine_does_not_export_are_absent(fake: FakeVllm) -> None:
    fake.metrics = "".join(
        f"{line}\n" for line in EXPOSITION.splitlines() if "spec_decode" not in line
    )
    assert ask(fake, lambda client: client.counters()) == {"engine_steps": 130}
    fake.metrics = "# nothing\n"
    assert ask(fake, lambda client: client.counters()) == {}


@pytest.mark.parametrize("concurrency", [1, 3, 5, 50])
def test_the_closed_loop_fills_its_concurrency_never_exceeds_it_and_keeps_the_order(
    concurrency: int,
) -> None:
    in_flight, most = 0, 0
    finished: list[int] = []

    async def work(item: int) -> int:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        for _ in range(3 * (11 - item)):  # later items take fewer turns of the loop
            await asyncio.sleep(0)
        in_flight -= 1
        finished.append(item)
        return item * item

    results = asyncio.run(run_closed_loop(range(11), work, concurrency))
    assert results == [item * item for item in range(11)]
    assert most == min(concurrency, 11)
    assert (finished == list(range(11))) == (concurrency == 1)


def test_the_closed_loop_of_nothing_is_empty() -> None:
    async def work(item: int) -> int:
        raise AssertionError(item)

    assert asyncio.run(run_closed_loop([], work, 4)) == []


def test_the_first_failure_ends_the_closed_loop_and_is_raised_itself() -> None:
    begun: list[int] = []
    cancelled: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        try:
            await asyncio.sleep(0)
            if item == 1:
                raise RuntimeError("item 1 failed")
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(RuntimeError, match=r"^item 1 failed$"):
        asyncio.run(run_closed_loop(range(10), work, 3))
    assert begun == [0, 1, 2]
    assert sorted(cancelled) == [0, 2]
