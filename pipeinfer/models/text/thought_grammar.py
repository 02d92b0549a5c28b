"""Grammars of what follows a model's reasoning: calls, or an answer with a grammar of its own. Knows no request."""

import json

from pipeinfer.models.text.answer_forms import MARK, NO_TEXT, THOUGHTS
from pipeinfer.models.text.answers import as_json
from pipeinfer.models.text.grammar_text import ANSWER
from pipeinfer.models.text.tokenizer import ATTR_CONTROL, Tokenizer

MAX_SPACE = 4  # characters of white space behind reasoning: a small model may never end it
HARMONY, HARMONY_THOUGHT = "<|channel|>", "<|channel|>analysis<|message|>"


def behind_reasoning(grammar: str, source: str, thought: str, tokenizer: Tokenizer) -> str:
    """The grammar of an answer, behind the reasoning of a model with the template `source`; the same where it has
    none. `thought`: the mark that ends the reasoning which the prompt begins, if any."""
    before, rules = thoughts(source, thought, tokenizer)
    if not before:
        return grammar
    final = literal(NO_TEXT[0], tokenizer) if HARMONY in source else ""
    lark = "\n".join([f"start: {before} {final} answer", *rules])
    return f"{ANSWER}{json.dumps(lark)}\n{grammar}"


def thoughts(source: str, thought: str, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The symbols before calls or an answer, and their rules: reasoning that the prompt begins, or that may come. None
    where a model with the template `source` does not reason. `thought`: as above."""
    begin = HARMONY_THOUGHT if HARMONY in source else next((each for each in THOUGHTS if each in source), "")
    if not thought and not begin:
        return "", []
    end, space = literal(thought or THOUGHTS[begin], tokenizer), f"/[ \\n]/{{0,{MAX_SPACE}}}"
    if begin == HARMONY_THOUGHT:
        space = literal("<|start|>assistant", tokenizer)
    free = ["free: /(.|\\n)*/", f"thought: free {end} {space}"]
    if end.startswith('"'):  # no token that text cannot have
        free = [f"free[suffix={end}]: /(.|\\n)*/", f"thought: free {space}"]
    return ("thought" if thought else f"({literal(begin, tokenizer)} thought)?"), free


def literal(text: str, tokenizer: Tokenizer) -> str:
    """A text in Lark, with control tokens by their ids."""
    return " ".join(_control(part, tokenizer) or as_json(part) for part in MARK.split(text) if part)


def _control(text: str, tokenizer: Tokenizer) -> str:
    tokens = tokenizer.encode(text, add_special=False, parse_special=True) if MARK.fullmatch(text) else []
    is_control = len(tokens) == 1 and tokenizer.attributes_of(tokens[0]) & ATTR_CONTROL
    return f"<[{tokens[0]}]>" if is_control else ""
