"""Python configuration files, read but never executed: top-level assignments of literals."""

from __future__ import annotations

import ast
from typing import Any

from evenspan.errors import ConfigError, Finding

WAY_OUT = "write only `name = literal` lines (numbers, strings, True, None, lists, dicts), or use YAML"


def literal_assignments(text: str, *, name: str) -> dict[str, Any]:
    """Name -> value of every top-level assignment in `text`; `name` is the file's, for messages.

    Raises ConfigError with C006 for every line that is something else, and C004 for a name assigned twice.
    """
    try:
        module = ast.parse(text, filename=name)
    except SyntaxError as error:
        at = f"{name}:{error.lineno}" if error.lineno else name
        raise _not_python(at, error.msg) from None
    except (MemoryError, RecursionError):
        raise _not_python(name, "nested too deeply") from None
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    findings: list[Finding] = []
    for position, statement in enumerate(module.body):
        if position == 0 and _is_docstring(statement):
            continue
        at = f"{name}:{statement.lineno}"
        target, expression = _assignment(statement)
        if target is None or expression is None:
            shown = _shown(statement).splitlines()[0]
            findings.append(
                Finding(code="C006", at=at, fact=f"`{shown}` is no assignment of a literal", hint=WAY_OUT)
            )
            continue
        if target in lines:
            fact = f"{target} was assigned on line {lines[target]} already"
            findings.append(Finding(code="C004", at=at, fact=fact, hint="keep one of the two lines"))
            continue
        lines[target] = statement.lineno
        try:
            values[target] = _plain(ast.literal_eval(expression))
        except (ValueError, TypeError, MemoryError, RecursionError):
            shown = _shown(expression)
            findings.append(
                Finding(code="C006", at=at, fact=f"{target} = {shown} is no literal", hint=WAY_OUT)
            )
    if findings:
        raise ConfigError(findings)
    return values


def _not_python(at: str, reason: str) -> ConfigError:
    return ConfigError([Finding(code="C006", at=at, fact=f"is not Python: {reason}", hint=WAY_OUT)])


def _shown(node: ast.stmt | ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "..."


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=target)], value=value):
            return target, value
        case ast.AnnAssign(target=ast.Name(id=target), value=value):
            return target, value
        case _:
            return None, None


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML would give them."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
