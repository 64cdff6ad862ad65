"""LoRA adapters of an embedding or a head on a base that ties them: each side has what PEFT gives it.

Expected figures are those of the untied checkpoint that an adapter means, built by hand; they were compared with
PEFT 0.21 over 160 adapters of six bases.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import ALPHA, RANK, of_module, write_adapter
from engine_driver import read, release
from plain import plain_logits
from safetensors.torch import load_file
from tiny_models import edit_json, edit_tensors

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint, Outline
from espalier.engine.models.model import load_generator, load_trunk
from espalier.engine.models.options import ModelImpl, Quantization
from espalier.prm.heads import take_token_rows

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
PREFIX = "base_model.model."
IDS = [5, 80, 33, 7, 120, 9]


@pytest.fixture
def base(copy_of: Callable[[str], Path]) -> Path:
    return copy_of("qwen2-tied")


class Means:
    """Adapters of a base, and the embedding and head that each means."""

    def __init__(self, base: Path) -> None:
        self.shared = load_file(base / "model.safetensors")[f"{EMBEDDING}.weight"].float()
        rows, hidden = self.shared.shape
        random = torch.Generator().manual_seed(3)
        self.a, self.b = torch.randn(RANK, hidden, generator=random) / 9, torch.randn(rows, RANK, generator=random) / 9
        self.e, self.f = torch.randn(RANK, rows, generator=random) / 9, torch.randn(hidden, RANK, generator=random) / 9
        self.one, self.other = (torch.randn(rows, hidden, generator=random) / 5 for _ in range(2))

    def of(self, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor, torch.Tensor]:
        """Tensors and configuration of an adapter; the embedding and the head of the checkpoint that it means."""
        shared, one, other = self.shared, self.one, self.other
        to_embedding, to_head = ALPHA / RANK * (self.f @ self.e).T, ALPHA / RANK * (self.b @ self.a)
        lora = {f"{PREFIX}{EMBEDDING}.lora_embedding_A": self.e, f"{PREFIX}{EMBEDDING}.lora_embedding_B": self.f}
        of_head = of_module(HEAD, self.a, self.b)
        stored, stored_head = {f"{PREFIX}{EMBEDDING}.weight": one}, {f"{PREFIX}{HEAD}.weight": other}
        of_base = {f"{PREFIX}{EMBEDDING}.base_layer.weight": one}
        old_base = {f"{PREFIX}{EMBEDDING}.original_module.weight": other}
        tied = {"ensure_weight_tying": True}
        save = {"modules_to_save": ["embed_tokens"]}
        save_head, save_both = {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}
        added, added_head = shared + to_embedding, shared + to_head
        return {
            "embedding": (lora, {}, added, shared),
            "head": (of_head, {}, shared, added_head),
            "both": (lora | of_head, {}, added, added_head),
            "embedding, and it follows": (lora, tied, added, added),
            "head, and it follows": (of_head, tied, added_head, added_head),
            "both, and they follow": (lora | of_module(HEAD, self.f.T, self.e.T), tied, added, added),
            "stored embedding": (stored, save, one, shared),
            "stored head": (stored_head, save_head, shared, other),
            "both stored": (stored | stored_head, save_both, one, other),
            "stored embedding, and it follows": (stored, save | tied, one, one),
            "stored head, and it follows": (stored_head, save_head | tied, other, other),
            "embedding and stored head": (lora | stored_head, save_head, added, other),
            "head and stored embedding": (of_head | stored, save, one, added_head),
            "another base": (stored, {}, one, one),
            "another base and embedding": (lora | of_base, {}, one + to_embedding, one),
            "another base and head": (of_head | of_base, {}, one, one + to_head),
            "stored embedding beside another base": (stored | old_base, save, one, other),
        }[kind]


KINDS = [
    "embedding", "head", "both", "embedding, and it follows", "head, and it follows", "both, and they follow",
    "stored embedding", "stored head", "both stored", "stored embedding, and it follows", "stored head, and it follows",
    "embedding and stored head", "head and stored embedding", "another base", "another base and embedding",
    "another base and head", "stored embedding beside another base",
]  # fmt: skip


def weights_of(checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    names = [f"{EMBEDDING}.weight", f"{EMBEDDING if checkpoint.decoder_config.tied else HEAD}.weight"]
    embedding, head = (checkpoint.take(name, torch.float32, "cpu") for name in names)
    return embedding, head


@pytest.mark.parametrize("copied", [False, True], ids=["one matrix", "two alike"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_side_has_what_peft_gives_it(kind: str, copied: bool, base: Path, tmp_path: Path):
    tensors, config, embedding, head = (means := Means(base)).of(kind)
    if copied:
        edit_tensors(base / "model.safetensors", {f"{HEAD}.weight": means.shared})
    checkpoint = Checkpoint(base, adapter=write_adapter(tmp_path / "adapter", tensors, **config))
    found, found_head = weights_of(checkpoint)
    torch.testing.assert_close(found, embedding)
    torch.testing.assert_close(found_head, head)
    assert checkpoint.decoder_config.tied == torch.equal(embedding, head)
    assert bool(checkpoint.warnings) != checkpoint.decoder_config.tied


@pytest.mark.parametrize("model_impl", [ModelImpl.NATIVE, ModelImpl.TRANSFORMERS])
@pytest.mark.parametrize("kind", ["head", "stored embedding", "embedding, and it follows"])
def test_logits_are_those_of_the_untied_checkpoint_that_an_adapter_means(
    kind: str, model_impl: ModelImpl, base: Path, tmp_path: Path, make_engine: Callable[..., Engine]
):
    tensors, config, embedding, head = Means(base).of(kind)
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    assert load_generator(Outline(base, adapter=adapter, model_impl=model_impl), torch.float32, "meta").config
    engine = make_engine(load_generator(Checkpoint(base, adapter=adapter, model_impl=model_impl), torch.float32, "cpu"))
    sequence = engine.open("generator", [])
    found = torch.from_numpy(read(engine, sequence, IDS))
    release(engine, sequence)
    whole = shutil.copytree(base, tmp_path / "untied")
    edit_json(whole / "config.json", {"tie_word_embeddings": False})
    edit_tensors(whole / "model.safetensors", {f"{EMBEDDING}.weight": embedding, f"{HEAD}.weight": head.clone()})
    expected = plain_logits(whole, IDS)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_an_int8_head_and_a_judges_rows_are_the_adapters_too(base: Path, tmp_path: Path):
    tensors, _, _, head = Means(base).of("head")
    adapter = write_adapter(tmp_path / "adapter", tensors)
    model = load_generator(Checkpoint(base, quantization=Quantization.INT8, adapter=adapter), torch.float32, "cpu")
    hidden = torch.randn(3, head.shape[1], generator=torch.Generator().manual_seed(0))
    assert (model.head(hidden) - hidden @ head.T).abs().max() < 0.05 * (hidden @ head.T).abs().max()
    checkpoint = Checkpoint(base, adapter=adapter)
    rows = take_token_rows(checkpoint, load_trunk(checkpoint, torch.float32, "cpu"), [7, 3])
    torch.testing.assert_close(rows(hidden), hidden @ head[[7, 3]].T)


def test_a_verifiers_adapter_changes_its_embedding_alone(base: Path, tmp_path: Path):
    tensors, _, embedding, _ = (means := Means(base)).of("embedding")
    score = {f"{PREFIX}score.weight": means.one[:2], f"{PREFIX}score.bias": torch.zeros(2)}
    adapter = write_adapter(tmp_path / "adapter", tensors | score, task_type="TOKEN_CLS", modules_to_save=["score"])
    checkpoint = Checkpoint(base, adapter=adapter)
    torch.testing.assert_close(checkpoint.take(f"{EMBEDDING}.weight", torch.float32, "cpu"), embedding)
    assert "lm_head.weight" not in checkpoint
    assert torch.equal(checkpoint.read("score.weight"), means.one[:2])


def test_what_does_not_follow_in_peft_is_refused_by_the_adapters_name(base: Path, tmp_path: Path):
    tensors, config, embedding, _ = Means(base).of("embedding, and it follows")
    tensors[f"{PREFIX}{EMBEDDING}.lora_magnitude_vector"] = torch.ones(embedding.shape[1])
    adapter = write_adapter(tmp_path / "adapter", tensors, **config, use_dora=True)
    with pytest.raises(CheckpointError, match=r"adapter/adapter_config.json: ensure_weight_tying is true.*use_dora"):
        Checkpoint(base, adapter=adapter)
    more = {f"{PREFIX}{EMBEDDING}.weight": torch.zeros(400, embedding.shape[1])}
    resized = write_adapter(tmp_path / "resized", more, modules_to_save=["embed_tokens"])
    with pytest.raises(CheckpointError, match=r"resized/adapter_model.*has shape \(400, .*resized when it was trained"):
        Checkpoint(base, adapter=resized)
    wider = {f"{PREFIX}{EMBEDDING}.lora_embedding_A": torch.zeros(RANK, 400)} | tensors
    wider = {name: torch.zeros(RANK, 400) if name.endswith("_A") else each for name, each in wider.items()}
    adapter = write_adapter(tmp_path / "wider", {n: t for n, t in wider.items() if "magnitude" not in n})
    with pytest.raises(CheckpointError, match=r"wider/adapter_model.*does not fit"):
        weights_of(Checkpoint(base, adapter=adapter))
