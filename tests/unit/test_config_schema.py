"""Every setting says what it is, and the spelling tables only lead to settings that exist."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from evenspan.config import spellings
from evenspan.config.schema import RunConfig


def described(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from described(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field.description


def test_every_setting_has_a_description() -> None:
    assert [path for path, text in described(RunConfig) if not text] == []


def test_canonical_paths_are_those_of_the_schema() -> None:
    assert spellings.canonical_paths() == {path for path, _ in described(RunConfig)}


def test_spellings_lead_to_settings() -> None:
    settings = spellings.canonical_paths()
    assert set(spellings.renames().values()) <= settings
    for table in spellings.translations().values():
        for translated in table.values():
            assert translated.keys() <= settings


def test_no_spelling_hides_a_setting() -> None:
    hidden = (spellings.renames().keys() | spellings.translations().keys()) & spellings.canonical_paths()
    assert hidden == {"parallel.mesh.context"}


@pytest.mark.parametrize("path", sorted(spellings.canonical_paths()))
def test_no_setting_is_refused(path: str) -> None:
    assert spellings.refusal(path) is None or path.startswith("inference.")
