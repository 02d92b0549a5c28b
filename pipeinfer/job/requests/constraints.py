"""What a request says may come, read and checked against the vocabulary before anything loads. Chooses no token."""

from dataclasses import replace

from pipeinfer.core.logit_bias import read_biases
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.text_sections import GrammarOptions
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.request import read_text
from pipeinfer.models.text.grammar_check import check_grammar
from pipeinfer.models.text.grammar_text import ANY_TOKENS
from pipeinfer.models.text.json_schema import read_schema, schema_grammar
from pipeinfer.models.text.relaxed_schema import as_schema, mismatch, relaxations
from pipeinfer.models.text.tokenizer import Tokenizer


def constrained(options: RunOptions, tokenizer: Tokenizer) -> RunOptions:
    """The same with the grammar that is asked for in its sampling. Raises UserError for what cannot be had."""
    sampling = replace(options.sampling, grammar=_grammar(options.grammar))
    check_constraints(sampling, options.ignore_eos, tokenizer)
    return replace(options, sampling=sampling)


def check_constraints(
    sampling: SamplingParams, ignore_eos: bool, tokenizer: Tokenizer, flag: str = "--ignore-eos"
) -> None:
    """`flag`: what says `ignore_eos`. Raises UserError for what cannot be had with this vocabulary."""
    ids, _ = read_biases(sampling.logit_bias)
    if len(ids) and ids[-1] >= tokenizer.n_vocab:
        raise UserError(f"a logit bias is for token {ids[-1]}, and the vocabulary has {tokenizer.n_vocab}, from 0 on; "
                        "`pipeinfer run --json` and POST /tokenize tell a text's tokens")  # fmt: skip
    if sampling.grammar and ignore_eos:
        raise UserError(f"{flag} goes on behind the end of the text, where a grammar lets nothing follow; "
                        "leave one of them out")  # fmt: skip
    if sampling.grammar:
        check_grammar(tokenizer, sampling.grammar)


def _schema(option: str, text: str) -> str:
    """What no grammar holds a text to is said."""
    schema = read_schema(text)
    for reason in relaxations(schema):
        complain(f"{option}: {reason}")
    return schema_grammar(schema)


def complain_of_mismatch(sampling: SamplingParams, text: str) -> None:
    """Compare a whole text with the schema that it was to fit, where no grammar could hold it to all of that."""
    schema = as_schema(sampling.grammar)
    if schema is not None and relaxations(schema) and (wrong := mismatch(schema, text)):
        complain(f"the text does not fit the JSON schema: {wrong}")


def _grammar(given: GrammarOptions) -> str:
    if given.schema is not None:
        return _schema("--json-schema", given.schema)
    if given.schema_file is not None:
        return _schema("--json-schema-file", read_text("--json-schema-file", given.schema_file))
    text = read_text("--grammar-file", given.grammar_file) if given.grammar_file is not None else given.grammar or ""
    return text.removeprefix(ANY_TOKENS)  # in GBNF it means nothing
