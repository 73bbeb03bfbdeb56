"""`quire bench serve`: load on a server over HTTP, under the flags and result names of `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.batch_files import Line, open_input, read_lines
from quire.cli.client.credentials import KEY_HELP, authorization
from quire.cli.output import check_writable, write_json
from quire.config.flags.knobs import json_object, whole_number
from quire.errors import ConfigError, counted, shown

if TYPE_CHECKING:
    from quire.cli.client.http_client import HttpClient

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
MAX_LINE_BYTES = 16 << 20
"""Of a file of prompts: as much as a server takes in a body."""
RANDOM_IDS = range(10, 1000)
"""Random prompts are made of these: every model has them, and the lowest ones are often special."""
SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a dataset. `content` is text, token ids, or the messages of a conversation."""

    content: str | list[Any]
    max_tokens: int
    is_chat: bool = False


def add_arguments(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Flags of this subcommand."""
    parser = kinds.add_parser("serve", help="load on a server over HTTP: latencies, throughput, goodput")
    parser.set_defaults(run=run)
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=list(ENDPOINTS), default="openai", help="API (default: openai)")
    server.add_argument("--base-url", metavar="URL", help="server; instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    server.add_argument("--port", type=whole_number, default=8000, help="(default: 8000)")
    server.add_argument("--endpoint", metavar="PATH", help="route; that of the backend when left out")
    server.add_argument("--model", metavar="NAME", help="what to ask for; the first model listed when left out")
    server.add_argument("--api-key", metavar="KEY", help=KEY_HELP)
    server.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    server.add_argument(
        "--ready-check-timeout-sec", type=whole_number, default=0, metavar="S", help="wait so long for the server"
    )
    prompts = parser.add_argument_group("requests")
    prompts.add_argument(
        "--dataset-name",
        choices=("random", "custom"),
        default="random",
        help="custom: a JSONL file, `prompt` or `messages` in each line and maybe `output_tokens` (default: random)",
    )
    prompts.add_argument("--dataset-path", metavar="FILE", help="file of a custom dataset; used again when too short")
    _add(prompts, "--num-prompts", 1000, "requests")
    _add(prompts, "--num-warmups", 0, "requests before, not counted")
    _add(prompts, "--random-input-len", 1024, "prompt tokens")
    _add(prompts, "--random-output-len", 128, "output tokens")
    _add(prompts, "--random-prefix-len", 0, "tokens before them that all prompts share")
    prompts.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by this share (default: 0)"
    )
    _add(prompts, "--custom-output-len", 256, "output tokens where the file names none")
    _add(prompts, "--seed", 0, "of prompts and arrivals")
    prompts.add_argument("--ignore-eos", action="store_true", help="go on to the full length; random prompts always do")
    for name, kind in SAMPLING.items():
        text = "(default: 0)" if name == "temperature" else "(default: the server's)"
        prompts.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help=text)
    prompts.add_argument("--extra-body", type=json_object, metavar="JSON", help="fields added to every request")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, metavar="R", help="per second (default: inf)")
    load.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; below 1: in bursts; above: even"
    )
    load.add_argument("--max-concurrency", type=whole_number, metavar="N", help="requests in progress at most")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput", nargs="+", metavar="METRIC:MS", help="count requests within limits, such as ttft:100 tpot:20"
    )
    report.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help="what to show (default: all four)"
    )
    report.add_argument("--metric-percentiles", default="50,90,99", metavar="P", help="(default: 50,90,99)")
    report.add_argument("--save-result", nargs="?", const="", metavar="FILE", help="write the figures to a JSON file")
    report.add_argument("--save-detailed", action="store_true", help="with the times of each request")
    report.add_argument("--result-dir", metavar="DIR", help="where --save-result without a FILE writes")
    report.add_argument("--result-filename", metavar="FILE", help="the name it writes to")
    report.add_argument("--metadata", nargs="+", metavar="K=V", help="facts to store with the figures")
    report.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def _add(group: argparse._ArgumentGroup, flag: str, default: int, help_text: str) -> None:
    group.add_argument(flag, type=whole_number, default=default, metavar="N", help=f"{help_text} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Load the server, print a table; 1 when any request failed.

    Raises: ConfigError.
    """
    _check(args)
    metrics = [name for name in args.percentile_metrics.split(",") if name]
    percentiles = _numbers("--metric-percentiles", args.metric_percentiles, 0, 100)
    goodput = _limits(args.goodput or [])
    metadata = dict(_pair("--metadata", text, "=") for text in args.metadata or [])
    path = _result_file(args)
    prompts = list(_custom(args)) if args.dataset_name == "custom" else list(_random(args))
    from quire.cli.bench.load import run_loop
    from quire.utils.process import raise_descriptor_limit

    raise_descriptor_limit()
    result, details = run_loop(_measure(args, prompts, percentiles, goodput))
    _print(result, metrics, percentiles)
    if path is not None:
        facts = {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": args.backend,
            "num_prompts": args.num_prompts,
            "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
            "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
        }
        stored = {**facts, **metadata, **result, **(details if args.save_detailed else {})}
        write_json(path, stored)
    return 1 if result["failed"] else 0


async def _measure(
    args: argparse.Namespace, prompts: list[Prompt], percentiles: list[float], goodput: dict[str, float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures, lists with an entry for each request)."""
    from quire.cli.client.http_client import HttpClient

    url = args.base_url or f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    async with HttpClient(url, headers=authorization(url, args.api_key), insecure=args.insecure) as client:
        return await _load(args, client, prompts, percentiles, goodput)


async def _load(
    args: argparse.Namespace,
    client: HttpClient,
    prompts: list[Prompt],
    percentiles: list[float],
    goodput: dict[str, float],
) -> tuple[dict[str, Any], dict[str, Any]]:
    import msgspec

    from quire.cli.bench.load import Record, figures, send_all, send_one
    from quire.observability.progress import generate_progress
    from quire.simulation.synthetic import due_times

    model = args.model or await _ready_model(client, args.ready_check_timeout_sec)
    if args.backend == "openai-chat" and args.dataset_name == "random":
        prompts = await _as_text(client, model, prompts)
    path = args.endpoint or ENDPOINTS[args.backend]
    bodies = [msgspec.json.encode(_body(args, model, prompt)) for prompt in prompts]
    for body in bodies[: args.num_warmups]:
        warm_up = Record()
        await send_one(client, path, body, warm_up)
        if warm_up.error is not None:
            raise ConfigError(f"a warm-up request to {client.url}{path} failed: {warm_up.error}")
    counted = bodies[args.num_warmups :]
    times = due_times(len(counted), args.request_rate, args.burstiness, random.Random(args.seed))
    num_ended = num_input = num_output = 0
    with generate_progress(not args.disable_tqdm, len(counted)) as show:

        def on_end(record: Record) -> None:
            nonlocal num_ended, num_input, num_output
            num_ended += 1
            num_input += record.num_prompt_tokens
            num_output += record.num_output_tokens
            show(num_ended, num_input, num_output)

        records, peak = await send_all(client, path, counted, times, args.max_concurrency, on_end)
    result = {"model_id": model, "max_concurrent_requests": peak, **figures(records, percentiles, goodput)}
    result["tokens_are_counted_by"] = "usage" if all(r.is_counted for r in records if not r.error) else "pieces"
    details = {
        "ttfts": [record.ttft if record.piece_times else None for record in records],
        "itls": [record.itl for record in records],
        "e2els": [record.e2el for record in records],
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "start_times": [record.sent_at - records[0].due_at for record in records],
        "errors_by_request": [record.error for record in records],
    }
    return result, details


async def _ready_model(client: HttpClient, patience_s: int) -> str:
    from quire.cli.client.http_client import first_model

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await first_model(client)
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(0.2)


async def _as_text(client: HttpClient, model: str, prompts: list[Prompt]) -> list[Prompt]:
    """Token ids as a user's message: only the server knows what text they are."""
    texts = []
    for prompt in prompts:
        try:
            reply = await client.post("/detokenize", {"model": model, "tokens": prompt.content})
        except ConnectionError as error:
            raise ConfigError(str(error)) from None
        if reply.status != 200:
            raise ConfigError(
                f"random conversations need {client.url}/detokenize, which answered {reply.error}; "
                "use --dataset-name custom"
            )
        texts.append(Prompt(str(reply.json()["prompt"]), prompt.max_tokens))
    return texts


def _body(args: argparse.Namespace, model: str, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body["temperature"] = 0.0
    body |= {name: value for name in SAMPLING if (value := vars(args)[name]) is not None}
    if args.backend == "openai-chat":
        content = prompt.content
        body["messages"] = content if prompt.is_chat else [{"role": "user", "content": content}]
        body["max_completion_tokens"] = prompt.max_tokens
    else:
        body["prompt"] = prompt.content
        body["max_tokens"] = prompt.max_tokens
    if args.ignore_eos or args.dataset_name == "random":
        body["ignore_eos"] = True
    return {**body, **(args.extra_body or {})}


def _random(args: argparse.Namespace) -> Iterator[Prompt]:
    rng = random.Random(args.seed)

    def some(count: int) -> list[int]:
        return rng.choices(RANDOM_IDS, k=count)

    def about(count: int) -> int:
        spread = int(count * args.random_range_ratio)
        return max(1, rng.randint(count - spread, count + spread))

    prefix = some(args.random_prefix_len)
    for _ in range(args.num_prompts + args.num_warmups):
        yield Prompt([*prefix, *some(about(args.random_input_len))], about(args.random_output_len))


def _custom(args: argparse.Namespace) -> Iterator[Prompt]:
    if args.dataset_path is None:
        raise ConfigError("--dataset-name custom needs --dataset-path FILE")
    count = args.num_prompts + args.num_warmups
    with open_input(args.dataset_path, "--dataset-path") as file:
        found = [_line(args, line) for line in itertools.islice(read_lines(file, MAX_LINE_BYTES), count)]
    if not found:
        raise ConfigError(f"--dataset-path {args.dataset_path} is empty")
    for index in range(count):
        yield found[index % len(found)]


def _line(args: argparse.Namespace, line: Line) -> Prompt:
    place = f"{args.dataset_path}, line {line.number}"
    if line.is_too_long:
        raise ConfigError(f"{place}: has more than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(line.data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ConfigError(f"{place}: must be an object with either `prompt` or `messages`")
    max_tokens = value.get("output_tokens", args.custom_output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(f"{place}: output_tokens must be a whole number above 0, got {shown(max_tokens)}")
    is_chat = "messages" in value
    content = value["messages"] if is_chat else value["prompt"]
    if is_chat and args.backend != "openai-chat":
        raise ConfigError(f"{place}: `messages` need --backend openai-chat")
    if not isinstance(content, list if is_chat else str) and not (isinstance(content, list) and not is_chat):
        raise ConfigError(f"{place}: a prompt is text or token ids, messages are a list; got {shown(content)}")
    if isinstance(content, list) and not is_chat and args.backend == "openai-chat":
        raise ConfigError(f"{place}: token ids need --backend openai")
    return Prompt(content, max_tokens, is_chat)


def _print(result: dict[str, Any], metrics: list[str], percentiles: list[float]) -> None:
    print(
        f"{counted(result['completed'], 'request')} in {result['duration']:.2f} s, {result['failed']} failed; "
        f"{result['max_concurrent_requests']} at once at most"
    )
    rates = {
        "requests/s": "request_throughput",
        "requests/s within goodput": "request_goodput",
        "output tok/s": "output_throughput",
        "tok/s": "total_token_throughput",
    }
    for title, name in rates.items():
        if name in result:
            print(f"  {title:<26} {result[name]:>10.2f}")
    names = ["mean", *([] if 50 in percentiles else ["median"]), *(f"p{percent:g}" for percent in percentiles)]
    shown_metrics = [name for name in metrics if f"mean_{name}_ms" in result]
    if shown_metrics:
        print(f"  {'ms':<8}" + "".join(f"{name:>10}" for name in names))
    for metric in shown_metrics:
        print(f"  {metric:<8}" + "".join(f"{result[f'{name}_{metric}_ms']:>10.2f}" for name in names))
    for error, count in result["errors"].items():
        print(f"  {count} x {error}")


def _check(args: argparse.Namespace) -> None:
    least = {
        "num_prompts": 1, "num_warmups": 0, "random_input_len": 1, "random_output_len": 1, "random_prefix_len": 0,
        "custom_output_len": 1, "max_concurrency": 1, "ready_check_timeout_sec": 0, "port": 1,
    }  # fmt: skip
    for name, smallest in least.items():
        value = vars(args)[name]
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
    for name, value in (("--request-rate", args.request_rate), ("--burstiness", args.burstiness)):
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, got {value}")
    if not math.isfinite(args.burstiness):
        raise ConfigError(f"--burstiness must be finite, got {args.burstiness}; 1 is a Poisson process")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {args.random_range_ratio}")
    if args.dataset_path is not None and args.dataset_name != "custom":
        raise ConfigError("--dataset-path has no effect without --dataset-name custom")
    for name in args.percentile_metrics.split(","):
        if name and name not in METRIC_NAMES:
            raise ConfigError(f"--percentile-metrics: {name!r} is none of {', '.join(METRIC_NAMES)}")


def _numbers(flag: str, text: str, least: float, most: float) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(least <= value <= most for value in values):
        raise ConfigError(f"{flag} must be numbers from {least} to {most} with commas between, got {text!r}")
    return values


def _pair(flag: str, text: str, sign: str) -> tuple[str, str]:
    name, found, value = text.partition(sign)
    if not found or not name:
        raise ConfigError(f"{flag} takes NAME{sign}VALUE, got {text!r}")
    return name, value


def _limits(given: list[str]) -> dict[str, float]:
    limits = {}
    for text in given:
        name, value = _pair("--goodput", text, ":")
        if name not in METRIC_NAMES:
            raise ConfigError(f"--goodput: {name!r} is none of {', '.join(METRIC_NAMES)}")
        limits[name] = _numbers(f"--goodput {name}", value, 0, 1e9)[0]
    return limits


def _result_file(args: argparse.Namespace) -> Path | None:
    """Where the figures go; refused now when it cannot be written."""
    if args.save_result is None:
        for name in ("result_dir", "result_filename", "save_detailed", "metadata"):
            if vars(args)[name]:
                raise ConfigError(f"--{name.replace('_', '-')} has no effect without --save-result")
        return None
    rate = "inf" if math.isinf(args.request_rate) else f"{args.request_rate:g}"
    name = args.save_result or args.result_filename or f"{args.backend}-{rate}qps-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = Path(args.result_dir or ".") / name
    check_writable("--save-result", path)
    return path
