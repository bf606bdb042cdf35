"""Tagged sentences from Python sources: statements, and the role of each name in them.

    self        . total      = add    ( x          , by        = n          )
    <value>     . <attribute> …  <call>   <argument>   <keyword>   <argument>

A role follows from what stands before and behind the name, as a word's part of speech does.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

TAGS = (
    *("<value>", "<target>", "<attribute>", "<call>", "<method>", "<argument>", "<keyword>"),
    *("<parameter>", "<function>", "<class>", "<import>"),
)
NO_TAG = "<>"  # of a word that is no name
SHORTEST, LONGEST = 4, 32  # words of a statement

_LITERALS = {"NUMBER": "<number>", "STRING": "<string>"}
_DEFINITIONS = {ast.FunctionDef: "def ", ast.AsyncFunctionDef: "async def ", ast.ClassDef: "class "}
_Tags = dict[tuple[int, int], str]  # by line and column


def read_statements(
    source: bytes, shortest: int = SHORTEST, longest: int = LONGEST
) -> Iterator[tuple[str, str]]:
    """Yield the words of the statements of a file, and their tags; those without any are left out.

    A compound statement is its first line alone, as `for x in y :`.
    """
    # Columns are in characters for `tokenize`, and in bytes for `ast`.
    text = re.sub(r"[^\x00-\x7f]", "x", source.decode("utf-8", "replace"))
    try:
        tags = _find_tags(ast.parse(text))
        tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    except (SyntaxError, ValueError, tokenize.TokenError):  # as in templates
        return
    statement: list[tuple[str, str]] = []
    depth = 0  # of f-strings, which have tokens of their own since Python 3.12
    for token in tokens:
        kind = tokenize.tok_name[token.type]
        depth += kind.endswith("STRING_START")
        depth -= kind.endswith("STRING_END")
        if kind in ("NAME", "OP", *_LITERALS) and not depth:
            tag = tags.get(token.start, NO_TAG)
            statement.append((_LITERALS.get(kind, token.string), tag))
        elif kind.endswith("STRING_END") and not depth:
            statement.append((_LITERALS["STRING"], NO_TAG))
        elif kind == "NEWLINE" and statement:
            words, tags_of_words = zip(*statement, strict=True)
            if shortest <= len(words) <= longest and {*tags_of_words} != {NO_TAG}:
                yield " ".join(words), " ".join(tags_of_words)
            statement = []


def read_typed_statements(text: str) -> list[tuple[str, str]]:
    """Return the words and the tags of statements in Python, or as words of the data."""
    for word, code in (("<number>", "0"), ("<string>", "''"), ("<unknown>", "_unknown_")):
        text = text.replace(word, code)
    text = text.strip()
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):  # as the first line of a compound statement, without a body
        text += f"\n{' ' * 80}pass"
    return [*read_statements(f"{text}\n".encode(), shortest=1, longest=2**16)]


def _find_tags(tree: ast.AST) -> _Tags:
    """Return the tags of the names of a file by their places."""
    tags: _Tags = {}
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if node.__class__.__name__ in ("JoinedStr", "TemplateStr"):  # with places of its own
            continue
        nodes += ast.iter_child_nodes(node)
        match node:
            case ast.Call(function, arguments, keywords):
                _tag(tags, function, "<call>", "<method>")
                for argument in (*arguments, *(keyword.value for keyword in keywords)):
                    if isinstance(argument, ast.Name):
                        _tag(tags, argument, "<argument>")
            case ast.Name(ctx=ast.Store()):
                _tag(tags, node, "<target>")
            case ast.Name():
                _tag(tags, node, "<value>")
            case ast.Attribute():
                _tag(tags, node, "", "<attribute>")
            case ast.keyword(arg=str()):
                tags[node.lineno, node.col_offset] = "<keyword>"
            case ast.arg():
                tags[node.lineno, node.col_offset] = "<parameter>"
            case ast.alias():
                tags[node.lineno, node.col_offset] = "<import>"
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                column = node.col_offset + len(_DEFINITIONS[type(node)])
                is_class = isinstance(node, ast.ClassDef)
                tags[node.lineno, column] = "<class>" if is_class else "<function>"
    return tags


def _tag(tags: _Tags, node: ast.AST, name: str, attribute: str = "") -> None:
    """Tag a name, or the last part of a dotted one, unless the node above it has done so."""
    match node:
        case ast.Name():
            tags.setdefault((node.lineno, node.col_offset), name)
        case ast.Attribute(attr=attr, end_lineno=int(line), end_col_offset=int(end)):
            tags.setdefault((line, end - len(attr)), attribute)
