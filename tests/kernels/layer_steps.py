"""Random layers, and steps for them to take, without the engine's own code."""

import dataclasses

import torch
from paged_batch import paged_problem

from espalier.kernels.layers import Activation, DecoderSpec, EmbeddingAndNorm, Layers, LayerWeights
from espalier.kernels.layout import AttentionBatch, KVLayout, StepBatch
from espalier.kernels.rotary import Rotary

LAYERS, VOCABULARY = 3, 90
OF_ALL_KINDS = DecoderSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    norm_eps=1e-6,
    windows=(4, None, 33),
    rotaries=(
        Rotary(1_000_000.0, {"rope_type": "linear", "factor": 8.0}),
        Rotary(dims=8),
        Rotary(50.0, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, dims=10),
    ),
    rotary_of=(1, 0, 2),
    activation=Activation.GELU_TANH,
    query_scale=0.4,
    embedding_scale=3.3,
)
"""Layers that differ in all in which layers may."""


def random_layer(
    seed: int,
    hidden: int,
    inner: int,
    shape: DecoderSpec,
    bias: bool,
    head_norms: bool = False,
    out_bias: bool = False,
    post_norms: bool = False,
) -> LayerWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def factors(size: int, spread: float) -> torch.Tensor:
        return 1 + spread * torch.randn(size, generator=generator)

    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return LayerWeights(
        attention_norm=factors(hidden, 0.1),
        qkv=matrix(qkv, hidden),
        qkv_bias=torch.randn(qkv, generator=generator) if bias else None,
        out=matrix(hidden, shape.num_heads * shape.head_dim),
        mlp_norm=factors(hidden, 0.1),
        gate_up=matrix(2 * inner, hidden),
        down=matrix(hidden, inner),
        out_bias=torch.randn(hidden, generator=generator) if out_bias else None,
        query_norm=factors(shape.head_dim, 0.3) if head_norms else None,
        key_norm=factors(shape.head_dim, 0.3) if head_norms else None,
        attention_post_norm=factors(hidden, 0.3) if post_norms else None,
        mlp_post_norm=factors(hidden, 0.3) if post_norms else None,
    )


def random_outer(hidden: int, shape: DecoderSpec) -> EmbeddingAndNorm:
    generator = torch.Generator().manual_seed(hidden)
    embedding = torch.randn(VOCABULARY, hidden, generator=generator)
    norm = 1 + 0.1 * torch.randn(hidden, generator=generator)
    return EmbeddingAndNorm(embedding, norm)


@dataclasses.dataclass
class Step:
    """Some tokens of paged sequences, as the layers are given them, over a KV pool of random KV."""

    batch: AttentionBatch
    layout: KVLayout
    kv_pool: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor

    def run(self, layers: Layers) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layers give, and the KV pool that they leave."""
        kv_pool = self.kv_pool.clone()
        kvs = [self.layout.layer_view(kv_pool, i) for i in range(LAYERS)]
        layers.warm_up(kvs, decodes=True)
        return layers.forward(self.given(), kvs), kv_pool.view(torch.float32)

    def given(self, token_ids: torch.Tensor | None = None, drawn: torch.Tensor | None = None) -> StepBatch:
        """What layers are given, perhaps with other token ids."""
        return StepBatch(self.token_ids if token_ids is None else token_ids, self.positions, self.batch, drawn)

    def only(self, sequence: int) -> "Step":
        """The step of one sequence alone."""
        b = self.batch
        start, end = int(b.query_starts[sequence]), int(b.query_starts[sequence + 1])
        rows = slice(start, end)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            row_sequences=torch.zeros(end - start, dtype=torch.int32),
            context_lengths=b.context_lengths[sequence : sequence + 1],
            block_tables=b.block_tables[sequence : sequence + 1],
            write_slabs=b.write_slabs[rows],
            write_slots=b.write_slots[rows],
            write_offsets=b.write_offsets[rows],
            write_rows=None,
        )
        return dataclasses.replace(self, batch=batch, token_ids=self.token_ids[rows], positions=self.positions[rows])


def make_step(sequences: list[tuple[int, int]], shape: DecoderSpec, kind: type[KVLayout] = KVLayout) -> Step:
    sizes = {"heads": shape.num_heads, "kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    problem = paged_problem(sequences, **sizes, kind=kind)
    generator = torch.Generator().manual_seed(1)
    layout = dataclasses.replace(problem.layout, num_layers=LAYERS)
    layout = dataclasses.replace(layout, slab_bytes=problem.layout.blocks_per_slab * layout.block_bytes + 64)
    slabs = problem.layer_kv.keys.shape[0]
    kv_pool = torch.randn(slabs * layout.slab_bytes // 4, generator=generator).view(torch.uint8)
    positions = torch.cat([torch.arange(c - n, c) for c, n in sequences])
    size, slots = layout.block_size, layout.blocks_per_slab
    blocks = torch.stack(
        [
            problem.batch.block_tables[s, p // size]
            for s, p in zip(problem.batch.row_sequences.tolist(), positions.tolist(), strict=True)
        ]
    ).long()
    batch = dataclasses.replace(
        problem.batch, write_slabs=blocks // slots, write_slots=blocks % slots, write_offsets=positions % size
    )
    token_ids = torch.randint(VOCABULARY, (len(positions),), generator=generator)
    return Step(batch, layout, kv_pool, token_ids, positions)
