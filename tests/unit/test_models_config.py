"""Configs: what is accepted, what is refused by name, and where the stop ids come from."""

from __future__ import annotations

import json
import subprocess
import sys
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from epicycle.engine.errors import ConfigError
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.locate import CONFIGS as NAMED
from epicycle.engine.models.locate import locate
from epicycle.engine.models.registry import ARCHITECTURES, architecture
from tests.fakes.tiny_models import CONFIGS, HUGINN, NANBEIGE, OURO, spec_of

REFUSED = [
    (OURO, "rope_scaling", {"type": "yarn"}, "unsupported_value"),
    (OURO, "use_sliding_window", True, "unsupported_value"),
    (OURO, "sliding_window", 4096, "unsupported_value"),
    (OURO, "tie_word_embeddings", True, "unsupported_value"),
    (OURO, "attention_dropout", 0.1, "unsupported_value"),
    (OURO, "hidden_act", "gelu", "unsupported_value"),
    (OURO, "num_key_value_heads", 3, "unsupported_value"),
    (OURO, "head_dim", 15, "unsupported_value"),
    (OURO, "eos_token_id", 61, "unsupported_value"),
    (OURO, "bos_token_id", -1, "unsupported_value"),
    (OURO, "layer_types", ["full_attention", "sliding_attention"], "unsupported_value"),
    (OURO, "layer_types", ["full_attention"], "unsupported_value"),
    (OURO, "mystery", 1, "unknown_key"),
    (OURO, "hidden_size", "32", "bad_config"),
    (OURO, "hidden_size", True, "bad_config"),
    (OURO, "total_ut_steps", 0, "bad_config"),
    (OURO, "rms_norm_eps", -1e-6, "bad_config"),
    (HUGINN, "test_time_noise", 0.1, "unsupported_value"),
    (HUGINN, "injection_type", "add", "unsupported_value"),
    (HUGINN, "state_init", "zero", "unsupported_value"),
    (HUGINN, "qk_bias", False, "unsupported_value"),
    (HUGINN, "bias", True, "unsupported_value"),
    (HUGINN, "tie_embeddings", False, "unsupported_value"),
    (HUGINN, "norm_class_name", "LayerNorm", "unsupported_value"),
    (HUGINN, "mlp_class_name", "BaseMLP", "unsupported_value"),
    (HUGINN, "nonlin_name", "ReLU", "unsupported_value"),
    (HUGINN, "block_class_name", "PreNormBlock", "unsupported_value"),
    (HUGINN, "n_layers", 6, "unsupported_value"),
    (HUGINN, "num_attention_heads", 4, "unsupported_value"),
    (HUGINN, "num_key_value_heads", 1, "unsupported_value"),
    (HUGINN, "head_dim", 8, "unsupported_value"),
    (HUGINN, "padded_vocab_size", 64, "unsupported_value"),
    (HUGINN, "rope_scaling", None, "unknown_key"),
    (HUGINN, "init_values", {"std": 0.1, "mystery": 1}, "unknown_key"),
    (NANBEIGE, "skip_loop_final_norm", True, "unsupported_value"),
    (NANBEIGE, "total_ut_steps", 2, "unsupported_value"),
    (NANBEIGE, "head_dim", 8, "unsupported_value"),
    (NANBEIGE, "loop_share_kv", True, "unsupported_value"),
    (NANBEIGE, "qk_layernorm", True, "unsupported_value"),
    (NANBEIGE, "attention_bias", True, "unsupported_value"),
    (NANBEIGE, "mystery", None, "unknown_key"),
]


@pytest.mark.parametrize(
    ("config", "key", "value", "code"), REFUSED, ids=[f"{c['model_type']}-{k}" for c, k, *_ in REFUSED]
)
def test_a_refusal_names_key_and_value(config: dict[str, Any], key: str, value: object, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of({**config, key: value})
    named = "mystery" if isinstance(value, dict) and "mystery" in value else key
    assert (code, True) == (caught.value.code, named in str(caught.value))


@pytest.mark.parametrize(("config", "key"), [(OURO, "rope_theta"), (HUGINN, "block_size"), (NANBEIGE, "kv_channels")])
def test_a_missing_key_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        spec_of({name: value for name, value in config.items() if name != key})
    assert "missing_key" == caught.value.code


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_bookkeeping_keys_change_nothing(kind: str) -> None:
    config = CONFIGS[kind]
    noise = {"architectures": ["X"], "auto_map": {}, "torch_dtype": "bfloat16", "dtype": "bfloat16", "use_cache": True}
    noise |= {"transformers_version": "4.55.0", "_name_or_path": "somewhere"}
    assert spec_of(config) == spec_of({**config, **noise})


def test_ouro_accepts_its_neutral_spellings() -> None:
    neutral = {"rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "attention_dropout": 0.0}
    neutral |= {"layer_types": ["full_attention"] * 2, "max_window_layers": 2, "early_exit_threshold": 1.0}
    assert spec_of(OURO) == spec_of({**OURO, **neutral})


def test_ouro_defaults_head_dim_and_kv_heads() -> None:
    config = {key: value for key, value in OURO.items() if key != "head_dim"} | {"num_key_value_heads": None}
    spec = spec_of(config)
    assert (4, 8) == (spec.kv_heads, spec.head_dim)


@pytest.mark.parametrize("spelling", [{"n_heads": 2}, {"num_attention_heads": 2, "num_key_value_heads": 2}])
def test_huginn_accepts_both_head_count_spellings(spelling: dict[str, int]) -> None:
    config = {key: value for key, value in HUGINN.items() if key != "n_heads"} | spelling
    assert spec_of(HUGINN) == spec_of(config)


def test_huginn_spread_follows_from_the_width_unless_stored() -> None:
    spec = spec_of(HUGINN)
    assert (sqrt(2 / (5 * 32)), sqrt(32)) == (spec.init_std, spec.embed_scale)
    stored = spec_of({**HUGINN, "init_values": {"std": 0.125, "embed_scale": 2.0, "out_proj": 0.5, "embedding": 0.1}})
    assert (0.125, 2.0) == (stored.init_std, stored.embed_scale)


def test_stages_of_each_architecture() -> None:
    ouro, huginn, nanbeige = (spec_of(config) for config in (OURO, HUGINN, NANBEIGE))
    assert (32, 2, 0, 2, 0, 4) == _stages(ouro)
    assert (64, 5, 2, 2, 1, 5) == _stages(huginn)
    assert (24, 3, 0, 3, 0, 4) == _stages(nanbeige)
    assert [(True, False), (False, True), (False, False)] == [
        (spec.has_gate, spec.has_costly_boundary) for spec in (ouro, huginn, nanbeige)
    ]


def _stages(spec: Any) -> tuple[int, ...]:
    return (spec.state_width, spec.layers, spec.first_recurrent, spec.recurrent_layers, spec.coda_layers, spec.loops)


PUBLISHED = [
    ("ouro-1.4b", 1_434_652_673, 269, 8_192),
    ("huginn-0125", 3_564_976_800, 75, 21_120),
    ("nanbeige4.2-3b", 4_169_800_704, 201, 4_096),
]


@pytest.mark.parametrize(("name", "parameters", "count", "kv_bytes"), PUBLISHED)
def test_published_shapes_have_their_published_sizes(name: str, parameters: int, count: int, kv_bytes: int) -> None:
    spec = read_spec(locate(name, "random").folder)
    plan = architecture(spec.model_type).tensors(spec)
    assert (parameters, count, kv_bytes) == (plan.parameters, len(plan.required), spec.kv_token_layer_bytes(2))


def test_every_named_config_is_covered_by_an_architecture() -> None:
    assert set(ARCHITECTURES) == {read_spec(locate(name, "random").folder).model_type for name in NAMED}


def test_huginn_stops_where_its_official_generation_code_stops() -> None:
    assert (65504, 65505, 65508) == read_spec(locate("huginn-0125", "random").folder).eos_ids


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_eos_is_the_union_of_every_declaration(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        config={**OURO, "eos_token_id": 2},
        generation_config={"eos_token_id": [5, 2]},
        tokenizer_config={"eos_token": {"content": "<end>"}, "eot_token": "<turn>"},
        tokenizer={"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 7, "content": "<turn>"}]},
    )
    assert (2, 5, 7, 9) == read_spec(folder).eos_ids


def test_eos_of_a_tokenizer_config_with_its_own_table(tmp_path: Path) -> None:
    tokens = {"eos_token": "<end>", "added_tokens_decoder": {"11": {"content": "<end>"}}}
    assert (2, 11) == read_spec(write(tmp_path, config=OURO, tokenizer_config=tokens)).eos_ids


def test_eos_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path, config=OURO, tokenizer_config={"eos_token": "<end>"})
    write(tmp_path, tokenizer={"added_tokens": [{"id": 61, "content": "<end>"}]})
    with pytest.raises(ConfigError, match="61"):
        read_spec(tmp_path)


def test_generation_defaults_are_read(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, config=OURO, generation_config={"exit_threshold": 0.7, "min_loops": 9}))
    assert (0.7, 4) == (spec.exit_threshold, spec.min_loops)
    assert 1.0 == read_spec(write(tmp_path, generation_config={})).exit_threshold


def test_a_threshold_above_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exit_threshold=1\.5"):
        read_spec(write(tmp_path, config=OURO, generation_config={"exit_threshold": 1.5}))


def test_an_unknown_model_type_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama.*huginn_raven, nanbeige, ouro"):
        read_spec(write(tmp_path, config={"model_type": "llama"}))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


def test_reading_a_spec_imports_no_torch() -> None:
    code = (
        "import sys; from epicycle.engine.models.locate import locate; "
        "from epicycle.engine.models.config import read_spec; "
        "from epicycle.engine.models.checkpoint import fingerprint; "
        "f = locate('embedded'); read_spec(f.folder); fingerprint(f.folder); sys.exit('torch' in sys.modules)"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
