"""Plain text of manual pages, simply: the words of their macros, without layout.

Knows what pages in man(7) and mdoc(7) are made of. Dropped are: all before the first heading (the
title line, definitions of macros), comments, requests that set layout, links' addresses, formats of
tables, fonts, sizes and motions. Both branches of a condition are kept.
"""

import re

_ALTERNATING = {"BI", "BR", "IB", "IR", "RB", "RI", "SB"}
_WORDS = {"B", "I", "SM", "SS", "R"}
# Macros of mdoc(7) whose arguments are text; within these arguments the names are macros too.
_MDOC = set(
    re.findall(
        "..",
        "AdAnAoApAqArBcBoBqCmDlDoDqDvEmErEvFaFcFlFnFoFtIcInItLiLkMsMtNdNmNoNsOcOoOpPaPcPfPoPqQcQlQo"
        "QqScSoSqSsStSxSyTaTnVaVtXcXoXr",
    )
)
_ESCAPE = re.compile(
    r"\\(?:(?P<drop>f(?:\[[^]]*\]|\(..|.)|s[+-]?\d+|s\[[^]]*\]|[hvwlLDZbo]'[^']*'|[mMFn]\[[^]]*\]"
    r"|n\(..|n.|\*\[[^]]*\]|\*\(..|\*.|[kz].|[&|^/,)c%:{}dupra])|\((?P<two>..)"
    r"|\[(?P<long>[^]]*)\]|(?P<one>.)|$)"
)
_CHARACTERS = {
    "aq": "'", "cq": "'", "oq": "'", "dq": '"', "lq": '"', "rq": '"', "em": "--", "en": "-",
    "ha": "^", "ti": "~", "rs": "\\", "bu": "*", "ga": "`", "at": "@", "sh": "#", "bv": "|",
    "or": "|", "mi": "-", "hy": "-", "lB": "[", "rB": "]", "mu": "x", "<=": "<=", ">=": ">=",
    "->": "->", "co": "(c)",
}  # fmt: skip
_SINGLE = {"-": "-", "e": "\\", "\\": "\\", "~": " ", "0": " ", "t": "\t", "(": ""}
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|((?:\\.|[^\s])+)')
_CELL = re.compile(r"^T}|T{$")  # around a cell of several lines in a table
_REQUEST = re.compile(r"[.'][ \t]*([A-Za-z]+|[^\s\w]*)(.*)")


def sections(source: str) -> list[tuple[str, str]]:
    """Headings of a page, and the text below each.

    Args:
        source: of a page, in roff.
    """
    found: list[tuple[str, list[str]]] = []
    skip_to = ""  # the line that ends what is being skipped
    heading_follows = False
    for line in source.replace("\\\n", "").splitlines():
        line = re.sub(r'\\["#].*', "", line)
        if skip_to:
            if line.rstrip().endswith(skip_to) if skip_to == "." else line.startswith(skip_to):
                skip_to = ""
            continue
        request = _REQUEST.fullmatch(line)
        name, rest = request.groups() if request else ("", line)
        if name in ("de", "ig", "am"):
            skip_to = ".."
        elif name == "TS":
            skip_to = "."
        elif name in ("SH", "Sh") or (heading_follows and not request):
            title = " ".join(_arguments(rest)) if request else plain(line)
            heading_follows = not title
            if title:
                found.append((title, []))
        elif found:
            text = _macro(name, rest) if request else plain(_CELL.sub("", line))
            if text.strip():
                found[-1][1].append(text)
    return [(heading, "\n".join(lines)) for heading, lines in found]


def plain(text: str) -> str:
    """Text without escapes."""
    return _ESCAPE.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    name = match["two"] or match["long"]
    if name is not None:
        return _CHARACTERS.get(name, "")
    return _SINGLE.get(match["one"] or "", match["one"] or "")


def _arguments(rest: str) -> list[str]:
    return [
        plain(quoted.replace('""', '"') if quoted else word)
        for quoted, word in _ARGUMENT.findall(rest)
    ]


def _macro(name: str, rest: str) -> str:
    """What a macro other than a heading shows."""
    if name in _ALTERNATING:
        return "".join(_arguments(rest))
    if name in _WORDS:
        return " ".join(_arguments(rest))
    if name in ("IP", "HP"):
        return " ".join(_arguments(rest)[:1])
    if name not in _MDOC:
        return ""
    words = _arguments(rest)
    if name == "Xr":
        return f"{words[0]}({words[1]}) {' '.join(words[2:])}" if len(words) > 1 else ""
    mark = {"Nd": "- ", "Fl": "-"}.get(name, "")
    return mark + " ".join(word for word in words if word not in _MDOC)
