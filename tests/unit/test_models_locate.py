"""Model names resolve to folders; a name that can't is refused with what could be said instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from epicycle.engine.errors import LoadError
from epicycle.engine.models.locate import CONFIGS, EMBEDDED, locate


@pytest.mark.parametrize(
    ("name", "served_id"),
    [("embedded", "ouro-tiny"), ("embedded:ouro", "ouro-tiny"), ("embedded:huginn", "huginn-tiny")],
)
def test_embedded_models_are_complete(name: str, served_id: str) -> None:
    files = locate(name)
    assert (served_id, True, files.folder / "tokenizer.json") == (files.served_id, files.has_weights, files.tokenizer)
    assert name in EMBEDDED


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_config_name_needs_random_weights(name: str) -> None:
    files = locate(name, "random")
    assert (name, False, None) == (files.served_id, files.has_weights, files.tokenizer)
    with pytest.raises(LoadError, match="--weights random") as caught:
        locate(name)
    assert "missing_weights" == caught.value.code


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    files = locate(str(folder))
    assert (folder.resolve(), "my-model", True) == (files.folder, files.served_id, files.has_weights)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(LoadError, match=r"embedded:huginn.*ouro-1\.4b") as caught:
        locate("Someone/A-Model")
    assert "unknown_model" == caught.value.code


def test_notices_lie_beside_the_embedded_models() -> None:
    notice = (locate("embedded").folder.parent / "NOTICE").read_text()
    for source in ("chitchat-dataset", "Gunther Cox", "Princeton University", "Apache"):
        assert source in notice
