"""Fill-in-the-middle: the prompt of a text with a hole, llama-server's `/infill` and OpenAI's `suffix`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pipeinfer.job.requests.body import are_prompts, length_of, prompt_parts
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.fields import PassedOver, flag, is_list_of, refuse, shown
from pipeinfer.models.text.tokenizer import Tokenizer

S = TypeVar("S", str, list[int])
INFILL = "/infill"
HOLE = ("input_prefix", "input_suffix", "input_extra")
N_BATCH = 2048  # llama-server's -b by default: the tokens of prefix and suffix at most
PROJECT, FILE, SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"  # as llama-server writes them


def infill_of(body: Mapping[str, Any], prompts: BodyPrompts, passed: PassedOver) -> dict[str, Any]:
    """The body of a completion between a prefix and a suffix, of which what is next to the hole stays, as in
    llama-server, and the last of the files that fit. The tokens that are asked for, a quarter of the batch at
    least, are for the text. Raises UserError."""
    tokenizer, fields = prompts.tokenizer, {"prompt": "", **body}
    _check_marks(tokenizer)
    extra = fields.get("input_extra", [])
    if not is_list_of(dict, extra) or not all(map(_is_file, extra)):
        refuse(f"input_extra is {shown(extra)}; give a list of objects with text, and maybe filename")
    before, after, prompt = (_text(fields, name) for name in ("input_prefix", "input_suffix", "prompt"))
    quarter = min(N_BATCH, prompts.n_ctx * 4 // 5) // 4
    opening = tokenizer.encode(prompts.fitting(prompt), False, True)
    n_suffix = max(0, quarter - 2 - len(opening))
    prefix = _end(tokenizer, before, 3 * quarter)
    suffix = tokenizer.encode(after[: n_suffix * tokenizer.longest], False)[:n_suffix]
    hole = _with_hole(tokenizer, [*prefix, *opening], suffix)
    n_text = max(quarter, length_of(fields, quarter))
    files = _files(tokenizer, extra, max(0, prompts.n_ctx - len(hole) - n_text))
    return {name: value for name, value in body.items() if name not in HOLE} | {"prompt": [*files, *hole]}


def with_suffix(body: Mapping[str, Any], prompts: BodyPrompts, passed: PassedOver) -> dict[str, Any]:
    """The body of a completion that may have a suffix, behind each of its prompts. Raises UserError."""
    fields = dict(body)
    if not fields.get("suffix"):
        return fields
    suffix = _text(fields, "suffix")
    if flag(fields, "echo", False):
        refuse("echo and suffix do not go together, since the text is between the two; leave one of them out")
    _check_marks(prompts.tokenizer)
    del fields["suffix"]
    value = fields.get("prompt")

    def around(prompt: Any) -> list[str | int]:
        parts = prompt_parts(prompt)
        return _with_hole(prompts.tokenizer, [parts] if isinstance(parts, str) else parts, [suffix])

    prompt = [around(each) for each in value] if are_prompts(value) else around(value)
    return fields | {"prompt": prompt, "parse_special": False}  # names of control tokens are text


def _is_file(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("text"), str) and isinstance(value.get("filename", ""), str)


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else refuse(f"{name} is {shown(value)}; give a text")


def _check_marks(tokenizer: Tokenizer) -> None:
    if not {"pre", "suf", "mid"} <= tokenizer.fill_in.keys():
        refuse("this model's vocabulary has no tokens for a text with a hole in it (FIM); a coder's model has them")


def _with_hole(tokenizer: Tokenizer, prefix: Sequence[str | int], suffix: Sequence[str | int]) -> list[str | int]:
    """A prompt of token ids and texts."""
    marks, bos = tokenizer.fill_in, [tokenizer.bos] if tokenizer.adds_bos else []
    return [part for part in (*bos, marks["pre"], *prefix, marks["suf"], *suffix, marks["mid"]) if part != ""]


def _files(tokenizer: Tokenizer, extra: Sequence[Mapping[str, str]], n: int) -> list[int]:
    """The last `n` tokens of a repository: its name and its files, of which the last has the hole."""
    marks = tokenizer.fill_in

    def parts() -> Iterator[list[int]]:
        """From the last on."""
        if "sep" in marks:
            yield [marks["sep"], *tokenizer.encode(FILE, False)]
        for each in reversed(extra):
            yield _end(tokenizer, each["text"], n)
            name = _end(tokenizer, f"{each.get('filename', 'tmp')}\n", n)
            yield [marks["sep"], *name] if "sep" in marks else tokenizer.encode(SNIPPET, False)
        if "rep" in marks:
            yield [marks["rep"], *tokenizer.encode(PROJECT, False)]

    tokens = list[int]()
    for part in parts():
        tokens = _last([*part, *tokens], n)
        if len(tokens) == n:
            break
    return tokens


def _end(tokenizer: Tokenizer, text: str, n: int) -> list[int]:
    """The last `n` tokens of a text, of which no more is read than they can be."""
    return _last(tokenizer.encode(_last(text, n * tokenizer.longest), False), n)


def _last(values: S, n: int) -> S:
    return values[max(0, len(values) - n) :]
