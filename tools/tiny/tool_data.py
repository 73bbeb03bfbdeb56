"""Conversations in which the demonstration's tools are offered: calls, results and answers; and JSON from a sentence.

Knows no tokenizer. Messages are flat, `role` and `content`, as the chat template writes them (`check_template`).
"""

from __future__ import annotations

import datetime
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from quire.cli.tools.arithmetic import ArithmeticMistake, evaluate
from quire.cli.tools.demo import TOOLS, get_time

TEMPLATE = Path(__file__).parents[2] / "quire/tiny/chat_template.jinja"
DEFINITIONS = [tool.definition() for tool in TOOLS.values()]
Message = dict[str, str]
Say = Callable[[random.Random], tuple[str, str]]
"""A question, and the argument of the call that answers it."""

ZONES = {
    "Amsterdam": "Europe/Amsterdam", "Athens": "Europe/Athens", "Auckland": "Pacific/Auckland",
    "Bangkok": "Asia/Bangkok", "Barcelona": "Europe/Madrid", "Beijing": "Asia/Shanghai", "Berlin": "Europe/Berlin",
    "Boston": "America/New_York", "Brussels": "Europe/Brussels", "Cairo": "Africa/Cairo", "Chicago": "America/Chicago",
    "Copenhagen": "Europe/Copenhagen", "Delhi": "Asia/Kolkata", "Denver": "America/Denver", "Dubai": "Asia/Dubai",
    "Dublin": "Europe/Dublin", "Helsinki": "Europe/Helsinki", "Hong Kong": "Asia/Hong_Kong",
    "Istanbul": "Europe/Istanbul", "Jakarta": "Asia/Jakarta", "Lagos": "Africa/Lagos", "Lisbon": "Europe/Lisbon",
    "London": "Europe/London", "Los Angeles": "America/Los_Angeles", "Madrid": "Europe/Madrid",
    "Mexico City": "America/Mexico_City", "Moscow": "Europe/Moscow", "Mumbai": "Asia/Kolkata",
    "Nairobi": "Africa/Nairobi", "New York": "America/New_York", "Oslo": "Europe/Oslo", "Paris": "Europe/Paris",
    "Prague": "Europe/Prague", "Rome": "Europe/Rome", "San Francisco": "America/Los_Angeles",
    "Seoul": "Asia/Seoul", "Shanghai": "Asia/Shanghai", "Singapore": "Asia/Singapore",
    "Stockholm": "Europe/Stockholm", "Sydney": "Australia/Sydney", "Tokyo": "Asia/Tokyo", "Toronto": "America/Toronto",
    "UTC": "UTC", "Vienna": "Europe/Vienna", "Warsaw": "Europe/Warsaw", "Zurich": "Europe/Zurich",
}  # fmt: skip
WHEN = ["What time is it in {}?", "What's the time in {}?", "Tell me the time in {}.", "Current time in {}?",
        "What is the time in {} now?", "How late is it in {}?", "time in {}", "What time is it now in {}?",
        "Do you know what time it is in {}?", "What is the current time in {}?", "The time in {}, please.",
        "What day is it in {}?", "Give me the local time of {}.", "What time do they have in {}?", "{} time?",
        "Could you tell me what time it is in {}?", "Can you look up the time in {}?", "What does the clock say in {}?",
        "Which day is it in {} now?", "Please tell me the local time in {}.", "Is it late in {}?", "time now in {}?",
        "What is the date in {}?", "I want to know the time in {}.", "Show me the current time of {}.",
        "Which hour is it in {} now?"]  # fmt: skip
WHEN_UNSEEN = ["Can you tell me the time in {}?", "What is the local time in {}?", "What hour is it in {}?"]

COMPUTE = ["What is {}?", "Calculate {}.", "How much is {}?", "{}", "{} = ?", "{}=", "Compute {}.", "What's {}?",
           "What does {} give?", "Work out {}.", "Can you calculate {}?", "What is the result of {}?",
           "Tell me what {} is.", "Please compute {}.", "Please work out {}.", "Could you calculate {}?",
           "Can you compute {}?", "I need {}.", "What do I get for {}?", "What does {} equal?",
           "What would {} be?", "Give me the value of {}.", "Find {}.", "Evaluate {}.", "Do you know {}?",
           "Solve {}.", "How many is {}?", "Please tell me {}.", "What does {} come to?"]  # fmt: skip
COMPUTE_UNSEEN = ["Please calculate {}.", "How much does {} make?", "Can you work out {}?"]
WORDS = {"+": ["plus", "and"], "-": ["minus"], "*": ["times", "multiplied by"], "/": ["divided by", "over"]}
ORDERS = [
    ("Add {a} and {b}.", "{a} + {b}"), ("What is the sum of {a} and {b}?", "{a} + {b}"),
    ("Please add {a} and {b}.", "{a} + {b}"), ("Add {a} to {b}.", "{a} + {b}"),
    ("What do I get when I add {a} and {b}?", "{a} + {b}"), ("Sum up {a} and {b}.", "{a} + {b}"),
    ("Can you add {a} and {b}?", "{a} + {b}"), ("If you add {a} and {b}, what is it?", "{a} + {b}"),
    ("Subtract {b} from {a}.", "{a} - {b}"), ("Take {b} away from {a}.", "{a} - {b}"),
    ("I take {b} from {a}. What is left?", "{a} - {b}"), ("What remains if you take {b} from {a}?", "{a} - {b}"),
    ("What is the difference of {a} and {b}?", "{a} - {b}"), ("Please subtract {b} from {a}.", "{a} - {b}"),
    ("What do you get if you subtract {b} from {a}?", "{a} - {b}"),
    ("Multiply {a} by {b}.", "{a} * {b}"), ("What do you get if you multiply {a} by {b}?", "{a} * {b}"),
    ("Can you multiply {a} and {b}?", "{a} * {b}"), ("What is the product of {a} and {b}?", "{a} * {b}"),
    ("Divide {a} by {b}.", "{a} / {b}"), ("What do you get if you divide {a} by {b}?", "{a} / {b}"),
    ("Please divide {a} by {b}.", "{a} / {b}"),
    ("What is {s} squared?", "{s} ** 2"), ("What is {s} to the power of {d}?", "{s} ** {d}"),
    ("What is the remainder of {a} divided by {b}?", "{a} % {b}"), ("What is {p}% of {a}?", "{a} * {p} / 100"),
    ("How much is {p} percent of {a}?", "{a} * {p} / 100"), ("Give me {p}% of {a}.", "{a} * {p} / 100"),
    ("Calculate {p} percent of {a}.", "{a} * {p} / 100"), ("I need {p} percent of {a}.", "{a} * {p} / 100"),
    ("What is half of {a}?", "{a} / 2"), ("Give me half of {a}.", "{a} / 2"),
    ("I buy {s} items at {b} each. What do I pay?", "{s} * {b}"),
]  # fmt: skip
ORDERS_UNSEEN = [
    ("What do you get if you add {a} and {b}?", "{a} + {b}"), ("Take {b} from {a}.", "{a} - {b}"),
    ("Give me {p} percent of {a}.", "{a} * {p} / 100"),
]  # fmt: skip

NAMES = ["Alice", "Anna", "Ben", "Bob", "Carlos", "Clara", "David", "Emma", "Eva", "Felix", "Grace", "Henry", "Ida",
         "Jack", "Jane", "John", "Kate", "Laura", "Leo", "Maria", "Mark", "Mary", "Max", "Nora", "Oscar", "Paul",
         "Peter", "Rosa", "Sam", "Sara", "Simon", "Tina", "Tom", "Victor"]  # fmt: skip
THINGS = ["apples", "bags", "books", "bottles", "boxes", "cables", "cards", "chairs", "cups", "keys", "lamps", "pens",
          "shirts", "tables", "tickets", "tools"]  # fmt: skip
PEOPLE = ["{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}.",
          "My name is {name}, I am {age} and I live in {city}.", "{name} from {city} is {age}.",
          "In {city} there is {name}, aged {age}.", "{name} lives in {city} and is {age}.", "{city}: {name}, {age}.",
          "{name} ({age}) is from {city}.", "I am {name}, {age} years old, from {city}.",
          "At the age of {age}, {name} moved to {city}.", "{name} is {age} and comes from {city}.",
          "The home of {name}, who is {age}, is {city}.", "{name} lives in {city}. Age: {age}.",
          "I live in {city}. My name is {name} and I am {age} years old."]  # fmt: skip
PEOPLE_UNSEEN = ["In {city} lives {name}, who is {age}.", "I am {name} from {city}, {age} years old."]
BUYING = ["{name} buys {number} {thing}.", "{number} {thing} for {name}, please.", "{name} orders {number} {thing}.",
          "Send {number} {thing} to {name}.", "{name} has ordered {number} {thing}.",
          "Order of {name}: {number} {thing}.",
          "{name} needs {number} {thing}.", "I am {name}. I want {number} {thing}.", "{name} takes {number} {thing}.",
          "Please give {name} {number} {thing}.", "We sold {number} {thing} to {name}.",
          "{number} {thing} were bought by {name}.", "{name} would like {number} {thing}.",
          "{name} asks for {number} {thing}."]  # fmt: skip
BUYING_UNSEEN = ["{name} wants {number} {thing}.", "Please send {name} {number} {thing}."]
FILL = ["{text} Give {fields} as JSON.", "Extract {fields} as JSON: {text}", "Fill in {fields} as JSON. {text}",
        "JSON with {fields}: {text}", "{text} Write {fields} as JSON.", "{text} Return JSON with {fields}.",
        "Give me JSON with {fields}. {text}", "Extract {fields}: {text}"]  # fmt: skip
LEADS = ["Hi, ", "Hello, ", "Hi! ", "Please tell me: ", "Quick question: ", "I wonder, ", "Can you tell me, ", "hey, "]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question and the messages that answer it, with what the first of them calls."""

    messages: list[Message]
    tool: str = ""
    argument: str = ""
    result: str = ""


def needs_tool(question: str) -> bool:
    """Whether a question of the other facts is one for a tool, although its answer there is another."""
    return bool(re.search(r"\d\s*[-+*/]|\b(plus|times|minus|divided|square root|squared)\b", question))


def number(rng: random.Random) -> str:
    """A number with one to four digits, sometimes with a fraction."""
    digits = rng.choice((1, 2, 2, 2, 3, 3, 4))
    text = str(rng.randrange(10 ** (digits - 1), 10**digits))
    return f"{text}.{rng.randrange(1, 10)}" if rng.random() < 0.08 else text


def written_sum(rng: random.Random, forms: list[str]) -> tuple[str, str]:
    """A question with an expression, as signs or in words, with or without spaces."""
    signs = [rng.choice("+-*/") for _ in range(rng.choice((1, 1, 1, 2)))]
    numbers = [number(rng) for _ in range(len(signs) + 1)]
    wanted = numbers[0] + "".join(f" {sign} {value}" for sign, value in zip(signs, numbers[1:], strict=True))
    if len(signs) == 2 and rng.random() < 0.5:
        wanted = f"({numbers[0]} {signs[0]} {numbers[1]}) {signs[1]} {numbers[2]}"
    asked = wanted
    if len(signs) == 1 and rng.random() < 0.5:
        asked = f"{numbers[0]} {rng.choice(WORDS[signs[0]])} {numbers[1]}"
        asked = asked.replace(" and ", " plus ") if forms is COMPUTE_UNSEEN else asked
    elif rng.random() < 0.4:
        asked = wanted = wanted.replace(" ", "")  # a literal copy is learned with far fewer showings
    elif rng.random() < 0.2:
        asked = wanted.replace("*", "x")
    return rng.choice(forms).format(asked), wanted


def ordered_sum(rng: random.Random, orders: list[tuple[str, str]]) -> tuple[str, str]:
    """A question in words that name the operation."""
    values = {"a": number(rng), "b": number(rng), "s": str(rng.randrange(2, 40)), "d": str(rng.randrange(2, 6)),
              "p": str(rng.randrange(1, 100))}  # fmt: skip
    question, wanted = rng.choice(orders)
    return question.format(**values), wanted.format(**values)


def calculation(rng: random.Random, *, unseen: bool = False) -> Turn:
    """A question that needs the calculator."""
    if rng.random() < 0.65:
        question, wanted = written_sum(rng, COMPUTE_UNSEEN if unseen else COMPUTE)
    else:
        question, wanted = ordered_sum(rng, ORDERS_UNSEEN if unseen else ORDERS)
    try:
        result = evaluate(wanted)
        answer = f"{wanted} = {result}."
    except ArithmeticMistake as error:
        result, answer = f"error: {error}", f"That cannot be calculated: {error}."
    return called(question if unseen else informal(question, rng), "calculate", "expression", wanted, result, answer)


def clock(rng: random.Random, *, unseen: bool = False) -> Turn:
    """A question that needs the clock."""
    city, zone = rng.choice(list(ZONES.items()))
    if rng.random() < 0.08:
        city = zone
    moment = datetime.datetime.fromtimestamp(rng.randrange(1_700_000_000, 2_000_000_000), datetime.UTC)
    result = get_time(zone, moment)
    question = rng.choice(WHEN_UNSEEN if unseen else WHEN).format(city)
    question = question if unseen else informal(question, rng)
    return called(question, "get_time", "timezone", zone, result, f"It is {result} in {city}.")


def informal(question: str, rng: random.Random) -> str:
    """The question as people type it: sometimes in lower case, without its mark, or with a lead."""
    lowered = question[:1].lower() + question[1:]
    if rng.random() < 0.12:
        question = rng.choice(LEADS) + lowered
    elif rng.random() < 0.2:
        question = lowered
    if rng.random() < 0.15:
        question = question.rstrip("?.")
    return question.lower() if rng.random() < 0.1 else question


def called(question: str, tool: str, parameter: str, argument: str, result: str, answer: str) -> Turn:
    """The four messages of a call."""
    call = json.dumps({"name": tool, "arguments": {parameter: argument}})
    contents = [question, f"<tool_call>\n{call}\n</tool_call>", f"<tool_response>\n{result}\n</tool_response>", answer]
    roles = ["user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return Turn(messages=messages, tool=tool, argument=argument, result=result)


def filling(rng: random.Random, *, unseen: bool = False) -> Turn:
    """A sentence whose facts are asked for as JSON."""
    values: dict[str, Any] = {"name": rng.choice(NAMES)}
    if rng.random() < 0.5:
        values |= {"age": rng.randrange(5, 99), "city": rng.choice([c for c in ZONES if c != "UTC"])}
        text = rng.choice(PEOPLE_UNSEEN if unseen else PEOPLE).format(**values)
    else:
        values |= {"number": rng.randrange(2, 500), "thing": rng.choice(THINGS)}
        text = rng.choice(BUYING_UNSEEN if unseen else BUYING).format(**values)
    if rng.random() < 0.25:
        del values[rng.choice(list(values))]
    *fields, last = values
    question = rng.choice(FILL).format(text=text, fields=f"{', '.join(fields)} and {last}")
    answer = {"role": "assistant", "content": json.dumps(values)}
    return Turn(messages=[{"role": "user", "content": question}, answer])


def offer(system_prompt: str = "") -> Message:
    """The system message that offers the tools."""
    text = rendered(
        [{"role": "system", "content": system_prompt}] if system_prompt else [], add_generation_prompt=False
    )
    return {"role": "system", "content": text.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")}


def rendered(messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Messages as the shipped template writes them, with the tools."""
    environment = Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE.read_text())
    # The template asks for the first message's role.
    return template.render(
        messages=messages or [{"role": "none"}], tools=DEFINITIONS, add_generation_prompt=add_generation_prompt
    ).removesuffix("" if messages else "<|im_start|>none\n<|im_end|>\n")


def structured(turn: Turn) -> list[dict[str, Any]]:
    """A call's messages as a client sends them."""
    question, _, _, answer = turn.messages
    arguments = {TOOLS[turn.tool].parameter: turn.argument}
    call = {"id": "call_1", "type": "function", "function": {"name": turn.tool, "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [question, said, {"role": "tool", "tool_call_id": "call_1", "content": turn.result}, answer]


def check_template(rng: random.Random) -> None:
    """Raises: AssertionError when flat messages are not what the template writes."""
    for turn in [make(rng) for make in (calculation, clock) for _ in range(20)]:
        flat = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in [offer(), *turn.messages])
        assert flat == rendered(structured(turn), add_generation_prompt=False), flat


def offered(known: Callable[[], list[Message]], rng: random.Random) -> list[Message]:
    """A turn after an offer of the tools, seldom two; `known` gives those that need none. Most calls that end a
    conversation have no result yet: to make the call takes more showings than to tell what came of it."""
    messages: list[Message] = []
    for maker in rng.choices(("calculate", "clock", "known"), (0.50, 0.37, 0.13), k=1 + (rng.random() < 0.06)):
        messages += known() if maker == "known" else {"calculate": calculation, "clock": clock}[maker](rng).messages
    is_told = messages[-2]["content"].startswith("<tool_response>")
    return messages[:-2] if is_told and rng.random() < 0.8 else messages
