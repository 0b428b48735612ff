"""The page of every code: what it checks, why, a bad example, and what to write instead."""

from __future__ import annotations

from importlib.resources import files

from evenspan.errors import ConfigError, Finding, nearest

PAGES = files("evenspan.check") / "pages"


def explained_codes() -> list[str]:
    """Every code that has a page, sorted."""
    return sorted(page.name.removesuffix(".md") for page in PAGES.iterdir() if page.name.endswith(".md"))


def explain(code: str) -> str:
    """The Markdown page of `code`; raises ConfigError C016 for a code without one."""
    wanted = code.strip().upper()
    codes = explained_codes()
    if wanted not in codes:
        near = " or ".join(nearest(wanted, codes) or codes)
        raise ConfigError([Finding(code="C016", at=code, fact="no such code", hint=f"did you mean {near}?")])
    return (PAGES / f"{wanted}.md").read_text(encoding="utf-8")
