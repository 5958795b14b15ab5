"""The trainer of the embedded models: its files fit the public layout, and its maths is what the docs say."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from epicycle.engine.models.locate import locate
from epicycle.tools import train_files, train_golden
from epicycle.tools.exit_table import render
from epicycle.tools.train_embedded import main
from epicycle.tools.train_gate import hindsight_depth, pays_to_go_on
from epicycle.tools.train_huginn import HuginnShape
from epicycle.tools.train_optim import Muon, orthogonalise, trapezoid
from epicycle.tools.train_ouro import ExitRule, OuroModel, OuroShape, decode, exit_log_probabilities
from epicycle.tools.train_recipe import Recipe
from epicycle.tools.train_score import Score, load_model
from tests.fakes.toy_corpus import write_toy_corpus

# A toy run is an eighth of the shipped models in every size, so that shapes can be compared.
EMBEDDED = locate("embedded:ouro").folder
SCALE = 8
HIDDEN, FFN, VOCAB = 256 // SCALE, 768 // SCALE, 4096 // SCALE
COMMON_FILES = {
    "config.json", "generation_config.json", "golden.json", "log.txt", "model.safetensors", "report.json",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
FILES = {"ouro": COMMON_FILES | {"golden_serving.json", "lookahead.safetensors"}, "huginn": COMMON_FILES}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint folder per architecture: one trained from a corpus folder, one from an archive of it."""
    root = tmp_path_factory.mktemp("toys")
    corpus = write_toy_corpus(root / "corpus", VOCAB)
    with tarfile.open(root / "corpus.tar.xz", "w:xz") as packed:
        packed.add(corpus / "tokens", "tokens")
    toy_run(corpus, root / "ouro", "ouro")
    toy_run(root / "corpus.tar.xz", root / "huginn", "huginn")
    return {"ouro": root / "ouro", "huginn": root / "huginn"}


def toy_run(corpus: Path, out: Path, arch: str) -> None:
    flags = {
        "corpus": corpus, "out": out, "arch": arch, "seconds": 100, "max-steps": 4, "device": "cpu",
        "hidden-size": HIDDEN, "ffn-size": FFN, "context-tokens": 96, "batch-rows": 4, "max-train-loops": 8,
        "eval-tokens": 192, "eval-rows": 2, "sample-tokens": 2, "golden-tokens": 2,
    }  # fmt: skip
    assert main([part for name, value in flags.items() for part in (f"--{name}", str(value))]) == 0


def stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="pt") as tensors:
        names = list(tensors.keys())
        assert {"BF16"} == {tensors.get_slice(name).get_dtype() for name in names}
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}


def tiny_ouro(seed: int = 0) -> OuroModel:
    torch.manual_seed(seed)
    model = OuroModel(OuroShape(vocab_size=64, hidden_size=32, ffn_size=48, layers=2, heads=2, loops=4, rope_theta=1e4))
    torch.nn.init.normal_(model.model.early_exit_gate.weight, std=0.3)
    return model.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["ouro", "huginn"])
def test_a_toy_run_writes_a_checkpoint_in_the_public_layout(arch: str, toys: dict[str, Path]) -> None:
    assert FILES[arch] == {path.name for path in toys[arch].iterdir()}
    shipped = stored_shapes(EMBEDDED.parent / f"{arch}-tiny" / "model.safetensors")
    expected = {
        name: tuple(size // SCALE if size >= SCALE * SCALE else size for size in shape)
        for name, shape in shipped.items()
    }
    assert expected == stored_shapes(toys[arch] / "model.safetensors")


@pytest.mark.slow
def test_a_toy_run_records_what_it_trained_and_measured(toys: dict[str, Path]) -> None:
    report = json.loads((toys["ouro"] / "report.json").read_text())
    shipped = json.loads((EMBEDDED / "report.json").read_text())
    assert set(shipped) == set(report)
    assert (4, 4 * 4 * 96) == (report["steps"], report["tokens"])
    assert {"story", "chat", "mix"} == set(report["final"]["depth_loss"])
    assert set(shipped["stage3"]["quality"]) == set(report["stage3"]["quality"])
    assert set() == {"corpus", "out"} & set(report["args"])


@pytest.mark.slow
def test_a_toy_run_leaves_a_lookahead_head_and_goldens(toys: dict[str, Path]) -> None:
    shipped, made = (stored_shapes(folder / "lookahead.safetensors") for folder in (EMBEDDED, toys["ouro"]))
    assert {**shipped, "fc1.weight": (64, 2 * HIDDEN)} == made
    for run in json.loads((toys["ouro"] / "golden_serving.json").read_text())["cases"][0]["runs"]:
        assert 4 == run["exit_depths"][0]  # the last prompt token runs full depth whatever the bounds
        assert len(run["ids"]) == len(run["exit_depths"])
        assert run["exit_depths"][1] <= run["max_loops"]


@pytest.mark.slow
def test_the_training_model_reproduces_the_shipped_serving_golden() -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    case = json.loads((EMBEDDED / "golden_serving.json").read_text())["cases"][1]
    model = load_model(EMBEDDED)
    with torch.no_grad():
        for run in case["runs"]:
            bounds = run["exit_threshold"], run["min_loops"], run["max_loops"]
            written = train_golden.serve_greedily(model, case["prompt_ids"], 40, *bounds)
            assert (run["ids"], run["exit_depths"]) == (written.ids, written.depths)
            assert run["text"] == tokenizer.decode(written.text_ids)


def test_configs_of_the_shipped_shapes_equal_the_shipped_files(tmp_path: Path) -> None:
    ouro, huginn = tmp_path / "ouro", tmp_path / "huginn"
    ouro.mkdir()
    huginn.mkdir()
    train_files.save_ouro_config(ouro, OuroShape(4096, 256, 768, layers=6, heads=4, loops=4, rope_theta=1e4), 1024)
    train_files.save_huginn_config(huginn, HuginnShape(4096, 256, 768, 4, 1, 2, 1, 8), Recipe(corpus="", out=""))
    for made, shipped in ((ouro, EMBEDDED), (huginn, EMBEDDED.parent / "huginn-tiny")):
        for name in ("config.json", "generation_config.json"):
            assert json.loads((shipped / name).read_text()) == json.loads((made / name).read_text())


def test_help_does_not_import_torch() -> None:
    probe = (
        "import sys\n"
        "from epicycle.tools import exit_table, train_embedded\n"
        "for tool in (exit_table, train_embedded):\n"
        "    try:\n        tool.main(['--help'])\n    except SystemExit as stop:\n        assert stop.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    finished = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert (0, "") == (finished.returncode, finished.stderr)
    assert "--loop-price" in finished.stdout


def test_a_recipe_that_does_not_fit_is_refused_with_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--corpus", "c", "--out", "o", "--loops", "1", "--hidden-size", "30"])
    complaint = capsys.readouterr().err
    assert "loops must be at least 2" in complaint
    assert "hidden_size must be an even multiple of heads" in complaint


def test_decoding_at_threshold_one_equals_full_depth() -> None:
    model, ids = tiny_ouro(), torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    decoded = decode(model, ids, ExitRule(1.0, 1, 4))
    assert torch.equal(model.all_depths(ids)[-1], decoded.state)
    assert {4} == set(decoded.depth.flatten().tolist())


def test_decoding_a_prefix_alone_gives_the_same_exits_and_states() -> None:
    model, ids = tiny_ouro(), torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(2))
    whole, prefix = (decode(model, part, ExitRule(0.6, 1, 4)) for part in (ids, ids[:, :9]))
    assert len(set(whole.depth.flatten().tolist())) > 1
    assert whole.depth[:, :9].tolist() == prefix.depth.tolist()
    torch.testing.assert_close(whole.state[:, :9], prefix.state, atol=1e-5, rtol=0)


def test_floor_and_cap_bound_each_token() -> None:
    model, ids = tiny_ouro(), torch.arange(8)[None]
    floor, cap = torch.tensor([[4, 4, 2, 2, 2, 2, 2, 2]]), torch.tensor([[4, 4, 3, 3, 3, 3, 3, 3]])
    depth = decode(model, ids, ExitRule(0.01, floor, cap)).depth
    assert [4, 4, 2, 2, 2, 2, 2, 2] == depth[0].tolist()
    assert [4, 4, 3, 3, 3, 3, 3, 3] == decode(model, ids, ExitRule(1.0, floor, cap)).depth[0].tolist()


def test_exit_probabilities_sum_to_one_and_follow_the_gate() -> None:
    gates = torch.tensor([0.0, 1.0, -1.0, 5.0])
    odds = torch.sigmoid(gates)
    leave = exit_log_probabilities(gates).exp()
    expected = torch.stack(
        [odds[0], (1 - odds[0]) * odds[1], (1 - odds[0]) * (1 - odds[1]) * odds[2], (1 - odds[:3]).prod()]
    )
    torch.testing.assert_close(leave, expected)
    torch.testing.assert_close(leave.sum(), torch.tensor(1.0))


def test_going_on_pays_only_when_it_saves_more_than_its_price() -> None:
    # Distance to the last belief after loops 1..4 of two tokens: the first gains at loop 2, the second at loop 4 only.
    distance = torch.tensor([[0.5, 0.001, 0.001, 0.0], [0.5, 0.5, 0.5, 0.0]]).T
    assert [2, 4] == hindsight_depth(distance, price=0.1).tolist()
    assert [1, 1] == hindsight_depth(distance, price=0.6).tolist()
    assert 1.0 == round(pays_to_go_on(distance, 0.1, slope=100.0)[0, 0].item(), 3)


def test_orthogonalised_updates_have_even_singular_values() -> None:
    tall = torch.randn(3, 40, 20, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalise(tall))
    assert 0.5 < values.min().item()
    assert values.max().item() < 1.5


def test_muon_walks_against_the_gradient_and_decays() -> None:
    matrix = torch.nn.Parameter(torch.eye(4))
    matrix.grad = torch.eye(4)
    Muon([matrix], lr=0.1, decay=0.5).step()
    diagonal = matrix.detach().diagonal()
    assert torch.equal(matrix.detach() - torch.diag(diagonal), torch.zeros(4, 4))
    assert diagonal.max().item() < 0.95  # below what decay alone leaves


def test_the_learning_rate_rises_holds_and_falls() -> None:
    curve = [trapezoid(progress, 0.1, 0.5) for progress in (0.0, 0.05, 0.3, 0.75, 1.0)]
    assert [0.02, 0.5, 1.0, 0.51, 0.02] == [round(value, 6) for value in curve]


def test_the_exit_table_compares_every_threshold_with_the_last() -> None:
    rows = [Score(0.5, 10, 1.5, 1.25, (0.5, 0.5)), Score(1.0, 10, 2.0, 1.0, (0.0, 1.0))]

    table = render(rows, [[150.0, 300.0, 160.0], [100.0, 90.0, 110.0]])

    assert "| 0.5 | 1.50 | 1.2500 | +0.2500 | 160 | 1.60x |" in table
