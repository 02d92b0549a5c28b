"""Convert llama.cpp's grammars (GBNF) to llguidance's Lark. Knows no vocabulary, and checks no limits.

Every terminal is one character: llguidance matches terminals greedily, so longer ones would change a grammar's meaning.
llguidance's own `gbnf_to_lark` makes such terminals, and rejects valid escapes, names and line breaks. Groups become
rules of their own, so that nothing is nested.
"""

import re
from collections.abc import Iterator
from typing import NoReturn

from pipeinfer.errors import UserError

TOKEN = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<rule>[\w-]+)\s*::=
    | (?P<name>[\w-]+)
    | "(?P<literal>(?:\\.|[^"\\])*)"
    | \[(?P<negated>\^?)(?P<characters>(?:\\.|[^\]\\])*)\]
    | (?P<token>!?<\[\d+\]>|<[^<>\s]+>)
    | (?P<repetition>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<mark>[().|])""",
    re.DOTALL | re.ASCII | re.VERBOSE,
)
CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in '\\"[]'}
ANY = r"/[\x{0}-\x{10FFFF}]/"
ROOT = "root"
MAX_REPETITIONS = 100_000

MAX_TAILS = 8
"""Depth of nested groups that are searched for a rule's own name at the end of the rule."""

Item = tuple[str, str]
"""A rule's key or a terminal, and its repetition."""
Alternatives = list[list[Item]]


class GbnfReader:
    """Reads one grammar. `token_names`: the tokens of the vocabulary that it names, as `<name>`."""

    def __init__(self, text: str) -> None:
        """Raises UserError for an invalid grammar."""
        self.token_names: set[str] = set()
        self._rules: dict[str, Alternatives] = {}  # the key is a name, or a group's number
        self._literals: dict[str, str] = {}
        self._read(text)
        if ROOT not in self._rules:
            _refuse(f"it has no rule {ROOT}, which says what the whole text is; give one")
        for key in [*self._rules]:
            self._iterate(key)

    def lark(self, token_ids: dict[str, int]) -> str:
        """The grammar in Lark. `token_ids`: the id of each of `token_names`."""
        names = {key: f"r{at}" for at, key in enumerate(self._rules)} | {ROOT: "start"}
        names |= {name: f"<[{id}]>" for name, id in token_ids.items()}

        def sequence(items: list[Item]) -> str:
            return " ".join(names.get(what, what) + often for what, often in items) or '""'

        return "\n".join(f"{names[key]}: {' | '.join(map(sequence, rule))}" for key, rule in self._rules.items())

    def _read(self, text: str) -> None:
        open_groups, rule, used = list[Alternatives](), Alternatives(), dict[str, int]()
        position = 0
        while position < len(text):
            found = TOKEN.match(text, position)
            if not found:
                _refuse(f"{text[position : position + 30]!r} is not understood at character {position}")
            position, kind = found.end(), found.lastgroup
            if kind is None:
                continue
            if kind == "rule":
                if open_groups:
                    _refuse(f"a ( is not closed before the rule {found[kind]}")
                rule = self._rules[found[kind]] = [[]]
                continue
            if not rule:
                _refuse("it begins with no rule; write root ::= …")
            if kind == "repetition":
                self._repeat(rule[-1], found[kind])
            elif found["mark"] == "|":
                rule.append([])
            elif found["mark"] == "(":
                open_groups.append(rule)
                rule = [[]]
            elif found["mark"] == ")":
                if not open_groups:
                    _refuse(f"a ) closes nothing at character {position - 1}")
                group, rule = self._group(rule), open_groups.pop()
                rule[-1].append((group, ""))
            else:
                if kind == "name":
                    used.setdefault(found[kind], position)
                rule[-1].append((self._terminal(found), ""))
        if open_groups:
            _refuse("a ( is not closed at its end")
        if missing := used.keys() - self._rules.keys():
            _refuse(f"it has no rule {min(missing)}, which another one names; give it")

    def _terminal(self, found: re.Match[str]) -> str:
        if found["name"]:
            return found["name"]
        if found["literal"] is not None:
            return self._literal(found["literal"])
        if found["characters"] is not None:
            return _class(found["negated"], found["characters"])
        if found["mark"]:
            return ANY
        token = found["token"]
        if token.startswith("!"):
            return f"<[^{token[3:]}"
        if not token.startswith("<["):
            self.token_names.add(token)
        return token

    def _literal(self, text: str) -> str:
        if text not in self._literals:
            characters = [f"/\\x{{{code:x}}}/" for code, _ in _characters(text)]
            single = len(characters) == 1
            self._literals[text] = characters[0] if single else self._group([[(each, "") for each in characters]])
        return self._literals[text]

    def _group(self, alternatives: Alternatives) -> str:
        key = f" {len(self._rules)}"  # no name has a space
        self._rules[key] = alternatives
        return key

    def _repeat(self, items: list[Item], repetition: str) -> None:
        if not items:
            _refuse(f"{repetition} repeats nothing")
        bounds = [int(each) for each in re.findall(r"\d+", repetition)]
        if bounds and (max(bounds) > MAX_REPETITIONS or bounds[0] > bounds[-1]):
            _refuse(f"{repetition} are no bounds of repetitions: the first is at most the second, and that at most "
                    f"{MAX_REPETITIONS}")  # fmt: skip
        what, often = items.pop()
        if often:
            what = self._group([[(what, often)]])
        if bounds[-1:] != [0] or repetition.rstrip(" }").endswith(","):
            items.append((what, re.sub(r"\s", "", repetition)))

    def _iterate(self, key: str) -> None:
        """Rewrite a rule that ends with itself, as lists do, as a repetition: an Earley parser's time grows with the
        former."""
        tails = [*self._tails(self._rules[key], key, MAX_TAILS)]
        again = [items[:-1] for items in tails if items[-1:] == [(key, "")]]
        last = [items for items in tails if items[-1:] != [(key, "")]]
        if again and last:
            self._rules[key] = [[(self._group(again), "*"), (self._group(last), "")]]

    def _tails(self, alternatives: Alternatives, key: str, depth: int) -> Iterator[list[Item]]:
        """The same alternatives, with groups at their ends expanded if these end with the rule `key`."""
        for items in alternatives:
            what, often = items[-1] if items else ("", "")
            group = self._rules[what] if depth and what.startswith(" ") and often in ("", "?") else []
            if any(each and (each[-1][0] == key or each[-1][0].startswith(" ")) for each in group):
                for tail in self._tails(group, key, depth - 1):
                    yield [*items[:-1], *tail]
                if often:
                    yield items[:-1]
            else:
                yield items


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """The code points of a literal or class, and whether each is escaped."""
    for *codes, escaped, plain in CHARACTER.findall(text):
        if escaped and escaped not in ESCAPES:
            _refuse(f"\\{escaped} is no escape")
        code = int("".join(codes), 16) if any(codes) else ord(ESCAPES[escaped] if escaped else plain)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            _refuse(f"{code:#x} is no character")
        yield code, not plain


def _class(negated: str, text: str) -> str:
    characters, ranges, at = [*_characters(text)], list[str](), 0
    if not characters:
        _refuse("[] matches no character")
    while at < len(characters):
        first = last = characters[at][0]
        if at + 2 < len(characters) and characters[at + 1] == (ord("-"), False):
            last, at = characters[at + 2][0], at + 2
        if last < first:
            _refuse(f"[{text[:30]}] has a range that ends before it begins")
        ranges.append(f"\\x{{{first:x}}}-\\x{{{last:x}}}")
        at += 1
    return f"/[{negated}{''.join(ranges)}]/"


def _refuse(why: str) -> NoReturn:
    raise UserError(f"this is no grammar in llama.cpp's form (GBNF): {why}")
