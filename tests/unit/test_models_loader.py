"""Checkpoints load strictly: exactly the tensors the config implies, or an error that names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from epicycle.engine.errors import LoadError
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.models import checkpoint
from epicycle.engine.models.build import build_model, weights_fingerprint
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.loader import load_weights, random_weights
from epicycle.engine.models.locate import locate
from epicycle.engine.models.rope import pair_tables
from tests.fakes.driver import logits_by_depth
from tests.fakes.tiny_models import CONFIGS, lively_weights, spec_of

CPU = torch.device("cpu")
GATE = "model.early_exit_gate.weight"
Tensors = dict[str, Tensor]


def folder_of(kind: str, path: Path, tensors: Tensors | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    save_file(tensors if tensors is not None else lively_weights(spec_of(CONFIGS[kind])), path / checkpoint.SINGLE_FILE)
    return path


def sharded(path: Path, shards: dict[str, Tensors], weight_map: dict[str, str] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIGS["ouro"]))
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    mapped = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": weight_map if weight_map is not None else mapped}
    (path / checkpoint.INDEX_FILE).write_text(json.dumps(index))
    return path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return load_weights(folder, read_spec(folder), dtype=dtype, device=CPU)


def refused(folder: Path, code: str, *named: str) -> None:
    with pytest.raises(LoadError) as caught:
        load(folder)
    assert code == caught.value.code
    for text in named:
        assert text in str(caught.value)


def halves() -> tuple[Tensors, Tensors]:
    items = sorted(lively_weights(spec_of(CONFIGS["ouro"])).items())
    return dict(items[:10]), dict(items[10:])


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    stored = lively_weights(spec_of(CONFIGS["ouro"]))
    loaded = load(folder_of("ouro", tmp_path))
    assert set(stored) == set(loaded)
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_sources_are_cast_to_the_target(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    stored = {name: tensor.to(source) for name, tensor in lively_weights(spec_of(CONFIGS["ouro"])).items()}
    loaded = load(folder_of("ouro", tmp_path, stored), target)
    assert all(torch.equal(stored[name].to(target), loaded[name]) for name in stored)


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    first, second = halves()
    loaded = load(sharded(tmp_path, {"a.safetensors": first, "b.safetensors": second}))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in (first | second).items())


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(GATE), "missing_tensor"),
    "wrong shape": (lambda t: t.update({GATE: torch.zeros(2, 32)}), "wrong_shape"),
    "flat shape": (lambda t: t.update({GATE: torch.zeros(32)}), "wrong_shape"),
    "integers": (lambda t: t.update({GATE: torch.zeros(1, 32, dtype=torch.int32)}), "not_floating"),
    "double": (lambda t: t.update({GATE: torch.zeros(1, 32, dtype=torch.float64)}), "not_floating"),
    "renamed": (lambda t: t.update({GATE + "s": t.pop(GATE)}), "unknown_tensor"),
    "unknown layer": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": t[GATE][0].clone()}),
        "unknown_tensor",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_tensor(tmp_path: Path, damage: str) -> None:
    tensors = lively_weights(spec_of(CONFIGS["ouro"]))
    change, code = DAMAGES[damage]
    change(tensors)
    refused(folder_of("ouro", tmp_path, tensors), code, "layers.2" if damage == "unknown layer" else GATE)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    first, second = halves()
    name = next(iter(first))
    folder = sharded(tmp_path, {"a.safetensors": first, "b.safetensors": second | {name: first[name]}})
    refused(folder, "duplicate_tensor", name)


def test_a_tensor_listed_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    entry = '"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f"{{{entry},{entry}}}".encode()
    folder_of("ouro", tmp_path)
    (tmp_path / checkpoint.SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    refused(tmp_path, "duplicate_tensor", "tensor x")


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "/tmp/a.safetensors", "a.bin", "x\\a.safetensors", "gone.safetensors"]
)
def test_an_index_naming_anything_but_a_shard_beside_it_is_refused(tmp_path: Path, shard: str) -> None:
    first, second = halves()
    folder = sharded(tmp_path, {"a.safetensors": first | second}, dict.fromkeys(first | second, shard))
    refused(folder, "bad_index", "safetensors")


def test_an_index_that_misses_a_stored_tensor_is_refused(tmp_path: Path) -> None:
    first, second = halves()
    mapped = dict.fromkeys(list(first | second)[1:], "a.safetensors")
    refused(sharded(tmp_path, {"a.safetensors": first | second}, mapped), "bad_index", next(iter(first)))


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    first, second = halves()
    mapped = dict.fromkeys([*first, *second, "ghost"], "a.safetensors")
    refused(sharded(tmp_path, {"a.safetensors": first | second}, mapped), "bad_index", "ghost")


@pytest.mark.parametrize("text", ["{", '{"weight_map": 3}', "{}"])
def test_an_unreadable_index_is_refused(tmp_path: Path, text: str) -> None:
    (folder_of("ouro", tmp_path) / checkpoint.INDEX_FILE).write_text(text)
    refused(tmp_path, "bad_index")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a header", (5).to_bytes(8, "little") + b"[1,2]"])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    folder_of("ouro", tmp_path)
    (tmp_path / checkpoint.SINGLE_FILE).write_bytes(content)
    refused(tmp_path, "bad_file", checkpoint.SINGLE_FILE)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = folder_of("ouro", tmp_path) / checkpoint.SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-4])
    refused(tmp_path, "bad_file")


def test_a_folder_without_weights_names_the_knob(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["ouro"]))
    refused(tmp_path, "missing_weights", "--weights random")


def test_stored_inverse_frequencies_are_dropped(tmp_path: Path) -> None:
    tensors = lively_weights(spec_of(CONFIGS["ouro"])) | {"model.rotary_emb.inv_freq": torch.zeros(8)}
    assert "model.rotary_emb.inv_freq" not in load(folder_of("ouro", tmp_path, tensors))


def huginn_tensors() -> tuple[Tensors, Tensor]:
    spec = spec_of(CONFIGS["huginn_raven"])
    tables = pair_tables(spec.head_dim, spec.rope_theta, spec.context_tokens)
    return lively_weights(spec), torch.stack(tables, dim=-1)[None, :, None].contiguous()


@pytest.mark.parametrize("form", ["neither", "head", "freqs", "both", "head only"])
def test_huginn_loads_with_and_without_its_redundant_tensors(tmp_path: Path, form: str) -> None:
    tensors, freqs = huginn_tensors()
    embedding = tensors["transformer.wte.weight"]
    if form in ("head", "both", "head only"):
        tensors["lm_head.weight"] = embedding.clone()
    if form in ("freqs", "both"):
        tensors["freqs_cis"] = freqs
    if form == "head only":
        del tensors["transformer.wte.weight"]
    loaded = load(folder_of("huginn_raven", tmp_path, tensors), torch.bfloat16)
    assert torch.equal(embedding.bfloat16(), loaded["transformer.wte.weight"])
    assert "lm_head.weight" not in loaded
    assert ("freqs_cis" in loaded) == (form in ("freqs", "both"))
    if "freqs_cis" in loaded:
        assert torch.float32 == loaded["freqs_cis"].dtype


@pytest.mark.parametrize("name", ["lm_head.weight", "freqs_cis"])
def test_huginn_redundant_tensors_with_other_values_are_refused(tmp_path: Path, name: str) -> None:
    tensors, freqs = huginn_tensors()
    tensors |= {"lm_head.weight": tensors["transformer.wte.weight"].clone(), "freqs_cis": freqs}
    tensors[name][0] += 1.0
    refused(folder_of("huginn_raven", tmp_path, tensors), "tensor_value", name)


def test_huginn_frequencies_in_bfloat16_are_refused(tmp_path: Path) -> None:
    tensors, freqs = huginn_tensors()
    refused(folder_of("huginn_raven", tmp_path, tensors | {"freqs_cis": freqs.bfloat16()}), "tensor_value", "freqs_cis")


def test_huginn_without_embedding_and_head_is_refused(tmp_path: Path) -> None:
    tensors, _ = huginn_tensors()
    del tensors["transformer.wte.weight"]
    refused(folder_of("huginn_raven", tmp_path, tensors), "missing_tensor", "transformer.wte.weight")


def test_stored_frequencies_give_the_logits_of_recomputed_ones(tmp_path: Path) -> None:
    tensors, freqs = huginn_tensors()
    logits = []
    for number, content in enumerate((tensors, tensors | {"freqs_cis": freqs})):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = locate(str(folder_of("huginn_raven", folder, content)))
        model = build_model(files, dtype=torch.float32, device=CPU, weights="checkpoint", ops=PlainOps())
        logits.append(logits_by_depth(model, [1, 2, 3])[-1])
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_random_weights_repeat_and_run(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    files = locate(str(tmp_path), "random")
    runs = []
    for seed in (1, 1, 2):
        model = build_model(files, dtype=torch.float32, device=CPU, weights="random", ops=PlainOps(), seed=seed)
        runs.append(logits_by_depth(model, [4, 5, 6])[-1])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_random_weights_follow_the_configs_spread() -> None:
    spec = spec_of(CONFIGS["ouro"])
    weights = random_weights(spec, seed=0, dtype=torch.float32, device=CPU)
    assert abs(weights["model.embed_tokens.weight"].std().item() - spec.init_std) < 2e-3
    assert torch.equal(torch.ones(32), weights["model.norm.weight"])
    assert torch.equal(torch.zeros(1), weights["model.early_exit_gate.bias"])


def test_fingerprint_follows_weights_and_config_not_place(tmp_path: Path) -> None:
    prints = []
    for number, bump in enumerate((0.0, 0.0, 1.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        tensors = lively_weights(spec_of(CONFIGS["ouro"]))
        tensors["model.norm.weight"] += bump
        files = locate(str(folder_of("ouro", folder, tensors)))
        prints.append(weights_fingerprint(files, weights="checkpoint", seed=0))
    (tmp_path / "0" / "config.json").write_text(json.dumps({**CONFIGS["ouro"], "rope_theta": 999.0}))
    prints.append(checkpoint.fingerprint(tmp_path / "0"))
    assert prints[0] == prints[1]
    assert 3 == len(set(prints))


def test_fingerprint_of_random_weights_follows_the_seed() -> None:
    files = locate("ouro-1.4b", "random")
    assert 2 == len({weights_fingerprint(files, weights="random", seed=seed) for seed in (0, 0, 1)})
