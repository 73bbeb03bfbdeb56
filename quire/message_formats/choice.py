"""The automatic choice of formats: by what the chat template writes, since a model writes what it was shown."""

from __future__ import annotations

from dataclasses import dataclass

from quire.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of formats, or None where there is nothing to read or no format for it."""

    calls: str | None
    thinking: str | None
    why: str


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    texts: tuple[str, ...]
    """The template holds all of them."""
    absent: str = ""
    """It does not hold this."""
    token: str = ""
    """And this is a token."""

    def fits(self, template: str, tokens: frozenset[str]) -> bool:
        has_texts = all(text in template for text in self.texts)
        return has_texts and not (self.absent and self.absent in template) and (not self.token or self.token in tokens)


def _deepseek(words: str) -> str:
    """A marker of the family."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS = (
    _Rule("openai", ("<|channel|>", "functions."), token="<|channel|>"),
    _Rule("inkling", ("<|content_invoke_tool_json|>", "<|message_model|>")),
    _Rule("muse", ("<atem:function_calls>", "commentary")),
    _Rule("muse_glimmer", ("<atem:function_calls>", "to=self")),
    _Rule("functiongemma", ("<start_function_call>",)),
    _Rule("gemma4", ("<|tool_call>", '<|"|>')),
    _Rule("seed_oss", ("<seed:tool_call>",)),
    _Rule("minimax_m2", ("<minimax:tool_call>", "<invoke")),
    _Rule("dots", ("<dots_function_call>", "<invoke")),
    _Rule("gigachat3", ("<|role_sep|>", "<|message_sep|>", "function call")),
    _Rule("minimax_m3", ("]<]minimax[>[",)),
    _Rule("poolside_v1", ("<available_tools>", "<assistant>", "<arg_key>")),
    _Rule("glm47", ("<tool_call>", "</arg_key><arg_value>")),
    _Rule("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    _Rule("solar_open2", ("<|tool_call:start|>", "<|tool_arg:value|>")),
    _Rule("plamo3", ("<|plamo:", "begin_tool_requests")),
    _Rule("hy_v3", ("HYTK", "<arg_key{}>", "<tool_sep{}>")),
    _Rule("k2_horizon", ("<ifm|tool_call>", "<ifm|arg_key>")),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>", "'call'", "'argument'")),
    _Rule("minicpm5", ('<function name="', '<param name="')),
    _Rule("step3", ("<steptml:invoke",)),
    _Rule("deepseek_v32", ("DSML", "function_calls")),
    _Rule("deepseek_v4", ("DSML", "tool_calls>")),
    _Rule("deepseek_v41", ("DSML", " calls>")),
    _Rule("deepseek_v3", (_deepseek("tool calls begin"), "```json")),
    _Rule("deepseek_v31", (_deepseek("tool calls begin"), _deepseek("tool sep"))),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    _Rule("lfm2", ("<|tool_call_start|>",)),
    _Rule("lfm2", ("List of tools: ",), token="<|tool_call_start|>"),
    _Rule("apertus", ("<|tools_prefix|>",)),
    _Rule("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    _Rule("cohere_command3", ("<|START_ACTION|>", "tool_call_id")),
    _Rule("internlm", ("<|action_start|>", "<|plugin|>")),
    _Rule("longcat", ("<longcat_tool_call>",)),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("phi4_mini_json", ("<|tool|>", "<|tool_call|>")),
    _Rule("granite", ("<|start_of_role|>", "<|tool_call|>")),
    _Rule("granite4", ("<|start_of_role|>", "<tool_call>")),
    _Rule("olmo3", ("<function_calls>", "<functions>")),
    _Rule("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    _Rule("nemotron_json", ("<TOOLCALL>",)),
    _Rule("hunyuan_a13b", ("<tool_calls>", "<answer>")),
    _Rule("jamba", ("<tool_calls>", "<|bom|>")),
    _Rule("ernie45", ("<tool_call>", "<response>")),
    _Rule("hermes", ("<tool_call>", '"arguments"'), absent="<tool_calls>"),
    _Rule("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    _Rule("pythonic", ("[func_name1(",)),
    _Rule("llama4_json", ("<|header_start|>", '"parameters": ')),
    _Rule("llama3_json", ("<|start_header_id|>", '"parameters": '), absent="<function="),
)
"""The most specific first."""
_THINKING = (
    _Rule("openai_gptoss", ("<|channel|>", "analysis"), token="<|channel|>"),
    _Rule("inkling", ("<|content_thinking|>", "<|message_model|>")),
    _Rule("muse", ("<atem:function_calls>", "commentary")),
    _Rule("muse_glimmer", ("<|start|>assistant to=self",)),
    _Rule("seed_oss", ("<seed:think>",)),
    _Rule("mistral", ("[THINK]",)),
    _Rule("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    _Rule("cohere_command3", ("<|START_THINKING|>",)),
    _Rule("gemma4", ("<|channel>thought", "<channel|>")),
    _Rule("granite", ("Here is my thought process:", "Here is my response:"), absent="<think>"),
    _Rule("minimax_m2", ("<minimax:tool_call>", "</think>")),
    _Rule("minimax_m3", ("<mm:think>",)),
    _Rule("poolside_v1", ("<available_tools>", "<assistant>", "</think>")),
    _Rule("glm45", ("<arg_key>", "</think>")),
    _Rule("solar_open2", ("<|think:start|>", "<|think:end|>")),
    _Rule("plamo3", ("<|plamo:", "begin_think")),
    _Rule("hy_v3", ("HYTK", "<think{}>")),
    _Rule("k2_horizon", ("<ifm|think",)),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>", "'think'")),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    _Rule("hunyuan_a13b", ("<answer>", "</think>")),
    _Rule("step3", ("<steptml:invoke", "</think>")),
    _Rule("step3p5", ("<function=", "<|im_start|>assistant\\n<think>\\n"), absent="enable_thinking"),
    _Rule("ernie45", ("<response>", "</think>")),
    _Rule("deepseek_v3", (_deepseek("Assistant"), "</think>", "thinking is ")),
    _Rule("deepseek_r1", (_deepseek("Assistant"), "</think>")),
    _Rule("olmo3", ("<function_calls>", "<think>")),
    _Rule("qwen3", ("<think>",)),
    _Rule("qwen3", ("</think>",)),
)


def choose(template: str, tokenizer: Tokenizer) -> Choice:
    """The formats of a model, from its chat template and its tokens."""
    tokens = frozenset(tokenizer.added_tokens.values())
    calls, why_calls = _first(_CALLS, template, tokens, "calls of tools")
    thinking, why_thinking = _first(_THINKING, template, tokens, "thinking")
    return Choice(calls, thinking, f"{why_calls}; {why_thinking}")


def _first(rules: tuple[_Rule, ...], template: str, tokens: frozenset[str], what: str) -> tuple[str | None, str]:
    rule = next((rule for rule in rules if rule.fits(template, tokens)), None)
    if rule is None:
        return None, f"the chat template shows no form of {what} that is known"
    shown = " and ".join(rule.texts)
    return rule.name, f"{what}: {rule.name}, since the chat template writes {shown}"
